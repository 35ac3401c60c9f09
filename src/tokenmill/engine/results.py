"""`Results`: turns a step's draws into output rows. The other half of the scheduler's tick; owned by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import BAD_ROW, DecodeOutput, IntArray, Sampled
from tokenmill.contract.backend import FloatArray
from tokenmill.engine.constraints import Constraints, Course
from tokenmill.engine.events import EventBus, Phase, ProposalEvent
from tokenmill.engine.plan import PromptRows, StepPlan, Verification, num_common
from tokenmill.engine.request import Request
from tokenmill.engine.rows import RunningRows
from tokenmill.outputs import End, FinishReason, StepResult, TokenLogprobs
from tokenmill.params import Pooling
from tokenmill.sampling.state import SamplingState

SLICE = 16
"""Rows of logits reduced at once: vocabularies are large."""


@dataclass(frozen=True)
class Completed:
    """A request completed by a step; the scheduler ends it and frees its resources."""

    request: Request
    reason: FinishReason
    token: int | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Verified:
    """The outcome of a request's proposed tokens."""

    request: Request
    verification: Verification
    num_agreed: int
    """Number of leading ones that were accepted: their KV is that of the log."""
    num_drawn: int
    """Tokens from the draws behind them, beyond the request's own draw..."""
    completed: tuple[Completed, ...]
    """...and its ending, if one of them was its last."""

    @property
    def num_rejected(self) -> int:
        return len(self.verification.tokens) - self.num_agreed


@dataclass(frozen=True)
class Update:
    """The outcome of a step: requests to end, and KV of rejected tokens to remove before that."""

    completed: list[Completed]
    verified: list[Verified]


class _Crowd:
    """The requests of some rows, with what is needed whenever they get a token."""

    def __init__(self, num_changes: int, rows: IntArray, requests: list[Request]) -> None:
        self.num_changes = num_changes
        self.rows = rows
        self.requests = requests
        self.names = [request.request_id for request in requests]
        self.stop_ids = [request.stop_ids for request in requests]
        self.appends = [request.tokens.append for request in requests]


_NOBODY = _Crowd(0, np.zeros(0, dtype=np.int32), [])


