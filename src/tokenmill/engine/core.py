"""`EngineCore`: scheduler, executor and one KV memory, owned by one thread.

    add / cancel ──> Scheduler ──StepPlan──> Executor ──Sampled──> Results ──> StepResult

At depth 1 a step is submitted before the previous one is collected, so that planning and bookkeeping overlap with
the device's work. A failed step is undone, and its requests are rerun alone, one by one, to find
the one that makes it fail (`Isolation`).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenmill.config import EngineConfig
from tokenmill.contract import (
    Backend,
    BackendLimits,
    DecodeOutput,
    Forward,
    IntArray,
    Mask,
    ModelHandle,
    ModelInfo,
    Sampled,
    Sampler,
    SampleRows,
    Sampling,
)
from tokenmill.engine.events import (
    CellsEvent,
    CoreSnapshot,
    CoreStats,
    EventBus,
    FailedStepEvent,
    SlotView,
    StartEvent,
    TickEvent,
)
from tokenmill.engine.kv_manager import KVManager
from tokenmill.engine.plan import StepPlan
from tokenmill.engine.policies import CoreUsage, KeyUsage
from tokenmill.engine.proposers import DraftProposer, TokenRows
from tokenmill.engine.request import GREEDY, Draw, Hints, Limits, Request
from tokenmill.engine.rows import RunningRows
from tokenmill.engine.scheduler import Scheduler
from tokenmill.errors import (
    BackendError,
    ConfigError,
    EngineDead,
    ForwardFailed,
    IntegrityError,
    InvalidRequest,
    RequestFailed,
    StaleKV,
)
from tokenmill.outputs import ENDED_WELL, FinishReason, StepResult
from tokenmill.sampling.sampler import HostSampler, StepSampler
from tokenmill.sampling.state import SamplingState

NOTHING = Sampled(np.zeros(0, dtype=np.int32))
NOTHING_PROPOSED: Mapping[int, Sequence[int]] = {}


@dataclass(frozen=True)
class Submitted:
    """A step in flight."""

    plan: StepPlan
    forward: Forward
    sampling: Sampling | None = None
    """None before it is drawn, and if no row of the step draws a token."""


class Executor:
    """Runs plans on a backend: two launches, one wait. The sampler reads the rows' parameters at launch."""

    def __init__(self, backend: Backend, sampling: SamplingState) -> None:
        self.backend = backend
        self._sampling = sampling
        self._host = HostSampler()
        self.awaited: StepPlan | None = None
        """The plan last submitted or collected."""

    def submit(self, plan: StepPlan) -> Submitted:
        """Launch the forward pass; returns at once. Raises what `Backend.forward` raises."""
        self.awaited = plan
        return Submitted(plan, self.backend.forward(plan.batch))

    def draw(self, step: Submitted, plan: StepPlan, masks: Mask | None = None) -> Submitted:
        """Launch the sampling of the step's rows, before the next step is submitted; returns at once.

        `plan`: the step's own, or the part of it still to be drawn.
        """
        if not len(plan.sampled_rows):
            return Submitted(plan, step.forward)
        try:
            logits_rows = plan.logits_rows
            if plan.verifications:  # draws after proposed tokens are never referred to by a later batch
                logits_rows = np.concatenate([logits_rows, plan.more_logits_rows])
            rows = SampleRows(logits_rows, plan.sampled_rows, self._sampler(plan))
            return Submitted(plan, step.forward, self.backend.sample(step.forward, rows, masks))
        except Exception as error:
            # The forward has been launched and can't be undone from here.
            raise ForwardFailed(f"sampling failed: {type(error).__name__}: {error}", fatal=True) from error

    def _sampler(self, plan: StepPlan) -> Sampler | None:
        if not plan.verifications:
            return self.sampler_for(plan.sampled_rows, plan.positions)
        rows = np.concatenate([plan.sampled_rows, plan.more_rows])
        positions = np.concatenate([plan.positions, plan.more_positions])
        return self.sampler_for(rows, positions, plan.proposed_before())

    def sampler_for(
        self, rows: IntArray, positions: IntArray, proposed: Mapping[int, Sequence[int]] = NOTHING_PROPOSED
    ) -> Sampler | None:
        """A sampler for these rows at these positions; `proposed`: index into `rows` -> tokens before the draw.

        None if every row is greedy, which a backend does by itself.
        """
        if self._sampling.is_plain_greedy[rows].all():
            return None
        return StepSampler(self._sampling, rows, positions, proposed, self._host)

    def collect(self, step: Submitted) -> Sampled:
        """Wait for the step's draws, one id per sampled row of the plan."""
        self.awaited = step.plan
        if step.sampling is None:
            self.backend.collect(step.forward)
            return NOTHING
        return self.backend.collect(step.sampling)

    def outputs(self, step: Submitted) -> DecodeOutput | None:
        """All logits and hidden rows of a collected step, if its plan has prompts to score or to pool."""
        return self.backend.collect(step.forward) if step.plan.scores or step.plan.pools else None

    def close(self) -> None:
        self.backend.close()


