"""Cores on threads: many callers, one owner each; death, restart and shutdown reach everybody once."""

from __future__ import annotations

import errno
import itertools
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.helpers import VOCAB, alone, backend_of, request
from tokenmill.backends.fake import FakeBackend, FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Event, Phase, RequestEvent
from tokenmill.engine.pool import LOOKS, MIN_LOOKS, EnginePool, RestartLimit
from tokenmill.engine.view import CoreView
from tokenmill.errors import EngineDead, InvalidRequest
from tokenmill.outputs import FinishReason, GeneratedToken, StepResult

WAIT_S = 20


class Listener:
    """A sink that keeps what it hears and lets others wait for the end."""

    def __init__(self) -> None:
        self.outputs: list[GeneratedToken] = []
        self.ended = threading.Event()
        self.heard = threading.Event()

    def __call__(self, result: StepResult) -> None:
        self.outputs += result
        self.heard.set()
        if result.ends:
            self.ended.set()

    def result(self) -> tuple[list[int], FinishReason]:
        assert self.ended.wait(WAIT_S), "the request never ended"
        endings = [output.finish_reason for output in self.outputs if output.finish_reason]
        assert len(endings) == 1
        return [output.token_id for output in self.outputs if output.token_id is not None], endings[0]


def make_pool(depth: int = 1, num_cores: int = 2, hang_timeout_s: float | None = None, **options: Any) -> EnginePool:
    model = FakeModel(FakeConfig(vocab_size=VOCAB, max_context=256, depth=depth))
    config = EngineConfig(max_num_seqs=8, hang_timeout_s=hang_timeout_s)
    return EnginePool(model, config, BackendLimits(num_cells=512), num_cores=num_cores, **options)


def backend(pool: EnginePool, core: int = 0) -> FakeBackend:
    found = pool.cores[core].core._executor.backend
    assert isinstance(found, FakeBackend)
    return found


def stall(pool: EnginePool) -> tuple[Fault, Listener]:
    """Stalls the only core in the first step of a request; `release` of the fault lets it continue."""
    fault, listener = Fault(FaultKind.STALL), Listener()
    backend(pool).faults.add(fault)
    pool.submit(request("r", (1,), max_new_tokens=3), listener)
    assert fault.stalled.wait(WAIT_S)
    return fault, listener


@contextmanager
def busy(pool: EnginePool) -> Iterator[None]:
    """Inside, no core looks into its inbox: what is submitted counts as load until the end."""
    begun, release = threading.Semaphore(0), threading.Event()

    def block(_: EngineCore) -> None:
        begun.release()
        release.wait(WAIT_S)

    for core in pool.cores:
        core.call(block)
    for _ in pool.cores:
        assert begun.acquire(timeout=WAIT_S)
    try:
        yield
    finally:
        release.set()


@pytest.mark.req("R11", "G11")
@pytest.mark.parametrize("depth", [0, 1])
def test_many_threads_submit_and_each_hears_its_own(depth: int) -> None:
    def ask(i: int) -> tuple[list[int], FinishReason]:
        listener = Listener()
        pool.submit(request(f"r{i}", (i % 7, i % 5, 3), max_new_tokens=10), listener)
        return listener.result()

    with make_pool(depth) as pool:
        with ThreadPoolExecutor(8) as callers:
            results = list(callers.map(ask, range(64)))
        for i, (tokens, reason) in enumerate(results):
            assert reason is FinishReason.LENGTH
            assert tokens == alone((i % 7, i % 5, 3), 10)
        assert all(stats and stats.tick > 0 for stats in pool.stats()), "a core had nothing to do"
        assert all(core.load == 0 for core in pool.cores), "a sink was kept"
        for core in pool.cores:
            core.call(lambda engine: engine.check_integrity()).result(WAIT_S)


@pytest.mark.req("R11")
def test_load_includes_requests_that_a_core_has_not_looked_at() -> None:
    """Both cores are busy with something else: what comes meanwhile is shared out evenly all the same."""
    with make_pool() as pool:
        listeners = [Listener() for _ in range(6)]
        with busy(pool):
            chosen = [pool.submit(request(f"r{i}", (i,), max_new_tokens=1), one) for i, one in enumerate(listeners)]
            loads = [core.load for core in pool.cores]
        for listener in listeners:
            listener.result()
        assert loads == [3, 3]
        assert sorted(chosen) == [0, 0, 0, 1, 1, 1]


