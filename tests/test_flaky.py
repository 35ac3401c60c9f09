"""CI tells flaky tests from broken ones: suites that fail on purpose, run as CI runs the real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import flaky

ROOT = Path(__file__).parent.parent
FAILS_ONCE = """
    import os
    from pathlib import Path
    import pytest

    def fail_once(name):
        print("captured words")
        if not Path(name).exists():
            Path(name).touch()
            raise AssertionError("for the first time")
"""
PASSES = """
    def test_sound():
        assert "tests.flaky" not in os.environ.get("PYTEST_ADDOPTS", "")
"""


def flaky_tests(count: int) -> str:
    return f"""
    @pytest.mark.parametrize("i", range({count}))
    def test_flaky(i):
        fail_once(f"flaky-{{i}}")
    """


@dataclass
class Ci:
    """A folder with a suite and a Makefile."""

    folder: Path

    def run(self, *tests: str, options: tuple[str, ...] = (), num_workers: int = 0) -> subprocess.CompletedProcess[str]:
        source = "".join(textwrap.dedent(one) for one in (FAILS_ONCE, *tests))
        (self.folder / "test_suite.py").write_text(source)
        (self.folder / "pytest.ini").write_text("[pytest]\naddopts = -ra -p no:cacheprovider\nxfail_strict = true\n")
        make = f"test:\n\t@{sys.executable} -m pytest -n {num_workers}\n"
        (self.folder / "Makefile").write_text(make)
        # The plugins of the environment would be most of the time.
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin",
        }
        command = [sys.executable, "-m", "tests.flaky", *options, "make", "test"]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    return Ci(tmp_path)


def summary(done: subprocess.CompletedProcess[str]) -> str:
    """The last line, which must be one of pytest's summaries, without its duration."""
    *_, last = done.stdout.strip().splitlines()
    found = re.fullmatch(r"=+ (.*) in [\d.]+s =+", last)
    assert found is not None, done.stdout + done.stderr
    return found.group(1)


def test_a_sound_suite_passes_with_its_own_summary(ci: Ci) -> None:
    done = ci.run(PASSES)
    assert done.returncode == 0
    assert summary(done) == "1 passed"
    assert "FLAKY" not in done.stdout


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_flaky_test_is_reported_and_does_not_fail_the_run(ci: Ci, num_workers: int) -> None:
    done = ci.run(PASSES, flaky_tests(1), num_workers=num_workers)
    assert done.returncode == 0
    assert summary(done) == "2 passed, 1 rerun"
    _, report = done.stdout.split(" FLAKY ")
    assert "AssertionError: for the first time" in report
    assert "captured words" in report
    assert "FLAKY test_suite.py::test_flaky[0]" in report


def test_a_broken_test_fails_the_run(ci: Ci) -> None:
    done = ci.run(PASSES, flaky_tests(1), "def test_broken():\n    assert False")
    assert done.returncode == 1
    assert summary(done) == "1 failed, 2 passed, 1 rerun"
    assert "FAILED test_suite.py::test_broken\n" in done.stdout
    assert "FLAKY test_suite.py::test_flaky[0]\n" in done.stdout


@pytest.mark.parametrize(("count", "status", "words"), [(3, 0, "3 passed, 3 rerun"), (4, 1, "4 failed, 4 rerun")])
def test_three_flaky_tests_are_allowed_and_four_are_not(ci: Ci, count: int, status: int, words: str) -> None:
    done = ci.run(flaky_tests(count))
    assert done.returncode == status
    assert summary(done) == words
    assert done.stdout.count("\nFLAKY test_suite.py::test_flaky[") == count


def test_setup_and_teardown_count(ci: Ci) -> None:
    both = """
    @pytest.fixture
    def around():
        fail_once("setup")
        yield
        fail_once("teardown")

    def test_in_between(around):
        pass
    """
    done = ci.run(both)  # it fails in setup, then in teardown
    assert done.returncode == 1
    assert "FAILED test_suite.py::test_in_between" in done.stdout
    done = ci.run(both.replace('"setup"', '"teardown"'))
    assert done.returncode == 0, "both are over by now"


CRASHES_ONCE = """
    def test_crash():
        if not Path("crashed").exists():
            Path("crashed").touch()
            os._exit(1)
"""
DOES_NOT_IMPORT = """
    raise AssertionError("not collected")
"""


@pytest.mark.parametrize(
    ("source", "num_workers"),
    [(CRASHES_ONCE, 2), (DOES_NOT_IMPORT, 2), (DOES_NOT_IMPORT, 0)],
    ids=["worker", "collection by workers", "collection"],
)
def test_a_crash_and_a_collection_error_are_broken(ci: Ci, source: str, num_workers: int) -> None:
    done = ci.run(source, PASSES, num_workers=num_workers)
    assert done.returncode == 1
    assert "broken, not flaky: test_suite.py" in done.stdout
    assert "run again" not in done.stdout
    assert summary(done).startswith("1 failed")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import signal\ndef test_killed():\n    os.kill(os.getpid(), signal.SIGKILL)",
            "for another reason than a test",
        ),
        ("import atexit\natexit.register(os._exit, 7)\n" + textwrap.dedent(PASSES), "for another reason than a test"),
        ("def test_left():\n    pytest.exit('enough', returncode=9)", "pytest ended with status 9"),
        ("", "pytest ended with status 5"),
    ],
    ids=["killed", "failed after its end", "left", "no tests"],
)
def test_a_run_that_ends_otherwise_is_broken(ci: Ci, source: str, why: str) -> None:
    done = ci.run(source)
    assert done.returncode == 1
    assert why in done.stdout


def test_a_second_run_that_does_not_end_is_no_excuse(ci: Ci) -> None:
    done = ci.run("def test_crash_again():\n    Path('once').exists() and os._exit(1)\n    fail_once('once')")
    assert done.returncode == 1
    assert "the second run did not come to its end" in done.stdout
    assert summary(done) == "1 failed"


def test_a_command_that_runs_no_tests_is_broken(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.flaky", "true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1


def test_on_a_busy_machine_every_failure_counts(ci: Ci) -> None:
    done = ci.run(PASSES, flaky_tests(1), options=("--busy", "1", "--allowed", "0"))
    assert done.returncode == 1
    assert "FLAKY test_suite.py::test_flaky[0]" in done.stdout


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_busy_loops_end_with_what_they_compete_with(ending: str) -> None:
    program = f"import os, signal\nfrom tests import flaky\nwith flaky.busy_loops(2):\n    {ending}"
    # The loops hold the pipe: it ends when the last of them has.
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)


def test_busy_loops_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flaky, "MOST_BUSY_S", 0.0)
    with flaky.busy_loops(1) as loops:
        assert [loop.wait(60) for loop in loops] == [0]
