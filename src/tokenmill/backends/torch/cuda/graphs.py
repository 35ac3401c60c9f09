"""`DecodeGraphs`: decode steps as CUDA graphs, one for each padded batch size and each turn of the buffers.

A size is captured after the first step that needs it has run, so that everything it launches is compiled and warm. All
graphs share one pool of memory: they run one after the other, and none keeps anything in it between steps.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SMALL_SIZES = (1, 2, 4)
STEP = 8


@dataclass(frozen=True)
class DecodeShape:
    """What a graph is for: so many tokens, one of each sequence. Lengths and tables are data, not shape."""

    num_tokens: int
    turn: int
    """Which buffers its results go to."""


class DecodeGraphs:
    """The graphs of one backend. `largest` is the most tokens that a graph is made for."""

    def __init__(self, largest: int, device: torch.device) -> None:
        self._sizes = [size for size in SMALL_SIZES if size < largest]
        self._sizes += [size for size in range(STEP, largest, STEP) if size > SMALL_SIZES[-1]]
        self._sizes.append(largest)
        self.largest = largest
        self._graphs: dict[DecodeShape, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def size_for(self, num_tokens: int) -> int:
        """The smallest size that holds so many tokens, which are not more than the largest one's."""
        return self._sizes[bisect.bisect_left(self._sizes, num_tokens)]

    def run(self, shape: DecodeShape, launch: Callable[[], object]) -> None:
        """Replay the shape's graph; the first time, launch it as it is and capture it for the next."""
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.replay()
            return
        launch()
        self._graphs[shape] = self._capture(launch)

    def _capture(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads may use the card meanwhile: only what this one launches is captured, or can spoil it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._pool = graph.pool()
        return graph

    def clear(self) -> None:
        """Give up all graphs and their memory."""
        self._graphs.clear()
        self._pool = None
