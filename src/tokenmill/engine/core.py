"""`EngineCore`: scheduler, executor and one KV memory, owned by one thread.

    add / cancel ──> Scheduler ──StepPlan──> Executor ──ids──> Scheduler ──> GeneratedToken

At depth 1 a step is submitted before the one before it is collected, so that planning and bookkeeping happen while the
device computes. A step that fails is undone, and its requests are run alone, one by one, to find the culprit.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.config import EngineConfig
from tokenmill.core import Backend, ModelHandle
from tokenmill.engine.events import EventBus, TickEvent
from tokenmill.engine.executor import Executor, Submitted
from tokenmill.engine.kv_manager import KVManager
from tokenmill.engine.plan import StepPlan
from tokenmill.engine.request import Hints, Limits, Request
from tokenmill.engine.scheduler import Scheduler
from tokenmill.engine.stats import CoreStats, SlotView, slot_views
from tokenmill.errors import BackendError, ConfigError, EngineDead, ForwardFailed, IntegrityError, InvalidRequest
from tokenmill.outputs import FinishReason, GeneratedToken

MAX_FAILURES_IN_A_ROW = 2
"""Isolated requests that may fail one after the other before the engine itself is given up."""


@dataclass(frozen=True)
class Suspect:
    """A request of a step that failed, and how many tokens it had in it."""

    request: Request
    num_tokens: int


class EngineCore:
    """One engine. All methods are for the thread that owns it."""

    def __init__(
        self,
        backend: Backend,
        max_context: int,
        config: EngineConfig = EngineConfig(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        capabilities = backend.capabilities
        if config.max_num_seqs > capabilities.max_seqs:
            raise ConfigError(f"max_num_seqs {config.max_num_seqs} > the backend's {capabilities.max_seqs} sequences")
        if (config.depth or 0) > capabilities.depth:
            raise ConfigError(f"depth {config.depth} > the backend's {capabilities.depth}")
        self.config = config
        self.depth = capabilities.depth if config.depth is None else config.depth
        self.events = EventBus(clock)
        self.kv = KVManager(backend.kv, capabilities, reuse=config.prefix_caching)
        self.max_model_len = self._longest(config, max_context)
        self.scheduler = Scheduler(config, self.kv, self.max_model_len, self.events)
        self.failure: BaseException | None = None
        """Why the engine is dead, if it is."""
        self.closed = False
        self.heartbeat = clock()
        """When a step last began or ended. An engine with work whose heartbeat stands still hangs."""
        self._executor = Executor(backend)
        self._in_flight: deque[Submitted] = deque()
        self._suspects: deque[Suspect] = deque()
        self._failures_in_a_row = 0
        self._num_failed_steps = 0
        self._last_collect = clock()
        self._names = itertools.count()
        self._added: list[Request] = []

    @classmethod
    def on(cls, model: ModelHandle, backend: Backend, config: EngineConfig = EngineConfig()) -> EngineCore:
        return cls(backend, model.info.max_context, config)

    # -- verbs --------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. `InvalidRequest` if it can never run; one too many for the queue ends with `overload`."""
        self._check_alive()
        self.scheduler.add(request)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, error: str | None = None) -> bool:
        """End a request now, in whatever phase it is; its terminal token comes with the next `step`. Its KV stays."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        self.scheduler.finish(request, reason, error=error)
        return True

    def fork(self, request_id: str, new_id: str, limits: Limits, hints: Hints = Hints()) -> Request:
        """A new request that continues the log of a running one; it shares the KV that exists."""
        source = self.scheduler.requests.get(request_id)
        if source is None:
            raise InvalidRequest(f"request {request_id} is not running; submit its tokens instead")
        shared = Hints(
            priority=hints.priority,
            key=hints.key,
            owner=hints.owner,
            namespace=source.hints.namespace,
            fork_of=request_id,
        )
        child = Request(new_id, source.tokens, limits, shared)
        self.add(child)
        return child

    def step(self) -> list[GeneratedToken]:
        """One tick: submit a step, collect the oldest one in flight. The tokens and endings it brought."""
        self._check_alive()
        self.heartbeat = self.events.clock()
        try:
            if self._suspects:
                self._run_suspect(self._suspects.popleft())
            else:
                self._tick()
        except Exception as error:
            self.die(error)
        self.heartbeat = self.events.clock()
        return self.scheduler.take_outputs()

    @property
    def has_work(self) -> bool:
        """Is there anything for `step` to do or to tell?"""
        return bool(self.scheduler.requests or self._in_flight or self.scheduler.has_outputs)

    # -- sequences: the smallest way to use it ------------------------------------------------------------------------

    def add_sequence(self, prompt: Sequence[int], max_new_tokens: int = 16, eos_token_id: int | None = None) -> str:
        """Add a prompt under a name of its own, which is returned. `run_until_complete` gives its output."""
        stop_ids = frozenset() if eos_token_id is None else frozenset({eos_token_id})
        request = Request(f"seq-{next(self._names)}", prompt, Limits(max_new_tokens=max_new_tokens, stop_ids=stop_ids))
        self.add(request)
        self._added.append(request)
        return request.request_id

    def run_until_complete(self) -> list[list[int]]:
        """Step until nothing is left; the generated ids of the sequences added since the last call, in that order."""
        while self.has_work:
            self.step()
        added, self._added = self._added, []
        return [request.output for request in added]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        began = self.events.clock()
        plan = self.scheduler.schedule()
        if plan is not None and not self._submit(plan):
            return
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            self._collect(self.events.clock() - began)

    def _submit(self, plan: StepPlan) -> bool:
        """Submit a plan; if it fails, let what is in flight come home and suspect the plan's requests."""
        try:
            self._in_flight.append(self._executor.submit(plan))
            return True
        except BackendError as error:
            self._raise_if_fatal(error)
            self.scheduler.undo(plan)
            while self._in_flight and self._collect(0.0):
                pass
            self._suspect(plan)
            return False

    def _collect(self, schedule_s: float) -> bool:
        """Collect the oldest step. If it has failed, so have all after it: False."""
        step = self._in_flight.popleft()
        try:
            ids = self._executor.collect(step)
        except BackendError as error:
            self._raise_if_fatal(error)
            self._in_flight.clear()
            self.scheduler.resync()
            self._suspect(step.plan)
            return False
        self._note_tick(step.plan, schedule_s)
        self.scheduler.update(step.plan, ids)
        return True

    def _note_tick(self, plan: StepPlan, schedule_s: float) -> None:
        now = self.events.clock()
        step_s, self._last_collect = now - max(self._last_collect, self.heartbeat), now
        self.scheduler.cost.observe(plan.num_tokens, plan.attention, step_s, plan.num_prefill)
        if self.events.is_heard:
            self.events.emit(
                TickEvent(
                    plan=plan,
                    at=now,
                    schedule_s=schedule_s,
                    step_s=step_s,
                    num_running=self.scheduler.rows.num_running,
                    num_waiting=len(self.scheduler.queue),
                    free_cells=self.kv.free(),
                    num_parked=self.kv.num_parked,
                )
            )

    # -- failure ------------------------------------------------------------------------------------------------------

    def _suspect(self, plan: StepPlan) -> None:
        """A step failed; one of its requests may be the reason."""
        self._num_failed_steps += 1
        rows = self.scheduler.rows
        for row, lease, count in zip(plan.rows, plan.leases, plan.counts, strict=True):
            request = rows.requests[row]
            if request is not None and rows.lease[row] == lease:
                self._suspects.append(Suspect(request, int(count)))

    def _run_suspect(self, suspect: Suspect) -> None:
        """Run one request of a failed step alone. If it fails again it is the culprit, and ends with an error."""
        request = suspect.request
        plan = None if request.is_finished else self.scheduler.plan_alone(request, suspect.num_tokens)
        if plan is None:
            return
        try:
            step = self._executor.submit(plan)
            ids = self._executor.collect(step)
        except BackendError as error:
            self._raise_if_fatal(error)
            self.scheduler.resync()
            self.scheduler.finish(request, FinishReason.ERROR, error=f"{type(error).__name__}: {error}")
            self._count_failure(error)
            return
        self._failures_in_a_row = 0
        self.scheduler.update(plan, ids)

    def _count_failure(self, error: BackendError) -> None:
        """A request that fails by itself is its own fault; two in a row are the engine's."""
        if isinstance(error, ForwardFailed):
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise error

    def _raise_if_fatal(self, error: BackendError) -> None:
        if isinstance(error, IntegrityError) or (isinstance(error, ForwardFailed) and error.fatal):
            raise error

    def die(self, error: BaseException) -> None:
        """The engine is lost: every request ends with an error, nothing new is taken."""
        self.failure = error
        self._end_all(FinishReason.ERROR, f"the engine failed: {type(error).__name__}: {error}")

    def close(self) -> list[GeneratedToken]:
        """Stop. Requests that were not done end with `shutdown`; returns what was left to tell."""
        if not self.closed:
            self._end_all(FinishReason.SHUTDOWN, "the engine was closed")
            self.closed = True
            self._executor.close()
        return self.scheduler.take_outputs()

    def _end_all(self, reason: FinishReason, error: str) -> None:
        self._in_flight.clear()
        self._suspects.clear()
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
            num_failed_steps=self._num_failed_steps,
            kv=self.kv.kv.stats(),
        )

    def slots(self) -> list[SlotView]:
        """What each row is doing right now."""
        return slot_views(self.scheduler.rows)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the books do not balance; when idle, nothing but parked KV may be left."""
        self.kv.check_integrity()
        if self.has_work:
            return
        if self.scheduler.rows.num_running or len(self.scheduler.queue):
            raise IntegrityError("an idle engine still has rows or waiting requests")
        if self.kv.kv.stats().referenced_cells != self.kv.num_parked_tokens:
            raise IntegrityError("an idle engine holds KV that is not parked")

    def _longest(self, config: EngineConfig, max_context: int) -> int:
        """The longest request that always fits once everybody else has made room: two blocks less than there are."""
        fits = self.kv.num_cells - (2 * self.kv.kv.block_size if self.kv.kv.block_size > 1 else 0)
        longest = min(max_context, fits, config.max_model_len or max_context)
        if longest < 2:
            raise ConfigError(f"KV memory of {self.kv.num_cells} cells is too small for any request")
        if config.max_model_len is not None and longest < config.max_model_len:
            raise ConfigError(
                f"max_model_len {config.max_model_len} > {longest}: the model's context is {max_context}, "
                f"KV memory of {self.kv.num_cells} cells holds {fits}"
            )
        return longest
