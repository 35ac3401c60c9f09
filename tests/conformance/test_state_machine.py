"""Any sequence of KV operations and batches agrees with `CellTable`: hypothesis looks for the one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.conformance import operations
from tests.conformance.adapter_subject import TRANSFORMERS
from tests.conformance.machine import Machine
from tests.conformance.subjects import FAKE
from tests.conformance.torch_subject import TORCH, TORCH_DETERMINISTIC
from tests.llamacpp import needs_llamacpp


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


class TorchStateMachine(KVStateMachine):
    subject = TORCH


class TorchStateMachineAtDepth1(KVStateMachine):
    subject, depth = TORCH, 1


class DeterministicStateMachine(KVStateMachine):
    subject = TORCH_DETERMINISTIC


class AdapterStateMachine(KVStateMachine):
    subject = TRANSFORMERS


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
TestTorchDepth0 = _test_case(TorchStateMachine, FEWER)
TestTorchDepth1 = _test_case(TorchStateMachineAtDepth1, FEWER)
TestDeterministic = _test_case(DeterministicStateMachine, FEWER)
TestAdapter = _test_case(AdapterStateMachine, FEWER)
TestLlamaCpp = needs_llamacpp(_test_case(LlamaStateMachine, FEWER))
