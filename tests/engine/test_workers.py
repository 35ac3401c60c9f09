"""Several workers: one set of weights, with KV memory, threads and request limits divided between engine cores."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import alone, request
from tests.engine.test_pool import Listener, backend, busy, make_pool
from tests.parity.checkpoints import save
from tokenmill import LLM, open_model
from tokenmill.backends.fake import FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.contract.backend import num_processors
from tokenmill.engine.client import QueuedClient, ThreadClient
from tokenmill.engine.pool import ROUTE_BLOCK, EnginePool, PrefixRoutes, Sink
from tokenmill.engine.request import Quota, Request
from tokenmill.engine.rows import RunningRows
from tokenmill.entrypoints.fit import plan_fit
from tokenmill.entrypoints.options import load_for_engine
from tokenmill.errors import ConfigError, Unsupported
from tokenmill.outputs import FinishReason
from tokenmill.params import SamplingParams
from tokenmill.text.tokenizer import ByteTokenizer

WAIT_S = 20
FAKE: dict[str, Any] = {"vocab_size": 64, "max_context": 256, "block_size": 16}


def pool_of(llm: LLM) -> EnginePool:
    assert isinstance(llm._client, QueuedClient)
    assert isinstance(llm._client._client, ThreadClient)
    return llm._client._client.pool


def shares(**options: Any) -> tuple[EngineConfig, BackendLimits]:
    """What one core of an engine with these options gets."""
    loaded = load_for_engine(FakeModel(FakeConfig(**FAKE)), options)
    config, limits = loaded.config, loaded.limits
    return config, limits


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_kv_of_all_workers_is_never_more_than_was_asked_for(workers: int) -> None:
    for asked in (1000, 1024, 1039, 4096):
        with LLM("fake", extra=FAKE, workers=workers, kv_cache_tokens=asked) as llm:
            cores = [llm.engine] if workers == 1 else [one.core for one in pool_of(llm).cores]
            cells = [core._executor.backend.kv.stats().num_cells for core in cores]
        assert len(cells) == workers
        assert asked - 16 * workers < sum(cells) <= asked


def test_limits_on_requests_and_threads_are_divided() -> None:
    config, limits = shares(
        workers=3, max_num_seqs=32, max_queue=100, max_queue_tokens=1000, num_threads=8, kv_cache_tokens=3000
    )
    assert (config.max_num_seqs, config.max_queue, config.max_queue_tokens) == (11, 34, 334)
    assert (limits.num_running, limits.num_threads, limits.num_cells) == (11, 2, 992)
    assert shares(workers=2 * num_processors())[1].num_threads == 1
    assert shares()[1].num_threads is None, "the backend knows best how many threads one core should have"


def test_the_default_kv_cache_is_the_same_for_any_number_of_workers() -> None:
    """The model's budget is for all of them together."""
    model = FakeModel(FakeConfig(**FAKE | {"max_context": 1 << 20}))
    alone = load_for_engine(model, {}).limits
    share = load_for_engine(model, {"workers": 4}).limits
    assert alone.num_cells - 4 * 16 < 4 * share.num_cells <= alone.num_cells


def test_workers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers must be at least 1, not 0"):
        shares(workers=0)
    with pytest.raises(ConfigError, match="kv_cache_tokens must be at least 64, not 63"):
        shares(workers=4, kv_cache_tokens=63)
    with pytest.raises(ConfigError, match="n_ctx is a size of one context; with several workers use kv_cache_tokens"):
        load_for_engine("fake", {"workers": 2, "extra": {"n_ctx": 512}})
    with pytest.raises(ConfigError, match="one engine core uses a whole GPU"):
        load_for_engine("some/model", {"workers": 2, "device": "cuda"})


@pytest.mark.req("R11")
def test_an_llm_with_workers_says_what_one_without_says() -> None:
    prompts = [[1 + i % 5, 2, 3 + i] for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=12)
    said = []
    for workers in (1, 3):
        with LLM("fake", extra=FAKE, workers=workers, kv_cache_tokens=4096) as llm:
            said.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
            if workers > 1:
                assert all(stats and stats.tick > 0 for stats in pool_of(llm).stats()), "a core had nothing to do"
                with pytest.raises(Unsupported, match="use one worker"):
                    _ = llm.engine
    assert said[0] == said[1]


