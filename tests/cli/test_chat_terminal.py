"""What a terminal sends to `tokenmill chat`, through readline on a real pseudo-terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("readline")
pty = pytest.importorskip("pty")

READER = """
from tokenmill.cli.chat import terminal_reader
read = terminal_reader()
while True:
    try:
        print(f"<{read()!r}>")
    except EOFError:
        print("<end>")
        break
"""
WAIT_S = 60.0
UP, ALT_ENTER, CTRL_D, CTRL_R = "\x1b[A", "\x1b\r", "\x04", "\x12"


@dataclass
class Terminal:
    file: int

    def type(self, keys: str) -> str:
        """Send keys when the prompt is there; what is said about them."""
        self._read_until("> ")
        os.write(self.file, keys.encode())
        return self._read_until(">\r\n").rpartition("<")[2].removesuffix(">\r\n")

    def _read_until(self, end: str) -> str:
        found, deadline = b"", time.monotonic() + WAIT_S
        while not found.endswith(end.encode()):
            assert time.monotonic() < deadline, found
            found += os.read(self.file, 1)
        return found.decode()


@contextmanager
def chat_in_a_terminal(home: Path) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    settings = {**os.environ, "TOKENMILL_HOME": str(home), "TERM": "dumb"}
    command = [sys.executable, "-c", READER]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings, start_new_session=True
    ) as child:
        os.close(theirs)
        try:
            yield Terminal(ours)
            assert child.wait(WAIT_S) == 0
        finally:
            child.kill()
            os.close(ours)


def test_lines_are_edited_joined_and_found_again(tmp_path: Path) -> None:
    with chat_in_a_terminal(tmp_path) as terminal:
        assert terminal.type("helo\x1b[Dl\r") == "'hello'"
        assert terminal.type(f"two{ALT_ENTER}lines ü\r") == r"'two\nlines ü'"
        assert terminal.type(f"{UP}{UP}\r") == "'hello'"
        assert terminal.type(CTRL_D) == "end"
    with chat_in_a_terminal(tmp_path) as terminal:  # another day
        assert terminal.type(f"{UP}{UP}\r") == r"'two\nlines ü'"
        assert terminal.type(f"{CTRL_R}hel\r") == "'hello'"
        assert terminal.type(CTRL_D) == "end"
    assert (tmp_path / "chat_history.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_damaged_history_is_no_reason_not_to_talk(tmp_path: Path) -> None:
    (tmp_path / "chat_history.jsonl").write_text("{")
    with chat_in_a_terminal(tmp_path) as terminal:
        assert terminal.type("hello\r") == "'hello'"
        assert terminal.type(CTRL_D) == "end"
