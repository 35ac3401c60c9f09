"""How much code a request passes: counted by `tools/trace_request.py` on a streamed chat, over a real socket."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MOST_FUNCTIONS = 130
"""Distinct functions outside the engine and the backend contract."""
MOST_FUNCTIONS_OF_A_TURN = 206
"""The same for a turn of a session."""
MOST_CALLS_PER_TOKEN = 17
"""Of the package's functions, on the event loop's thread."""
MOST_TO_KNOW = 45
"""Functions in the trace by hand."""


def trace(*options: str) -> Any:
    command = [sys.executable, str(ROOT / "tools" / "trace_request.py"), "--json", *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


@pytest.fixture(scope="module")
def report() -> Any:
    return trace("--tokens", "64")


def documented(title: str) -> list[str]:
    """The functions of a section's table."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition(title)[2].partition("\n##")[0]
    return re.findall(r"^\| [^|]*\| `([\w.]+)` \|", section, flags=re.MULTILINE)


def test_a_streamed_chat_passes_few_functions(report: Any) -> None:
    assert report["distinct_functions"] <= MOST_FUNCTIONS, "\n".join(report["functions"])
    assert report["calls_per_token_on_loop"] <= MOST_CALLS_PER_TOKEN, report["per_token"]


def test_the_trace_in_the_docs_names_what_runs(report: Any) -> None:
    named = documented("## A streamed chat, from socket to socket")
    assert 0 < len(named) <= MOST_TO_KNOW
    assert [name for name in named if name not in report["called"]] == []


def test_the_trace_of_a_turn_names_what_runs() -> None:
    named, report = documented("### A turn of a session"), trace("--session", "--tokens", "16")
    assert named
    assert [name for name in named if name not in report["called"]] == []
    assert report["distinct_functions"] <= MOST_FUNCTIONS_OF_A_TURN, "\n".join(report["functions"])