@pytest.mark.req("B9")
def test_workers_take_what_was_planned_for_them(tmp_path: Path) -> None:
    """Weights once, KV and activations for each; and a plan that does not fit is refused."""
    path = str(save("qwen3", tmp_path))
    planned = plan_fit(path, 4, 100, free_bytes=1 << 40, workers=2, dtype="float32", device="cpu")
    one = plan_fit(path, 2, 100, free_bytes=1 << 40, dtype="float32", device="cpu")
    assert planned.plan == one.plan.times(2)
    assert (planned.plan.weights, planned.plan.kv) == (one.plan.weights, 2 * one.plan.kv)
    model: Any = open_model(path, dtype="float32", device="cpu")
    with LLM(model, tokenizer=ByteTokenizer(), workers=2, max_num_seqs=4, max_model_len=100) as llm:
        backends = [one.core._executor.backend for one in pool_of(llm).cores]
        assert sum(backend._storage.num_bytes for backend in backends) == planned.plan.kv  # type: ignore[attr-defined]
        assert len({id(backend._decoder.weights) for backend in backends}) == 1  # type: ignore[attr-defined]
    num_cells = model.free_bytes // model.info.kv_bytes_per_token // 2 + 16
    with pytest.raises(ConfigError, match="are free"):
        LLM(model, tokenizer=ByteTokenizer(), workers=2, kv_cache_tokens=4 * num_cells)


# -- routing ----------------------------------------------------------------------------------------------------------

PREFIX = (*range(1, 61), 7, 7, 7, 7)
OTHER = (*range(60, 0, -1), 9, 9, 9, 9)
"""Two blocks each."""


class Submitter:
    """Submits prompts without a core of their own; notes which took them."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._names = itertools.count()
        self.listeners: list[Listener] = []

    def __call__(self, *prompts: tuple[int, ...], core: int | None = None) -> list[int]:
        chosen = []
        for prompt in prompts:
            self.listeners.append(Listener())
            sent = request(f"r{next(self._names)}", prompt, max_new_tokens=2)
            chosen.append(self._pool.submit(sent, self.listeners[-1], core))
        return chosen

    def wait(self) -> None:
        for listener in self.listeners:
            assert listener.result()[1] is FinishReason.LENGTH


def test_a_request_goes_to_the_core_with_its_prefix() -> None:
    with make_pool(num_cores=2) as pool:
        submit = Submitter(pool)
        assert submit(PREFIX) == [0]
        assert submit(OTHER) == [1], "nothing tells which: they take turns"
        submit.wait()
        for _ in range(3):
            assert submit((*OTHER, 1), (*PREFIX, 2)) == [1, 0]
            submit.wait()
        assert submit((*PREFIX[:32], *OTHER)) == [0], "one block is a prefix, too"
        submit.wait()


def test_a_core_that_is_much_busier_is_not_chosen_for_a_prefix() -> None:
    with make_pool(num_cores=2) as pool:
        submit = Submitter(pool)
        with busy(pool):
            assert submit(*[PREFIX] * 3) == [0, 0, 0]
            assert submit(PREFIX) == [1], "three requests more are too many"
            assert submit(*[PREFIX] * 3) == [1, 1, 0], "both have it now, or soon: the least loaded one takes it"
        submit.wait()


def test_prefixes_of_other_namespaces_and_of_bound_requests() -> None:
    with make_pool(num_cores=2) as pool:
        submit = Submitter(pool)
        assert submit(PREFIX, core=1) == [1]
        submit.wait()
        assert submit(PREFIX) == [1], "what a session has computed is of use to others"
        submit.wait()
        salted = [request(f"s{i}", PREFIX, max_new_tokens=1, namespace="salt") for i in range(2)]
        listeners = [Listener(), Listener()]
        assert pool.submit(salted[0], listeners[0]) == 0
        listeners[0].result()
        assert pool.submit(salted[1], listeners[1]) == 0
        listeners[1].result()


def test_routes_are_as_many_as_the_kv_can_hold_and_go_with_it() -> None:
    routes = PrefixRoutes(2, num_cells=4 * ROUTE_BLOCK)
    first, second = [1, 2, 3], [1, 2, 4, 5]
    routes.note(0, first)
    assert [routes.num_cached(core, second) for core in (0, 1)] == [2, 0]
    routes.note(0, second)
    assert (routes.num_cached(0, second), routes.num_cached(0, first)) == (4, 2), "the oldest block is forgotten"
    routes.forget(0)
    assert routes.num_cached(0, second) == 0
    with make_pool(num_cores=2) as pool:
        submit = Submitter(pool)
        assert submit(PREFIX, OTHER) == [0, 1]
        submit.wait()
        backend(pool).faults.add(Fault(FaultKind.FATAL))
        failing = Listener()
        assert pool.submit(request("failing", (1, 2)), failing, core=0) == 0
        assert failing.result()[1] is FinishReason.ERROR
        pool.cores[0].call(lambda core: core.stats()).result(WAIT_S)  # it was built again
        assert pool._routes is not None
        assert pool._routes.num_cached(0, pool._routes.blocks_of(request("x", PREFIX))) == 0


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("R32")
def test_killing_a_worker_fails_only_its_own_requests() -> None:
    with make_pool(num_cores=3) as pool:
        listeners: dict[int, list[Listener]] = {core: [Listener() for _ in range(4)] for core in range(3)}
        backend(pool, 1).faults.add(Fault(FaultKind.FATAL, after=3))
        with busy(pool):
            for core, own in listeners.items():
                for i, listener in enumerate(own):
                    pool.submit(request(f"{core}.{i}", (core, i), max_new_tokens=100), listener, core)
        for core, own in listeners.items():
            for i, listener in enumerate(own):
                tokens, reason = listener.result()
                whole = alone((core, i), 100)
                if core == 1:
                    assert reason is FinishReason.ERROR
                    assert tokens == whole[: len(tokens)]
                else:
                    assert (tokens, reason) == (whole, FinishReason.LENGTH)
        again = Listener()
        pool.submit(request("again", (1, 0), max_new_tokens=9), again, core=1)
        assert again.result() == (alone((1, 0), 9), FinishReason.LENGTH)
        assert [core.num_restarts for core in pool.cores] == [0, 1, 0]


# -- limits of a key --------------------------------------------------------------------------------------------------


class RunningCount:
    """How many requests have a row at the same time, on all cores together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        lock, attach, detach = threading.Lock(), RunningRows.attach, RunningRows.detach

        def note_attach(rows: RunningRows, *given: Any) -> int:
            with lock:
                self.now += 1
                self.most = max(self.most, self.now)
            return attach(rows, *given)

        def note_detach(rows: RunningRows, given: Request) -> int:
            seq = detach(rows, given)
            with lock:
                self.now -= 1
            return seq

        monkeypatch.setattr(RunningRows, "attach", note_attach)
        monkeypatch.setattr(RunningRows, "detach", note_detach)


