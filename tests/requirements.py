"""`make requirements`: the tests of each requirement, and the open requirements. Fails if a delivered one has no test.

A requirement is a row `| R7 | ... |` of docs/requirements.md; a test proves it with `@pytest.mark.req("R7")`;
tests/delivered.txt lists the delivered ids. The text of every other row begins with `**open**`.

Checks of the server have ids too: rows `| N05 | ... |` of the pages in CHECK_PAGES. A test performs one if it is named
`test_n05_...` or marked `@pytest.mark.fault("N05")`; the rows' last column is written by `make docs`.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPEN = "**open**"
CHECK_PAGES = ("operations.md", "serving-checks.md")
CHECK_ROW = re.compile(r"^(\| ([CEFILMNOPST]\d\d) \| .* \|)([^|\n]*)\|$", re.MULTILINE)
_CITED_BY_NAME = re.compile(r"^(?:async )?def test_([a-z]\d\d)_", re.MULTILINE)
_CITED_BY_MARK = re.compile(r"^@pytest\.mark\.fault\(([^)]*)\)", re.MULTILINE)


class Collector:
    """A pytest plugin that notes every collected test's requirements."""

    def __init__(self) -> None:
        self.tests: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for requirement in sorted({name for mark in item.iter_markers("req") for name in mark.args}):
                self.tests[requirement].append(item.nodeid)


def collect() -> dict[str, list[str]]:
    collector = Collector()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = pytest.main(["--collect-only", "-q", str(ROOT / "tests")], plugins=[collector])
    if status != pytest.ExitCode.OK:
        sys.exit(f"tests could not be collected:\n{printed.getvalue()}")
    return dict(collector.tests)


def known() -> dict[str, str]:
    """Id -> text, from the tables of docs/requirements.md."""
    text = (ROOT / "docs" / "requirements.md").read_text()
    return dict(re.findall(r"^\| ([RGB]\d+) \| (.*?) \|$", text, flags=re.MULTILINE))


def delivered() -> list[str]:
    lines = (ROOT / "tests" / "delivered.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def check_rows() -> list[str]:
    """Ids of the checks in the tables of the docs."""
    return [row[1] for page in CHECK_PAGES for row in CHECK_ROW.findall((ROOT / "docs" / page).read_text())]


def checks() -> dict[str, list[str]]:
    """Id of a check -> the files of the tests that perform it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        ids = {name.upper() for name in _CITED_BY_NAME.findall(text)}
        ids |= {name for marks in _CITED_BY_MARK.findall(text) for name in re.findall(r'"(\w+)"', marks)}
        for name in ids:
            found[name].append(str(path.relative_to(ROOT)))
    return dict(found)


def problems(known: dict[str, str], delivered: list[str], tests: dict[str, list[str]]) -> list[str]:
    return [
        *(
            f"{name} is marked in {tests[name][0]}, but is no requirement"
            for name in sorted(tests)
            if name not in known
        ),
        *(f"{name} is in delivered.txt, but is no requirement" for name in delivered if name not in known),
        *(f"{name} is delivered, but no test proves it" for name in delivered if not tests.get(name)),
        *(
            f"{name} is {'delivered' if name in delivered else 'open'}, but its row says otherwise"
            for name, text in known.items()
            if text.startswith(OPEN) == (name in delivered)
        ),
    ]


def main() -> int:
    requirements, promised, tests = known(), delivered(), collect()
    for name, text in requirements.items():
        state = "delivered" if name in promised else "OPEN"
        proofs = tests.get(name, [])
        print(f"{name:4} {state:9} {len(proofs):3} tests  {text}")
        for node in sorted({re.sub(r"\[.*", "", proof) for proof in proofs}):
            print(f"       {node}")
    found = problems(requirements, promised, tests)
    missing = [name for name in requirements if name not in promised]
    print(f"\n{len(promised)} of {len(requirements)} requirements delivered, {len(found)} problems")
    print(f"open: {', '.join(missing) or 'none'}")
    for problem in found:
        print(f"  {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
