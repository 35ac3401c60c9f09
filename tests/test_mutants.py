"""The mutation run: which mutants a source has, which tests are chosen for them, and what a run says about them."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from tests.mutants.__main__ import stale
from tests.mutants.covering import ROOT, CoverageMap, CoveredTest, measure
from tests.mutants.running import Plan, Workshop, plan_for
from tests.mutants.sites import Mutant, mutants_of, sample

SOURCE = textwrap.dedent('''
    import logging
    log = logging.getLogger()
    LIMIT = 10

    class Counter:
        """Docstring."""

        def __init__(self):
            self.total = 0

        def add(self, items, limit):
            if not items:
                return 0
            for item in items[:limit]:
                if item <= 3 and item is not None:
                    self.total += item
                    log.info("%s", 7)
            if self.total < 0:
                raise ValueError(f"total {self.total - 1} is negative")
            self.total = divmod(self.total, limit)[1]
            assert self.total != 5
            self.publish()
            return self.total

        def __repr__(self):
            return "x" if self.total > 1 else "y"
''').encode()
"""With three places that no mutant may touch: messages, assertions, and text for people."""


def changes(kind: str) -> set[tuple[str, str]]:
    """Text before and after, of all mutants of a kind."""
    found = [mutant for mutant in mutants_of("counter.py", SOURCE) if mutant.kind == kind]
    return {(SOURCE[mutant.begin : mutant.end].decode(), mutant.text) for mutant in found}


def test_comparisons_are_moved_by_one_and_turned_round() -> None:
    assert changes("comparison flipped") == {
        ("item <= 3", "(item < 3)"),
        ("item <= 3", "(item > 3)"),
        ("item is not None", "(item is None)"),
        ("self.total < 0", "(self.total <= 0)"),
        ("self.total < 0", "(self.total >= 0)"),
    }


def test_numbers_and_bounds_are_off_by_one() -> None:
    found = changes("off by one")
    assert {("3", "4"), ("3", "(2)"), ("limit", "(limit + 1)"), ("limit", "(limit - 1)"), ("1", "2")} <= found
    assert not {before for before, _ in found} & {"5", "7", "10"}, "an assertion, the log, a constant of the module"


def test_statements_are_dropped_unless_any_test_would_see_it() -> None:
    assert {before for before, _ in changes("statement dropped")} == {
        "return 0",
        "self.total += item",
        'raise ValueError(f"total {self.total - 1} is negative")',
        "self.total = divmod(self.total, limit)[1]",
        "self.publish()",
    }


def test_arguments_are_swapped_and_branches_negated() -> None:
    assert changes("arguments swapped") == {("divmod(self.total, limit)", "divmod(limit, self.total)")}
    assert changes("branch negated") == {
        ("not items", "(items)"),
        ("item <= 3 and item is not None", "(not (item <= 3 and item is not None))"),
        ("self.total < 0", "(not self.total < 0)"),
    }


def test_a_mutant_changes_its_function_and_nothing_else() -> None:
    before = {ast.unparse(node) for node in ast.parse(SOURCE).body}
    for mutant in mutants_of("counter.py", SOURCE):
        after = {ast.unparse(node) for node in ast.parse(mutant.applied(SOURCE)).body}
        assert len(before - after) == 1
        assert mutant.function == "Counter.add" or mutant.kind == "off by one"
        assert mutant.diff(SOURCE).count("\n") == 1, "one line became another"


def test_a_seed_draws_the_same_mutants_every_time(tmp_path: Path) -> None:
    path = tmp_path / "counter.py"
    path.write_bytes(SOURCE)
    first = sample(tmp_path, [path], 5, seed=1)
    assert len(set(first)) == 5
    assert sample(tmp_path, [path], 5, seed=1) == first
    assert sample(tmp_path, [path], 5, seed=2) != first


def key_in(source: bytes) -> set[str]:
    return {mutant.key(source) for mutant in mutants_of("counter.py", source) if mutant.text == "(item < 3)"}


def test_a_key_survives_a_reformat_and_not_an_edit() -> None:
    reformatted = ast.unparse(ast.parse(SOURCE)).encode()
    elsewhere = b"\n\n" + SOURCE.replace(b"LIMIT = 10", b"LIMIT = 11")
    edited = SOURCE.replace(b"self.publish()", b"self.publish(1)")
    assert key_in(SOURCE) == key_in(reformatted) == key_in(elsewhere)
    assert key_in(SOURCE) != key_in(edited)


def test_an_equivalent_mutant_is_stale_when_its_function_has_changed() -> None:
    path = "src/tokenmill/kv/tables.py"
    source = (ROOT / path).read_bytes()
    mutant = next(mutants_of(path, source))
    entry = {"key": mutant.key(source), "path": path, "function": mutant.function}
    edited = {**entry, "key": "0" * 16}
    moved = {**entry, "path": "src/tokenmill/contract/gone.py"}
    assert stale([entry, edited, moved]) == [edited, moved]


# -- choosing tests ---------------------------------------------------------------------------------------------------

PATH = "src/tokenmill/engine/rows.py"


def mutant_at(line: int, statement: int = 0) -> Mutant:
    return Mutant(PATH, "f", "off by one", line, statement or line, 0, 0, "")


def test_tests_of_its_own_part_go_first_and_fast_ones_before_slow_ones() -> None:
    covered = CoverageMap(
        tests={
            "tests/session/test_a.py::fast": CoveredTest(0.01, {PATH: 1 << 7}),
            "tests/engine/test_b.py::slow": CoveredTest(3.0, {PATH: 1 << 7}),
            "tests/engine/test_b.py::fast": CoveredTest(0.01, {PATH: 1 << 7}),
            "tests/engine/test_b.py::elsewhere": CoveredTest(0.01, {PATH: 1 << 8}),
        }
    )
    plan = plan_for(mutant_at(7), covered)
    assert list(plan.limits) == [
        "tests/engine/test_b.py::fast",
        "tests/engine/test_b.py::slow",
        "tests/session/test_a.py::fast",
    ]
    assert plan.limits["tests/engine/test_b.py::slow"] > 3.0
    assert list(plan_for(mutant_at(9, statement=8), covered).limits) == ["tests/engine/test_b.py::elsewhere"]
    assert not plan_for(mutant_at(9), covered).limits


# -- running them -----------------------------------------------------------------------------------------------------

COUNTING = """
import sys
import threading