@pytest.mark.req("R18", "G8")
def test_the_rows_of_a_key_are_limited_on_all_workers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request runs in the end, wherever the key's rows were before; another key does not notice."""
    running = RunningCount(monkeypatch)
    with make_pool(num_cores=3) as pool:
        listeners = [Listener() for _ in range(18)]
        with busy(pool):
            for i, listener in enumerate(listeners):
                sent = request(f"r{i}", (i, 1), max_new_tokens=20, key="a", quota=Quota(max_rows=2))
                pool.submit(sent, listener, core=i % 3)
        for i, listener in enumerate(listeners):
            assert listener.result() == (alone((i, 1), 20), FinishReason.LENGTH)
        assert running.most == 2
        others = [Listener() for _ in range(6)]
        with busy(pool):
            for i, listener in enumerate(others):
                pool.submit(request(f"o{i}", (i, 2), max_new_tokens=20, key="b"), listener, core=i % 3)
        for listener in others:
            assert listener.result()[1] is FinishReason.LENGTH
        assert running.most > 2
        for core in pool.cores:
            core.call(lambda engine: engine.check_integrity()).result(WAIT_S)
            assert not core.core.scheduler.usage.num_rows("a")
            assert not core.core.scheduler.usage.num_slots("a")


@pytest.mark.req("R15", "G8")
def test_the_queue_slots_of_a_key_are_limited_on_all_workers_together() -> None:
    with make_pool(num_cores=2) as pool:
        listeners = [Listener() for _ in range(8)]
        with busy(pool):
            for i, listener in enumerate(listeners):
                quota = Quota(max_rows=1, max_queued=2)
                pool.submit(request(f"r{i}", (i,), max_new_tokens=200, key="a", quota=quota), listener, core=i % 2)
        reasons = Counter(listener.result()[1] for listener in listeners)
        assert reasons == {FinishReason.LENGTH: 3, FinishReason.OVERLOAD: 5}


