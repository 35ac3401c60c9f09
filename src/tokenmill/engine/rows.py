"""`RunningRows`: the running requests as arrays, one row each, so that a tick costs no Python per request.

The arrays of a step are built from them (`make_plan`). A row is also the request's row in the backend's token table.
Each time a row is given to a request it gets a new lease number; a plan records the leases it was made for, so
results for a reassigned row are ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import Batch, IntArray, Output
from tokenmill.engine.events import SlotState, SlotView
from tokenmill.engine.plan import NO_ROWS, Draft, PromptRows, StepPlan, Verification
from tokenmill.engine.request import NO_ROW, Request
from tokenmill.errors import IntegrityError
from tokenmill.params import Pooling

FREE = 0


@dataclass(frozen=True)
class _Chunk:
    """Consecutive tokens of one row, and their outputs."""

    row: int
    begin: int
    batch: Batch
    num_scored: int
    """The first this many keep their logits, to score the prompt."""
    num_pooled: int
    """The last this many keep their hidden states, for the prompt's embedding."""
    draws: bool
    """Its last token is the log's last one, so a new token is drawn."""


@dataclass(frozen=True)
class _Proposed:
    """The tokens of decoding rows, including proposed ones; the fields are those of a plan."""

    batch: Batch | None
    counts: IntArray
    logits_rows: IntArray
    verifications: tuple[Verification, ...]
    more_rows: IntArray
    more_logits_rows: IntArray
    more_positions: IntArray


NO_PROPOSALS = _Proposed(None, NO_ROWS, NO_ROWS, (), NO_ROWS, NO_ROWS, NO_ROWS)