@pytest.mark.req("G2")
def test_cancel_reaches_a_running_request() -> None:
    with make_pool(num_cores=1) as pool:
        listener = Listener()
        core = pool.submit(request("long", (1,), max_new_tokens=250), listener)
        assert listener.heard.wait(WAIT_S)
        pool.cancel(core, "long")
        tokens, reason = listener.result()
        assert reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        assert tokens == alone((1,), 250)[: len(tokens)]


@pytest.mark.req("G5")
def test_a_dead_core_tells_its_callers_and_is_built_anew() -> None:
    with make_pool(num_cores=1) as pool:
        backend(pool).faults.add(Fault(FaultKind.FATAL, after=2))
        listeners = [Listener() for _ in range(3)]
        for i, listener in enumerate(listeners):
            pool.submit(request(f"r{i}", (i,), max_new_tokens=100), listener)
        for listener in listeners:
            assert listener.result()[1] is FinishReason.ERROR
            assert "the engine failed" in (listener.outputs[-1].error or "")
        again = Listener()
        pool.submit(request("again", (4, 5), max_new_tokens=5), again)
        assert again.result() == (alone((4, 5), 5), FinishReason.LENGTH)
        assert pool.cores[0].num_restarts == 1


@pytest.mark.req("G5")
def test_a_core_that_keeps_dying_is_given_up() -> None:
    with make_pool(num_cores=1, max_restarts=0) as pool:
        backend(pool).faults.add(Fault(FaultKind.FATAL))
        listener = Listener()
        pool.submit(request("r", (1,), max_new_tokens=5), listener)
        assert listener.result()[1] is FinishReason.ERROR
        assert pool.cores[0].close(WAIT_S)
        with pytest.raises(EngineDead):
            pool.submit(request("more", (1,)), Listener())


def test_closing_ends_everybody() -> None:
    before = set(threading.enumerate())
    pool = make_pool()
    listeners = [Listener() for _ in range(6)]
    for i, listener in enumerate(listeners):
        pool.submit(request(f"r{i}", (i,), max_new_tokens=250), listener)
    assert pool.close(WAIT_S)
    for listener in listeners:
        assert listener.result()[1] in (FinishReason.SHUTDOWN, FinishReason.LENGTH)
    with pytest.raises(EngineDead, match="closed"):
        pool.submit(request("more", (1,)), Listener())
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("tokenmill-core")]


def test_a_sink_that_fails_hurts_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    def broken(result: StepResult) -> None:
        raise RuntimeError("nobody home")

    with make_pool(num_cores=1) as pool:
        pool.submit(request("broken", (1,), max_new_tokens=200), broken)
        fine = Listener()
        pool.submit(request("fine", (2,), max_new_tokens=20), fine)
        assert fine.result() == (alone((2,), 20), FinishReason.LENGTH)
        stats = pool.stats()[0]
        assert stats is not None
        assert stats.num_running == 0
        again = Listener()
        pool.submit(request("broken", (1,), max_new_tokens=3), again)
        assert again.result() == (alone((1,), 3), FinishReason.LENGTH)
    assert "the sink of request broken failed" in caplog.text


def test_bad_requests_are_refused_on_the_callers_thread_or_through_the_sink() -> None:
    with make_pool(num_cores=1) as pool:
        with pytest.raises(InvalidRequest, match="maximum context length"):
            pool.submit(request("long", tuple([1] * 300)), Listener())
        first, second = Listener(), Listener()
        pool.submit(request("same", (1,), max_new_tokens=200), first)
        pool.submit(request("same", (1,), max_new_tokens=2), second)
        assert second.result() == ([], FinishReason.ERROR)
        assert first.result()[1] is FinishReason.LENGTH


def test_a_hanging_core_shows_in_its_heartbeat() -> None:
    with make_pool(num_cores=1) as pool:
        assert pool.cores[0].seconds_since_heartbeat() == 0
        fault, listener = stall(pool)
        first = pool.cores[0].seconds_since_heartbeat()
        assert pool.cores[0].seconds_since_heartbeat() > first > 0
        fault.release.set()
        assert listener.result()[1] is FinishReason.LENGTH