MAX_FAILURES_IN_A_ROW = 2
"""Requests that may fail alone, one after the other, before the engine itself is considered broken."""


@dataclass(frozen=True)
class Suspect:
    """A request of a failed step, with its number of tokens in that step."""

    request: Request
    num_tokens: int


class Isolation:
    """Requests still to be run alone, and how many in a row have failed that way."""

    def __init__(self) -> None:
        self.num_failed_steps = 0
        self._suspects: deque[Suspect] = deque()
        self._failures_in_a_row = 0

    def suspect(self, plan: StepPlan, rows: RunningRows) -> None:
        """A step failed: any of its requests may be the cause."""
        self.num_failed_steps += 1
        for row, lease, count in zip(plan.rows, plan.leases, plan.counts, strict=True):
            request = rows.requests[row]
            if request is not None and rows.lease[row] == lease:
                self._suspects.append(Suspect(request, int(count)))

    def next(self) -> Suspect | None:
        """The next one to run alone; skips those that have ended meanwhile."""
        while self._suspects:
            suspect = self._suspects.popleft()
            if not suspect.request.is_finished:
                return suspect
        return None

    def note_success(self) -> None:
        self._failures_in_a_row = 0

    def note_failure(self, error: BackendError) -> None:
        """A request failed alone: the request is at fault. Two in a row are the engine's fault, and raise the error."""
        if isinstance(error, ForwardFailed):
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise error

    def clear(self) -> None:
        self._suspects.clear()


CALLERS_REASONS = frozenset({FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.ERROR, FinishReason.SHUTDOWN})
"""Why a caller may cancel a request."""


@dataclass(frozen=True)
class InFlight:
    """A submitted step and its submission time: some backends compute all of it before they return."""

    step: Submitted
    handed_at: float
    schedule_s: float
    mask_s: float = 0.0


@dataclass(frozen=True)
class DraftModel:
    """A smaller model with the same vocabulary that proposes tokens, and its memory limits per core."""

    model: ModelHandle
    limits: BackendLimits


