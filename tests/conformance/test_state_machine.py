"""Any sequence of KV operations and batches agrees with `CellTable`: hypothesis looks for the one that does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.conformance import operations
from tests.conformance.cpu_subject import CPU
from tests.conformance.machine import Machine
from tests.conformance.subjects import FAKE
from tests.llamacpp import needs_llamacpp
from tokenmill.backends.cpu.bindings import library

needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels are not built: there is no C compiler")
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs torch and transformers, which are not installed"
)


class HypothesisChooser:
    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def between(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self._data.draw(st.integers(0, len(options) - 1))]


class KVStateMachine(RuleBasedStateMachine):
    """One rule an operation; `Machine` compares after each of them."""

    depth = 0
    subject = FAKE

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        self.machine = Machine(self.subject, operations.config(HypothesisChooser(data), self.depth))

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        operations.run(self.machine, HypothesisChooser(data))

    @rule(data=st.data())
    def fork_and_write(self, data: st.DataObject) -> None:
        operations.fork_and_write(self.machine, HypothesisChooser(data))

    @rule(data=st.data())
    def seq_rm(self, data: st.DataObject) -> None:
        operations.seq_rm(self.machine, HypothesisChooser(data))

    @rule(data=st.data())
    def seq_cp(self, data: st.DataObject) -> None:
        operations.seq_cp(self.machine, HypothesisChooser(data))

    @rule(data=st.data())
    def seq_add(self, data: st.DataObject) -> None:
        operations.seq_add(self.machine, HypothesisChooser(data))

    @rule(data=st.data())
    def seq_keep(self, data: st.DataObject) -> None:
        operations.seq_keep(self.machine, HypothesisChooser(data))

    @rule(data=st.data())
    def move_through_bytes(self, data: st.DataObject) -> None:
        operations.move_through_bytes(self.machine, HypothesisChooser(data))

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        operations.look(self.machine, HypothesisChooser(data))

    @rule()
    def collect(self) -> None:
        self.machine.collect()

    @rule()
    def clear(self) -> None:
        self.machine.clear()

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.finish()


class KVStateMachineAtDepth1(KVStateMachine):
    depth = 1


class CPUStateMachine(KVStateMachine):
    subject = CPU


class TorchStateMachine(KVStateMachine):
    def __init__(self) -> None:
        from tests.conformance.torch_subject import TORCH

        self.subject = TORCH
        super().__init__()


class TorchStateMachineAtDepth1(TorchStateMachine):
    depth = 1


class DeterministicStateMachine(KVStateMachine):
    def __init__(self) -> None:
        from tests.conformance.torch_subject import TORCH_DETERMINISTIC

        self.subject = TORCH_DETERMINISTIC
        super().__init__()


class AdapterStateMachine(KVStateMachine):
    def __init__(self) -> None:
        from tests.conformance.adapter_subject import TRANSFORMERS

        self.subject = TRANSFORMERS
        super().__init__()


class LlamaStateMachine(KVStateMachine):
    def __init__(self) -> None:
        from tests.conformance.llamacpp_subject import LLAMACPP

        self.subject = LLAMACPP
        super().__init__()


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


FEWER = settings(SETTINGS, max_examples=25)
"""For backends that compute."""


def _test_case(machine: type[RuleBasedStateMachine], size: settings = SETTINGS) -> Any:
    case = machine.TestCase
    case.settings = size
    return pytest.mark.req("R22", "R23", "R24", "R25", "R26", "R46", "R47")(case)


TestDepth0 = _test_case(KVStateMachine)
TestDepth1 = _test_case(KVStateMachineAtDepth1)
TestCPU = needs_kernels(_test_case(CPUStateMachine, FEWER))
TestTorchDepth0 = needs_torch(_test_case(TorchStateMachine, FEWER))
TestTorchDepth1 = needs_torch(_test_case(TorchStateMachineAtDepth1, FEWER))
TestDeterministic = needs_torch(_test_case(DeterministicStateMachine, FEWER))
TestAdapter = needs_torch(_test_case(AdapterStateMachine, FEWER))
TestLlamaCpp = needs_llamacpp(_test_case(LlamaStateMachine, FEWER))