@pytest.mark.req("G13")
def test_a_hanging_core_is_abandoned_and_its_requests_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Those in the step, those in the inbox, and questions; the other core goes on. What comes back is not believed."""
    ended: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, RequestEvent) and event.phase is Phase.ENDED:
            ended.append(event.request_id)

    pool = make_pool(num_cores=2, hang_timeout_s=0.2)
    hold = Fault(FaultKind.STALL)
    backend(pool).faults.add(hold)
    pool.subscribe(listen)
    running, waiting = Listener(), Listener()
    pool.submit(request("running", (1,), max_new_tokens=3), running, core=0)
    assert hold.stalled.wait(WAIT_S)
    pool.submit(request("waiting", (2,), max_new_tokens=3), waiting, core=0)
    question = pool.cores[0].call(lambda engine: engine.stats())
    idle_question = pool.cores[0].call(lambda engine: engine.stats(), when_idle=True)
    for listener in (running, waiting):
        assert listener.result() == ([], FinishReason.ERROR)
        assert "has not returned" in (listener.outputs[-1].error or "")
    for asked in (question, idle_question):
        with pytest.raises(EngineDead, match="hangs"):
            asked.result(WAIT_S)
    with pytest.raises(EngineDead, match="hangs"):
        pool.submit(request("more", (1,)), Listener(), core=0)
    assert (pool.cores[0].is_hung, pool.cores[0].load, pool.cores[0].seconds_since_heartbeat()) == (True, 0, 0.0)
    assert ended == ["running"], "the other one never reached the core"
    assert "Stacks of all threads" in caplog.text
    assert "in _wait" in caplog.text
    good = Listener()
    assert pool.submit(request("good", (4, 5), max_new_tokens=5), good) == 1
    assert good.result() == (alone((4, 5), 5), FinishReason.LENGTH)
    assert not pool.close(WAIT_S), "a core that hangs has not stopped"
    hold.release.set()
    pool.cores[0]._thread.join(WAIT_S)
    assert not pool.cores[0]._thread.is_alive()
    for listener in (running, waiting):
        assert len(listener.outputs) == 1
    assert ended == ["running", "good"]


@pytest.mark.req("G13")
def test_a_hang_without_a_free_descriptor_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacks of the threads go through a file."""

    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    pool = make_pool(num_cores=1, hang_timeout_s=0.1)
    fault, listener = stall(pool)
    assert listener.result()[1] is FinishReason.ERROR
    fault.release.set()
    pool.close(WAIT_S)


@pytest.mark.req("G13")
def test_a_core_that_cannot_end_its_requests_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step fails, and then so does the bookkeeping: the core takes nothing more, and the other one goes on."""

    def fail(*_: object) -> None:
        raise KeyError("a bug in the scheduler")

    pool = make_pool(num_cores=2)
    hold = Fault(FaultKind.STALL)
    backend(pool).faults.add(hold)
    monkeypatch.setattr(pool.cores[0].core.scheduler, "abandon_all", fail)
    monkeypatch.setattr(pool.cores[0].core.scheduler, "update", fail)
    running, waiting = Listener(), Listener()
    pool.submit(request("running", (1,), max_new_tokens=3), running, core=0)
    assert hold.stalled.wait(WAIT_S)
    pool.submit(request("waiting", (2,), max_new_tokens=3), waiting, core=0)
    question = pool.cores[0].call(lambda engine: engine.stats(), when_idle=True)
    hold.release.set()
    for listener in (running, waiting):
        assert listener.result() == ([], FinishReason.ERROR)
    with pytest.raises(EngineDead, match="a bug in the scheduler"):
        question.result(WAIT_S)
    assert "cannot be rebuilt" in caplog.text
    good = Listener()
    assert pool.submit(request("good", (4, 5), max_new_tokens=5), good) == 1
    assert good.result() == (alone((4, 5), 5), FinishReason.LENGTH)
    assert pool.close(WAIT_S)


@pytest.mark.req("G13")
def test_a_command_that_hangs_is_a_hang_too() -> None:
    pool = make_pool(num_cores=1, hang_timeout_s=0.1)
    begun, release = threading.Event(), threading.Event()

    def block(_: EngineCore) -> None:
        begun.set()
        release.wait(WAIT_S)

    pool.cores[0].post(block)
    assert begun.wait(WAIT_S)
    listener = Listener()
    pool.submit(request("r", (1,), max_new_tokens=3), listener)
    assert listener.result()[1] is FinishReason.ERROR
    release.set()
    pool.close(WAIT_S)


def test_a_step_that_is_expected_to_take_long_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_pool(num_cores=1) as pool:
        fault, listener = stall(pool)
        core = pool.cores[0]
        monkeypatch.setattr(EngineCore, "expected_step_s", property(lambda _: 1000.0))
        assert 9_000 < core.supervise(1e-6) <= 10_000
        monkeypatch.setattr(EngineCore, "expected_step_s", property(lambda _: 1e-6))
        assert core.supervise(100.0) > 50
        assert not core.is_hung
        fault.release.set()
        assert listener.result()[1] is FinishReason.LENGTH


def test_a_process_that_was_stopped_takes_no_step_for_a_hang() -> None:
    """The clock went on, but nobody looked: the step has its time once more."""
    with make_pool(num_cores=1) as pool:
        fault, listener = stall(pool)
        core = pool.cores[0]
        core._busy_since = time.monotonic() - 100.0
        for _ in range(MIN_LOOKS - 1):
            assert core.supervise(8.0) == 8.0 / LOOKS
            assert not core.is_hung
        fault.release.set()
        assert listener.result()[1] is FinishReason.LENGTH
        core.supervise(8.0)
        assert not core.is_hung


SAMPLED_STEPS = """
import sys, threading
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine.pool import EnginePool
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.params import SamplingParams

