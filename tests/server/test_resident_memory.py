"""What an idle server takes of a machine's memory: the default model, as `tokenmill serve` opens it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.server.serving import HI, child, request
from tokenmill.backends.cpu.bindings import library

MB = 1_000_000
MOST_IDLE, MOST_GROWTH = 220 * MB, 24 * MB
"""Anonymous memory, which depends on nothing but the server: 193 MB idle (97 of them weights), and 11 more after an
answer. File pages, which a busy system drops, come to 32 MB."""


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("Anonymous:"))
    return int(found.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_server_stays_small_and_its_first_answer_adds_little(tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("the CPU kernels are not built")
    with child(tmp_path / "log", "smollm2-135m", "--backend", "cpu") as served:
        idle = anonymous_bytes(served.process.pid)
        assert idle < MOST_IDLE
        body = {"messages": HI, "max_tokens": 8}
        assert request(served.port, "POST", "/v1/chat/completions", body, key=None).status == 200
        assert anonymous_bytes(served.process.pid) < idle + MOST_GROWTH
