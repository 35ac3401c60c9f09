"""Random operations from a seed, without hypothesis: for machines that lack it, and for planted bugs."""

from __future__ import annotations

from tests.conformance.machine import Machine
from tests.conformance.operations import OPERATIONS, RandomChooser, config
from tests.conformance.subjects import Subject


def drive(subject: Subject, seed: int, depth: int, num_operations: int = 60) -> None:
    """One random run; an `AssertionError` carries the seed and everything that was done."""
    choose = RandomChooser(seed)
    machine = Machine(subject, config(choose, depth))
    weighted = [operation for weight, operation in OPERATIONS.values() for _ in range(weight)]
    try:
        for _ in range(num_operations):
            choose.one_of(weighted)(machine, choose)
        machine.finish()
    except Exception as error:
        steps = "\n  ".join(machine.log)
        message = f"{subject.name}, seed {seed}, depth {depth}: {error!r}\n{machine.config}\n  {steps}"
        raise AssertionError(message) from error