class EngineCore:
    """One engine. All methods belong to the thread that owns it."""

    def __init__(
        self,
        backend: Backend,
        model: ModelInfo,
        config: EngineConfig = EngineConfig(),
        clock: Callable[[], float] = time.monotonic,
        events: EventBus | None = None,
        draft: DraftModel | None = None,
        usage: CoreUsage | None = None,
    ) -> None:
        """`usage`: its part of what keys use of all cores; by itself it is the only one."""
        capabilities = backend.capabilities
        if config.max_num_seqs > capabilities.max_seqs:
            raise ConfigError(f"max_num_seqs {config.max_num_seqs} > the backend's {capabilities.max_seqs} sequences")
        if (config.depth or 0) > capabilities.depth:
            raise ConfigError(f"depth {config.depth} > the backend's {capabilities.depth}")
        self.config = config
        self.model = model
        self.depth = capabilities.depth if config.depth is None else config.depth
        self.events = events or EventBus(clock)
        self.kv = KVManager(
            backend.kv, capabilities, self.events, reuse=config.prefix_caching, num_rows=config.max_num_seqs
        )
        self.max_model_len = _longest_request(config, model.max_context, self.kv)
        usage = usage or CoreUsage(KeyUsage(), wake=lambda: None)
        self.scheduler = Scheduler(config, model, self.max_model_len, self.kv, self.events, self.depth, usage)
        self.failure: BaseException | None = None
        """Why the engine is dead, if it is."""
        self.closed = False
        self.is_blocked = False
        """Has the last step found nothing but requests whose keys have all their rows on other cores? Then another one
        is of use after a command, a wake-up by one of those keys, or a deadline."""
        self._executor = Executor(backend, self.scheduler.sampling)
        self._drafter = self._open_draft(draft) if draft is not None and self.kv.can_roll_back else None
        self._in_flight: deque[InFlight] = deque()
        self._isolation = Isolation()
        self._last_collect = self.events.clock()
        self._last_tick = 0
        self._told_cells = self.kv.free()
        self._names = itertools.count()
        self._added: list[Request] = []

    def _open_draft(self, draft: DraftModel) -> DraftProposer:
        sizes = draft.model.info.vocab_size, self.model.vocab_size
        context = draft.limits.max_context or draft.model.info.max_context
        backend = draft.model.new_backend(draft.limits)
        if not backend.capabilities.partial_rm:
            backend.close()
            raise ConfigError("draft_model cannot be rolled back: it has recurrent layers; choose another one")
        runs_ahead = self.depth > 0 and backend.capabilities.depth > 0
        spare = np.arange(self.config.max_num_seqs, self._executor.backend.capabilities.max_seqs, dtype=np.int32)
        ahead = TokenRows(self._executor.backend, spare) if runs_ahead else None
        drafter = DraftProposer(backend, sizes, context, self._executor.sampler_for, self.events, ahead)
        self.scheduler.speculation.use(drafter)
        return drafter

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. `InvalidRequest` if it can never run; one beyond the queue's limit ends with `overload`."""
        self._check_alive()
        self.scheduler.add(request)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, error: str | None = None) -> bool:
        """End a request, in whatever phase it is; its last row comes with the next `step`. Its KV is kept."""
        check_cancel(reason)
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self.scheduler.finish(request, reason, error=error)
            self._tell_cells()
        return request is not None

    def finish(self, request_id: str, keep_tokens: int) -> bool:
        """End a request with `stop` after its first `keep_tokens` generated tokens: its text matched a stop string."""
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            if not 0 <= keep_tokens <= len(request.tokens.generated):
                raise InvalidRequest(f"cannot keep {keep_tokens} of {len(request.tokens.generated)} generated tokens")
            request.tokens.keep_generated(keep_tokens)
            self.scheduler.finish(request, FinishReason.STOP)
            self._tell_cells()
        return request is not None

    def release(self, owner: str) -> None:
        """A session has ended: free the KV parked for it."""
        self.kv.drop_owner(owner)
        self._tell_cells()

    def replay_s(self, num_tokens: int) -> float | None:
        """Predicted seconds to compute the KV of so many tokens; None before enough prompts were seen."""
        return self.scheduler.cost.prompt_s(num_tokens)

    def export_kv(self, owner: str) -> tuple[IntArray, bytes] | None:
        """Tokens and KV bytes parked for a session, if any."""
        self._check_alive()
        return self.kv.export(owner)

    def import_kv(self, tokens: IntArray, state: bytes, hints: Hints) -> bool:
        """Park exported bytes as the KV of these tokens; False if they do not fit."""
        self._check_alive()
        done = self.kv.import_(tokens, state, hints)
        self._tell_cells()
        return done

    def fork(
        self, request_id: str, new_id: str, limits: Limits, hints: Hints = Hints(), draw: Draw = GREEDY
    ) -> Request:
        """A new request that continues the log of a running one; it shares the KV that exists."""
        source = self.scheduler.requests.get(request_id)
        if source is None:
            raise InvalidRequest(f"request {request_id} is not running; submit a new request with its tokens")
        shared = replace(hints, namespace=source.hints.namespace, fork_of=request_id)
        is_same = draw.params.structured_outputs == source.draw.params.structured_outputs
        # The child's grammar goes on where its source's is, in the middle of the output.
        grammar = source.grammar.fork() if source.grammar is not None and is_same else None
        child = Request(new_id, source.tokens.array, limits, shared, draw, grammar=grammar)
        self.add(child)
        return child

    def step(self) -> StepResult:
        """One tick: submit a step, collect the oldest one in flight. Returns its tokens and endings."""
        self._check_alive()
        try:
            suspect = self._isolation.next()
            if suspect is not None:
                self._run_alone(suspect)
            else:
                self._tick()
        except Exception as error:
            self.die(error)
        self._tell_cells()
        waiting, num_running = len(self.scheduler.queue), self.scheduler.rows.num_running
        self.is_blocked = 0 < waiting == self.scheduler.num_held and not num_running and not self._in_flight
        return self.scheduler.results.take()

    @property
    def expected_step_s(self) -> float:
        """Predicted duration of the step last submitted; 0 if unknown. Thread-safe."""
        plan = self._executor.awaited
        predicted = plan and self.scheduler.cost.predict(
            plan.num_tokens, plan.attention, plan.num_prefill, plan.num_proposed
        )
        return predicted or 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self.scheduler.requests or self._in_flight or self.scheduler.results)

    # -- sequences: the smallest interface -----------------------------------------------------------------------------

    def add_sequence(self, prompt: Sequence[int], max_new_tokens: int = 16, eos_token_id: int | None = None) -> str:
        """Add a prompt under a generated name, which is returned. `run_until_complete` gives its output."""
        stop_ids = frozenset() if eos_token_id is None else frozenset({eos_token_id})
        limits = Limits(max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        request = Request(f"seq-{next(self._names)}", prompt, limits)
        self.add(request)
        self._added.append(request)
        return request.request_id

    def run_until_complete(self) -> list[list[int]]:
        """Step until idle; the generated ids of the sequences added since the last call, in that order.

        `RequestFailed` if one of them ended otherwise than by a stop token or its length.
        """
        while self.has_work:
            self.step()
        added, self._added = self._added, []
        for request in added:
            if request.finish_reason not in ENDED_WELL:
                reason = request.finish_reason.value if request.finish_reason else "nothing"
                raise RequestFailed(f"{request.request_id} ended with {reason}: {request.error}")
        return [request.output for request in added]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        began = self.events.clock()
        plan = self.scheduler.schedule()
        if plan is not None and not self._submit(plan, began):
            return
        # Masks need the tokens of the previous step, which is collected while this one's forward pass runs.
        waits = plan is not None and len(self._in_flight) > 1 and self.scheduler.constraints.are_on(plan)
        if plan is not None and not waits:
            self._draw()
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth) and not self._collect():
            return
        if waits:
            self._draw()

    def _submit(self, plan: StepPlan, began: float) -> bool:
        """Submit a plan; if that fails, collect the steps in flight and suspect the plan's requests."""
        handed_at = self.events.clock()
        try:
            step = self._executor.submit(plan)
        except BackendError as error:
            _raise_if_fatal(error)
            self.scheduler.undo(plan)
            while self._in_flight and self._collect():
                pass
            if isinstance(error, StaleKV):
                self.scheduler.drop_kv()
            else:
                self._suspect(plan)
            return False
        self._in_flight.append(InFlight(step, handed_at, handed_at - began))
        return True

    def _draw(self) -> None:
        """Launch the draws of the latest step; all earlier steps have been drawn."""
        flight, drafting_s = self._drawn(self._in_flight.pop()), 0.0
        plan = flight.step.plan
        if self._drafter is not None:
            if plan.names_proposals:  # the device has these tokens already
                flight = replace(flight, step=replace(flight.step, plan=plan.knowing(self._drafter.await_drafts())))
            drafting_s = self._drafter.took_since(self._last_collect)
        if self.depth and plan.num_proposed and not self._in_flight:
            # Nothing was submitted ahead: what the host did meanwhile is part of what proposed tokens take.
            flight = replace(flight, handed_at=self._last_collect + drafting_s)
        self._in_flight.append(flight)

    def _drawn(self, flight: InFlight) -> InFlight:
        """A submitted step with its draws launched. A request whose grammar fails now ends."""
        plan = flight.step.plan
        if not self.scheduler.constraints.are_on(plan):
            return replace(flight, step=self._executor.draw(flight.step, plan))
        began = self.events.clock()
        plan = self.scheduler.rows.still_drawing(plan)
        found = self.scheduler.constraints.masks(plan)
        mask_s = self.events.clock() - began
        step = self._executor.draw(flight.step, plan, found.masks)
        for request, error in found.failed:
            self.scheduler.finish(request, FinishReason.ERROR, error=error)
        return replace(flight, step=step, mask_s=mask_s)

    def _collect(self) -> bool:
        """Collect the oldest step. If it failed, all later ones have failed, too: returns False."""
        flight = self._in_flight.popleft()
        try:
            sampled = self._executor.collect(flight.step)
        except BackendError as error:
            _raise_if_fatal(error)
            self._in_flight.clear()
            self.scheduler.resync()
            self._suspect(flight.step.plan)
            return False
        self._take(flight, sampled)
        return True

    def _take(self, flight: InFlight, sampled: Sampled) -> None:
        """A step is collected: update the cost model, publish events, hand out tokens."""
        self._isolation.note_success()
        plan, now = flight.step.plan, self.events.clock()
        step_s, self._last_collect = now - max(flight.handed_at, self._last_collect), now
        self.scheduler.observe(plan, step_s)
        self._last_tick = plan.tick
        if self.events.is_heard:
            self._tell_tick(plan, now, flight, step_s)
        self.scheduler.update(plan, sampled, self._executor.outputs(flight.step))

    # -- events -------------------------------------------------------------------------------------------------------

    def _tell_tick(self, plan: StepPlan, at: float, flight: InFlight, step_s: float) -> None:
        self._told_cells = self.kv.free()
        self.events.emit(
            TickEvent(
                plan=plan,
                requests=self.scheduler.rows.names(plan),
                at=at,
                schedule_s=flight.schedule_s,
                step_s=step_s,
                num_running=self.scheduler.rows.num_running,
                num_waiting=len(self.scheduler.queue),
                free_cells=self._told_cells,
                num_parked=self.kv.num_parked,
                prefill_s=self._prefill_s(plan, step_s),
                mask_s=flight.mask_s,
            )
        )

    def _prefill_s(self, plan: StepPlan, step_s: float) -> float:
        """The time that a step's prefill tokens took: beyond what its decodes alone would have."""
        if not plan.num_prefill or not plan.num_decode:
            return step_s if plan.num_prefill else 0.0
        alone = self.scheduler.cost.predict(plan.num_decode, plan.decode_attention)
        if alone is None:
            alone = step_s * plan.num_decode / plan.num_tokens
        return max(0.0, step_s - alone)

    def _tell_cells(self) -> None:
        """Publish the number of free cells if it has changed: steps are submitted, KV is parked and trimmed."""
        free = self.kv.free()
        if free != self._told_cells:
            self._told_cells = free
            if self.events.is_heard:
                self.events.emit(CellsEvent(self.events.clock(), free))

    def tell_start(self) -> None:
        """Announce a core that replaces one that died; its subscribers stay."""
        if self.events.is_heard:
            num_rows = len(self.scheduler.rows.requests)
            self.events.emit(StartEvent(self.events.clock(), num_rows, self.kv.num_cells))

    # -- failure ------------------------------------------------------------------------------------------------------

    def _suspect(self, plan: StepPlan) -> None:
        """The step failed: any of its requests may be the cause."""
        self._isolation.suspect(plan, self.scheduler.rows)
        if self.events.is_heard:
            self.events.emit(FailedStepEvent(self.events.clock(), plan.tick, plan.num_tokens))

    def _run_alone(self, suspect: Suspect) -> None:
        """Run one request of a failed step alone. If it fails again it is the culprit, and ends with an error."""
        began = self.events.clock()
        plan = self.scheduler.plan_alone(suspect.request, suspect.num_tokens)
        if plan is None:
            return
        try:
            step = self._executor.submit(plan)
            now = self.events.clock()
            flight = self._drawn(InFlight(step, now, now - began))
            sampled = self._executor.collect(flight.step)
        except BackendError as error:
            _raise_if_fatal(error)
            self.scheduler.resync()
            if isinstance(error, StaleKV):
                self.scheduler.drop_kv()
                return
            failed = f"{type(error).__name__}: {error}"
            self.scheduler.finish(suspect.request, FinishReason.ERROR, error=failed)
            self._isolation.note_failure(error)
            return
        self._take(flight, sampled)

    def die(self, error: BaseException) -> None:
        """The engine is lost: every request ends with an error, and no more are accepted."""
        self.failure = error
        self._end_all(FinishReason.ERROR, f"the engine failed: {type(error).__name__}: {error}")

    def close(self) -> StepResult:
        """Stop. Unfinished requests end with `shutdown`; returns the remaining results."""
        if not self.closed:
            self._end_all(FinishReason.SHUTDOWN, "the engine was closed")
            self.closed = True
            if self._drafter is not None:
                self._drafter.close()
            self.scheduler.usage.close()
            self._executor.close()
        return self.scheduler.results.take()

    def _end_all(self, reason: FinishReason, error: str) -> None:
        self._in_flight.clear()
        self._isolation.clear()
        self.scheduler.abandon_all(reason, error)

    def _check_alive(self) -> None:
        if self.closed:
            raise EngineDead("the engine was closed")
        if self.failure is not None:
            raise EngineDead(f"the engine failed: {self.failure}") from self.failure

    # -- views --------------------------------------------------------------------------------------------------------

    def stats(self) -> CoreStats:
        scheduler = self.scheduler
        return CoreStats(
            tick=scheduler.tick,
            num_running=scheduler.rows.num_running,
            num_waiting=len(scheduler.queue),
            num_waiting_tokens=scheduler.queue.num_tokens,
            num_parked=self.kv.num_parked,
            num_parked_tokens=self.kv.num_parked_tokens,
            num_evicted=self.kv.num_evicted,
            num_failed_steps=self._isolation.num_failed_steps,
            kv=self.kv.kv.stats(),
        )

    def slots(self) -> list[SlotView]:
        """What each row is doing now."""
        return self.scheduler.rows.views(flight.step.plan for flight in self._in_flight)

    def snapshot(self) -> CoreSnapshot:
        """The state that events refer to: the start of a view."""
        return CoreSnapshot(
            tick=self._last_tick,
            slots=tuple(self.slots()),
            waiting=self.scheduler.queue.views(),
            parked=self.kv.parked_views(),
            parked_tokens=self.kv.parked_tokens,
            free_cells=self.kv.free(),
            num_cells=self.kv.num_cells,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the bookkeeping is inconsistent; when idle, only parked KV may be left."""
        self.kv.check_integrity()
        if self._drafter is not None:
            self._drafter.check_integrity(is_idle=not self.has_work)
        if self.has_work:
            return
        if self.scheduler.rows.num_running or len(self.scheduler.queue):
            raise IntegrityError("an idle engine still has rows or waiting requests")
        if self.kv.num_leased:
            raise IntegrityError("an idle engine holds KV that is not parked")


def check_cancel(reason: FinishReason) -> None:
    """Raise `InvalidRequest` unless a caller may end a request for this reason. Thread-safe."""
    if reason not in CALLERS_REASONS:
        raise InvalidRequest(f"a request cannot be cancelled with reason {reason.value}")


def _raise_if_fatal(error: BackendError) -> None:
    if isinstance(error, IntegrityError) or (isinstance(error, ForwardFailed) and error.fatal):
        raise error


def _longest_request(config: EngineConfig, max_context: int, kv: KVManager) -> int:
    """The longest request that fits once all others are preempted: all blocks but two."""
    fits = kv.num_cells - (2 * kv.kv.block_size if kv.kv.block_size > 1 else 0)
    longest = min(max_context, fits, config.max_model_len or max_context)
    if longest < 2:
        raise ConfigError(f"KV memory of {kv.num_cells} cells is too small for any request")
    if config.max_model_len is not None and longest < config.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} > {longest}: the model's context is {max_context}, "
            f"KV memory of {kv.num_cells} cells holds {fits}"
        )
    return longest
