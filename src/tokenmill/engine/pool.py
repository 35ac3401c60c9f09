"""`EnginePool`: N engine cores on one model, each owned by a thread of its own.

Other threads talk to a core through its inbox; step results go from the core's thread straight to the callers' sinks.
A sink is called on that thread and must not block: it may set an event or fill a queue. A request that is not bound to
a core goes to the one that probably has its prefix in KV (`PrefixRoutes`), unless that one is much busier than another.
When a core dies, its requests get their terminal events, and the thread builds a new core on the same model. A core
whose step does not return is abandoned by the pool's supervisor thread: its requests get their terminal events, and it
accepts no others. Requests of other cores are not affected.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import queue
import tempfile
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, IntArray, ModelHandle
from tokenmill.engine.core import DraftModel, EngineCore, check_cancel
from tokenmill.engine.events import CoreSnapshot, CoreStats, EventBus, Phase, Subscriber
from tokenmill.engine.policies import CoreUsage, KeyUsage
from tokenmill.engine.request import Hints, Request, check_request
from tokenmill.errors import EngineDead, InvalidRequest, TokenmillError
from tokenmill.outputs import FinishReason, StepResult

log = logging.getLogger(__name__)

Sink = Callable[[StepResult], None]
"""Called once per step, with the rows of all requests submitted with it; other rows may be among them."""
Command = Callable[[EngineCore], None]
MakeSubscriber = Callable[[CoreSnapshot], Subscriber]
"""Makes the subscriber that continues from a snapshot: `CoreView`, for example."""
T = TypeVar("T")

BUSY_S = 1.0
"""How long a command that wants an idle core waits for that: a busy server may never be idle."""
ANSWER_S = 10.0
"""How long a core may take to answer a command, which it does between two steps."""
RESTART_WINDOW_S = 600.0
"""The window in which restarts of a core are counted."""
HANGS_AFTER_S = 5.0
"""A step that takes longer probably hangs: its core gets no request that another one can take."""
HANG_FACTOR = 10.0
"""A step is hung after this many times its predicted duration, and at least `hang_timeout_s`."""
MIN_LOOK_S = 0.02
"""Polling interval of the supervisor for a core that is about to be abandoned."""
LOOKS, MIN_LOOKS = 8, 4
"""Supervisor polls within the hang timeout, and how many must have found a core in the same step before it is
abandoned: a process that was stopped or starved has not polled."""
CLOSED = "the engine was closed"
ROUTE_BLOCK = 32
"""Tokens of a prompt that are looked up together: shorter common prefixes do not matter for routing."""
ROUTE_SLACK = 2
"""A core with the request's prefix may have this many requests more than the least loaded one."""