def count(items):
    total = 0
    for item in items:
        total += item
    return total

def in_a_thread(items):
    found = []
    thread = threading.Thread(target=lambda: found.append(count(items)))
    thread.start()
    thread.join()
    return found[0]

if __name__ == "__main__":
    print(len(sys.argv))
"""
CHECKS = """
import subprocess
import sys
import pytest
from counting import count, in_a_thread

def test_nothing():
    assert count([]) == 0

def test_thread():
    assert in_a_thread([1, 2]) == 3

def test_child():
    assert subprocess.run([sys.executable, "src/counting.py"], capture_output=True).stdout == b"1\\n"

def plant():
    pass

def test_planting():
    plant()

def test_failing():
    assert not count([])
    raise AssertionError
"""
NOTHING, THREAD, CHILD = (f"test_counting.py::test_{name}" for name in ("nothing", "thread", "child"))
DROPPED = COUNTING[: COUNTING.index("total += item")].count("\n") + 1
IN_CHILD = COUNTING[: COUNTING.index("print(")].count("\n") + 1


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small module and its tests, which start faster than ours."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "src" / "counting.py").write_text(COUNTING)
    (root / "test_counting.py").write_text(CHECKS)
    return root


def test_threads_and_child_processes_count_as_covered(project: Path) -> None:
    covered = CoverageMap(tests=measure(project, ["src/*"], ["test_counting.py"]))
    assert set(covered.tests) == {NOTHING, THREAD, CHILD}, "not those that plant bugs, nor those that fail"
    assert covered.of_line("src/counting.py", DROPPED) == [THREAD]
    assert covered.of_line("src/counting.py", IN_CHILD) == [CHILD]


def test_a_run_tells_what_became_of_a_mutant(project: Path, tmp_path: Path) -> None:
    path, source = "src/counting.py", COUNTING.encode()
    workshop = Workshop(tmp_path / "workshop", project)

    def fate(correct: str, faulty: str, *tests: str) -> tuple[str, str]:
        begin = COUNTING.index(correct)
        mutant = Mutant(path, "count", "", 1, 1, begin, begin + len(correct), faulty)
        result = workshop.run(mutant, Plan(dict.fromkeys(tests, 2.0)))
        assert (tmp_path / "workshop" / path).read_bytes() == source, "ready for the next one"
        return result.status, result.by

    assert fate("total += item", "pass", NOTHING, THREAD) == ("caught", THREAD)
    assert fate("total += item", "pass", NOTHING) == ("survived", "")
    assert fate("total += item", "pass") == ("uncovered", "")
    assert fate("total = 0", "total = 0\n    while True: pass", THREAD) == ("timeout", THREAD)
    assert fate("total = 0", "import os; os.abort()", NOTHING) == ("caught", NOTHING)
    assert workshop.run(None, Plan({NOTHING: 2.0, THREAD: 2.0})).status == "survived"


def test_a_mutant_without_time_left_has_survived(project: Path, tmp_path: Path) -> None:
    result = Workshop(tmp_path / "workshop", project).run(None, Plan({NOTHING: 60.0}), most_s=0.0)
    assert (result.status, result.num_covering) == ("survived", 1)
