"""`StepPlan`: everything one step computes, as arrays. Frozen, and free of requests: it could be sent anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import Batch, IntArray


@dataclass(frozen=True)
class PromptRows:
    """Rows of a step's output that belong to the tokens of one prompt: logits to score it, hidden states to pool."""

    row: int
    lease: int
    position: int
    """Of the token that the first of these rows belongs to."""
    output: slice
    """Of the step's logits or hidden rows."""


@dataclass(frozen=True)
class StepShape:
    """Batch composition of a step: which rows take part, and with how many tokens each."""

    tick: int
    rows: IntArray
    """The rows that take part..."""
    counts: IntArray
    """...and the tokens of each."""
    sampled_rows: IntArray
    """The rows that get a token."""
    num_decode: int
    """Rows that had one token to give, the first of them; the other tokens are prefill."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def num_prefill(self) -> int:
        return self.num_tokens - self.num_decode


@dataclass(frozen=True)
class StepPlan(StepShape):
    """One batch, with what the scheduler needs to make sense of the result."""

    batch: Batch
    leases: NDArray[np.int64]
    """Of each of the rows."""
    logits_rows: IntArray
    """Which row of the batch's logits each sampled row draws from; the next two arrays go along with it."""
    sampled_leases: NDArray[np.int64]
    positions: IntArray
    """Where the new token of each sampled row will stand."""
    scores: tuple[PromptRows, ...]
    """Prompts whose log-probabilities are wanted."""
    pools: tuple[PromptRows, ...]
    """Prompts whose embeddings are wanted."""
    attention: float
    """Cells read by all tokens together: what attention costs."""
    decode_attention: float = field(kw_only=True, default=0.0)
    """Those of them that decodes read."""

    @property
    def num_tokens(self) -> int:
        return len(self.batch)

    def drawing(self, places: NDArray[np.bool_]) -> StepPlan:
        """The same step with draws for these sampled rows only: the others have got their next token elsewhere."""
        return replace(
            self,
            sampled_rows=self.sampled_rows[places],
            logits_rows=self.logits_rows[places],
            sampled_leases=self.sampled_leases[places],
            positions=self.positions[places],
        )


@dataclass
class Draft:
    """A step in the making: rows that decode, chunks of prompts, and the cells promised to them."""

    budget: int
    """Tokens that may still be given."""
    cells: int = 0
    decodes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    chunks: dict[int, int] = field(default_factory=dict)
    """Row -> tokens."""
    preempted: bool = False
    num_tokens: int = 0
    attention: float = 0.0
    decode_attention: float = 0.0
    """That of the rows that decode alone."""

    def give_decodes(self, rows: IntArray, cells: int, attention: float) -> None:
        self.decodes = rows
        self.cells += cells
        self.decode_attention = attention
        self._give(len(rows), attention)

    def give_chunk(self, row: int, count: int, cells: int, num_computed: int) -> None:
        """Give a row tokens from position `num_computed` on, beside what it was given before."""
        self.chunks[row] = self.chunks.get(row, 0) + count
        self.cells += cells
        self._give(count, count * (num_computed + count / 2))

    def _give(self, count: int, attention: float) -> None:
        self.budget -= count
        self.num_tokens += count
        self.attention += attention