@pytest.mark.req("R18", "R35")
def test_a_worker_whose_requests_wait_for_a_row_elsewhere_rests() -> None:
    """It takes no steps meanwhile; timeouts, cancels and requests of others reach it; the end of the row wakes it."""
    quota = Quota(max_rows=1)
    with make_pool(num_cores=2) as pool:
        hold, first = Fault(FaultKind.STALL), Listener()
        backend(pool).faults.add(hold)
        pool.submit(request("first", (1,), max_new_tokens=3, key="a", quota=quota), first, core=0)
        assert hold.stalled.wait(WAIT_S)
        hasty, left, waits = Listener(), Listener(), Listener()
        pool.submit(request("hasty", (2,), key="a", quota=quota, timeout_s=0.05), hasty, core=1)
        assert hasty.result() == ([], FinishReason.TIMEOUT)
        pool.submit(request("waits", (3,), max_new_tokens=3, key="a", quota=quota), waits, core=1)
        pool.submit(request("left", (4,), key="a", quota=quota), left, core=1)
        pool.cancel(1, "left")
        assert left.result() == ([], FinishReason.CANCELLED)
        other = Listener()
        pool.submit(request("other", (5,), max_new_tokens=3, key="b"), other, core=1)
        assert other.result() == (alone((5,), 3), FinishReason.LENGTH)
        ticks = [pool.cores[1].call(lambda engine: engine.scheduler.tick).result(WAIT_S) for _ in range(5)]
        assert ticks == list(range(ticks[0], ticks[0] + 5)), "a step for each command, and none besides"
        assert not waits.outputs
        hold.release.set()
        assert first.result()[1] is FinishReason.LENGTH
        assert waits.result() == (alone((3,), 3), FinishReason.LENGTH)


@pytest.mark.req("R18", "G13")
def test_the_rows_of_a_worker_that_hangs_are_free_for_others() -> None:
    quota = Quota(max_rows=1)
    pool = make_pool(num_cores=2, hang_timeout_s=0.2)
    hold, lost, waits = Fault(FaultKind.STALL), Listener(), Listener()
    backend(pool).faults.add(hold)
    pool.submit(request("lost", (1,), key="a", quota=quota), lost, core=0)
    assert hold.stalled.wait(WAIT_S)
    pool.submit(request("waits", (3,), max_new_tokens=3, key="a", quota=quota), waits, core=1)
    assert lost.result()[1] is FinishReason.ERROR
    assert waits.result() == (alone((3,), 3), FinishReason.LENGTH)
    hold.release.set()
    pool.cores[0]._thread.join(WAIT_S)
    assert not pool.cores[1].core.scheduler.usage.num_rows("a"), "what came back late was counted twice"
    pool.close(WAIT_S)


def test_a_request_goes_to_a_core_whose_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.engine.pool.HANGS_AFTER_S", 0.01)
    with make_pool(num_cores=2) as pool:
        hold, stalled = Fault(FaultKind.STALL), Listener()
        backend(pool).faults.add(hold)
        pool.submit(request("stalled", PREFIX, max_new_tokens=3), stalled, core=0)
        assert hold.stalled.wait(WAIT_S)
        while pool.cores[0].seconds_since_heartbeat() < 0.01:
            hold.release.wait(0.01)
        submit = Submitter(pool)
        assert submit(PREFIX) == [1], "though the other one has its prefix"
        submit.wait()
        hold.release.set()
        assert stalled.result()[1] is FinishReason.LENGTH


def test_a_request_that_meets_a_dying_core_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was alive when it was chosen."""
    with make_pool(num_cores=2) as pool:
        monkeypatch.setattr(pool, "_choose", lambda _: 0 if pool.cores[0].is_alive else 1)
        submit_first = pool.cores[0].submit

        def submit_late(sent: Request, sink: Sink) -> None:
            pool.cores[0].stop()
            submit_first(sent, sink)

        monkeypatch.setattr(pool.cores[0], "submit", submit_late)
        submit = Submitter(pool)
        assert submit(PREFIX) == [1]
        submit.wait()
