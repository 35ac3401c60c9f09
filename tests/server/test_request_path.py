"""How much code a request passes: counted by `tools/trace_request.py` on a streamed chat, over a real socket."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parent.parent.parent / "tools" / "trace_request.py"
MOST_FUNCTIONS = 230
"""Distinct functions outside the engine and the backend contract."""
MOST_CALLS_PER_TOKEN = 47
"""Of the package's functions, on the event loop's thread."""


def test_a_streamed_chat_passes_few_functions() -> None:
    command = [sys.executable, str(TOOL), "--json", "--tokens", "64"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert report["distinct_functions"] <= MOST_FUNCTIONS, "\n".join(report["functions"])
    assert report["calls_per_token_on_loop"] <= MOST_CALLS_PER_TOKEN, report["per_token"]
