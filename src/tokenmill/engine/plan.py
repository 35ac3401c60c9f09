"""`StepPlan`: everything one step computes, as arrays. Frozen, without references to requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import Batch, IntArray

NO_ROWS: IntArray = np.zeros(0, dtype=np.int32)
UNKNOWN = -(1 << 31)
"""A proposed token that no draw can be."""


@dataclass(frozen=True)
class PromptRows:
    """Output rows of a step that belong to one prompt: logits to score it, or hidden states to pool."""

    row: int
    lease: int
    position: int
    """Token index in the prompt of the first of these rows."""
    output: slice
    """Among the step's logits or hidden rows."""


@dataclass(frozen=True)
class StepShape:
    """Batch composition of a step: participating rows, and tokens per row."""

    tick: int
    rows: IntArray
    """The participating rows..."""
    counts: IntArray
    """...and their numbers of tokens."""
    sampled_rows: IntArray
    """Rows that draw a token."""
    num_decode: int
    """The first rows are decodes: one token each, plus proposed tokens behind it. Others prefill."""
    num_proposed: int = field(kw_only=True, default=0)
    """Proposed tokens of the decodes, to be verified."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def num_prefill(self) -> int:
        return self.num_tokens - self.num_decode - self.num_proposed


@dataclass(frozen=True)
class Verification:
    """Proposed tokens of one row: computed before they are drawn, kept as long as the draws agree.

    The row's own draw verifies the first one. Each of them has one more draw, for the token after it.
    """

    row: int
    lease: int
    position: int
    """Position of the first one: the length of the log."""
    tokens: tuple[int, ...]
    """Below 0: the name of a row of the token table, see `StepPlan.names_proposals`."""
    first_draw: int
    """Index of the draw after the first one in `StepPlan.more_rows`; the others follow it."""


@dataclass(frozen=True)
class StepPlan(StepShape):
    """One batch, and what the scheduler needs to interpret its results."""

    batch: Batch
    leases: NDArray[np.int64]
    """Per row."""
    logits_rows: IntArray
    """The logits row that each sampled row draws from; parallel to the next two arrays."""
    sampled_leases: NDArray[np.int64]
    positions: IntArray
    """Position of each sampled row's new token."""
    scores: tuple[PromptRows, ...]
    """Prompts that request log-probabilities."""
    pools: tuple[PromptRows, ...]
    """Prompts that request embeddings."""
    attention: float
    """Cells read by attention, over all tokens: its cost."""
    decode_attention: float = field(kw_only=True, default=0.0)
    """The part of it read by decodes."""
    background_s: float | None = field(kw_only=True, default=None)
    """Predicted seconds of background tokens, where they are bounded; 0 without any."""
    num_background: int = field(kw_only=True, default=0)
    """Rows of background requests that decode."""
    verifications: tuple[Verification, ...] = field(kw_only=True, default=())
    more_rows: IntArray = field(kw_only=True, default_factory=lambda: NO_ROWS)
    """The row of each draw after proposed tokens; parallel to the next two arrays."""
    more_logits_rows: IntArray = field(kw_only=True, default_factory=lambda: NO_ROWS)
    more_positions: IntArray = field(kw_only=True, default_factory=lambda: NO_ROWS)

    @property
    def num_tokens(self) -> int:
        return len(self.batch)

    def proposed_before(self) -> dict[int, tuple[int, ...]]:
        """For each draw after proposed tokens, by index among all draws: the tokens between the log and the draw."""
        return {
            len(self.sampled_rows) + one.first_draw + i: one.tokens[: i + 1]
            for one in self.verifications
            for i in range(len(one.tokens))
        }

    @property
    def names_proposals(self) -> bool:
        """Are proposed tokens named by rows of the token table? They have been drafted, but are not known yet."""
        return any(token < 0 for one in self.verifications for token in one.tokens)

    def knowing(self, tokens: Mapping[int, int]) -> StepPlan:
        """The same step with what those names stand for; a name without a token stands for none that can be drawn."""
        known = tuple(
            replace(one, tokens=tuple(tokens.get(token, UNKNOWN) if token < 0 else token for token in one.tokens))
            for one in self.verifications
        )
        return replace(self, verifications=known)

    def drawing(self, places: NDArray[np.bool_]) -> StepPlan:
        """The same step, drawing for these sampled rows only: the others have received their next token elsewhere."""
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
    """A step under construction: decodes, prefill chunks, and the cells reserved for them."""

    budget: int
    """Remaining token budget."""
    cells: int = 0
    decodes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    chunks: dict[int, int] = field(default_factory=dict)
    """Row -> tokens."""
    proposals: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Decoding row -> proposed tokens computed behind its own, to be verified."""
    preempted: bool = False
    num_tokens: int = 0
    attention: float = 0.0
    decode_attention: float = 0.0
    """Of the decodes alone."""
    background_s: float | None = None
    """Seconds left for background requests; None if they are not bounded."""
    alone_s: float = 0.0
    """Seconds of the step without background requests; 0 before it is known."""
    background_given_s: float = 0.0
    """Predicted seconds of the tokens that background requests were given."""
    background_tokens: int = 0
    """Tokens left for them, if the time is bounded."""

    def give_decodes(self, rows: IntArray, cells: int, attention: float) -> None:
        self.decodes = rows
        self.cells += cells
        self.decode_attention = attention
        self._give(len(rows), attention)

    def give_chunk(self, row: int, count: int, cells: int, num_computed: int) -> None:
        """Give a row tokens from position `num_computed` on, in addition to what it has."""
        self.chunks[row] = self.chunks.get(row, 0) + count
        self.cells += cells
        self._give(count, count * (num_computed + count / 2))

    def give_proposal(self, row: int, tokens: tuple[int, ...], cells: int, num_computed: int) -> None:
        """Give a decoding row proposed tokens behind its own."""
        self.proposals[row] = tokens
        self.cells += cells
        self._give(len(tokens), len(tokens) * (num_computed + 1 + len(tokens) / 2))

    def _give(self, count: int, attention: float) -> None:
        self.budget -= count
        self.num_tokens += count
        self.attention += attention