with EnginePool(FakeModel(FakeConfig()), EngineConfig(), BackendLimits(num_cells=512)) as pool:
    before, ended = set(sys.modules), threading.Event()
    params = SamplingParams(temperature=1, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=2, dry_multiplier=1)
    request = Request("r", [1, 2], Limits(max_new_tokens=8), draw=Draw(params=params))
    pool.submit(request, lambda result: ended.set() if result.ends else None)
    assert ended.wait(60)
    print(sorted(set(sys.modules) - before))
"""


@pytest.mark.req("G13")
def test_no_step_imports_anything() -> None:
    """On a busy machine an import takes as long as a hang."""
    done = subprocess.run([sys.executable, "-c", SAMPLED_STEPS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_duration_of_a_step_is_predicted_from_its_plan() -> None:
    with make_pool(num_cores=1, depth=0) as pool:
        core = pool.cores[0]
        assert core.core.expected_step_s == 0.0
        listener = Listener()
        pool.submit(request("r", (1,), max_new_tokens=20), listener)
        listener.result()
        assert core.call(lambda engine: engine.expected_step_s).result(WAIT_S) > 0.0


def test_restarts_are_counted_within_a_window() -> None:
    now = 0.0
    limit = RestartLimit(2, window_s=100.0, clock=lambda: now)
    assert [limit.take() for _ in range(3)] == [True, True, False]
    now = 99.0
    assert not limit.take()
    now = 100.0
    assert [limit.take() for _ in range(3)] == [True, True, False]


def test_a_subscription_that_took_too_long_does_not_begin_later() -> None:
    with make_pool(num_cores=1) as pool:
        fault, listener = stall(pool)
        try:
            with pytest.raises(TimeoutError):
                pool.follow(0, CoreView, timeout_s=0)
        finally:
            fault.release.set()
        assert listener.result()[1] is FinishReason.LENGTH
        assert pool.stats() != [None]
        assert not pool.cores[0].events.is_heard


def test_a_question_whose_asker_has_left_hurts_nobody() -> None:
    with make_pool(num_cores=1) as pool:
        fault, listener = stall(pool)
        question = pool.cores[0].call(lambda engine: engine.stats())
        assert question.cancel()
        fault.release.set()
        assert listener.result()[1] is FinishReason.LENGTH
        assert pool.stats()[0] is not None


def test_a_command_that_fails_is_told_to_everybody_and_the_core_built_anew() -> None:
    def broken(engine: EngineCore) -> None:
        raise RuntimeError("a bug")

    with make_pool(num_cores=1) as pool:
        listener = Listener()
        pool.submit(request("r", (1,), max_new_tokens=250), listener)
        pool.cores[0].post(broken)
        assert listener.result()[1] in (FinishReason.ERROR, FinishReason.LENGTH)
        again = Listener()
        pool.submit(request("again", (2,), max_new_tokens=3), again)
        assert again.result() == (alone((2,), 3), FinishReason.LENGTH)
        assert pool.cores[0].num_restarts == 1


def test_a_core_that_is_gone_attracts_no_requests() -> None:
    with make_pool(num_cores=2, max_restarts=0) as pool:
        backend(pool, 0).faults.add(Fault(FaultKind.FATAL))
        listener = Listener()
        pool.submit(request("r", (1,), max_new_tokens=5), listener, core=0)
        assert listener.result()[1] is FinishReason.ERROR
        pool.cores[0]._thread.join(WAIT_S)
        again = Listener()
        assert pool.submit(request("again", (2,), max_new_tokens=3), again) == 1
        assert again.result()[1] is FinishReason.LENGTH
        assert [stats is None for stats in pool.stats()] == [True, False]


def test_subscribers_stay_through_a_restart() -> None:
    ended: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, RequestEvent) and event.phase is Phase.ENDED:
            ended.append(event.request_id)

    with make_pool(num_cores=1) as pool:
        unsubscribe = pool.subscribe(listen)
        backend(pool).faults.add(Fault(FaultKind.FATAL))
        for name in ("before", "after"):
            listener = Listener()
            pool.submit(request(name, (1,), max_new_tokens=3), listener)
            listener.result()
        assert ended == ["before", "after"]
        unsubscribe()


def test_a_flood_of_commands_does_not_keep_the_core_from_stepping() -> None:
    with make_pool(num_cores=1) as pool:
        core, flooding = pool.cores[0], True

        def flood(engine: EngineCore) -> None:
            if flooding:
                core.post(flood)

        core.post(flood)
        listener = Listener()
        pool.submit(request("r", (1,), max_new_tokens=20), listener)
        assert listener.result() == (alone((1,), 20), FinishReason.LENGTH)
        flooding = False


@pytest.mark.req("G5")
def test_a_wrong_verb_is_its_callers_mistake_and_nobody_elses() -> None:
    with make_pool(num_cores=1) as pool:
        good, bad = Listener(), Listener()
        pool.submit(request("good", (1,), max_new_tokens=200), good)
        core = pool.submit(request("bad", (2,), max_new_tokens=200), bad)
        with pytest.raises(InvalidRequest, match="cancelled with reason stop"):
            pool.cancel(core, "good", FinishReason.STOP)
        pool.finish(core, "bad", keep_tokens=10_000)
        assert bad.result()[1] in (FinishReason.ERROR, FinishReason.LENGTH)
        assert good.result() == (alone((1,), 200), FinishReason.LENGTH)
        assert pool.cores[0].num_restarts == 0


def test_a_core_with_nothing_to_do_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()

    class Inbox(queue.SimpleQueue[Any]):
        def get(self, *given: Any, **options: Any) -> Any:
            next(looks)
            return super().get(*given, **options)

    monkeypatch.setattr(queue, "SimpleQueue", Inbox)
    with make_pool(num_cores=1) as pool:
        for _ in range(10):
            assert pool.stats()[0] is not None
            threading.Event().wait(0.005)  # time to look again and again, if it did
    assert next(looks) < 50


def test_a_question_for_an_idle_core_is_answered_by_a_busy_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.engine.pool.BUSY_S", 0.0)
    hold = Fault(FaultKind.STALL, after=3)
    with make_pool(num_cores=1) as pool:
        backend_of(pool.cores[0].core).faults.add(hold)
        listener = Listener()
        pool.submit(request("r", (1,), max_new_tokens=200), listener)
        assert listener.heard.wait(WAIT_S)
        asked = pool.cores[0].call(lambda core: core.has_work, when_idle=True)
        hold.release.set()
        assert asked.result(WAIT_S) is True


def test_a_core_that_can_not_be_closed_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug in the backend")

    pool = make_pool(num_cores=1)
    hold = Fault(FaultKind.STALL, after=3)
    backend_of(pool.cores[0].core).faults.add(hold)
    monkeypatch.setattr(pool.cores[0].core._executor, "close", fail)
    listener = Listener()
    pool.submit(request("r", (1,), max_new_tokens=200), listener)
    assert listener.heard.wait(WAIT_S)
    pool.cores[0].stop()
    hold.release.set()
    assert listener.result()[1] is FinishReason.SHUTDOWN
    assert pool.close(WAIT_S)
    assert "could not be closed" in caplog.text


def test_an_engine_that_is_gone_raises_a_new_error_each_time() -> None:
    pool = make_pool(num_cores=1)
    assert pool.close(WAIT_S)
    errors = []
    for _ in range(2):
        with pytest.raises(EngineDead, match="closed") as caught:
            pool.submit(request("r", (1,)), Listener())
        errors.append(caught.value)
    assert errors[0] is not errors[1], "one that is raised again keeps the frames of all its callers"
