"""Servers as processes: they say where they are, sleep while others are measured, and end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenmill.bench.load_clients import ServerProcess, server_process

SCRIPT = "import sys; print('ready on http://127.0.0.1:4321/v1', flush=True); sys.stdin.read()"


def state(server: ServerProcess) -> str:
    """As the kernel has it: T is stopped."""
    status = Path(f"/proc/{server._process.pid}/status").read_text()
    return status.partition("State:")[2].split()[0]


def test_it_sleeps_wakes_and_ends() -> None:
    with server_process([sys.executable, "-c", SCRIPT]) as server:
        assert server.base_url == "http://127.0.0.1:4321"
        assert "ready" in server.said
        server.sleep()
        while state(server) != "T":
            pass
        server.wake()
        while state(server) == "T":
            pass
        server.sleep()
    assert server._process.returncode is not None  # although it slept


def test_one_that_does_not_start_says_why() -> None:
    command = ["sh", "-c", "echo no such model; exit 3"]
    with pytest.raises(RuntimeError, match="did not start: no such model"), server_process(command):
        pass