class RunningRows:
    """A request owes `num_tokens + pending - num_computed` tokens to the backend; one means that it decodes."""

    def __init__(self, max_rows: int) -> None:
        def column() -> IntArray:
            return np.zeros(max_rows, dtype=np.int32)

        self.lease: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.seq = column()
        self.num_tokens = column()
        """Length of the log."""
        self.pending = column()
        """Tokens sampled in steps that are in flight."""
        self.num_computed = column()
        """Tokens submitted to the backend, including steps in flight."""
        self.limit = column()
        """Length at which the log is complete."""
        self.last_token = column()
        self.last_progress = column()
        """Tick of the latest tokens."""
        self.uncharged = column()
        """Tokens not yet charged to the request's key."""
        self.awaits_token: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)
        """No token drawn yet since it got the row."""
        self.needs_history: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)
        """Its next token depends on the last one: never submitted ahead."""
        self.is_constrained: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)
        """Its next draw depends on the last token, but its forward pass can be submitted ahead."""
        self.speculates: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)
        """Its proposals depend on the last token: never submitted ahead."""
        self.pools: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)
        """An embedding request: it never decodes."""
        self.is_background: NDArray[np.bool_] = np.zeros(max_rows, dtype=bool)
        """A background request."""
        self.requests: list[Request | None] = [None] * max_rows
        self.ones: IntArray = np.ones(max_rows, dtype=np.int32)
        self.in_order: IntArray = np.arange(max_rows, dtype=np.int32)
        for shared in (self.ones, self.in_order):  # views of them are parts of plans
            shared.flags.writeable = False
        self.num_changes = 0
        """Lease number: how often a row was given or taken."""
        self._free = list(range(max_rows))
        """A heap: the lowest rows are used first, so that those in use are contiguous."""
        self._leases = FREE

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.requests) - len(self._free)

    def running(self) -> list[Request]:
        return [request for request in self.requests if request is not None]

    def attach(self, request: Request, seq: int, num_computed: int, limit: int, tick: int) -> int:
        """Give the request a row."""
        row = heapq.heappop(self._free)
        self.num_changes += 1
        self._leases += 1
        self.lease[row] = self._leases
        self.seq[row] = seq
        self.num_tokens[row] = len(request.tokens)
        self.num_computed[row] = num_computed
        self.limit[row] = limit
        self.last_token[row] = request.tokens[-1]
        self.last_progress[row] = tick
        self.pending[row] = self.uncharged[row] = 0
        self.awaits_token[row] = True
        self.needs_history[row] = request.draw.params.needs_history
        self.is_constrained[row] = request.grammar is not None
        self.speculates[row] = False
        self.pools[row] = request.pooling is not None
        self.is_background[row] = request.hints.is_background
        self.requests[row] = request
        request.row = row
        return row

    def detach(self, request: Request) -> int:
        """Take the row back; returns its sequence."""
        row, request.row = request.row, NO_ROW
        self.num_changes += 1
        self.lease[row] = FREE
        self.pending[row] = 0
        self.is_background[row] = False
        self.requests[row] = None
        heapq.heappush(self._free, row)
        return int(self.seq[row])

    @property
    def foreground(self) -> NDArray[np.bool_]:
        """Rows of requests that are not background."""
        rows: NDArray[np.bool_] = (self.lease != FREE) & ~self.is_background
        return rows

    # -- state of each row --------------------------------------------------------------------------------------------

    def owed(self) -> IntArray:
        """Tokens each row owes to the backend; 0 for free rows and for those that only wait for a token in flight."""
        wanting = (self.lease != FREE) & (self.num_tokens + self.pending < self.limit)
        wanting &= ~((self.needs_history | self.speculates) & (self.pending > 0))
        owed: IntArray = np.where(wanting, self.num_tokens + self.pending - self.num_computed, 0)
        return owed

    def num_collected(self, in_flight: Iterable[StepPlan]) -> IntArray:
        """Computed tokens of each row, not counting these steps in flight."""
        computed = self.num_computed.copy()
        for plan in in_flight:
            still = self.lease[plan.rows] == plan.leases
            computed[plan.rows[still]] -= plan.counts[still]
        return computed

    def names(self, plan: StepPlan) -> tuple[str | None, ...]:
        """Request id for each row of the plan; None where the row was reassigned."""
        requests, still = self.requests, self.lease[plan.rows] == plan.leases
        names = [None if (one := requests[row]) is None else one.request_id for row in plan.rows.tolist()]
        if not still.all():
            names = [name if stays else None for name, stays in zip(names, still.tolist(), strict=True)]
        return tuple(names)

    def views(self, in_flight: Iterable[StepPlan] = ()) -> list[SlotView]:
        """What each row is doing, given the steps in flight."""
        views = []
        computed = self.num_collected(in_flight)
        for row, request in enumerate(self.requests):
            if request is None:
                views.append(SlotView(row, "idle"))
                continue
            state: SlotState = "prefilling" if self.awaits_token[row] else "generating"
            hints = request.hints
            lengths = int(self.num_tokens[row]), int(computed[row])
            views.append(SlotView(row, state, request.request_id, *lengths, hints.key, hints.owner))
        return views

    def input_tokens(self, rows: IntArray) -> IntArray:
        """The next token of decoding rows: known, or the reference to the row in which a step in flight samples it."""
        tokens: IntArray = np.where(self.pending[rows] > 0, -1 - rows, self.last_token[rows])
        return tokens

    # -- the next step: from draft to arrays, without Python per decode token ------------------------------------------

    def decode_batch(self, index: IntArray) -> Batch:
        """One token for each of these rows."""
        return Batch(
            token=self.input_tokens(index),
            pos=self.num_computed[index],
            seq_ids=self.seq[index][:, None],
            output=np.ones(len(index), dtype=np.uint8),
        )

    def make_plan(self, draft: Draft, tick: int) -> StepPlan:
        """The draft as arrays: decodes first, then the chunks. The draft must not be empty."""
        decodes = draft.decodes
        all_rows = sampled = decodes
        counts, logits_rows = self.ones[: len(decodes)], self.in_order[: len(decodes)]
        scores: tuple[PromptRows, ...] = ()
        pools: tuple[PromptRows, ...] = ()
        proposed = NO_PROPOSALS
        if draft.proposals:
            proposed = self._proposed(decodes, draft.proposals)
            batch, counts, logits_rows = proposed.batch, proposed.counts, proposed.logits_rows
        else:
            batch = self.decode_batch(decodes) if len(decodes) else None
        if batch is None or draft.chunks:
            num_decoded = 0 if batch is None else len(batch)
            chunks = [self._chunk(row, count) for row, count in draft.chunks.items()]
            batch = _join(batch, chunks)
            all_rows = np.concatenate([decodes, np.fromiter(draft.chunks, np.int32)])
            counts = np.concatenate([counts, np.fromiter(draft.chunks.values(), np.int32)])
            completed, completed_logits, scores = self._logits_of(chunks, num_decoded)
            pools = self._hidden_of(chunks)
            sampled = np.concatenate([decodes, np.array(completed, dtype=np.int32)])
            logits_rows = np.concatenate([logits_rows, np.array(completed_logits, dtype=np.int32)])
        background_s: float | None = 0.0
        if self.is_background[all_rows].any():
            background_s = None if draft.background_s is None else draft.background_given_s
        leases = self.lease[all_rows]
        return StepPlan(
            tick=tick,
            batch=batch,
            rows=all_rows,
            leases=leases,
            counts=counts,
            sampled_rows=sampled,
            logits_rows=logits_rows,
            sampled_leases=leases if sampled is all_rows else self.lease[sampled],
            positions=self.num_tokens[sampled] + self.pending[sampled],
            num_decode=len(decodes),
            scores=scores,
            pools=pools,
            attention=draft.attention,
            decode_attention=draft.decode_attention,
            background_s=background_s,
            num_background=int(np.count_nonzero(self.is_background[decodes])),
            num_proposed=len(proposed.more_rows),
            verifications=proposed.verifications,
            more_rows=proposed.more_rows,
            more_logits_rows=proposed.more_logits_rows,
            more_positions=proposed.more_positions,
        )

    def _proposed(self, decodes: IntArray, proposals: dict[int, tuple[int, ...]]) -> _Proposed:
        """One token per decoding row, followed by its proposed tokens: all of them output logits."""
        counts = np.array([1 + len(proposals.get(row, ())) for row in decodes.tolist()], dtype=np.int32)
        begin = np.cumsum(counts, dtype=np.int32) - counts
        rows = np.repeat(decodes, counts)
        within = np.arange(len(rows), dtype=np.int32) - np.repeat(begin, counts)
        is_behind = within > 0
        token = np.repeat(self.input_tokens(decodes), counts)
        token[is_behind] = [token for row in decodes.tolist() for token in proposals.get(row, ())]
        batch = Batch(
            token=token,
            pos=self.num_computed[rows] + within,
            seq_ids=self.seq[rows][:, None],
            output=np.ones(len(rows), dtype=np.uint8),
        )
        first_draws = begin - self.in_order[: len(decodes)]
        verifications = tuple(
            Verification(row, int(self.lease[row]), int(self.num_tokens[row]), proposals[row], first)
            for row, first in zip(decodes.tolist(), first_draws.tolist(), strict=True)
            if row in proposals
        )
        more_rows = rows[is_behind]
        return _Proposed(
            batch=batch,
            counts=counts,
            logits_rows=begin,
            verifications=verifications,
            more_rows=more_rows,
            more_logits_rows=is_behind.nonzero()[0].astype(np.int32),
            more_positions=self.num_tokens[more_rows] + within[is_behind],
        )

    def _chunk(self, row: int, count: int) -> _Chunk:
        request, begin = self.requests[row], int(self.num_computed[row])
        if request is None:
            raise IntegrityError(f"row {row} has a chunk but no request")
        is_last = begin + count == int(self.num_tokens[row])
        num_scored = max(min(count, request.num_prompt - 1 - begin), 0) if request.wants_scores else 0
        num_pooled = count if request.pooling is Pooling.MEAN else int(is_last and request.pooling is Pooling.LAST)
        draws = is_last and request.pooling is None
        output = np.zeros(count, dtype=np.uint8)
        output[:num_scored] = Output.LOGITS
        output[count - num_pooled :] = Output.HIDDEN
        if draws:
            output[-1] = Output.LOGITS
        batch = Batch(
            token=request.tokens.array[begin : begin + count],
            pos=np.arange(begin, begin + count, dtype=np.int32),
            seq_ids=np.full((count, 1), self.seq[row], dtype=np.int32),
            output=output,
        )
        return _Chunk(row, begin, batch, num_scored, num_pooled, draws)

    def _logits_of(
        self, chunks: list[_Chunk], first_logits: int
    ) -> tuple[list[int], list[int], tuple[PromptRows, ...]]:
        """Output rows of the chunks: rows that draw a token, the logits rows they draw from, and the scores."""
        completed, logits_rows, scores, at = [], [], [], first_logits
        for chunk in chunks:
            if chunk.num_scored:
                logits = slice(at, at + chunk.num_scored)
                scores.append(PromptRows(chunk.row, int(self.lease[chunk.row]), chunk.begin, logits))
            at += int(np.count_nonzero(chunk.batch.output == Output.LOGITS))
            if chunk.draws:
                completed.append(chunk.row)
                logits_rows.append(at - 1)
        return completed, logits_rows, tuple(scores)

    def _hidden_of(self, chunks: list[_Chunk]) -> tuple[PromptRows, ...]:
        """Hidden-state rows of the chunks, for embedding requests."""
        pools, at = [], 0
        for chunk in chunks:
            if chunk.num_pooled:
                position = chunk.begin + len(chunk.batch) - chunk.num_pooled
                hidden = slice(at, at + chunk.num_pooled)
                pools.append(PromptRows(chunk.row, int(self.lease[chunk.row]), position, hidden))
                at += chunk.num_pooled
        return tuple(pools)

    # -- effects of a step --------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        rows, sampled = _as_index(plan, plan.rows), _as_index(plan, plan.sampled_rows)
        self.num_computed[rows] += plan.counts
        self.uncharged[rows] += plan.counts
        self.pending[sampled] += 1
        self.last_progress[rows] = plan.tick

    def undo(self, plan: StepPlan) -> None:
        """Undo a step that was not submitted."""
        still = self.lease[plan.rows] == plan.leases
        rows = plan.rows[still]
        self.num_computed[rows] -= plan.counts[still]
        self.uncharged[rows] -= plan.counts[still]
        self.pending[plan.sampled_rows[self.lease[plan.sampled_rows] == plan.sampled_leases]] -= 1

    def settle(self, plan: StepPlan, ids: IntArray) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
        """The step's ids have arrived: rows that still belong to the same requests, their ids, and their indices."""
        still = np.asarray(self.lease[plan.sampled_rows] == plan.sampled_leases)
        rows = plan.sampled_rows
        index = _as_index(plan, rows)
        if not still.all():
            rows, ids = rows[still], ids[still]
            index = rows
        self.pending[index] -= 1
        self.num_tokens[index] += 1
        self.last_token[index] = ids
        return rows, ids, still

    def accept(self, row: int, tokens: Sequence[int]) -> None:
        """The row has got tokens that no step has drawn; a step in flight must not draw the first of them again."""
        self.num_tokens[row] += len(tokens)
        self.last_token[row] = tokens[-1]
        self.pending[row] = 0

    def roll_back(self, row: int, num_computed: int) -> None:
        """Proposed tokens of the row were rejected: this much of its log is computed."""
        self.uncharged[row] -= self.num_computed[row] - num_computed
        self.num_computed[row] = num_computed

    def still_drawing(self, plan: StepPlan) -> StepPlan:
        """A submitted plan that has not been drawn yet, without the rows that have accepted tokens since."""
        still = (self.lease[plan.sampled_rows] != plan.sampled_leases) | (self.pending[plan.sampled_rows] > 0)
        return plan if still.all() else plan.drawing(still)


def _as_index(plan: StepPlan, rows: IntArray) -> IntArray | slice:
    """The plan's rows as a slice if they are contiguous, which is four times as fast."""
    if plan.num_prefill or not len(rows) or int(rows[-1]) - int(rows[0]) != len(rows) - 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def _join(decodes: Batch | None, chunks: list[_Chunk]) -> Batch:
    parts = [*([decodes] if decodes is not None else []), *(chunk.batch for chunk in chunks)]
    return Batch(
        token=np.concatenate([part.token for part in parts]),
        pos=np.concatenate([part.pos for part in parts]),
        seq_ids=np.concatenate([part.seq_ids for part in parts]),
        output=np.concatenate([part.output for part in parts]),
    )
