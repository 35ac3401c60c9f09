"""Running the tests that cover a mutant, on a copy of the source that has it.

Tests run in one process, the fastest first, until one fails. A test that takes far longer than when it was measured
hangs, which counts as caught: many mutants are endless loops. A mutant whose time is over before a test has failed or
hung has survived.

This module is also the pytest plugin of those runs (`-p tests.mutants.running --plan=FILE`).
"""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import py_compile
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.covering import ROOT, CoverageMap, file_of
from tests.mutants.sites import Mutant

MUTANT_S = 60.0
"""Wall-clock limit of a mutant."""
COLLECT_S = 45.0
"""For importing and collecting; the code of an import may loop as well."""
HANG_S, HANG_FACTOR = 15.0, 8.0
"""A test hangs if it runs longer than both, in seconds and times its measured duration."""
MOST_BYTES = 8 << 30
"""Memory of a process: a mutant may append forever."""
POLL_S = 0.2
MOST_OUTPUT = 1000


@dataclass(frozen=True)
class Result:
    status: str
    """caught, timeout, survived, uncovered or equivalent."""
    by: str = ""
    """The test that caught it, or the reason it is equivalent."""
    num_covering: int = 0
    """Tests that cover it."""
    num_started: int = 0
    """Those of them that were run: until one failed, or the time was over."""
    seconds: float = 0.0
    output: str = ""
    """How pytest's output ended."""

    @property
    def is_caught(self) -> bool:
        return self.status in ("caught", "timeout")


@dataclass(frozen=True)
class Plan:
    """Tests in the order they are run, with the seconds after which each of them hangs."""

    limits: dict[str, float]


def plan_for(mutant: Mutant, covered: CoverageMap) -> Plan:
    """Tests that cover the mutant: those of its own part of the package first, each group by speed."""
    names = covered.of_line(mutant.path, mutant.line) or covered.of_line(mutant.path, mutant.statement)
    part = Path(mutant.path).parts[2]
    seconds = {name: covered.tests[name].seconds for name in names}
    names.sort(key=lambda name: (not name.startswith(f"tests/{part}/"), _band(seconds[name]), name))
    return Plan({name: max(HANG_S, HANG_FACTOR * seconds[name]) for name in names})


def _band(seconds: float) -> int:
    """Tests of about the same speed stay together by file, so that fixtures of a module are made once."""
    return next(i for i, limit in enumerate((0.05, 0.2, 1.0, 5.0, float("inf"))) if seconds <= limit)


class Workshop:
    """A copy of the source, for one mutant at a time."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self._folder = folder
        self._root = root
        self._source = folder / "src"
        shutil.copytree(root / "src", self._source, ignore=shutil.ignore_patterns("__pycache__"))
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(self._source, quiet=1, invalidation_mode=mode)

    def run(self, mutant: Mutant | None, plan: Plan, most_s: float = MUTANT_S) -> Result:
        """Without a mutant: the same tests on the source as it is."""
        if mutant is None:
            return self._test(plan, most_s)
        path = self._folder / mutant.path
        original = path.read_bytes()
        compiled = Path(importlib.util.cache_from_source(str(path)))
        kept = compiled.read_bytes()
        try:
            path.write_bytes(mutant.applied(original))
            compiled.unlink()
            return self._test(plan, most_s)
        finally:
            path.write_bytes(original)
            compiled.write_bytes(kept)

    def _test(self, plan: Plan, most_s: float) -> Result:
        if not plan.limits:
            return Result("uncovered")
        scratch = self._folder / "t"
        scratch.mkdir()
        (scratch / "plan").write_text(json.dumps(list(plan.limits)))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self._source), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "h"),
            "TMPDIR": str(scratch),
        }
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.running", f"--plan={scratch / 'plan'}"]
        command = [sys.executable, "-m", "pytest", *options, *dict.fromkeys(map(file_of, plan.limits))]
        began = time.monotonic()
        with (scratch / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self._root,
                env=env,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                status, by = _watch(process, scratch, plan, began + most_s)
            finally:
                _kill_group(process)
        num_started = len(_started(scratch))
        said = (scratch / "output").read_text(errors="replace")[-MOST_OUTPUT:]
        shutil.rmtree(scratch, ignore_errors=True)
        return Result(status, by, len(plan.limits), num_started, time.monotonic() - began, said)


def _watch(process: subprocess.Popen[bytes], scratch: Path, plan: Plan, ends: float) -> tuple[str, str]:
    """How it ends, and the test it ends with."""
    while True:
        try:
            code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            name, seconds = _current(scratch)
            if seconds > plan.limits.get(name, COLLECT_S):
                return "timeout", name
            if time.monotonic() > ends:
                return "survived", ""
        else:
            break
    if code == pytest.ExitCode.OK:
        return "survived", ""
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with status {code}:\n{(scratch / 'output').read_text(errors='replace')}")
    return "caught", _current(scratch)[0]


def _current(scratch: Path) -> tuple[str, float]:
    """The test that was started last, and for how long it has been running."""
    started, since = _started(scratch), scratch / ("plan.log" if (scratch / "plan.log").exists() else "plan")
    return started[-1] if started else "collection", time.time() - since.stat().st_mtime


def _started(scratch: Path) -> list[str]:
    log = scratch / "plan.log"
    return log.read_text().splitlines() if log.exists() else []


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The tests' own children, too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- the plugin -------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plan", metavar="FILE", help="run the tests that this JSON file lists, in its order")


def pytest_configure(config: pytest.Config) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    config.pluginmanager.register(_Running(Path(config.getoption("--plan"))))


class _Running:
    def __init__(self, path: Path) -> None:
        self._tests: list[str] = json.loads(path.read_text())
        self._log = path.with_suffix(".log")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self._tests]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self._log.open("a") as log:
            log.write(nodeid + "\n")
