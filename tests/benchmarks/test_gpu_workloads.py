"""What `benchmarks.gpu` measures, on the fake backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import gpu_workloads
from benchmarks.gpu_workloads import Job, first_token, run
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.contract import Backend, BackendLimits
from tokenmill.engine.core import EngineCore


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


def test_21_8_the_first_token_of_a_model_does_not_wait_for_another_models_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(gpu_workloads, "time", SimpleNamespace(perf_counter=clock.perf_counter))

    def opening(seconds: float) -> tuple[EngineCore, Backend]:
        clock.now_s += seconds
        model = FakeModel(FakeConfig())
        backend = model.new_backend(BackendLimits())
        return EngineCore(backend, model.info), backend

    engine, _, first_s = first_token(lambda: opening(7.0), startup_s=2.0)
    assert first_s == 9.0
    run(engine, [Job([1] * 16, 8)], "workload")
    clock.now_s += 60.0  # all that is measured with the first model
    engine.close()
    engine, _, second_s = first_token(lambda: opening(3.0), startup_s=2.0)
    assert second_s == 5.0
    engine.close()
