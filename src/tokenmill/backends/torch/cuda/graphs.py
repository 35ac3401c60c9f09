"""`DecodeGraphs`: decode steps as CUDA graphs, one for each padded batch size and each turn of the buffers.

A size is captured after the first step that needs it has run, so that everything it launches is compiled and warm. All
graphs share one pool of memory: they run one after the other, and none keeps anything in it between steps.

`OutputTurns`: where graphs leave logits, and the ids of the largest ones. A graph writes to the same addresses each
time, so a step's results would be gone with the next one. Two sets of buffers take turns, one for each step that may be
in flight; a caller that needs a step's logits after that keeps a copy.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.backends.torch.backend import TorchStep
from tokenmill.backends.torch.footprint import NUM_TURNS

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


@dataclass(frozen=True)
class GraphOutputs:
    """What graphs of one turn write to."""

    turn: int
    logits: Tensor
    """[rows, vocab]"""
    ids: Tensor
    """Where each row's largest logit is."""

    def first(self, count: int) -> GraphOutputs:
        """Outputs of the first `count` rows."""
        return GraphOutputs(self.turn, self.logits[:count], self.ids[:count])


class OutputTurns:
    """The buffers of one backend."""

    def __init__(self, num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._outputs = [
            GraphOutputs(
                turn,
                torch.empty(num_rows, vocab_size, dtype=dtype, device=device),
                torch.empty(num_rows, dtype=torch.int32, device=device),
            )
            for turn in range(NUM_TURNS)
        ]
        self._owners: list[weakref.ref[TorchStep] | None] = [None] * NUM_TURNS
        self._turn = 0

    def clear(self) -> None:
        """Let go of the memory."""
        self._outputs.clear()

    def begin(self, step: TorchStep) -> GraphOutputs:
        """The buffers for what this step computes next."""
        self._turn = (self._turn + 1) % NUM_TURNS
        outputs, owner = self._outputs[self._turn], self._owners[self._turn]
        before = None if owner is None else owner()
        if before is not None:
            address = outputs.logits.data_ptr()
            before.logits_parts = [part.clone() if part.data_ptr() == address else part for part in before.logits_parts]
        self._owners[self._turn] = weakref.ref(step)
        return outputs