class Results:
    """Gives tokens to requests, detects completion, and collects output rows until they are taken."""

    def __init__(self, rows: RunningRows, sampling: SamplingState, constraints: Constraints, events: EventBus) -> None:
        self._rows = rows
        self._sampling = sampling
        self._constraints = constraints
        self._events = events
        self._pending = StepResult([], [], None, {})
        self._crowd = _NOBODY
        self._ending: set[str] = set()
        """Requests whose ending is among the outputs not taken yet."""

    def take(self) -> StepResult:
        """The collected output rows; each is returned once."""
        result, self._pending = self._pending, StepResult([], [], None, {})
        self._ending.clear()
        if self._rows.num_running == 0:
            self._crowd = _NOBODY  # do not keep requests that have ended
        return result

    def __len__(self) -> int:
        return len(self._pending.request_ids)

    def is_ending(self, request_id: str) -> bool:
        """Whether the request's ending has not been taken yet."""
        return request_id in self._ending

    def end(
        self,
        request: Request,
        end: End,
        tick: int,
        num_computed: int,
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """The request has ended: mark it, and add its ending to the output."""
        request.finish(end.finish_reason, end.error)
        self._ending.add(request.request_id)
        self._pending.ends[len(self._pending.request_ids)] = end
        self._add([request.request_id], [token], None if logprobs is None else [logprobs])
        self._events.phase(request, Phase.ENDED, tick, num_computed)

    def _add(
        self, names: list[str], tokens: Sequence[int | None], logprobs: Sequence[TokenLogprobs | None] | None
    ) -> None:
        pending = self._pending
        if logprobs is not None and pending.logprobs is None:
            pending = self._pending = replace(pending, logprobs=[None] * len(pending.request_ids))
        if pending.logprobs is not None:
            pending.logprobs.extend([None] * len(names) if logprobs is None else logprobs)
        pending.request_ids.extend(names)
        pending.token_ids.extend(tokens)

    def begin(self, request: Request) -> None:
        """Output the forced tokens that a new request begins with."""
        self._add([request.request_id] * len(request.output), request.output, None)

    def update(self, plan: StepPlan, sampled: Sampled, outputs: DecodeOutput | None) -> Update:
        """Give the sampled tokens to their requests; returns the completed ones."""
        completed: list[Completed] = []
        if outputs is not None:
            self._score_prompts(plan, outputs.logits)
            completed = self._pool_prompts(plan, outputs.hidden)
        num_rows = len(plan.sampled_rows)
        rows, ids, still = self._rows.settle(plan, sampled.ids[:num_rows])
        if self._rows.awaits_token[rows].any():
            self._note_first_tokens(rows, plan.tick)
        places = still.nonzero()[0]
        completed += self._hand_out(rows, ids, self._logprobs(rows, sampled, places) if sampled.extras else None)
        if self._sampling.has_rules[rows].any():
            self._advance_rules(rows, ids, {one.request.row for one in completed})
        if self._rows.is_constrained[rows].any():
            completed += self._follow_grammars(rows, ids, {one.request.row for one in completed})
        verified: list[Verified] = []
        if plan.verifications:
            ended = {one.request.row for one in completed}
            for one in plan.verifications:
                request = self._still_there(one)
                if request is not None:
                    first = len(plan.sampled_rows) + one.first_draw
                    verified.append(self._verify(request, one, first, sampled, is_over=one.row in ended))
            completed += [end for one in verified for end in one.completed]
        return Update(completed, verified)

    def _verify(
        self, request: Request, proposed: Verification, first: int, sampled: Sampled, *, is_over: bool
    ) -> Verified:
        """After its own draw, a request takes the draws behind it, as long as its log agrees with the proposal."""
        log, begin = request.tokens, proposed.position
        num_drawn, num_agreed, found = 0, num_common(log[begin:], proposed.tokens), list[Completed]()
        while not is_over and not found and num_agreed == len(log) - begin:  # so a draw follows the log
            found = self._take(request, first + num_agreed - 1, sampled)
            num_drawn, num_agreed = num_drawn + 1, num_common(log[begin:], proposed.tokens)
        return Verified(request, proposed, num_agreed, num_drawn, tuple(found))

    def _take(self, request: Request, place: int, sampled: Sampled) -> list[Completed]:
        """One more token for a request, from the draw at this index: as in a step of its own."""
        row, ids = np.array([request.row], dtype=np.int32), sampled.ids[place : place + 1]
        logprobs = self._logprobs(row, sampled, np.array([place])) if sampled.extras else [None]
        _, completed = self._accept(request, ids.tolist(), logprobs[0])
        if completed is not None:
            return [completed]
        return self._follow_grammars(row, ids, set()) if request.grammar is not None else []

    def _follow_grammars(self, rows: IntArray, ids: IntArray, completed: set[int]) -> list[Completed]:
        """Constrained requests have got a token: advance their grammars, which may force what comes next."""
        found: list[Completed] = []
        proposed: dict[int, int] = {}
        constrained = self._rows.is_constrained[rows].nonzero()[0]
        for row, token in zip(rows[constrained].tolist(), ids[constrained].tolist(), strict=True):
            request = self._rows.requests[row]
            if request is None or row in completed:
                continue
            followed, one = self._constraints.follow(request, (token,)), None
            while one is None and followed.proposal:
                count, one = self._accept(request, followed.proposal)
                proposed[row] = proposed.get(row, 0) + count
                followed = self._constraints.follow(request, followed.proposal) if one is None else followed
            if one is not None:
                found.append(one)
            elif followed.course is Course.COMPLETE:
                found.append(Completed(request, FinishReason.STOP))
            elif followed.course is Course.BROKEN:
                found.append(Completed(request, FinishReason.ERROR, error=followed.error))
        if proposed and self._events.is_heard:
            self._events.emit(ProposalEvent(self._events.clock(), tuple(proposed), tuple(proposed.values())))
        return found

    def _accept(
        self, request: Request, proposal: Sequence[int], logprobs: TokenLogprobs | None = None
    ) -> tuple[int, Completed | None]:
        """Append tokens to a request's log as if each had been drawn in its own step; returns how many were taken.

        The request may complete before the last of them. `logprobs` are those of a single one.
        """
        row, completed = request.row, None
        accepted: list[int] = []
        for token in proposal:
            request.tokens.append(token)
            accepted.append(token)
            completed = self._completed_by(request, token, logprobs)
            if completed is not None:
                break
        self._rows.accept(row, accepted)
        told = accepted if completed is None else accepted[:-1]
        self._add([request.request_id] * len(told), told, None if logprobs is None else [logprobs] * len(told))
        if self._sampling.has_rules[row] and completed is None:
            for token in accepted:
                self._sampling.advance(row, token)
        return len(accepted), completed

    def _hand_out(self, rows: IntArray, ids: IntArray, logprobs: list[TokenLogprobs | None] | None) -> list[Completed]:
        """Append every row's token to its request's log and to the output; handle possible last tokens one by one.

        The only loops over all rows in a decode step: every lookup here shows in `python -m benchmarks.engine`.
        """
        crowd, tokens = self._crowd_of(rows), ids.tolist()
        for append, token in zip(crowd.appends, tokens, strict=True):
            append(token)
        may_end = self._rows.num_tokens[rows] >= self._rows.limit[rows]
        may_end |= ids == BAD_ROW
        stops = [token in stop_ids for token, stop_ids in zip(tokens, crowd.stop_ids, strict=True)]
        if True in stops:
            may_end |= stops
        ending: list[int] = may_end.nonzero()[0].tolist()
        if not ending:
            self._add(crowd.names, tokens, logprobs)
            return []
        going_on = (~may_end).nonzero()[0].tolist()
        told = [None] * len(tokens) if logprobs is None else logprobs
        self._add(
            [crowd.names[place] for place in going_on],
            [tokens[place] for place in going_on],
            None if logprobs is None else [logprobs[place] for place in going_on],
        )
        completed = []
        for place in ending:
            request, token, its = crowd.requests[place], tokens[place], told[place]
            one = self._completed_by(request, token, its)
            if one is not None:
                completed.append(one)
            else:
                self._add([request.request_id], [token], None if its is None else [its])
        return completed

    def _crowd_of(self, rows: IntArray) -> _Crowd:
        """The requests of these rows; cached, since consecutive decode steps mostly have the same."""
        crowd, num_changes = self._crowd, self._rows.num_changes
        is_same = crowd.num_changes == num_changes and len(crowd.rows) == len(rows)
        if not is_same or (crowd.rows != rows).any():
            requests = [one for row in rows.tolist() if (one := self._rows.requests[row]) is not None]
            crowd = self._crowd = _Crowd(num_changes, rows, requests)
        return crowd

    def _completed_by(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Completed | None:
        """The token may be the request's last one: a stop token, the last that fits, or none at all."""
        if token == BAD_ROW:
            request.tokens.keep_generated(len(request.tokens.generated) - 1)
            params = request.draw.params
            if request.grammar is not None and (params.allowed_token_ids is not None or params.banned_token_ids):
                what = "its grammar allows only tokens that allowed_token_ids or banned_token_ids rule out"
                return Completed(request, FinishReason.CONFLICT, error=what)
            return Completed(request, FinishReason.ERROR, error="the model gave logits that are not finite")
        if token in request.stop_ids and len(request.tokens) - request.num_prompt > request.limits.min_new_tokens:
            return Completed(request, FinishReason.STOP, token, logprobs=logprobs)
        if len(request.tokens) >= self._rows.limit[request.row]:
            return Completed(request, FinishReason.LENGTH, token, logprobs=logprobs)
        return None

    def _score_prompts(self, plan: StepPlan, logits: FloatArray) -> None:
        for scores in plan.scores:
            request = self._still_there(scores)
            if request is None:
                continue
            rows = logits[scores.output]
            known = len(request.prompt_logprobs) - scores.position  # from before it was preempted
            targets = request.tokens.array[scores.position + 1 : scores.position + 1 + len(rows)]
            count = request.draw.params.prompt_logprobs or 0
            request.prompt_logprobs += score(rows[known:], targets[known:], count) if known < len(rows) else []

    def _pool_prompts(self, plan: StepPlan, hidden: FloatArray) -> list[Completed]:
        """Add hidden states to the embeddings they belong to; completes requests whose prompt is done."""
        completed = []
        for pool in plan.pools:
            request = self._still_there(pool)
            if request is None:
                continue
            rows = hidden[pool.output]
            end = pool.position + len(rows)
            if request.pooling is Pooling.MEAN:
                rows = rows[request.num_pooled - pool.position :]  # some are known from before it was preempted
            if len(rows):
                total = rows.sum(axis=0, dtype=np.float64)
                request.pooled = total if request.pooled is None else request.pooled + total
                request.num_pooled += len(rows)
            if end == request.num_prompt and request.pooled is not None:
                embedding = (request.pooled / request.num_pooled).astype(np.float32)
                request.pooled = None
                completed.append(_embedded(request, embedding))
        return completed

    def _still_there(self, rows: PromptRows | Verification) -> Request | None:
        """The request that the rows were computed for, if it is still running."""
        return self._rows.requests[rows.row] if self._rows.lease[rows.row] == rows.lease else None

    def _advance_rules(self, rows: IntArray, ids: IntArray, completed: set[int]) -> None:
        for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
            if self._sampling.has_rules[row] and row not in completed:
                self._sampling.advance(row, token)

    def _logprobs(self, rows: IntArray, sampled: Sampled, places: NDArray[np.intp]) -> list[TokenLogprobs | None]:
        """Log-probabilities of the rows that requested them, None for the others; `places`: their draws."""
        chosen, top_ids, top = (sampled.extras[name][places] for name in ("logprob", "top_ids", "top_logprobs"))
        found: list[TokenLogprobs | None] = []
        for i, count in enumerate(self._sampling.table["num_logprobs"][rows].tolist()):
            likeliest = zip(top_ids[i, : max(count, 0)].tolist(), top[i, : max(count, 0)].tolist(), strict=True)
            found.append(TokenLogprobs(float(chosen[i]), tuple(likeliest)) if count >= 0 else None)
        return found

    def _note_first_tokens(self, rows: IntArray, tick: int) -> None:
        for row in rows[self._rows.awaits_token[rows]]:
            request = self._rows.requests[row]
            if request is not None:
                self._events.phase(request, Phase.DECODE, tick)
        self._rows.awaits_token[rows] = False


def _embedded(request: Request, embedding: FloatArray) -> Completed:
    if not np.isfinite(embedding).all():
        return Completed(request, FinishReason.ERROR, error="the model gave hidden states that are not finite")
    request.embedding = embedding.tolist()
    return Completed(request, FinishReason.STOP)


def score(logits: NDArray[np.float32], tokens: NDArray[np.int32], count: int) -> list[TokenLogprobs]:
    """The log-probability of each prompt token, and the `count` most likely alternatives."""
    scores: list[TokenLogprobs] = []
    for begin in range(0, len(tokens), SLICE):
        rows = logits[begin : begin + SLICE].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        for row, token in zip(rows, tokens[begin : begin + SLICE].tolist(), strict=True):
            likeliest = np.argsort(-row, kind="stable")[:count]
            top = tuple((int(i), float(row[i])) for i in likeliest)
            scores.append(TokenLogprobs(float(row[token]), top))
    return scores
