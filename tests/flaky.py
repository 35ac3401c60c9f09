"""`python -m tests.flaky COMMAND`: run the suite, then tell flaky tests from broken ones.

COMMAND is the test command (`make test`). Tests that failed are run once more, one after another, on the machine that
is quiet by then. A test that passes now is flaky: it is reported with its first failure, and up to `--allowed` of them
do not fail the run. A test that fails again fails it, and so does what a second run cannot excuse: a crashed worker, an
error in collection, an interrupted run. The last line printed is a pytest summary of both runs together.

With `--busy N`, N busy loops compete with the first run (`make flaky`).

This module is also the pytest plugin (`-p tests.flaky --outcomes=FILE`) that notes what happened in a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

ALLOWED = 3
MOST_RERUN = 50
"""Failures beyond this are not run again: no suite is that flaky."""
MOST_BUSY_S = 2 * 3600.0
WIDTH = 100


@dataclass
class Outcomes:
    """What happened in one run."""

    exit_status: int = 0
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    xfailed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Test -> output of its failure, in setup and teardown as well."""
    broken: dict[str, str] = field(default_factory=dict)
    """What no rerun can excuse: crashed workers and errors in collection."""


# -- the plugin -------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", metavar="FILE", default=None, help="write what happened to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        own = _plugin_options(path)
        os.environ["PYTEST_ADDOPTS"] = os.environ.get("PYTEST_ADDOPTS", "").removesuffix(own)  # tests may run pytest
        config.pluginmanager.register(Recorder(Path(path)))


def _plugin_options(path: str) -> str:
    return f" -p tests.flaky --outcomes={shlex.quote(path)}"


class Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes = Outcomes()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, noted = report.nodeid, self._outcomes
        if report.failed and report.when not in ("setup", "call", "teardown"):  # pytest-xdist: its worker has crashed
            noted.broken[name] = _text(report)
        elif report.failed:
            noted.failed[name] = "\n".join(filter(None, [noted.failed.get(name), _text(report)]))
        elif report.skipped:
            (noted.xfailed if hasattr(report, "wasxfail") else noted.skipped).append(name)
        elif report.when == "call":
            noted.passed.append(name)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcomes.broken[report.nodeid] = _text(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._outcomes.exit_status = int(exitstatus)
        self._path.write_text(json.dumps(asdict(self._outcomes)))


def _text(report: pytest.TestReport | pytest.CollectReport) -> str:
    captured = [f"{name:-^{WIDTH}}\n{text}" for name, text in report.sections]
    return "\n".join([f"({report.when})", report.longreprtext, *captured])


# -- two runs ---------------------------------------------------------------------------------------------------------


def first_run(command: list[str], num_busy: int) -> tuple[int, Outcomes | None]:
    """The whole suite by its own command: the exit status, and what happened; None if no pytest run came to its end."""
    with tempfile.TemporaryDirectory() as folder, busy_loops(num_busy):
        path = str(Path(folder) / "outcomes.json")
        options = os.environ.get("PYTEST_ADDOPTS", "") + _plugin_options(path)
        status = subprocess.run(command, env={**os.environ, "PYTEST_ADDOPTS": options}, check=False).returncode
        return status, _read(path)


def second_run(tests: list[str]) -> Outcomes | None:
    """These tests alone, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "outcomes.json")
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "tests.flaky", "--outcomes", path, *tests]
        subprocess.run(command, check=False)
        return _read(path)


def _read(path: str) -> Outcomes | None:
    return Outcomes(**json.loads(Path(path).read_text())) if Path(path).exists() else None


BUSY_LOOP = """
import os, sys, time
parent, ends = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < ends:
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Load beside what runs. The loops end with this process, too, however it ends."""
    command = [sys.executable, "-c", BUSY_LOOP, str(os.getpid()), str(MOST_BUSY_S)]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


# -- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    flaky: list[str]
    """Failed, then passed alone."""
    failed: list[str]
    """Failed twice, or could not be run again."""
    why: str
    """Why the run fails; empty if it does not."""


def judge(first: Outcomes, second: Outcomes | None, allowed: int) -> Verdict:
    if second is None:
        return Verdict(
            [], [*first.broken, *first.failed], beyond_rerun(first) or "the second run did not come to its end"
        )
    flaky = [name for name in first.failed if name in second.passed and name not in second.failed]
    failed = [name for name in first.failed if name not in flaky]
    if failed:
        return Verdict(flaky, failed, f"{len(failed)} failed again")
    if len(flaky) > allowed:
        return Verdict(flaky, failed, f"{len(flaky)} flaky tests, {allowed} allowed")
    return Verdict(flaky, failed, "")


def beyond_rerun(first: Outcomes) -> str:
    """Why a second run would say nothing about the failures of the first; empty if it would."""
    if first.broken:
        return f"broken, not flaky: {', '.join(first.broken)}"
    if first.exit_status != pytest.ExitCode.TESTS_FAILED:
        return f"pytest ended with status {first.exit_status}"
    if not first.failed:
        return "pytest failed without a failed test"
    if len(first.failed) > MOST_RERUN:
        return f"{len(first.failed)} tests failed, too many to run again ({MOST_RERUN})"
    return ""


def show(first: Outcomes, verdict: Verdict, seconds: float) -> None:
    if verdict.flaky:
        print(f"\n{' FLAKY ':=^{WIDTH}}")
        print(f"{len(verdict.flaky)} tests failed, and passed when they were run again. Their first failures:")
        for name in verdict.flaky:
            print(f"{f' {name} ':_^{WIDTH}}\n{first.failed[name]}")
    print(f"\n{' short test summary info ':=^{WIDTH}}")
    for name in verdict.flaky:
        print(f"FLAKY {name}")
    for name in verdict.failed:
        print(f"FAILED {name}")
    if verdict.why:
        print(f"the run fails: {verdict.why}")
    is_over = bool(verdict.why) and not verdict.failed  # then the flaky ones are what fails
    num_failed = len(verdict.failed) + (len(verdict.flaky) if is_over else 0)
    passed = set(first.passed) - set(first.failed) | (set() if is_over else set(verdict.flaky))
    counts = {
        "failed": num_failed,
        "passed": len(passed),
        "skipped": len(first.skipped),
        "xfailed": len(first.xfailed),
        "rerun": len(verdict.flaky),
    }
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    print(f"{f' {words} in {seconds:.2f}s ':=^{WIDTH}}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops beside the first run (default: 0)")
    parser.add_argument(
        "--allowed",
        type=int,
        default=ALLOWED,
        metavar="N",
        help=f"flaky tests that do not fail it (default: {ALLOWED})",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="test command, such as `make test`")
    options = parser.parse_args()
    began = time.monotonic()
    status, first = first_run(options.command, options.busy)
    if first is None or (status != 0 and first.exit_status == pytest.ExitCode.OK):
        print(
            f"the run fails: `{shlex.join(options.command)}` ended with status {status} for another reason than a test"
        )
        return 1
    if first.exit_status == pytest.ExitCode.OK:
        return 0
    second = None
    if not beyond_rerun(first):
        print(f"\n{f' {len(first.failed)} failed: run again, alone ':=^{WIDTH}}", flush=True)
        second = second_run(list(first.failed))
    verdict = judge(first, second, options.allowed)
    show(first, verdict, time.monotonic() - began)
    return 1 if verdict.why else 0


if __name__ == "__main__":
    sys.exit(main())
