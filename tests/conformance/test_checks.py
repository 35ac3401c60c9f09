"""Every check, on every backend that takes the suite."""

from pathlib import Path

import pytest

from tests.conformance.all_subjects import SUBJECTS
from tests.conformance.checks import CHECKS, Check
from tests.conformance.random_driver import drive
from tests.conformance.subjects import Subject


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=pytest.mark.req(*check.requirements), id=check.name) for check in CHECKS]
)
def test_conformance(check: Check, subject: Subject) -> None:
    if check.needs_faults and not subject.can_fail:
        pytest.skip(f"{subject.name} can't be told to fail")
    if check.needs_shift and not subject.can_shift:
        pytest.skip(f"{subject.name} can't shift positions")
    check.run(subject)


@pytest.mark.req("R22", "R23", "R24", "R25", "R26", "R46", "R47")
@pytest.mark.parametrize(
    ("subject", "depth"),
    [pytest.param(one, depth, id=f"{depth}-{one.name}") for one in SUBJECTS for depth in one.depths],
)
def test_random_operations_agree_with_the_specification(subject: Subject, depth: int) -> None:
    for seed in range(subject.num_seeds):
        drive(subject, seed, depth)


@pytest.mark.req("R48")
def test_the_docs_say_that_there_is_one_stream() -> None:
    contract = Path(__file__).parents[2] / "docs" / "contract.md"
    assert "## One stream" in contract.read_text()
