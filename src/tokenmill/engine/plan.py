"""`StepPlan`: everything one step computes, as arrays. Frozen, and free of requests: it could be sent anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import Batch, IntArray

NO_ROWS: IntArray = np.zeros(0, dtype=np.int32)


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
    """Rows that decode, the first of them: each has one token to give, and proposed ones behind it. Others prefill."""
    num_proposed: int = field(kw_only=True, default=0)
    """Proposed tokens of the rows that decode, to be verified."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def num_prefill(self) -> int:
        return self.num_tokens - self.num_decode - self.num_proposed


@dataclass(frozen=True)
class Verification:
    """Proposed tokens of one row: computed before they are drawn, kept as far as they are what is drawn.

    The row's own draw decides about the first of them. For each of them there is one more draw, of what follows it.
    """

    row: int
    lease: int
    position: int
    """Of the first one: the length of the log."""
    tokens: tuple[int, ...]
    first_draw: int
    """Place of the draw after the first one among `StepPlan.more_rows`; the others follow it."""


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
    verifications: tuple[Verification, ...] = field(kw_only=True, default=())
    more_rows: IntArray = field(kw_only=True, default_factory=lambda: NO_ROWS)
    """Rows of the draws that follow proposed tokens, one entry a draw; the next two arrays go along with it."""
    more_logits_rows: IntArray = field(kw_only=True, default_factory=lambda: NO_ROWS)
    more_positions: IntArray = field(kw_only=True, default_factory=lambda: NO_ROWS)

    @property
    def num_tokens(self) -> int:
        return len(self.batch)

    def proposed_before(self) -> dict[int, tuple[int, ...]]:
        """For each draw after proposed tokens, by its place among all draws: those between the log and the draw."""
        return {
            len(self.sampled_rows) + one.first_draw + i: one.tokens[: i + 1]
            for one in self.verifications
            for i in range(len(one.tokens))
        }

    def drawing(self, places: NDArray[np.bool_]) -> StepPlan:
        """The same step with draws for these sampled rows only: the others have got their next token elsewhere."""
        return replace(
            self,
            sampled_rows=self.sampled_rows[places],
            logits_rows=self.logits_rows[places],
            sampled_leases=self.sampled_leases[places],
            positions=self.positions[places],
        )


def num_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


@dataclass
class Draft:
    """A step in the making: rows that decode, chunks of prompts, and the cells promised to them."""

    budget: int
    """Tokens that may still be given."""
    cells: int = 0
    decodes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    chunks: dict[int, int] = field(default_factory=dict)
    """Row -> tokens."""
    proposals: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Row that decodes -> tokens computed behind its own one, to be verified."""
    preempted: bool = False
    num_tokens: int = 0
    attention: float = 0.0
    decode_attention: float = 0.0
    """That of the rows that decode alone."""
    background_s: float | None = None
    """Seconds that are left for background requests; None: as many as for all others."""
    background_tokens: int = 0
    """Tokens that are left for them, where the time is bounded."""

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

    def give_proposal(self, row: int, tokens: tuple[int, ...], cells: int, num_computed: int) -> None:
        """Let a row that decodes have proposed tokens behind its own one."""
        self.proposals[row] = tokens
        self.cells += cells
        self._give(len(tokens), len(tokens) * (num_computed + 1 + len(tokens) / 2))

    def _give(self, count: int, attention: float) -> None:
        self.budget -= count
        self.num_tokens += count
        self.attention += attention