class Sinks:
    """The sink of each request. Usually all requests share one, which receives whole step results."""

    def __init__(self) -> None:
        self._sink_of: dict[str, Sink] = {}
        self._num_requests: Counter[Sink] = Counter()

    def __len__(self) -> int:
        return len(self._sink_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sink_of

    def add(self, request_id: str, sink: Sink) -> None:
        self._sink_of[request_id] = sink
        self._num_requests[sink] += 1

    def route(self, result: StepResult) -> list[tuple[Sink, StepResult]]:
        """The sinks of a core's requests. Ended requests are removed."""
        if len(self._num_requests) == 1:
            parts = [(sink, result) for sink in self._num_requests]
        else:
            places: dict[Sink, list[int]] = {}
            for place, request_id in enumerate(result.request_ids):
                if (sink := self._sink_of.get(request_id)) is not None:
                    places.setdefault(sink, []).append(place)
            parts = [(sink, result.select(own)) for sink, own in places.items()]
        for place in result.ends:
            self._remove(result.request_ids[place])
        return parts

    def each(self) -> list[tuple[str, Sink]]:
        """All unfinished requests, each with its sink."""
        return list(self._sink_of.items())

    def drop(self, request_ids: Sequence[str]) -> None:
        """Discard further results of these requests; their ids stay reserved until they end."""
        for request_id in request_ids:
            self._remove(request_id)
            self.add(request_id, _ignore)

    def _remove(self, request_id: str) -> None:
        sink = self._sink_of.pop(request_id, None)
        if sink is not None:
            self._num_requests[sink] -= 1
            if not self._num_requests[sink]:
                del self._num_requests[sink]


def tell(sink: Sink, result: StepResult) -> list[str]:
    """Call a sink. If it raises, its unfinished requests have lost their consumer."""
    try:
        sink(result)
    except Exception:
        ended = {result.request_ids[place] for place in result.ends}
        going_on = [name for name in result.request_ids if name not in ended]
        log.exception("the sink of request %s failed; it is cancelled", ", ".join(result.request_ids[:8]))
        return going_on
    return []


def _ignore(result: StepResult) -> None:
    """The sink of requests that have lost their consumer."""


def _ignore_wake(core: EngineCore) -> None:
    """A no-op command: the core takes a step after it."""


def _ignore_reason(why: str) -> None:
    """Refuses a command that has no waiting caller."""


def stack_dump() -> str:
    """The stacks of all threads. Works while a thread is inside native code that has released the GIL."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")
    except OSError as error:  # no descriptor or disk space left: requests must end without the stacks
        return f"(none: {error})"


class RestartLimit:
    """Limits restarts within a window, so that an old failure does not count forever."""

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque()

    def take(self) -> bool:
        """Whether another restart is allowed now; counts it if so."""
        now = self._clock()
        while self._times and self._times[0] <= now - self._window_s:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True


@dataclass(frozen=True)
class _Posted:
    """A command in an inbox."""

    run: Command
    refuse: Callable[[str], None]
    """Called with the reason if there is no core left to run the command."""


class CoreThread:
    """A thread, its core, and the sinks of the core's requests."""

    def __init__(
        self,
        name: str,
        make_core: Callable[[EventBus, Callable[[], None]], EngineCore],
        events: EventBus,
        restarts: RestartLimit,
        on_end: Callable[[str], None] = lambda _: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_end = on_end
        """Called with the id of each ended request, before its sink is."""
        self._on_restart = on_restart
        """Called after the core was rebuilt, without its predecessor's KV."""
        self.events = events
        """Outlives the core: subscribers stay through a restart."""
        self.num_restarts = 0
        self._inbox: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self.core = make_core(events, self._wake)
        self._make_core = make_core
        self._restarts = restarts
        self._sinks = Sinks()
        """All unfinished requests, including those in the inbox. Guarded by the lock."""
        self._idle_commands: deque[tuple[float, _Posted]] = deque()
        """Commands to run when the core is idle, each with its latest time."""
        self._lock = threading.Lock()
        self._gone: str | None = None
        """Why no command is accepted any more. Set under the lock, so that nothing is posted after the last look."""
        self._busy_since: float | None = None
        """When it last began to run commands and a step; None while it waits for its inbox."""
        self.is_hung = False
        """Whether it was abandoned. Set under the lock: from then on its thread delivers no results."""
        self._looked_at: float | None = None
        """Start of the step that the supervisor last found it in, and how often it has."""
        self._num_looks = 0
        self._stopped = threading.Event()
        """Set when the thread has ended or was abandoned."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- for any thread -----------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Hand a request over. `InvalidRequest` at once if it cannot run; everything else goes to the sink."""
        check_request(request, self.core.model, self.core.max_model_len)
        request.arrived_at = self.events.clock()
        with self._lock:
            self._check_alive()
            if is_new := request.request_id not in self._sinks:
                self._sinks.add(request.request_id, sink)
                self._inbox.put(_Posted(lambda core: self._add(core, request), _ignore_reason))
        if not is_new:
            taken = f"request {request.request_id} is already running"
            tell(sink, StepResult.of_end(request.request_id, FinishReason.ERROR, taken))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        check_cancel(reason)

        def command(core: EngineCore) -> None:
            core.cancel(request_id, reason)

        self.post(command)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        def command(core: EngineCore) -> None:
            try:
                core.finish(request_id, keep_tokens)
            except InvalidRequest as error:  # the caller's mistake, which affects no other request
                core.cancel(request_id, FinishReason.ERROR, str(error))

        self.post(command)

    def call(self, question: Callable[[EngineCore], T], *, when_idle: bool = False) -> Future[T]:
        """Run a query on the core's thread between two steps; with `when_idle`, preferably while it is idle."""
        future: Future[T] = Future()

        def answer(core: EngineCore) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(question(core))
            except Exception as error:
                future.set_exception(error)

        def refuse(why: str) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDead(why))

        def wait_for_idle(_: EngineCore) -> None:
            self._idle_commands.append((self.events.clock() + BUSY_S, _Posted(answer, refuse)))

        self.post(wait_for_idle if when_idle else answer, refuse)
        return future

    def post(self, command: Command, refuse: Callable[[str], None] = _ignore_reason) -> None:
        """Run a command on the core's thread between two steps; call `refuse` if the core is gone by then."""
        with self._lock:
            self._check_alive()
            self._inbox.put(_Posted(command, refuse))

    def _wake(self) -> None:
        """Make it look at its queue again."""
        self._inbox.put(_Posted(_ignore_wake, _ignore_reason))

    def _check_alive(self) -> None:
        if self._gone is not None:
            raise EngineDead(self._gone)

    @property
    def is_alive(self) -> bool:
        """Whether it accepts requests."""
        return self._gone is None

    @property
    def load(self) -> int:
        """Requests of this core, including its inbox."""
        return len(self._sinks)

    def seconds_since_heartbeat(self) -> float:
        """How long the core has been inside one step or command; 0 if idle. Grows if it hangs."""
        since = self._busy_since
        return 0.0 if since is None or self._stopped.is_set() else time.monotonic() - since

    @property
    def has_stopped(self) -> bool:
        """Whether its thread has ended or was abandoned."""
        return self._stopped.is_set()

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop after the step in flight; False if that exceeds the timeout."""
        self.stop()
        return self._stopped.wait(timeout_s) and not self.is_hung

    def stop(self) -> None:
        """Accept nothing more, and stop after the step in flight; does not wait."""
        with self._lock:
            if self._gone is None:
                self._gone = CLOSED
                self._inbox.put(None)

    # -- the supervisor -----------------------------------------------------------------------------------------------

    def supervise(self, hang_timeout_s: float) -> float:
        """Abandon the core if its step hangs; returns the seconds until the next poll."""
        since, silent_s, bound_s = self._busy_since, self.seconds_since_heartbeat(), hang_timeout_s
        self._num_looks = self._num_looks + 1 if since == self._looked_at else 1
        self._looked_at = since
        if silent_s >= bound_s:  # its thread is computing, so the cost model is not being updated
            bound_s = max(bound_s, HANG_FACTOR * self.core.expected_step_s)
        if silent_s < bound_s:
            return max(MIN_LOOK_S, bound_s - silent_s)
        if self._num_looks >= MIN_LOOKS:
            self._abandon(silent_s)
        return max(MIN_LOOK_S, hang_timeout_s / LOOKS)

    def _abandon(self, silent_s: float) -> None:
        """End all requests on behalf of a core that does not answer. Its thread cannot be stopped and is left."""
        why = f"engine core {self._thread.name} hangs: a step has not returned for {silent_s:.1f} s"
        log.critical("%s; it is abandoned. Stacks of all threads:\n%s", why, stack_dump())
        with self._lock:
            if self._stopped.is_set():  # the step has just returned, and the core has ended
                return
            self.is_hung, self._gone = True, why
        self._end_requests(why)
        self._stopped.set()

    def _end_requests(self, why: str) -> None:
        """End the requests of a core whose own thread cannot, and refuse new ones."""
        self.core.scheduler.usage.close()
        for request in list(self.core.scheduler.requests.values()):
            self.events.phase(request, Phase.ENDED, self.core.scheduler.tick, reason=FinishReason.ERROR)
        self.events.close()
        self._refuse_all(FinishReason.ERROR, why)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_core()
        except BaseException as error:  # it could not even end its requests
            log.critical("engine core %s failed and cannot be rebuilt", self._thread.name, exc_info=True)
            self._end_requests(self._give_up(error))
        finally:
            self._stopped.set()

    def _run_core(self) -> None:
        going = True
        while going and not self.is_hung:
            try:
                going = self._run_commands()
                if going and self.core.has_work:
                    self._dispatch(self.core.step())
            except Exception as error:  # a bug in a command or in the engine: no caller may be left waiting
                log.exception("engine core %s failed", self._thread.name)
                self.core.die(error)
                self._dispatch(self.core.scheduler.results.take())
            if self.core.failure is not None and not self.is_hung and not self._restart():
                return
        self._close_core()
        self._refuse_all(FinishReason.SHUTDOWN, CLOSED)

    def _close_core(self) -> None:
        """Close the core and end its requests, even if its backend fails to close."""
        try:
            ends = self.core.close()
        except Exception:
            log.exception("engine core %s could not be closed", self._thread.name)
            ends = self.core.scheduler.results.take()
        self._dispatch(ends)

    def _run_commands(self) -> bool:
        """Run the commands in the inbox; waits for one when there is nothing else to do. False: time to stop."""
        core, patience_s = self.core, None
        waits = (not core.has_work or core.is_blocked) and not self._idle_commands
        if waits and core.is_blocked and (at := core.scheduler.deadlines.next_at) is not None:
            patience_s = max(MIN_LOOK_S, at - self.events.clock())
        self._busy_since = None if waits else time.monotonic()
        for i in range(max(1, self._inbox.qsize())):
            try:
                posted = self._inbox.get(block=waits and i == 0, timeout=patience_s)
            except queue.Empty:
                break
            if waits and i == 0:
                self._busy_since = time.monotonic()
            if posted is None:
                return False
            posted.run(core)
        idle = self._idle_commands
        if idle and (not core.has_work or core.is_blocked or idle[0][0] <= self.events.clock()):
            idle.popleft()[1].run(core)
        return True

    def _add(self, core: EngineCore, request: Request) -> None:
        try:
            core.add(request)
        except TokenmillError as error:
            reason = FinishReason.SHUTDOWN if core.closed else FinishReason.ERROR
            self._dispatch(StepResult.of_end(request.request_id, reason, str(error)))

    def _dispatch(self, result: StepResult) -> None:
        if not result.request_ids:
            return
        with self._lock:
            if self.is_hung:  # its requests have had their endings
                return
            parts = self._sinks.route(result)
        for place in result.ends:
            self._on_end(result.request_ids[place])
        for sink, part in parts:
            if unheard := tell(sink, part):
                with self._lock:
                    self._sinks.drop(unheard)
                for request_id in unheard:
                    self.core.cancel(request_id)

    def _restart(self) -> bool:
        """Replace a dead core by a new one. False if it died too often recently, or cannot be built."""
        failure = self.core.failure
        log.error("engine core %s died: %s", self._thread.name, failure)
        is_allowed = self._restarts.take()
        if not is_allowed:
            self._give_up(failure)  # before its requests end: the next one may follow at once
        self._close_core()
        if is_allowed:
            try:
                self.core = self._make_core(self.events, self._wake)
                self.num_restarts += 1
                self._on_restart()
                self.core.tell_start()
                return True
            except Exception:
                log.exception("engine core %s could not be built again", self._thread.name)
        self._refuse_all(FinishReason.SHUTDOWN, self._give_up(failure))
        return False

    def _give_up(self, failure: BaseException | None) -> str:
        """Accept no more requests; returns the reason."""
        with self._lock:
            self._gone = why = f"the engine failed: {failure}"
        return why

    def _refuse_all(self, reason: FinishReason, why: str) -> None:
        """No core will follow: refuse the waiting commands, and end the unfinished requests."""
        waiting = [posted for _, posted in self._idle_commands]
        with suppress(queue.Empty):
            while True:
                if (posted := self._inbox.get_nowait()) is not None:
                    waiting.append(posted)
        self._idle_commands.clear()
        for posted in waiting:
            posted.refuse(why)
        with self._lock:
            sinks, self._sinks = self._sinks, Sinks()
        for request_id, sink in sinks.each():
            self._on_end(request_id)
            tell(sink, StepResult.of_end(request_id, reason, why))


class PrefixRoutes:
    """Estimates how much of a prompt each core has in KV, from the prompts that it was given.

    A core's `PrefixIndex` belongs to its thread, which is inside a step most of the time. This estimate needs no
    answer from it: hashes of prompt blocks, as many per core as its KV can hold, evicted in LRU order. A wrong estimate
    costs recomputation.
    """

    def __init__(self, num_cores: int, num_cells: int) -> None:
        self._max_blocks = max(1, num_cells // ROUTE_BLOCK)
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_cores)]

    @staticmethod
    def blocks_of(request: Request) -> list[int]:
        """One hash per whole block of its prompt, of everything up to the block's end."""
        prompt = request.tokens.array
        found, before = [], hash(request.hints.namespace)
        for end in range(ROUTE_BLOCK, len(prompt) + 1, ROUTE_BLOCK):
            before = hash((before, prompt[end - ROUTE_BLOCK : end].tobytes()))
            found.append(before)
        return found

    def num_cached(self, core: int, blocks: Sequence[int]) -> int:
        """How many leading blocks of a prompt this core was given before."""
        known = self._blocks[core]
        return next((i for i, block in enumerate(blocks) if block not in known), len(blocks))

    def note(self, core: int, blocks: Sequence[int]) -> None:
        """The core is given a prompt."""
        known = self._blocks[core]
        for block in reversed(blocks):  # the first ones are shared most, so they are evicted last
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def forget(self, core: int) -> None:
        """The core has lost its KV."""
        self._blocks[core].clear()


class EnginePool:
    """N cores on one `ModelHandle`: shared weights, one KV memory and thread each."""

    def __init__(
        self,
        model: ModelHandle,
        config: EngineConfig = EngineConfig(),
        limits: BackendLimits = BackendLimits(),
        *,
        num_cores: int = 1,
        draft: DraftModel | None = None,
        max_restarts: int = 3,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        usage = KeyUsage()

        def make_core(events: EventBus, wake: Callable[[], None]) -> EngineCore:
            own = CoreUsage(usage, wake)
            return EngineCore(model.new_backend(limits), model.info, config, clock, events, draft, own)

        self.cores: list[CoreThread] = []
        self._routes = PrefixRoutes(num_cores, limits.num_cells) if num_cores > 1 and config.prefix_caching else None
        self._turns = itertools.count(1)
        self._latest_turn = [0] * num_cores
        """When each core was last given a request. Guarded by the lock, as are the next two."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        """Tells the supervisor to end."""
        self._supervisor: threading.Thread | None = None
        self.is_closed = False
        try:
            for i in range(num_cores):
                restarts, on_restart = RestartLimit(max_restarts, RESTART_WINDOW_S, clock), partial(self._forget, i)
                name = f"tokenmill-core-{i}"
                self.cores.append(CoreThread(name, make_core, EventBus(clock), restarts, on_end, on_restart))
        except BaseException:
            self.close()
            raise
        if config.hang_timeout_s is not None:
            self._supervisor = threading.Thread(
                target=self._supervise, args=(config.hang_timeout_s,), name="tokenmill-supervisor", daemon=True
            )
            self._supervisor.start()

    def _supervise(self, hang_timeout_s: float) -> None:
        """Abandon cores whose step does not return."""
        look_in_s = most_s = max(MIN_LOOK_S, hang_timeout_s / LOOKS)
        while not self._closed.wait(look_in_s):
            look_in_s = min(most_s, *(core.supervise(hang_timeout_s) for core in self.cores))

    def submit(
        self, request: Request, sink: Sink, core: int | None = None, on_core: Callable[[int], None] = lambda _: None
    ) -> int:
        """Give the request to a core, chosen by prefix and load by default; returns which.

        `on_core` is called before the core has the request, which may end before this returns.
        """
        blocks = [] if self._routes is None else self._routes.blocks_of(request)
        with self._lock:
            while True:
                index = self._choose(blocks) if core is None else core
                on_core(index)
                try:
                    self.cores[index].submit(request, sink)
                except EngineDead:  # it has just gone: another one takes the request
                    if core is not None or not any(one.is_alive for one in self.cores):
                        raise
                else:
                    break
            self._latest_turn[index] = next(self._turns)
            if self._routes is not None:
                self._routes.note(index, blocks)
        return index

    def _choose(self, blocks: Sequence[int]) -> int:
        """The core with the longest prefix in KV among those not much busier than the least loaded one.

        Ties are broken round-robin, so that the KV of all cores is used.
        """
        alive = [i for i, core in enumerate(self.cores) if core.is_alive]
        if not alive:
            return 0  # raises the reason
        going = [i for i in alive if self.cores[i].seconds_since_heartbeat() < HANGS_AFTER_S]
        loads = {i: self.cores[i].load for i in going or alive}
        least = min(loads.values())
        cores = [i for i, load in loads.items() if load <= least + ROUTE_SLACK]
        cached = {i: 0 if self._routes is None else self._routes.num_cached(i, blocks) for i in cores}
        return max(cores, key=lambda i: (cached[i], -loads[i], -self._latest_turn[i]))

    def _forget(self, core: int) -> None:
        """Called on the thread of a core that was rebuilt."""
        if self._routes is not None:
            with self._lock:
                self._routes.forget(core)

    def cancel(self, core: int, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.cores[core].cancel(request_id, reason)

    def release(self, owner: str) -> None:
        """A session has ended: free the KV parked for it, on whatever core it is."""
        for core in self.cores:
            with suppress(EngineDead):  # its KV is gone with it
                core.post(lambda engine: engine.release(owner))

    def finish(self, core: int, request_id: str, keep_tokens: int) -> None:
        self.cores[core].finish(request_id, keep_tokens)

    def replay_s(self, core: int, num_tokens: int) -> Future[float | None]:
        return self.cores[core].call(lambda engine: engine.replay_s(num_tokens))

    def export_kv(self, core: int, owner: str, *, at_once: bool = False) -> Future[tuple[IntArray, bytes] | None]:
        """KV that a core has parked for a session; copying takes its time, so preferably while it is idle."""
        return self.cores[core].call(lambda engine: engine.export_kv(owner), when_idle=not at_once)

    def import_kv(self, core: int, tokens: IntArray, state: bytes, hints: Hints) -> Future[bool]:
        return self.cores[core].call(lambda engine: engine.import_kv(tokens, state, hints))

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Subscribe to the events of all cores, each on its own thread; returns the call to unsubscribe."""
        endings = [core.events.subscribe(subscriber) for core in self.cores]

        def unsubscribe() -> None:
            for end in endings:
                end()

        return unsubscribe

    def stats(self, timeout_s: float | None = ANSWER_S) -> list[CoreStats | None]:
        """Statistics of each core, taken between two of its steps; None for one that is gone."""
        return self._ask_each(lambda engine: engine.stats(), timeout_s)

    def snapshots(self, timeout_s: float | None = ANSWER_S) -> list[CoreSnapshot | None]:
        """What each core is doing, taken between two of its steps; None for one that is gone."""
        return self._ask_each(lambda engine: engine.snapshot(), timeout_s)

    def _ask_each(self, question: Callable[[EngineCore], T], timeout_s: float | None) -> list[T | None]:
        """The answers of all cores, any of which may go meanwhile. `TimeoutError` if one takes too long."""
        asked: list[Future[T] | None] = []
        for core in self.cores:
            try:
                asked.append(core.call(question))
            except EngineDead:
                asked.append(None)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found: list[T | None] = []
        for answer in asked:
            try:
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                found.append(None if answer is None else answer.result(left_s))
            except EngineDead:
                found.append(None)
        return found

    def follow(self, core: int, make: MakeSubscriber, timeout_s: float | None = ANSWER_S) -> Callable[[], None]:
        """Subscribe to a core's events from a snapshot on, without a gap between them.

        Both are done on the core's own thread, between two of its steps. Returns the call to unsubscribe.
        """
        following = self.cores[core].call(lambda engine: engine.events.subscribe(make(engine.snapshot())))
        try:
            return following.result(timeout_s)
        except TimeoutError:
            if following.cancel():  # it began at the last moment
                raise
            return following.result(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop all cores; unfinished requests end with `shutdown`. False if they did not stop in time."""
        self.is_closed = True
        for core in self.cores:
            core.stop()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        stopped = [
            core.close(None if deadline is None else max(0.0, deadline - time.monotonic())) for core in self.cores
        ]
        if all(core.has_stopped for core in self.cores):  # the supervisor is still needed
            self._closed.set()
            if self._supervisor is not None:
                self._supervisor.join()
        return all(stopped)

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
