"""`Scheduler`: one rule. Every request has a log and a number of computed tokens; each tick lets it catch up.

There is no prefill phase and no decode phase. A tick gives one token to every request that needs just one (it
decodes), then chunks to those that need more, then starts new ones, within the token budget, the rows and the KV.
Chunked prefill, prefix hits and resuming after preemption are consequences, not cases. `docs/scheduling.md` has the
whole story.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokenmill.config import EngineConfig
from tokenmill.contract import DecodeOutput, IntArray, ModelInfo, Sampled
from tokenmill.engine.constraints import Constraints
from tokenmill.engine.cost_model import CostModel
from tokenmill.engine.events import EventBus, Phase
from tokenmill.engine.kv_manager import WEIGHTS, KVManager
from tokenmill.engine.plan import Draft, StepPlan
from tokenmill.engine.policies import SHARE_ROWS_TICKS, CoreUsage, Deadlines, Order, WaitingQueue, share_of
from tokenmill.engine.prefix import Match, common_prefix
from tokenmill.engine.request import (
    ENDINGS,
    NO_ROW,
    Request,
    RequestState,
    check_grammar,
    check_request,
    check_transition,
)
from tokenmill.engine.results import Results, Verified
from tokenmill.engine.rows import RunningRows
from tokenmill.engine.speculation import Speculation
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import ENDED_WELL, End, FinishReason, TokenLogprobs
from tokenmill.sampling.state import SamplingState

FIRST_BACKGROUND = 4
"""Tokens of background requests in the first step beside others; later ones have at most twice as many as the last, so
that the cost model sees what they take before they take much."""
PROBE_TICKS = 32
"""Every so many ticks a step has no background requests: so it is known what the others' steps take alone."""
BACKGROUND_TICKS = 128
"""After so many ticks without a token for background requests, one tick treats them as all others."""
AHEAD = 0.8
"""Share of the time for background requests when steps are submitted ahead: each is planned before it is known what the
one before it took."""
HEADROOM = 0.8
"""Share of `max_step_ms` that prompt steps are planned for: some take longer than predicted."""
SCORED_CHUNK = 64
"""Prompt tokens a step while they are scored: the logits of all of them are kept at once."""


@dataclass(frozen=True)
class Room:
    """Whether a waiting request fits, and what KV it starts from if it does."""

    is_enough: bool
    match: Match


