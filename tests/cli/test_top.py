"""`tokenmill top`: what it draws, and how it behaves in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import KEY, WAIT_S, Running, child, running
from tests.server.telling import make_config, make_llm
from tests.server.wire import Wire, chat_request, held
from tokenmill.cli.follow import Address, LiveState, frame
from tokenmill.cli.top import ENTER, LEAVE
from tokenmill.errors import ConfigError, EngineDead

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def slot(number: int, state: str, request: str, tokens: int, computed: int, session: str | None = None) -> Any:
    return {
        "slot": number,
        "state": state,
        "request": request,
        "session": session,
        "tokens": tokens,
        "computed": computed,
    }


SNAPSHOT: dict[str, Any] = {
    "model": "smollm2-135m",
    "core": 0,
    "at": 100.0,
    "tick": 1234,
    "slots": [
        slot(0, "generating", "chatcmpl-1/0~async-1/0", 120, 119, "sess-a"),
        slot(1, "prefilling", "9f8e7d6c", 1024, 512),
        {"slot": 2, "state": "idle"},
    ],
    "waiting": [{"request": "cmpl-2/0~async-2/0", "session": None, "tokens": 700, "preempted": True}],
    "parked": [
        {"seq": 4, "session": "sess-b", "tokens": 400},
        {"seq": 5, "session": "sess-c", "tokens": 350},
        {"seq": 6, "session": None, "tokens": 300},
        {"seq": 7, "session": None, "tokens": 300},
    ],
    "parked_tokens": {"all": 450, "plain": 40},
    "cells": {"all": 4096, "free": 2048, "used": 2048},
}
TICKS = [(2, 0), (1, 64), (0, 128)]
"""Decode and prefill tokens."""


@pytest.fixture
def state() -> LiveState:
    made = LiveState("http://127.0.0.1:8000")
    made.take("snapshot", SNAPSHOT)
    for number, (decode, prefill) in enumerate(TICKS):
        tokens = [1] * decode + ([prefill] if prefill else [])
        tick = {"tick": 1235 + number, "slots": list(range(len(tokens))), "tokens": tokens, "decode": decode,
                "drawn": list(range(decode)), "free": 2000, "at": 100.0 + number / 10}  # fmt: skip
        made.take("tick", {"model": "smollm2-135m", "core": 0, **tick})
    return made


# -- drawing ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("B6")
def test_a_frame_has_slots_steps_queue_kv_and_rates(state: LiveState) -> None:
    text = "\n".join(frame(state, 100, 60, colour=False))
    assert "smollm2-135m core 0  tick 1,237  running 2/3  waiting 1" in text
    assert re.search(r"tok/s +[\d,]+ prefill tok/s +[\d.,]+ ticks/s +hit rate -", text)
    assert re.search(r"0 +generating +122 +249 +sess-a +chatcmpl-1/0~async-1/0", text)
    assert re.search(r"1 +prefilling +1,025 +577 +- +9f8e7d6c", text)
    assert "1 idle" in text
    assert "ticks dmp" in text
    assert "2,096 of 4,096 cells, 450 tokens parked" in text
    assert re.search(r"700 tokens +cmpl-2/0~async-2/0 +preempted", text)
    assert re.search(r"400 tokens +sess-b\n +350 tokens +sess-c\n +40 tokens +\(no session\)", text)


@pytest.mark.req("B4")
def test_what_was_evicted_is_shown_with_for_whom(state: LiveState) -> None:
    at = state.now - 2
    lost = {"model": "smollm2-135m", "core": 0, "at": at, "change": "evicted", "seq": 4, "session": "sess-b"}
    left = {"parked_tokens": {"all": 400, "plain": 40}}
    state.take("parked", {**lost, **left, "tokens": 400, "for": "chatcmpl-9/0~async-9/0"})
    state.take("parked", {**lost, **left, "seq": 6, "session": None, "tokens": 300, "for": None})
    text = "\n".join(frame(state, 100, 40, colour=False))
    assert "400 tokens parked" in text
    assert "evicted KV of sessions\n         400 tokens  sess-b for chatcmpl-9/0~async-9/0, 2 s ago" in text
    assert text.count("s ago") == 1, "nobody comes back for what is no session's"


@pytest.mark.parametrize("width", [20, 40, 71, 80, 200])
@pytest.mark.parametrize("height", [5, 12, 60])
def test_a_frame_fits_into_its_terminal(state: LiveState, width: int, height: int) -> None:
    for colour in (False, True):
        lines = frame(state, width, height, colour=colour)
        assert len(lines) <= height
        assert all(len(ANSI.sub("", line)) <= width for line in lines)
        assert all(line.count("\x1b[") % 2 == 0 for line in lines), "a colour that begins must end"
        assert ("\x1b" in "".join(lines)) == colour


def test_many_slots_are_cut_to_what_fits(state: LiveState) -> None:
    slots = [slot(number, "generating", f"request {number}", 10, 9) for number in range(64)]
    state.take("snapshot", {**SNAPSHOT, "slots": slots})
    lines = frame(state, 100, 40, colour=False)
    assert len(lines) <= 40
    assert any(re.search(r"\d+ more", line) for line in lines)
    assert "parked KV by session" in "\n".join(lines)


def test_names_can_not_command_a_terminal(state: LiveState) -> None:
    state.take("snapshot", {**SNAPSHOT, "slots": [slot(0, "generating", "\x1b[2Jname\r\n\x07", 1, 0, "\x9b31m")]})
    text = "".join(frame(state, 100, 60, colour=False))
    assert "?[2Jname???" in text
    assert text.isprintable()


def test_models_that_go_and_connections_that_break(state: LiveState) -> None:
    state.take("gone", {"model": "smollm2-135m", "core": 0, "at": 0.0})
    assert "no model is served yet" in "".join(frame(state, 80, 24, colour=False))
    state.take("end", {"reason": "the server is shutting down"})
    assert "the server is shutting down" in "".join(frame(state, 80, 24, colour=False))
    state.lose("no server at http://127.0.0.1:8000: refused; trying again")
    lines = frame(state, 80, 24, colour=False)
    assert len(lines) == 2
    assert lines[1] == "no server at http://127.0.0.1:8000: refused; trying again"


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a server URL"):
        Address(url, None)


def test_an_address_may_be_that_of_the_api() -> None:
    assert Address("127.0.0.1:8000", None).url == "http://127.0.0.1:8000"
    assert Address("http://host/there/v1/", None).url == "http://host/there"


def test_a_server_that_is_not_there_is_said_to_be_so() -> None:
    with pytest.raises(EngineDead, match=r"no server at http://127\.0\.0\.1:9"):
        Address("http://127.0.0.1:9", None).get("/v1/scheduler")


# -- with a server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make_llm(), make_config()) as one:
        yield one


def call(server: Running, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [TOKENMILL, "top", "--url", f"http://127.0.0.1:{server.port}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.req("B6", "R50")
def test_once_prints_one_frame(server: Running) -> None:
    with held(server, after=1) as hold, Wire(server.port) as client:
        client.send(chat_request("hi", max_tokens=20))
        hold.wait()
        done = call(server, "--api-key", KEY, "--once")
        hold.release()
        assert client.read_reply() is not None
    assert (done.returncode, done.stderr) == (0, "")
    assert "fake core 0" in done.stdout
    assert "running 1/2" in done.stdout
    assert re.search(r"(prefilling|generating) .*chatcmpl-", done.stdout)
    assert "\x1b" not in done.stdout


def test_a_wrong_key_and_a_server_that_is_gone_are_told(server: Running) -> None:
    for more in ((), ("--cluster",)):
        refused = call(server, "--api-key", "wrong", "--once", *more)
        assert refused.returncode == 2
        assert "requires an API key" in refused.stderr
    gone = subprocess.run([TOKENMILL, "top", "--url", "http://127.0.0.1:9", "--once"], capture_output=True, text=True)
    assert gone.returncode == 3
    assert "no server at http://127.0.0.1:9" in gone.stderr


class Terminal:
    """`tokenmill top` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, self._slave = pty.openpty()
        self.before = termios.tcgetattr(self._slave)
        command = [TOKENMILL, "top", "--interval", "0.1", *arguments]
        environment = {**os.environ, "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            command, stdin=self._slave, stdout=self._slave, stderr=self._slave, env=environment
        )
        self.said = ""

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while text not in self.said:
            ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0.0))
            assert ready, f"it never said {text!r}: {self.said[-2000:]!r}"
            self.said += os.read(self.master, 1 << 16).decode(errors="replace")

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def end(self) -> int:
        """Its exit code, and the terminal is as it was."""
        code = self.process.wait(WAIT_S)
        self.wait_for(LEAVE)
        assert termios.tcgetattr(self._slave) == self.before
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)


@pytest.mark.req("B6")
@pytest.mark.parametrize("how", ["q", "Ctrl-C"])
def test_it_lives_in_a_terminal_and_leaves_it_as_it_was(server: Running, how: str) -> None:
    with Terminal("--url", f"http://127.0.0.1:{server.port}", "--api-key", KEY) as terminal:
        terminal.wait_for(ENTER)
        terminal.wait_for("all 2 slots are idle")
        assert server.chat(max_tokens=30).status == 200
        terminal.wait_for("parked KV by session")
        if how == "q":
            terminal.press(b"q")
        else:
            terminal.process.send_signal(signal.SIGINT)  # the terminal is nobody's, so it does not do it
        assert terminal.end() == 0


@pytest.mark.req("B6")
def test_it_says_when_the_server_is_gone(tmp_path: Path) -> None:
    with (
        child(tmp_path / "log", "fake", "--max-num-seqs", "3") as served,
        Terminal("--url", f"http://127.0.0.1:{served.port}") as terminal,
    ):
        terminal.wait_for("all 3 slots are idle")
        assert served.stop() == 0
        terminal.wait_for("the server is shutting down; trying again")
        terminal.wait_for("no server at")
        terminal.press(b"q")
        assert terminal.end() == 0
