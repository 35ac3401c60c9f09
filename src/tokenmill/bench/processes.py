"""Servers that are measured: each is a process of its own, which can be put to sleep while another one is looked at."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S, STOP_S = 120.0, 60.0
POLL_S = 0.05
READY = re.compile(r" on http://127\.0\.0\.1:(\d+)")
"""What a server says when it is ready."""


class ServerProcess:
    """A server that runs, and the port it listens on."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, said: str) -> None:
        self.port = port
        self.said = said
        """All that it printed until it was ready."""
        self._process = process

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sleep(self) -> None:
        """It gets no processor time until it is woken."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def server_process(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Start a server and wait until it says where it listens; it is stopped at the end."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:  # a pipe that nobody reads would fill up and stop the server
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # some end when it closes: with us, whatever happens
                stdout=file,
                stderr=file,
                env={**os.environ, **(environment or {})},
            )
        assert process.stdin is not None
        try:
            yield ServerProcess(process, _wait_for_port(process, log), log.read_text(errors="replace"))
        finally:
            process.stdin.close()
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_S
    while (found := READY.search(log.read_text(errors="replace"))) is None:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
        raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
    return int(found.group(1))


@contextmanager
def serving(model: str, arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """`tokenmill serve`, on any port that is free."""
    command = [sys.executable, "-m", "tokenmill", "serve", model, "--port", "0", *arguments]
    with server_process(command) as server:
        yield server
