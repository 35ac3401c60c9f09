"""Which tests run which lines: measured once by running them, and kept until the code or the tests change.

This module is also the pytest plugin that measures (`-p tests.mutants.covering`). Threads are traced, and so are child
processes: they start coverage by `sitecustomize` and name their lines after the test that started them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parent.parent.parent
PARTS = ("contract", "kv", "engine", "pipeline", "entrypoints", "session", "sampling", "text")
"""Parts of the package that are mutated."""
TESTS = ("contract", "kv", "engine", "session", "sampling", "text", "conformance")
"""Tests that run: `pipeline` and `entrypoints` are tested with the engine and with sessions."""
CACHE = ROOT / ".mutants" / "coverage.json"
MOST_MEASURE_S = 3600.0


@dataclass(frozen=True)
class CoveredTest:
    seconds: float
    lines: dict[str, int]
    """Path -> set of its lines that the test runs, as bits."""

    def covers(self, path: str, line: int) -> bool:
        return bool(self.lines.get(path, 0) >> line & 1)


@dataclass
class CoverageMap:
    """All that was measured."""

    code: str = ""
    """Hash of the package and of what the tests share."""
    files: dict[str, str] = field(default_factory=dict)
    """Test file -> its hash."""
    tests: dict[str, CoveredTest] = field(default_factory=dict)

    def of_line(self, path: str, line: int) -> list[str]:
        return [name for name, test in self.tests.items() if test.covers(path, line)]


def measured() -> CoverageMap:
    """The map of this state of the code: what is kept, with the files measured anew that have changed."""
    code, files = _hashes()
    kept = _load()
    if kept.code != code:
        kept = CoverageMap(code)
    changed = [name for name, digest in files.items() if kept.files.get(name) != digest]
    fresh = {} if not changed else measure(ROOT, [f"src/tokenmill/{part}/*" for part in PARTS], changed)
    still = {name: test for name, test in kept.tests.items() if file_of(name) in set(files) - set(changed)}
    found = CoverageMap(code, files, {**still, **fresh})
    CACHE.parent.mkdir(exist_ok=True)
    CACHE.write_text(json.dumps({"code": code, "files": files, "tests": {
        name: [test.seconds, {path: f"{lines:x}" for path, lines in test.lines.items()}]
        for name, test in found.tests.items()
    }}))  # fmt: skip
    return found


def _load() -> CoverageMap:
    if not CACHE.exists():
        return CoverageMap()
    kept = json.loads(CACHE.read_text())
    tests = {
        name: CoveredTest(seconds, {path: int(lines, 16) for path, lines in masks.items()})
        for name, (seconds, masks) in kept["tests"].items()
    }
    return CoverageMap(kept["code"], kept["files"], tests)


def _hashes() -> tuple[str, dict[str, str]]:
    """One hash of everything that all tests depend on, and one of each test file."""
    files = {str(path.relative_to(ROOT)): path for part in TESTS for path in (ROOT / "tests" / part).rglob("test_*.py")}
    shared = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    code = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *shared]):
        if path.parent != Path(__file__).parent:
            code.update(str(path).encode() + b"\0" + path.read_bytes())
    return code.hexdigest(), {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())
    }


def file_of(test: str) -> str:
    return test.partition("::")[0]


# -- measuring --------------------------------------------------------------------------------------------------------

CONFIG = """
[run]
parallel = true
sigterm = true
data_file = {folder}/lines
context = ${{PYTEST_CURRENT_TEST-}}
include = {include}
disable_warnings = no-data-collected, couldnt-parse, module-not-measured, module-not-imported
"""


def measure(root: Path, include: list[str], files: list[str]) -> dict[str, CoveredTest]:
    """Run these test files once with the modules of these patterns traced. Tests that fail are left out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        patterns = ",".join(f"{root}/{pattern}" for pattern in include)
        (folder / "config").write_text(CONFIG.format(folder=folder, include=patterns))
        (folder / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        env = {
            **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            "PYTHONPATH": os.pathsep.join([name, str(root / "src"), str(ROOT)]),
            "COVERAGE_PROCESS_START": str(folder / "config"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutants.covering", f"--passed={folder / 'passed.json'}"]
        print(f"measuring which lines are run by {len(files)} test files", flush=True)
        command = [sys.executable, "-m", "pytest", *options, *files]
        subprocess.run(command, cwd=root, env=env, check=False, timeout=MOST_MEASURE_S)
        seconds: dict[str, float] = json.loads((folder / "passed.json").read_text())
        lines = _lines(root, folder.glob("lines.*"))
    return {test: CoveredTest(seconds[test], lines[test]) for test in seconds}


def _lines(root: Path, files: Iterable[Path]) -> defaultdict[str, dict[str, int]]:
    """Test -> path -> lines, of all processes."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for file in files:
        data = coverage.CoverageData(str(file))
        data.read()
        for measured_path in data.measured_files():
            path = str(Path(measured_path).relative_to(root))
            for line, contexts in data.contexts_by_lineno(measured_path).items():
                for context in contexts:
                    test = re.sub(r" \((setup|call|teardown)\)$", "", context)  # that of a child process
                    found[test][path] = found[test].get(path, 0) | 1 << line
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", metavar="FILE", default=None, help="write the tests that pass, with their durations")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Measuring(Path(config.getoption("--passed"))))


class _Measuring:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        tracer = coverage.Coverage.current()
        assert tracer is not None
        self._tracer = tracer

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Not those that plant bugs: with their target mutated they can't plant, which proves nothing."""
        items[:] = [item for item in items if not isinstance(item, pytest.Function) or not _plants(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._tracer.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {name: seconds for name, seconds in self._seconds.items() if name not in self._failed}
        self._path.write_text(json.dumps(passed))


def _plants(item: pytest.Function) -> bool:
    return "plant" in inspect.unwrap(item.function).__code__.co_names