class Scheduler:
    """Decides what runs; computes nothing. Owned by its engine core's thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelInfo,
        max_model_len: int,
        kv: KVManager,
        events: EventBus,
        depth: int,
        usage: CoreUsage,
    ) -> None:
        self.config = config
        self.model = model
        self.max_model_len = max_model_len
        self.kv = kv
        self.rows = RunningRows(config.max_num_seqs)
        self.sampling = SamplingState(config.max_num_seqs, model.vocab_size)
        self.usage = usage
        self.queue = WaitingQueue(config.max_queue, config.max_queue_tokens, usage)
        self.order = Order(self.rows, config.max_wait_ticks, usage)
        self.cost = CostModel(config.min_prefill_chunk)
        self.deadlines = Deadlines()
        self.requests: dict[str, Request] = {}
        """The ones that have not ended."""
        self.tick = 0
        self.num_held = 0
        """Waiting requests that the last tick did not start since their keys have all the rows they may have."""
        self._background_slowdown = 1 + (config.background_slowdown - 1) * (AHEAD if depth else 1.0)
        self._background_tick = 0
        """The latest tick in which background requests got what they need, or had no need."""
        self._background_tokens = 0
        """Their tokens in the latest step that was bounded by others."""
        self._background_left_s = 0.0
        """Time that was left for them in that step: less than a token takes, and added to the next."""
        self._lacks_kv = False
        """A request waits for KV that background requests may have."""
        self._arrivals = 0
        self._events = events
        self.constraints = Constraints(self.rows, model.vocab_size, proposes=config.forced_tokens)
        self.results = Results(self.rows, self.sampling, self.constraints, events)
        self.speculation = Speculation(
            self.rows, config.speculation, is_possible=kv.can_roll_back, runs_ahead=depth > 0
        )

    # -- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. One that can't be taken ends at once, with `overload`."""
        if request.request_id in self.requests or self.results.is_ending(request.request_id):
            raise InvalidRequest(f"request {request.request_id} is already running")
        if request.arrival or request.state is not RequestState.WAITING:
            raise InvalidRequest(f"request {request.request_id} has already run; create a new request")
        check_request(request, self.model, self.max_model_len)
        check_grammar(request)
        request.tokens += self.constraints.begin(request, request.max_tokens(self.max_model_len))
        self._arrivals += 1
        request.arrival, request.last_progress = self._arrivals, self.tick
        request.arrived_at = request.arrived_at or self._events.clock()
        self.requests[request.request_id] = request
        self.order.enter(request)
        self._events.phase(request, Phase.QUEUED, self.tick)
        over = self.queue.take_slot(request, self.order.num_free_rows(request))
        full = over or self.queue.why_full(request, self.rows.num_free)
        if over is None and full is not None:
            crowding = self.queue.crowding(request, self.rows.running())
            if crowding is not None:
                self.finish(crowding, FinishReason.OVERLOAD, error=f"{full}, shared between API keys")
                full = None
        if full is not None:
            if over is None:
                self.queue.give_slot(request)
            self.finish(request, FinishReason.OVERLOAD, error=full)
            return
        self.queue.add(request)
        self.results.begin(request)
        self.deadlines.watch(request, request.arrived_at, self.config.queue_timeout_s)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        token: int | None = None,
        error: str | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """End a request in whatever state it is: its KV is parked (dropped after an error), its caller is told."""
        check_transition(request.state, ENDINGS[reason].state)
        row, num_computed = request.row, self._num_computed(request)
        self.order.leave(request, row)
        if row != NO_ROW:
            if self.speculation.has_begun(row):
                self.speculation.forget(request, is_complete=reason in ENDED_WELL)
            seq = self._take_row(request)
            if reason is FinishReason.ERROR:
                self.kv.release(seq)
            else:
                self.kv.park(seq, request.tokens.array, request.num_prompt, request.hints)
        elif request in self.queue:
            self.queue.remove(request)
        del self.requests[request.request_id]
        self.results.end(request, End(reason, error), self.tick, num_computed, token, logprobs)

    def abandon_all(self, reason: FinishReason, error: str) -> None:
        """End every request without touching KV, which may be lost: for an engine that dies or closes."""
        for request in list(self.requests.values()):
            num_computed = self._num_computed(request)
            if request.row != NO_ROW:
                self.rows.detach(request)
                self.usage.give_row(share_of(request))
            elif request in self.queue:
                self.queue.remove(request)
            if not request.is_finished:
                self.results.end(request, End(reason, error), self.tick, num_computed)
        self.requests.clear()

    def expire(self) -> None:
        """End the requests whose time is up."""
        for request, error in self.deadlines.expired(self._events.clock(), self.config.queue_timeout_s):
            self.finish(request, FinishReason.TIMEOUT, error=error)

    # -- the tick -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan one step: decode tokens first, then prefill chunks, then new requests. None if nothing can run."""
        self.tick += 1
        self.num_held = 0
        self.expire()
        if self.tick % SHARE_ROWS_TICKS == 0:
            self._share_rows()
        draft = Draft(self.config.max_num_batched_tokens)
        if self._has_background:
            self._bound_background(draft)
        else:
            self._background_tick = self.tick
        self._lacks_kv = False
        owed = self.rows.owed()
        decodes = (owed == 1) & ~self.rows.pools
        self._decode(draft, self._in_slack(draft, decodes.nonzero()[0].astype(np.int32)))
        self._prefill(draft, ((owed > 0) & ~decodes).nonzero()[0])
        if not draft.preempted:
            self._admit(draft)
        if draft.background_s is not None:
            self._background_left_s = min(max(0.0, draft.background_s), self.cost.decode_s(1, 0.0))
        if not self._anyone_decodes(draft):
            self._use_up_budget(draft)
        if self.rows.speculates[draft.decodes].any():
            self._speculate(draft)
        if self.speculation.is_watching:
            self.speculation.watch(draft, self.cost)
        return self._seal(draft)

    def _share_rows(self) -> None:
        """Take a row from a key that has more than its share, for another key's request that waits for one."""
        if len(self.queue) and not self.rows.num_free and (victim := self.order.gives_way(self.queue, self.tick)):
            self._preempt(victim)

    # -- background requests ------------------------------------------------------------------------------------------

    @property
    def _has_background(self) -> bool:
        return bool(self.rows.is_background.any()) or self.queue.has_background

    def _bound_background(self, draft: Draft) -> None:
        """Take rows from background requests for others that wait, and bound the time that they add to the step.

        While others run, a step may take `background_slowdown` times as long as their decoding alone, or a little
        longer where steps vary by themselves (`BackgroundCost`).
        """
        foreground, num_waiting = self.rows.foreground, self.queue.num_startable
        if num_waiting and (self._lacks_kv or not self.rows.num_free):
            behind = [one for one in self.rows.running() if one.hints.is_background]
            num_wanted = 1 if self._lacks_kv else num_waiting
            for request in sorted(behind, key=lambda one: one.arrival)[-num_wanted:]:
                self._preempt(request)
        if not foreground.any() and not num_waiting:
            self._background_tick = self.tick
        elif self.tick - self._background_tick <= BACKGROUND_TICKS:
            cells = float(self.rows.num_computed[foreground].sum())
            draft.alone_s = self.cost.alone_s(int(foreground.sum()), cells)
            draft.background_s = self.cost.background.budget_s(draft.alone_s, self._background_slowdown)
            draft.background_s += self._background_left_s
            if self.tick % PROBE_TICKS:
                draft.background_tokens = max(FIRST_BACKGROUND, 2 * self._background_tokens)
                self._background_tokens = 0
        else:
            self._background_tick = self.tick

    def _in_slack(self, draft: Draft, rows: IntArray) -> IntArray:
        """Those of the rows that decode now: of background requests, as many as there is time for, in turn."""
        if draft.background_s is None:
            return rows
        is_background = self.rows.is_background[rows]
        behind = rows[is_background]
        waits_since = self.rows.last_progress[behind].tolist()
        behind = behind[sorted(range(len(behind)), key=waits_since.__getitem__)]
        cells = self.rows.num_computed[behind]
        count = min(len(behind), draft.background_tokens, self.cost.decodes_in(draft.background_s, cells))
        if count:
            self._give_background(draft, count, self.cost.decode_s(count, float(cells[:count].sum())))
        return np.array(sorted(rows[~is_background].tolist() + behind[:count].tolist()), dtype=np.int32)

    def _give_background(self, draft: Draft, count: int, seconds: float) -> None:
        """Background requests get so many tokens of a step beside others."""
        draft.background_s = (draft.background_s or 0.0) - seconds
        draft.background_given_s += seconds
        draft.background_tokens -= count
        self._background_tokens += count
        self._background_tick = self.tick

    def _is_bounded(self, draft: Draft, request: Request) -> bool:
        """Has the request only the time that others leave?"""
        return draft.background_s is not None and request.hints.is_background

    # -- the tick, step by step ---------------------------------------------------------------------------------------

    def _decode(self, draft: Draft, rows: IntArray) -> None:
        """One token for each request that needs one; when KV is short, the last in order makes room for the others."""
        while len(rows) and not self._has_room_for_decodes(draft, rows):
            victim = self.order.sort(self.rows.running(), self.tick)[-1]
            rows = rows[rows != victim.row]
            self._preempt(victim)
            draft.preempted = True

    def _prefill(self, draft: Draft, rows: NDArray[np.intp]) -> None:
        """Chunks for running requests that are behind."""
        if not len(rows):
            return
        behind = self.order.sort([request for row in rows if (request := self.rows.requests[row])], self.tick)
        has_time = True
        for place, request in enumerate(behind):
            if request.row == NO_ROW:  # made room for one before it
                continue
            is_bounded = self._is_bounded(draft, request)
            if is_bounded and not has_time:
                continue
            count = self._chunk(draft, request, int(self.rows.num_computed[request.row]))
            if count == 0 and is_bounded:  # one that is not as far may have time
                has_time = self._chunk(draft, request, 0) > 0
                continue
            if count == 0:
                return
            cells = self.kv.cells_for(count)
            if self._make_room_before(draft, cells, request, behind[place + 1 :]):
                self._give_chunk(draft, request, count, cells)
                has_time = True

    def _admit(self, draft: Draft) -> None:
        """Start waiting requests, first ones first; the first that does not fit stops the others."""
        free_rows = self.rows.num_free
        if not free_rows or not len(self.queue) or draft.budget == 0:
            return
        promised, kept = self._cells_owed(draft), list[str]()
        has_time = draft.background_s is None or not self.queue.num_startable
        for request in self.order.sort(self.queue, self.tick):
            if free_rows == 0:
                break
            share = share_of(request)
            if self._is_bounded(draft, request):
                has_time = has_time and self._chunk(draft, request, 0) > 0
                if not has_time:
                    continue
            if not self.usage.take_row(share, request.hints.quota.max_rows):
                self.num_held += 1
                continue
            free_rows -= 1
            if self._keeps_waiting(request) or self._is_worth_waiting(request, match := self._match(request)):
                kept.append(share)  # a row, while it waits for its prefix
                continue
            fits = self._chunk(draft, request, match.length) > 0
            if not fits or not self._start(draft, request, match, promised):
                self._lacks_kv = fits and not request.hints.is_background
                kept.append(share)
                break
            promised += self._cells_beyond(draft, request)
        for share in kept:
            self.usage.give_row(share)

    def _match(self, request: Request) -> Match:
        """What KV the request could start from; none if something is wanted of each of its own tokens."""
        return Match() if request.computes_all else self.kv.match(request.tokens.array, request.hints)

    def _use_up_budget(self, draft: Draft) -> None:
        """Nobody decodes: give what is left of the budget and of the time to the chunks, first ones first."""
        for row in list(draft.chunks):
            request, num_computed = self.rows.requests[row], int(self.rows.num_computed[row])
            if request is None or draft.budget == 0:
                return
            if self._is_bounded(draft, request):
                continue
            given = draft.chunks[row]
            more = min(self._most(request, num_computed) - given, draft.budget)
            more = self._in_time(draft, num_computed + given, more)
            cells = self.kv.cells_for(given + more) - self.kv.cells_for(given)
            if more > 0 and self.kv.make_room(draft.cells + cells, request):
                draft.give_chunk(row, more, cells, num_computed + given)

    def _speculate(self, draft: Draft) -> None:
        """Proposed tokens for requests that decode, from what is left: no request is preempted for them."""
        for row, tokens in self.speculation.propose(draft, self.cost).items():
            cells = self.kv.cells_for(1 + len(tokens))
            if self.kv.make_room(draft.cells + cells, self.rows.requests[row]):
                draft.give_proposal(row, tokens, cells, int(self.rows.num_computed[row]))

    # -- parts of the tick --------------------------------------------------------------------------------------------

    def _has_room_for_decodes(self, draft: Draft, rows: IntArray) -> bool:
        """Promise cells to the rows if they can be had, evicting parked KV; the exact need is asked only when tight."""
        cells = len(rows) * self.kv.cells_for(1)
        if self.kv.free() < cells:
            cells = self.kv.needed(self.rows.decode_batch(rows))
            if not self.kv.make_room(cells, self.rows.requests[int(rows[0])]):
                return False
        draft.give_decodes(rows, cells, float(self.rows.num_computed[rows].sum()))
        return True

    def _make_room_before(self, draft: Draft, cells: int, request: Request, later: list[Request]) -> bool:
        """Room for a chunk: evict parked KV, then preempt those behind it in order. Never one that decodes."""
        while not self.kv.make_room(draft.cells + cells, request):
            victims = [other for other in later if other.row != NO_ROW]
            if not victims:
                return False
            self._preempt(victims[-1])
            draft.preempted = True
        return True

    def _most(self, request: Request, num_computed: int) -> int:
        """What the request can take in one step by itself: all it needs, within its own quota."""
        need = len(request.tokens) - num_computed
        most = min(need, SCORED_CHUNK) if request.wants_scores else need
        return min(most, request.limits.max_tokens_per_step or most)

    def _chunk(self, draft: Draft, request: Request, num_computed: int) -> int:
        """How many tokens the request gets now: within the chunk size, the budget and the time."""
        count = min(self._most(request, num_computed), self.config.prefill_chunk, draft.budget)
        if draft.background_s is not None and request.hints.is_background:
            return min(count, draft.background_tokens, self.cost.chunk_in(draft.background_s, draft, num_computed))
        return self._in_time(draft, num_computed, count)

    def _give_chunk(self, draft: Draft, request: Request, count: int, cells: int) -> None:
        """Let a running request catch up by so many tokens."""
        num_computed = int(self.rows.num_computed[request.row])
        if draft.background_s is not None and request.hints.is_background:
            self._give_background(draft, count, self.cost.chunk_s(draft, num_computed, count))
        draft.give_chunk(request.row, count, cells, num_computed)

    def _in_time(self, draft: Draft, num_computed: int, count: int) -> int:
        """So many of the tokens at position `num_computed` as the step has time for, beside what it already holds."""
        target_ms: float | None = self.config.target_tick_ms
        if not self._anyone_decodes(draft):
            target_ms = None if self.config.max_step_ms is None else HEADROOM * self.config.max_step_ms
        if target_ms is None or count <= 0:
            return count
        return min(count, self.cost.largest_chunk(draft, num_computed, target_ms / 1000))

    def _anyone_decodes(self, draft: Draft) -> bool:
        """In this step, or in the next one: at depth 1 some wait for their last token before they go on."""
        return bool(len(draft.decodes)) or bool(self.rows.pending.any())

    def _keeps_waiting(self, request: Request) -> bool:
        """Is the neighbour it waits for still on its way to the prefix? Spares looking the prefix up in every tick."""
        entry = request.waits_on
        coming = entry is not None and entry.is_indexed and entry.num_computed() < request.waits_until
        return coming and self._may_wait(request)

    def _is_worth_waiting(self, request: Request, match: Match) -> bool:
        """Is a neighbour computing this request's prefix right now? Then it is cheaper to wait for it, for a while."""
        saved = match.coming - match.length
        waits = saved >= max(1, self.config.min_shared_prefix) and self._may_wait(request)
        request.waits_on, request.waits_until = (match.neighbour, match.coming) if waits else (None, 0)
        return waits

    def _may_wait(self, request: Request) -> bool:
        return self.tick - request.last_progress <= self.config.max_wait_ticks

    def _start(self, draft: Draft, request: Request, match: Match, promised: int) -> bool:
        """Give a waiting request a sequence, a row and its first chunk; False if there is no room for it."""
        room = self._make_room_for(draft, request, match, promised)
        if not room.is_enough:
            return False
        divergence = self.kv.divergence(request)  # before what it goes on with is taken out of the index
        leased = self._lease(request, room.match)
        if leased is None:
            return False
        seq, num_computed = leased
        if num_computed < room.match.length:
            room = self._make_room_for(draft, request, Match(), promised)
            if not room.is_enough:
                self.kv.release(seq)
                return False
        if request.state is RequestState.WAITING:
            request.verdict = self.kv.verdict(request, num_computed, divergence)
        self._run(request, seq, num_computed)
        count = self._chunk(draft, request, num_computed)
        if count:
            self._give_chunk(draft, request, count, self.kv.cells_for(count))
        return True

    def _make_room_for(self, draft: Draft, request: Request, match: Match, promised: int) -> Room:
        """Make room for the whole prompt beside what was promised: keep the match, or else evict it, too."""
        block, num_running = self.kv.kv.block_size, self.rows.num_running
        margin = self.config.admission_margin * block * num_running
        for candidate in (match, Match()):
            # A running neighbour whose block is shared now may have to copy it in this very step.
            is_shared = request.hints.fork_of or (candidate.entry is not None and not candidate.entry.parked)
            shared = block if is_shared else 0
            cells = self.kv.cells_for(len(request.tokens) - candidate.length) + shared
            if self.kv.make_room(draft.cells + promised + margin + cells, request, keep=candidate.entry):
                return Room(is_enough=True, match=candidate)
        if num_running:
            return Room(is_enough=False, match=Match())
        self.kv.evict_all(by=request)
        return Room(is_enough=True, match=Match())

    def _lease(self, request: Request, match: Match) -> tuple[int, int] | None:
        """A sequence for the request, with as much of its prefix as can be had: (sequence, tokens)."""
        source = self.requests.get(request.hints.fork_of or "")
        if (
            source is not None
            and not request.computes_all
            and source.row != NO_ROW
            and source.hints.namespace == request.hints.namespace
        ):
            length = min(int(self.rows.num_computed[source.row]), len(source.tokens), len(request.tokens) - 1)
            if length > match.length and common_prefix(source.tokens.array, request.tokens.array) >= length:
                seq = self.kv.fork(int(self.rows.seq[source.row]), length, request)
                if seq is not None:
                    return seq, length
        return self.kv.start(match, request)

    def _run(self, request: Request, seq: int, num_computed: int) -> None:
        """The request leaves the queue and gets a row."""
        self.queue.remove(request)
        if request.state is RequestState.WAITING:
            request.num_cached = num_computed
        request.become(RequestState.RUNNING)
        row = self.rows.attach(request, seq, num_computed, request.max_tokens(self.max_model_len), self.tick)
        draw, limits = request.draw, request.limits
        self.sampling.attach(
            row, draw.params, request.tokens, request.num_prompt,
            seed=draw.seed, choice=draw.choice, stop_ids=limits.stop_ids,
        )  # fmt: skip
        if draw.params.speculation or self.config.speculation != "off":
            self.speculation.begin(request)
        self.order.started(request, self.tick)
        self.kv.announce(seq, request.tokens.array, request.hints.namespace, self._computed_in(row))
        self._events.phase(request, Phase.PREFILL, self.tick, num_computed)

    def _take_row(self, request: Request) -> int:
        """Take the row back; returns the sequence it used."""
        self.sampling.detach(request.row)
        seq = self.rows.detach(request)
        self.usage.give_row(share_of(request))
        return seq

    def _preempt(self, request: Request) -> None:
        """Take the row away. Its KV is parked: evicted first if cells are short, found again if they are not."""
        self.order.settle(request, request.row)
        num_computed = self._num_computed(request)
        if self.speculation.has_begun(request.row):
            self.speculation.forget(request)
        seq = self._take_row(request)
        self.kv.park(seq, request.tokens.array, request.num_prompt, request.hints)
        request.become(RequestState.PREEMPTED)
        request.num_preemptions += 1
        request.last_progress = self.tick
        self.queue.add_preempted(request)
        self._events.phase(request, Phase.PREEMPTED, self.tick, num_computed)

    def _cells_owed(self, draft: Draft) -> int:
        """Cells that running requests still need for their prompts, beyond this step."""
        behind = (self.rows.owed() > 1).nonzero()[0]
        return sum(self._cells_beyond(draft, request) for row in behind if (request := self.rows.requests[row]))

    def _cells_beyond(self, draft: Draft, request: Request) -> int:
        """Cells that a running request needs for its prompt after this step."""
        given = int(self.rows.num_computed[request.row]) + draft.chunks.get(request.row, 0)
        remaining = len(request.tokens) - given
        return self.kv.cells_for(remaining) if remaining > 0 else 0

    def _num_computed(self, request: Request) -> int:
        """How far it has come in its row; 0 without one."""
        return 0 if request.row == NO_ROW else int(self.rows.num_computed[request.row])

    def _computed_in(self, row: int) -> Callable[[], int]:
        return lambda: int(self.rows.num_computed[row])

    def _seal(self, draft: Draft) -> StepPlan | None:
        """Make the plan, and count its tokens as computed."""
        if draft.num_tokens == 0:
            return None
        plan = self.rows.make_plan(draft, self.tick)
        self.rows.submit(plan)
        return plan

    def plan_alone(self, request: Request, count: int) -> StepPlan | None:
        """A step for one running request only, to find out whether it is the one that fails."""
        self.tick += 1
        self.expire()
        if request.row == NO_ROW:
            return None
        num_computed = int(self.rows.num_computed[request.row])
        draft = Draft(count)
        draft.give_chunk(request.row, min(count, len(request.tokens) - num_computed), 0, num_computed)
        cells = self.kv.needed(self.rows.make_plan(draft, self.tick).batch)
        while not self.kv.make_room(cells, request):
            others = [other for other in self.order.sort(self.rows.running(), self.tick) if other is not request]
            self._preempt(others[-1])
        return self._seal(draft)

    # -- steps that came back, and steps that did not happen ----------------------------------------------------------

    def update(self, plan: StepPlan, sampled: Sampled, outputs: DecodeOutput | None = None) -> None:
        """The step's results: tokens go to their requests, and those that are complete end.

        `outputs` are all of the step's, where the plan has prompts to score or to pool.
        """
        update = self.results.update(plan, sampled, outputs)
        if update.verified:
            self._roll_back(update.verified)
        for one in update.completed:
            self.finish(one.request, one.reason, one.token, one.error, one.logprobs)

    def _roll_back(self, verified: list[Verified]) -> None:
        """Remove the KV of proposed tokens that were not drawn: before any of it is parked, or goes on."""
        for one in verified:
            if one.num_rejected:
                row, length = one.verification.row, one.verification.position + one.num_agreed
                self.kv.trim(int(self.rows.seq[row]), length)
                self.rows.roll_back(row, length)
        self.speculation.learn(verified)
        if self._events.is_heard:
            self._events.emit(self.speculation.told(verified, self._events.clock()))

    def observe(self, plan: StepPlan, step_s: float) -> None:
        """Learn from the duration of a step."""
        self.cost.observe(plan.num_tokens, plan.attention, step_s, plan.num_prefill, plan.num_proposed)
        num_others = plan.num_decode - plan.num_background
        if num_others and plan.background_s is not None and not (plan.num_prefill and plan.background_s == 0):
            self.cost.background.observe(num_others, step_s, plan.background_s)

    def undo(self, plan: StepPlan) -> None:
        """The step could not be submitted: its tokens are to be computed again."""
        self.rows.undo(plan)

    def drop_kv(self) -> None:
        """All KV is worthless: the weights were replaced. Running requests start anew from their logs."""
        for request in self.rows.running():
            self._preempt(request)
            if request.verdict is not None and not request.output:  # what it started from was worth nothing
                request.num_cached, request.verdict = 0, replace(request.verdict, num_cached=0)
        self.kv.evict_all(WEIGHTS)

    def resync(self) -> None:
        """Steps in flight were lost: what has been computed is what KV memory holds, and no token is pending."""
        for request in self.rows.running():
            self.rows.num_computed[request.row] = self.kv.length(int(self.rows.seq[request.row]))
            self.rows.pending[request.row] = 0
        self.kv.resync()
