"""Weights that are replaced while requests run: what follows is what the new weights say about the whole log."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.engine.test_pool import WAIT_S, Listener
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine.core import EngineCore
from tokenmill.engine.pool import EnginePool
from tokenmill.engine.request import Limits, Request
from tokenmill.errors import InvalidOperation, StaleKV
from tokenmill.kv.paged_backend import WeightsGate

LIMITS = BackendLimits(num_cells=512, max_seqs=16)


def model(depth: int = 0) -> FakeModel:
    return FakeModel(FakeConfig(vocab_size=64, max_context=256, block_size=4, depth=depth))


def versioned(version: int) -> FakeModel:
    fresh = model()
    for _ in range(version):
        fresh.replace_weight("salt", None)
    return fresh


def continuation(version: int, log: list[int], count: int) -> list[int]:
    """What a model of this version says after a log, computed anew."""
    fresh = versioned(version)
    engine = EngineCore(fresh.new_backend(LIMITS), fresh.info, EngineConfig(max_num_seqs=4))
    engine.add_sequence(log, max_new_tokens=count)
    return engine.run_until_complete()[0]


@pytest.mark.req("R45")
@pytest.mark.parametrize("depth", [0, 1])
def test_running_and_parked_kv_of_old_weights_is_never_used(depth: int) -> None:
    shared = model(depth)
    engine = EngineCore(shared.new_backend(LIMITS), shared.info, EngineConfig(max_num_seqs=4))
    old = Request("old", [1, 2, 3, 4, 5], Limits(max_new_tokens=4))
    engine.add(old)
    while engine.has_work:
        engine.step()
    running = [Request(f"r{i}", [1, 2, 3, 4, 5, i], Limits(max_new_tokens=30)) for i in range(3)]
    for request in running:
        engine.add(request)
    for _ in range(8):
        engine.step()
    shared.replace_weight("salt", None)
    assert shared.weights_version == 1
    said_before = [len(request.output) for request in running]
    pending = depth  # a step in flight was computed under the old weights, and its token is good
    while engine.has_work:
        engine.step()
    for request, before in zip(running, said_before, strict=True):
        log, rest = request.tokens[: 6 + before + pending], request.output[before + pending :]
        assert rest == continuation(1, log, len(rest))
        assert len(request.output) == 30
    follow = Request("follow", [*old.tokens, 7], Limits(max_new_tokens=5))
    engine.add(follow)
    while engine.has_work:
        engine.step()
    assert follow.output == continuation(1, [*old.tokens, 7], 5)
    engine.check_integrity()
    engine.close()


@pytest.mark.req("R45")
def test_a_memory_that_is_not_empty_refuses_until_it_is() -> None:
    from tokenmill.contract import BatchBuilder

    shared = model()
    with shared.new_backend(LIMITS) as backend:
        backend.decode(BatchBuilder().add_run([1, 2], 0, 0).build())
        shared.replace_weight("salt", None)
        with pytest.raises(StaleKV, match="KV has version 0, the weights 1"):
            backend.decode(BatchBuilder().add_run([3], 2, 0).build())
        backend.kv.clear()
        backend.decode(BatchBuilder().add_run([1, 2], 0, 0).build())
    with pytest.raises(InvalidOperation, match="no tensor 'nothing'"):
        shared.replace_weight("nothing", None)
    assert shared.weights_version == 1


@pytest.mark.req("R45")
def test_replacing_waits_for_running_steps_and_goes_before_new_ones() -> None:
    gate, events = WeightsGate(), []
    computing, may_end = threading.Event(), threading.Event()

    def compute(name: str, entered: Callable[[], object]) -> None:
        with gate.computing():
            entered()
            may_end.wait(WAIT_S)
            events.append(name)

    def replace() -> None:
        with gate.replacing():
            events.append("replaced")

    step = threading.Thread(target=compute, args=("step", computing.set))
    step.start()
    computing.wait(WAIT_S)
    replacement = threading.Thread(target=replace)
    replacement.start()
    with gate._changed:
        gate._changed.wait_for(lambda: gate._num_replacing == 1, WAIT_S)
    late = threading.Thread(target=compute, args=("late step", lambda: None))
    late.start()
    assert events == []
    may_end.set()
    for thread in (step, replacement, late):
        thread.join(WAIT_S)
    assert events == ["step", "replaced", "late step"]
    assert gate.version == 1


@pytest.mark.req("R45")
def test_while_two_cores_run_on_their_threads() -> None:
    shared = model(depth=1)
    pool = EnginePool(shared, EngineConfig(max_num_seqs=4), LIMITS, num_cores=2)
    listeners = [Listener() for _ in range(8)]
    for i, listener in enumerate(listeners):
        pool.submit(Request(f"r{i}", [1, 2, i], Limits(max_new_tokens=200)), listener)
    for _ in range(20):
        shared.replace_weight("salt", None)
    for listener in listeners:
        tokens, _ = listener.result()
        assert len(tokens) == 200
    pool.close()
    assert shared.weights_version == 20
