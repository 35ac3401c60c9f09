"""`StepGraphs`: steps as CUDA graphs, captured before the first request and replayed in one launch.

Decode steps have one for each padded batch size and each turn of the output buffers; steps with prompt tokens have one
for each padded number of tokens and of decodes among them. A shape is launched once before it is captured, so that
everything in it is compiled and warm. All graphs share one pool of memory: they run one after the other, and none keeps
anything in it between steps.

`OutputTurns`: where graphs leave logits, and the ids of the largest ones. A graph writes to the same addresses each
time, so a step's results would be gone with the next one. Two sets of buffers take turns, one for each step that may be
in flight; a caller that needs a step's logits after that keeps a copy.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.backends.torch.backend import TorchStep
from tokenmill.backends.torch.cuda.inputs import MOST_LONG_RUNS, SHORT_RUN, PromptShape
from tokenmill.backends.torch.footprint import GRAPH_TOKENS, NUM_TURNS


@dataclass(frozen=True)
class DecodeShape:
    """What a graph is for: so many tokens, each read for on its own. Lengths and tables are data, not shape."""

    num_tokens: int
    turn: int
    """Which buffers its results go to."""


class StepGraphs:
    """The graphs of one backend, by the shape of their steps."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __contains__(self, shape: Hashable) -> bool:
        return shape in self._graphs

    def run(self, shape: Hashable, launch: Callable[[], object]) -> None:
        """Replay the shape's graph; the first time, launch it as it is and capture it for the next."""
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.replay()
            return
        launch()
        self.capture(shape, launch)

    def capture(self, shape: Hashable, launch: Callable[[], object]) -> None:
        """Capture a shape all of whose kernels were launched before: what they load must not be loaded meanwhile."""
        self._graphs[shape] = self._captured(launch)

    def _captured(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
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


SMALL_SIZES = (1, 2, 4)
DECODE_STEPS = ((64, 8), (256, 16), (1 << 30, 32))
"""(limit, step): up to `limit` sequences, captured sizes are `step` apart."""
PROMPT_SIZES = (32, *range(64, 640, 64), *range(640, GRAPH_TOKENS + 1, 128))
"""Large ones are multiples of the rows in a tile of cuBLAS's, which a product is padded to in any case."""
SINGLES_SIZES = (16, 256, 1024)
"""Few decodes have their contexts split, see `num_splits_for`; runs that read nothing cost next to nothing."""


class PaddedSizes:
    """The sizes that steps are padded to."""

    def __init__(self, sizes: Iterable[int], largest: int) -> None:
        self.sizes = sorted({*(size for size in sizes if size < largest), largest})

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    @property
    def coarse_first(self) -> Sequence[int]:
        """The largest one, then such that those so far are spread evenly: any of them may be the last."""
        left, found = list(range(len(self.sizes))), []
        stride = 1 << len(self.sizes).bit_length()
        while left:
            found += [self.sizes[place] for place in reversed(left) if (len(self.sizes) - 1 - place) % stride == 0]
            left = [place for place in left if (len(self.sizes) - 1 - place) % stride]
            stride //= 2
        return found

    def size_for(self, count: int) -> int:
        """The smallest size that is at least `count`, which must not exceed `largest`."""
        return self.sizes[bisect.bisect_left(self.sizes, count)]

    def keep(self, sizes: Iterable[int]) -> None:
        """Pad to these sizes only."""
        self.sizes = sorted(sizes)


LARGEST_GRAPH = 512
"""Decode steps of more tokens are launched kernel by kernel: the host keeps up with them."""
SPECULATIVE_GRAPH = 64
"""Tokens, proposed ones among them, of a step of few sequences that is run as one graph."""


def largest_decode(num_seqs: int, ubatch_size: int) -> int:
    """Tokens of the largest step that is run as a decode graph."""
    with_proposals = min(SHORT_RUN * num_seqs, SPECULATIVE_GRAPH)
    return min(max(num_seqs, with_proposals), ubatch_size, LARGEST_GRAPH)


def decode_sizes(largest: int) -> PaddedSizes:
    """Sizes of the decode graphs, up to `largest` sequences."""
    sizes, size = list(SMALL_SIZES), 0
    while size < largest:
        size += next(step for end, step in DECODE_STEPS if size < end)
        sizes.append(size)
    return PaddedSizes(sizes, largest)


class PromptShapes:
    """Which graph a step with prompt tokens is run as."""

    def __init__(self, most_tokens: int, most_singles: int) -> None:
        self.tokens = PaddedSizes(PROMPT_SIZES, min(most_tokens, GRAPH_TOKENS))
        self.singles = PaddedSizes(SINGLES_SIZES, min(most_singles, SINGLES_SIZES[-1]))

    def shape_for(self, num_tokens: int, num_singles: int, num_longs: int) -> PromptShape | None:
        """None where kernels are launched one by one: large steps keep the card busy meanwhile."""
        fits = num_tokens <= self.tokens.largest and num_singles <= self.singles.largest
        if not fits or num_longs > MOST_LONG_RUNS:
            return None
        return PromptShape(self.tokens.size_for(num_tokens), self.singles.size_for(num_singles))


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
        return self.of(lambda some: some[:count])

    def of(self, rows: Callable[[Tensor], Tensor]) -> GraphOutputs:
        """Outputs of some rows."""
        return GraphOutputs(self.turn, rows(self.logits), rows(self.ids))


class OutputTurns:
    """The buffers of one backend."""

    def __init__(self, num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.outputs = [
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
        self.outputs.clear()

    def begin(self, step: TorchStep) -> GraphOutputs:
        """The buffers for what this step computes next."""
        self._turn = (self._turn + 1) % NUM_TURNS
        outputs, owner = self.outputs[self._turn], self._owners[self._turn]
        before = None if owner is None else owner()
        if before is not None:
            storage = outputs.logits.untyped_storage().data_ptr()
            before.logits_parts = [
                part.clone() if part.untyped_storage().data_ptr() == storage else part for part in before.logits_parts
            ]
        self._owners[self._turn] = weakref.ref(step)
        return outputs
