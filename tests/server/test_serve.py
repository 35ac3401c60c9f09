"""`tokenmill serve` as a process: it says where it is, drains, and ends with 0; what can't start says why."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.server.serving import HI, TOKENMILL, WAIT_S, child, request


def test_it_starts_answers_and_stops(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake") as served:
        assert request(served.port, "GET", "/health", key=None).status == 200
        body = {"model": "fake", "messages": HI, "max_tokens": 5}
        assert request(served.port, "POST", "/v1/chat/completions", body, key=None).status == 200
        assert served.stop() == 0
        assert " POST /v1/chat/completions 200 " in served.said()
        assert "Traceback" not in served.said()


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake") as served:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_it_does_not_listen_wider_without_a_key(host: str) -> None:
    done = subprocess.run([TOKENMILL, "serve", "fake", "--host", host], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "requires --api-key or --keys-file (or --insecure)" in done.stderr


def test_l01_what_cannot_start_says_why_in_one_line_and_exits_with_3(tmp_path: Path) -> None:
    empty = tmp_path / "model"
    empty.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, reason in (
            (["fake", "--port", port], rf"cannot bind to 127\.0\.0\.1:{port}: Address already in use"),
            ([str(tmp_path / "none"), "--port", "0"], r".*none.*"),
            ([str(empty), "--port", "0"], r".*config\.json.*"),
        ):
            done = subprocess.run([TOKENMILL, "serve", *arguments], capture_output=True, text=True, timeout=60)
            assert done.returncode == 3, done.stderr
            lines = [line for line in done.stderr.splitlines() if "; http://" not in line]
            assert len(lines) == 1, done.stderr
            assert re.fullmatch(f"tokenmill: {reason}", lines[0]), done.stderr
