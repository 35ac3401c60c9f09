"""`make soak`: a real server under all kinds of traffic and faults at once; every answer is checked.

A `tokenmill serve` process with two models, the fake one and the default one in deterministic mode, each in an engine
process of its own, a session store and several API keys. Clients chat, keep sessions, call tools, disconnect, read
slowly and send invalid requests; one key floods. Meanwhile engine processes are killed or hang, and the server is
restarted on its store. The plan follows from a seed. Expected answers are computed before the server starts, by `LLM`
and `SessionService` in this process.

A request that overlaps a fault may fail, but what it got must be a beginning of its answer. Everything else is a
problem, and the exit code is 1: a wrong answer, a status that was not expected, an answer of 429 to a key that does not
flood, a session that lost a durable turn, counters that do not add up, memory or descriptors that grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill import LLM, SamplingParams, SessionService
from tokenmill.bench.load_clients import HttpFailure, HttpReply, Target, events, exchange
from tokenmill.bench.sessions import line_chart
from tokenmill.config import DEFAULT_MODEL
from tokenmill.params import StructuredOutputs

FLOODING = "key-that-floods"
KEYS = ("key-of-chats", "key-of-sessions", "key-of-others")
CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"
LETTERS = list(range(ord("a"), ord("z") + 1))
QUESTIONS = ("What is the capital of Japan?", "Name a fruit.", "Why is the sky blue?", "Count to five.")
SYSTEM = "Answer briefly."
DEPTH = 3
"""Turns of the longest conversation."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALLED = {"city": "Rome", "days": 3}
"""The only arguments that the tool accepts: what must be called does not depend on the model."""
TOOL = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"const": "Rome"}, "days": {"const": 3}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CALL_S, START_S = 180.0, 180.0
"""Limits on one request and on one start: a machine may be busy, but nothing may hang."""
FAULTY = 0.7
"""Fraction of the time with faults. Growth of memory is measured in the rest of it."""
KILL_EVERY_S, RESTART_EVERY_S = 45.0, 150.0
HANG_TIMEOUT_S = 30.0
"""Of the fake model, whose steps take milliseconds."""
GROWTH_MIB, GROWTH_SHARE, GROWTH_FDS = 16.0, 0.05, 8.0
"""What a process may grow by while growth is measured: constant and relative to its size, and descriptors."""
LEAST_S = 60.0
"""Growth is not measured in less time: a process imports what it needs when it needs it."""
WRONG, UNEXPECTED, FAULT = "wrong", "unexpected failure", "failed by a fault"
MOST_PROBLEMS = 50
"""Then the traffic stops."""
NUM_POINTS = 20
"""Of a plot."""


# -- what is asked, and what must be answered -------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """One model of the server, and how its requests look."""

    name: str
    path: str
    options: Mapping[str, Any]
    """Engine options, the same here and there."""
    hang_timeout_s: float
    short: int
    long: int
    """Tokens of a short answer and of a long one."""
    branches: int
    """Questions to choose from at each turn of a session."""
    fields: Mapping[str, Any]
    """Sampling parameters of all requests."""

    @property
    def greedy(self) -> dict[str, Any]:
        return {**self.fields, "temperature": 0, "max_tokens": self.short}

    @property
    def chats(self) -> dict[str, dict[str, Any]]:
        """Sampling parameters by the kind of a chat."""
        seeded = {"temperature": 1, "top_p": 0.9, "seed": 7}
        constraint = {"temperature": 0, "max_tokens": 64, "structured_outputs": {"json": SCHEMA}}
        long = {**self.greedy, "max_tokens": self.long}
        return {"chat": self.greedy, "seeded": {**self.greedy, **seeded}, "long": long, "structured": constraint}

    def toml(self, hang_file: Path) -> str:
        extra = {**self.options.get("extra", {}), **({"hang_file": str(hang_file)} if self.path == "fake" else {})}
        options = {"name": self.name, "path": self.path, "engine": "process", "hang_timeout_s": self.hang_timeout_s}
        options |= {name: value for name, value in self.options.items() if name != "extra"}
        lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in extra.items())
        return "\n".join(["[[model]]", *lines, f"extra = {{{pairs}}}", ""])


FAKE = Model(
    "fake",
    "fake",
    {
        "max_num_seqs": 16,
        "max_queue": 24,
        "kv_cache_tokens": 16_384,
        "extra": {"vocab_size": 258, "max_context": 4096, "depth": 1},
    },
    HANG_TIMEOUT_S,
    short=24,
    long=150,
    branches=3,
    fields={"ignore_eos": True, "allowed_token_ids": LETTERS},
)
EXACT = Model(
    "exact",
    DEFAULT_MODEL,
    {"deterministic": True, "max_model_len": 1024, "max_num_seqs": 4, "kv_cache_tokens": 4096},
    600.0,
    short=12,
    long=40,
    branches=2,
    fields={"repetition_penalty": 1.0},
)
Path_ = tuple[int, ...]
"""The questions of a conversation, by number."""


@dataclass(frozen=True)
class Expected:
    """The answers of one model."""

    chats: Mapping[tuple[str, int], str]
    """By the kind of the chat and its question."""
    turns: Mapping[Path_, str]
    """The last answer of a conversation."""


def expect(model: Model) -> Expected:
    kinds = [(kind, number) for kind in model.chats for number in range(len(QUESTIONS))]
    params = [_sampling_params(model.chats[kind]) for kind, _ in kinds]
    with LLM(model.path, **model.options) as llm:
        outputs = llm.chat([[_user(QUESTIONS[number])] for _, number in kinds], params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    return Expected(dict(zip(kinds, texts, strict=True)), asyncio.run(_expect_turns(model)))


async def _expect_turns(model: Model) -> dict[Path_, str]:
    found: dict[Path_, str] = {}
    async with SessionService(model.path, **model.options) as service:

        async def grow(parent: str, path: Path_) -> None:
            for number in range(model.branches if len(path) < DEPTH else 0):
                session = await service.fork(parent)
                await service.append_input(session, QUESTIONS[number])
                answer = [chunk.text async for chunk in await service.generate_stream(session, model.short)]
                found[*path, number] = "".join(answer)
                await grow(session, (*path, number))

        await grow(await service.create_session(system=SYSTEM, sampling_params=_sampling_params(model.greedy)), ())
    return found


def _sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    constraint = fields.get("structured_outputs")
    given = {**fields, "structured_outputs": StructuredOutputs(**constraint)} if constraint else dict(fields)
    return SamplingParams(**given)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


# -- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disruption:
    """A fault, from before it happens until the server is ready again."""

    what: str
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Usage:
    """Of one process at one moment."""

    at_s: float
    pid: int
    is_server: bool
    rss_mib: float
    num_fds: int


class ServerUnderTest:
    """`tokenmill serve` on a port that stays the same over restarts."""

    def __init__(self, folder: Path, models: Sequence[Model]) -> None:
        self.models = models
        self.disruptions: list[Disruption] = []
        self._folder = folder
        self._hang_file = folder / "hang"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._since_s: float | None = None
        """When the present disruption began."""
        self._calm = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        (folder / "models.toml").write_text("\n".join(model.toml(self._hang_file) for model in models))

    def target(self, key: str | None) -> Target:
        return Target(f"http://127.0.0.1:{self.port}", key)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise Failed("the server is being restarted")
        return self._process.pid

    def engines(self) -> list[int]:
        """Process ids of the engines."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            pids = task.read_text().split()
            found += [int(pid) for pid in pids if b"entrypoints.process" in _bytes(Path(f"/proc/{pid}/cmdline"))]
        return sorted(found)

    def usage(self) -> list[Usage]:
        """Nothing while the server is being restarted."""
        if self._process is None:
            return []
        now, pids = time.monotonic(), [self.pid, *self.engines()]
        found = []
        for pid in pids:
            rss = re.search(rb"VmRSS:\s+(\d+)", _bytes(Path(f"/proc/{pid}/status")))
            if rss is not None:
                found.append(Usage(now, pid, pid == self.pid, int(rss[1]) / 1024, len(os.listdir(f"/proc/{pid}/fd"))))
        return found

    def was_disrupted(self, since_s: float) -> bool:
        """Was there a fault, or is there one, since this moment?"""
        return self._since_s is not None or any(one.ended_s > since_s for one in self.disruptions)

    async def wait_until_calm(self) -> None:
        await self._calm.wait()

    async def start(self) -> None:
        keys = [option for key in (*KEYS, FLOODING) for option in ("--api-key", key)]
        command = [sys.executable, "-m", "tokenmill", "serve", "--config", str(self._folder / "models.toml")]
        more = ["--port", str(self.port), "--store", str(self._folder / "store"), "--drain", "5"]
        with self._log.open("ab") as file:
            self._process = subprocess.Popen([*command, *more, *keys], stdout=file, stderr=file)
        await self._wait_until_ready()
        self._calm.set()

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self._process is not None
        process, self._process = self._process, None
        process.send_signal(how)
        return await asyncio.to_thread(process.wait, START_S)

    async def restart(self, how: signal.Signals) -> None:
        with self._disrupted(f"restart after {how.name}"):
            code = await self.stop(how)
            await self.start()
        if code != (-how if how is signal.SIGKILL else 0):
            raise Problem(f"exit code {code} after {how.name}")

    async def kill_engine(self, which: int) -> None:
        def is_replaced() -> bool:
            present = self.engines()
            return pid not in present and len(present) == len(pids)

        pids = self.engines()
        pid = pids[which % len(pids)]
        with self._disrupted("engine process killed"):
            os.kill(pid, signal.SIGKILL)
            await _until(is_replaced, "a killed engine process is replaced")
            await self._wait_until_ready()

    async def hang_engine(self) -> None:
        """The next step of the fake model never returns."""
        pids = set(self.engines())
        body = {"model": "fake", "messages": [_user("hi")], "max_tokens": 4}
        with self._disrupted("engine process hung"):
            self._hang_file.touch()
            victim = asyncio.ensure_future(fetch(self.target(KEYS[2]), "POST", CHAT, body))  # a step, if none is taken
            await _until(lambda: bool(set(self.engines()) - pids), "an engine process that hangs is replaced")
            await self._wait_until_ready()
            await asyncio.gather(victim, return_exceptions=True)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @contextmanager
    def _disrupted(self, what: str) -> Iterator[None]:
        self._calm.clear()
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self.disruptions.append(Disruption(what, self._since_s, time.monotonic()))
            self._since_s = None
            self._calm.set()

    async def _wait_until_ready(self) -> None:
        async def is_ready() -> bool:
            try:
                async with exchange(self.target(None), "GET", "/health/ready") as reply:
                    return reply.status == 200
            except (OSError, EOFError):
                return False

        deadline = time.monotonic() + START_S
        while not await is_ready():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise Problem("the server is not ready")
            await asyncio.sleep(0.05)


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise Problem(f"not within {START_S:.0f} s: {what}")
        await asyncio.sleep(0.02)


def _bytes(path: Path) -> bytes:
    """Of a file of a process that may have ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


# -- requests ---------------------------------------------------------------------------------------------------------


class Problem(Exception):
    """Something that must not happen, fault or not."""


class Failed(Exception):
    """A request did not get its answer: allowed while there is a fault."""


@dataclass(frozen=True)
class Answer:
    """A response that was read to its end."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


async def fetch(target: Target, method: str, path: str, body: Any = None) -> Answer:
    try:
        async with asyncio.timeout(CALL_S), exchange(target, method, path, body) as reply:
            return Answer(reply.status, reply.headers, await reply.content())
    except (OSError, EOFError, HttpFailure) as error:
        raise Failed(f"{method} {path}: {error!r}") from error


def checked(answer: Answer, *allowed: int) -> Answer:
    """An answer with one of these statuses; `Failed` for those of a server with a fault."""
    if answer.status in allowed:
        return answer
    said = f"status {answer.status}, not {' or '.join(map(str, allowed))}: {answer.content[:200]!r}"
    raise Failed(said) if answer.status >= 500 else Problem(said)


def text_of(body: Any) -> str:
    """What a whole chat completion or session answer says; tool calls by their arguments."""
    if "choices" not in body:
        return str(body["text"])
    message = body["choices"][0]["message"]
    calls = message.get("tool_calls") or ()
    return "".join(call["function"]["arguments"] for call in calls) or str(message["content"])


def delta_of(event: Any) -> str:
    """The same, of an event of a stream."""
    if "choices" not in event:
        return str(event.get("text") or "")
    delta = event["choices"][0].get("delta") or {} if event["choices"] else {}
    calls = delta.get("tool_calls") or ()
    return "".join(call["function"].get("arguments") or "" for call in calls) or str(delta.get("content") or "")


async def deltas(reply: HttpReply) -> AsyncIterator[str]:
    """The text of a stream; `Failed` if it ends without an end."""
    async for data in events(reply.pieces()):
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            raise Failed(f"error event: {event['error']}")
        yield delta_of(event)
    raise Failed("the stream was cut off")


async def answered(target: Target, path: str, body: Mapping[str, Any], expected: str, pause_s: float = 0.0) -> None:
    """Post, streaming or not, and compare: the whole answer, or as much as came before a failure."""
    said = ""
    try:
        async with asyncio.timeout(CALL_S), exchange(target, "POST", path, body) as reply:
            if reply.status != 200:
                checked(Answer(reply.status, reply.headers, await reply.content()), 200)
            if body.get("stream"):
                async for delta in deltas(reply):
                    said += delta
                    if not expected.startswith(said):
                        break
                    await asyncio.sleep(pause_s)
            else:
                said = text_of(json.loads(await reply.content()))
    except (OSError, EOFError, HttpFailure, Failed) as error:
        if not expected.startswith(said):
            raise Problem(f"wrong answer before a failure: {said!r}, not {expected!r}") from error
        raise error if isinstance(error, Failed) else Failed(repr(error)) from error
    if said != expected:
        raise Problem(f"wrong answer: {said!r}, not {expected!r} ({path}, {body})")


# -- traffic ----------------------------------------------------------------------------------------------------------

INVALID: Sequence[tuple[str, str, bytes, str | None, int]] = (
    ("POST", CHAT, b"{", KEYS[2], 400),
    ("POST", CHAT, b'{"messages": 7}', KEYS[2], 400),
    ("POST", CHAT, b'{"model": "none", "messages": [{"role": "user", "content": "hi"}]}', KEYS[2], 404),
    ("POST", CHAT, b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "n": 1e9}', KEYS[2], 400),
    (
        "POST",
        CHAT,
        b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": -1}',
        KEYS[2],
        400,
    ),
    ("POST", CHAT, b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}]}', "wrong key", 401),
    ("POST", CHAT, b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}]}', None, 401),
    ("POST", CHAT, json.dumps({"model": "fake", "messages": [_user("long " * 2000)]}).encode(), KEYS[2], 400),
    ("POST", CHAT, b'{"a":' * 1000 + b"1" + b"}" * 1000, KEYS[2], 400),
    ("POST", "/v1/completions", b'{"model": "fake", "prompt": "x", "temperature": "hot"}', KEYS[2], 400),
    ("POST", "/v1/completions", b'{"model": "fake", "prompt": [999999]}', KEYS[2], 400),
    ("POST", f"{SESSIONS}/no-such-session/generate", b'{"input": "hi"}', KEYS[2], 404),
    ("GET", "/v1/nothing", b"", KEYS[2], 404),
    ("DELETE", CHAT, b"", KEYS[2], 405),
)
GARBAGE = (
    b"\x16\x03\x01\x02\x00",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le",
)


@dataclass
class Talk:
    """A session as its client knows it."""

    id: str
    model: Model
    path: Path_
    """Answered questions."""


@dataclass
class Record:
    """What became of all requests."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By kind of traffic."""
    times: list[tuple[float, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_problem(self, what: str) -> None:
        self.problems.append(f"{datetime.now():%H:%M:%S} {what}")

    def note(self, kind: str, outcome: str) -> None:
        self.outcomes[kind][outcome] += 1
        self.times.append((time.monotonic(), outcome))


class Traffic:
    """Clients of all kinds. Each draws what it does from a generator of its own."""

    def __init__(self, server: ServerUnderTest, expected: Mapping[str, Expected], seed: int) -> None:
        self.server = server
        self.record = Record()
        self._expected = expected
        self._seed = seed
        self._ends = asyncio.Event()

    async def run(self, seconds: float) -> None:
        clients: dict[str, tuple[int, Callable[[random.Random], Awaitable[None]]]] = {
            "chat": (4, self.chat),
            "tools": (1, self.call_tool),
            "session": (3, self.converse),
            "cancel": (1, self.leave),
            "slow reader": (2, self.read_slowly),
            "invalid": (1, self.send_invalid),
            "flood": (1, self.flood),
        }
        running = [
            asyncio.ensure_future(self._repeat(kind, number, client))
            for kind, (count, client) in clients.items()
            for number in range(count)
        ]
        try:
            await asyncio.sleep(seconds)
        finally:
            self._ends.set()
            await asyncio.gather(*running)

    async def _repeat(self, kind: str, number: int, client: Callable[[random.Random], Awaitable[None]]) -> None:
        draw = random.Random(f"{self._seed} {kind} {number}")
        while not self._ends.is_set() and len(self.record.problems) < MOST_PROBLEMS:
            if draw.random() < 0.9:  # some requests meet a server that is not ready
                await self.server.wait_until_calm()
            await client(draw)
            await asyncio.sleep(draw.random() * 0.2)

    async def attempt(self, kind: str, work: Awaitable[str | None], outcome: str = "answered") -> str:
        """Note what becomes of a request, and return it; what succeeds may say itself what it was."""
        began = time.monotonic()
        try:
            outcome = await work or outcome
        except Problem as problem:
            outcome = WRONG
            self.record.add_problem(f"{kind}: {problem}")
        except (Failed, TimeoutError) as failure:
            is_excused = isinstance(failure, Failed) and self.server.was_disrupted(began)
            outcome = FAULT if is_excused else UNEXPECTED
            if not is_excused:
                self.record.add_problem(f"{kind}: {failure!r}")
        self.record.note(kind, outcome)
        return outcome

    def _model(self, draw: random.Random) -> Model:
        """The fake model more often: it is much faster."""
        return self.server.models[0] if draw.random() < 0.7 else self.server.models[-1]

    def _chat(self, draw: random.Random, kind: str, model: Model) -> tuple[dict[str, Any], str]:
        """The body of a chat, and its answer."""
        number = draw.randrange(len(QUESTIONS))
        body = {"model": model.name, "messages": [_user(QUESTIONS[number])], **model.chats[kind]}
        return body, self._expected[model.name].chats[kind, number]

    async def chat(self, draw: random.Random) -> None:
        kind = draw.choice(("chat", "seeded", "structured"))
        body, expected = self._chat(draw, kind, self._model(draw))
        body["stream"] = draw.random() < 0.5
        await self.attempt(kind, answered(self.server.target(KEYS[0]), CHAT, body, expected))

    async def call_tool(self, draw: random.Random) -> None:
        body, _ = self._chat(draw, "chat", self.server.models[0])
        del body["allowed_token_ids"], body["ignore_eos"]
        choice = {"type": "function", "function": {"name": TOOL["name"]}}
        more = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": choice, "parallel_tool_calls": False}
        body |= {**more, "max_tokens": 200, "stream": draw.random() < 0.5}
        await self.attempt("tools", answered(self.server.target(KEYS[0]), CHAT, body, json.dumps(CALLED)))

    async def leave(self, draw: random.Random) -> None:
        """Disconnect after some of the answer, or before all of it."""
        body, expected = self._chat(draw, "long", self._model(draw))
        body["stream"] = draw.random() < 0.7
        num_deltas = draw.randrange(1, 5)

        async def work() -> None:
            said = ""
            async with asyncio.timeout(CALL_S), exchange(self.server.target(KEYS[2]), "POST", CHAT, body) as reply:
                if reply.status != 200:
                    checked(Answer(reply.status, reply.headers, await reply.content()), 200)
                async for delta in deltas(reply):
                    said += delta
                    if len(said) >= num_deltas:
                        break
            if not expected.startswith(said):
                raise Problem(f"wrong answer: {said!r}, not a beginning of {expected!r}")

        async def leave_early() -> None:
            _, writer = await self.server.target(KEYS[2]).connect()
            writer.write(self.server.target(KEYS[2]).request("POST", CHAT, body))
            await writer.drain()
            await asyncio.sleep(draw.random() * 0.1)
            writer.close()

        await self.attempt("cancel", _as_failure(work() if body["stream"] else leave_early()), "cancelled")

    async def read_slowly(self, draw: random.Random) -> None:
        body, expected = self._chat(draw, "long", self.server.models[0])
        pause_s = draw.choice((0.01, 0.03))
        work = answered(self.server.target(KEYS[2]), CHAT, {**body, "stream": True}, expected, pause_s)
        await self.attempt("slow reader", work)

    async def send_invalid(self, draw: random.Random) -> None:
        if draw.random() < 0.2:
            await self.attempt("invalid", _as_failure(self._send_garbage(draw.choice(GARBAGE))), "refused")
            return
        method, path, body, key, status = draw.choice(INVALID)

        async def work() -> None:
            answer = await fetch(self.server.target(key), method, path, body or None)
            checked(answer, status)
            if "error" not in answer.json:
                raise Problem(f"an error without its form: {answer.content[:200]!r}")

        await self.attempt("invalid", work(), "refused")

    async def _send_garbage(self, data: bytes) -> None:
        _, writer = await self.server.target(None).connect()
        writer.write(data)
        await writer.drain()
        writer.close()

    async def flood(self, draw: random.Random) -> None:
        """More at once than there are rows and queue slots: each is answered, or refused with a time to retry."""
        target = self.server.target(FLOODING)

        async def one() -> None:
            body, expected = self._chat(draw, "long", self.server.models[0])

            async def work() -> str:
                answer = checked(await fetch(target, "POST", CHAT, body), 200, 429)
                if answer.status == 429:
                    if not answer.headers.get("retry-after", "").isdigit():
                        raise Problem("429 without Retry-After")
                    return "refused"
                if text_of(answer.json) != expected:
                    raise Problem(f"wrong answer: {text_of(answer.json)!r}, not {expected!r}")
                return "answered"

            await self.attempt("flood", work())

        await asyncio.gather(*(one() for _ in range(60)))
        await asyncio.sleep(2 + 3 * draw.random())

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def converse(self, draw: random.Random) -> None:
        """A session from its creation to its end, through faults and restarts."""
        model = self._model(draw)
        made: list[Talk] = []

        async def create() -> None:
            body = {"model": model.name, "system": SYSTEM, **model.greedy}
            answer = checked(await fetch(self.server.target(KEYS[1]), "POST", SESSIONS, body), 201)
            made.append(Talk(answer.json["id"], model, ()))

        await self.attempt("session", create())
        if not made:
            return
        for _ in range(draw.randrange(3, 10)):
            talk = made[-1]
            verb = draw.choice(("ask", "ask", "ask", "fork", "rewind", "compare"))
            if verb == "ask" and len(talk.path) < DEPTH:
                await self._ask(draw, talk)
            elif verb == "fork":
                await self.attempt("session", self._fork(made))
            elif verb == "rewind" and talk.path:
                await self._change(talk, self._rewind(talk, draw.randrange(len(talk.path))), "session")
            else:
                await self.attempt("session", self._compare(talk, {talk.path}))
            await asyncio.sleep(draw.random())
        for talk in made:
            await self.attempt("session", self._delete(talk))

    async def _ask(self, draw: random.Random, talk: Talk) -> None:
        number = draw.randrange(talk.model.branches)
        path = (*talk.path, number)
        expected = self._expected[talk.model.name].turns[path]
        stream = draw.random() < 0.5
        if draw.random() < 0.3:
            messages = [_user(QUESTIONS[number])]
            where, body = CHAT, {"model": talk.model.name, "session_id": talk.id, "messages": messages}
        else:
            where, body = f"{SESSIONS}/{talk.id}/generate", {"input": QUESTIONS[number]}

        async def ask() -> None:
            await answered(self.server.target(KEYS[1]), where, {**body, "stream": stream}, expected)
            talk.path = path

        await self._change(talk, ask(), "turn", path)

    async def _change(self, talk: Talk, work: Awaitable[None], kind: str, *after: Path_) -> None:
        """Run an operation; if a fault interrupts it, the session is as before it or as after it."""
        before = talk.path
        outcome = await self.attempt(kind, work)
        states = {before, *after, *(before[:count] for count in range(len(before)) if not after)}
        while outcome == FAULT:  # and another one may follow
            await self.server.wait_until_calm()
            outcome = await self.attempt("session", self._compare(talk, states))

    async def _compare(self, talk: Talk, states: set[Path_]) -> None:
        """The turns are those of one of these conversations; then drop what a fault has left of an answer."""
        answer = checked(await fetch(self.server.target(KEYS[1]), "GET", f"{SESSIONS}/{talk.id}/turns"), 200)
        turns = answer.json["data"]
        path: Path_ = ()
        for asked, said in zip(turns[::2], turns[1::2], strict=False):
            question, text = asked["messages"][-1]["content"], said["messages"][0]["content"]
            longer = (*path, QUESTIONS.index(question))
            expected = self._expected[talk.model.name].turns[longer]
            if text != expected:
                if not expected.startswith(text) or 2 * len(path) + 2 < len(turns):
                    raise Problem(f"turn {longer} of a session is {text!r}, not {expected!r}")
                break
            path = longer
        if path not in states:
            raise Problem(f"a session has the turns {path}, not one of {states}")
        talk.path = path
        if len(turns) > 2 * len(path):
            await self._rewind(talk, len(path))

    async def _rewind(self, talk: Talk, num_answers: int) -> None:
        body = {"at_turn": 2 * num_answers}
        checked(await fetch(self.server.target(KEYS[1]), "POST", f"{SESSIONS}/{talk.id}/rewind", body), 200)
        talk.path = talk.path[:num_answers]

    async def _fork(self, made: list[Talk]) -> None:
        talk = made[-1]
        answer = checked(await fetch(self.server.target(KEYS[1]), "POST", f"{SESSIONS}/{talk.id}/fork", {}), 201)
        made.append(Talk(answer.json["data"][0]["id"], talk.model, talk.path))

    async def _delete(self, talk: Talk) -> None:
        checked(await fetch(self.server.target(KEYS[1]), "DELETE", f"{SESSIONS}/{talk.id}"), 204)


async def _as_failure(work: Awaitable[None]) -> None:
    try:
        await work
    except (OSError, EOFError, HttpFailure) as error:
        raise Failed(repr(error)) from error


# -- faults and observation -------------------------------------------------------------------------------------------


def plan_faults(seconds: float, seed: int, *, hangs: bool) -> list[tuple[float, str]]:
    """What goes wrong, and when: seconds from the begin."""
    draw = random.Random(f"{seed} faults")
    faulty_s = FAULTY * seconds
    restarts = [("SIGTERM", "SIGKILL")[number % 2] for number in range(max(1, round(faulty_s / RESTART_EVERY_S)))]
    kills = [
        "kill" if number % 4 or not hangs else "hang" for number in range(1, 1 + max(1, round(faulty_s / KILL_EVERY_S)))
    ]
    faults = [*restarts, *kills]
    draw.shuffle(faults)
    return [(faulty_s * (number + draw.random()) / len(faults), what) for number, what in enumerate(faults)]


async def inject_faults(server: ServerUnderTest, plan: Sequence[tuple[float, str]], record: Record, seed: int) -> None:
    draw = random.Random(f"{seed} victims")
    began = time.monotonic()
    for at_s, what in plan:
        await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
        try:
            if what == "kill":
                await server.kill_engine(draw.randrange(2))
            elif what == "hang":
                await server.hang_engine()
            else:
                await server.restart(signal.Signals[what])
        except Problem as problem:
            record.add_problem(f"{what}: {problem}")


@dataclass
class Counts:
    """The server's own counters of requests, over all its processes one after another."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Of processes that have ended."""
    latest: tuple[int, Counter[str]] = (0, Counter())
    """Of the present one, by its id."""

    def update(self, pid: int, metrics: str) -> None:
        """Raises `Problem` if they do not add up."""
        pattern = r'^tokenmill_http_requests_(received_total|running|total)\{.*?(?:outcome="(\w+)")?\} (\S+)$'
        found: Counter[str] = Counter()
        for name, outcome, value in re.findall(pattern, metrics, re.MULTILINE):
            found[outcome or name] += int(float(value))
        ended = sum(found[one] for one in ("finished", "cancelled", "failed", "rejected"))
        if found["received_total"] != ended + found["running"]:
            raise Problem(f"the counters of requests do not add up: {dict(found)}")
        if pid != self.latest[0]:
            self.outcomes += self.latest[1]
        self.latest = (pid, found)

    @property
    def total(self) -> Counter[str]:
        return self.outcomes + self.latest[1]


async def scrape(server: ServerUnderTest) -> str:
    return checked(await fetch(server.target(KEYS[0]), "GET", "/metrics"), 200).content.decode()


async def observe(server: ServerUnderTest, record: Record, counts: Counts, usage: list[Usage]) -> None:
    """Each second until cancelled."""
    while True:
        await asyncio.sleep(1.0)
        usage += server.usage()
        began = time.monotonic()
        try:
            counts.update(server.pid, await scrape(server))
        except Problem as problem:
            record.add_problem(f"metrics: {problem}")
        except (Failed, TimeoutError) as failure:
            if not server.was_disrupted(began):
                record.add_problem(f"metrics: {failure!r}")


async def settle(server: ServerUnderTest, idle_fds: int, counts: Counts) -> None:
    """Without clients nothing runs, nothing waits, and as many descriptors are open as after the start."""
    deadline = time.monotonic() + 60
    while True:
        metrics = await scrape(server)
        counts.update(server.pid, metrics)
        busy = re.findall(r"^(tokenmill_requests_(?:running|waiting)\{.*\}) ([1-9]\S*)", metrics, re.MULTILINE)
        num_fds = next(one.num_fds for one in server.usage() if one.is_server)
        if counts.latest[1]["running"] == 1 and not busy and num_fds <= idle_fds + GROWTH_FDS:
            return
        if time.monotonic() > deadline:
            raise Problem(f"an idle server has {num_fds} descriptors ({idle_fds} after its start), {busy} run")
        await asyncio.sleep(0.5)


# -- report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """Of one process while there were no faults, by a line through its samples."""

    process: str
    minutes: float
    rss_mib: float
    """At the end."""
    growth_mib: float
    num_fds: int
    growth_fds: float

    def row(self) -> str:
        memory = f"{self.rss_mib:.0f} | {self.growth_mib:+.1f}"
        return f"| {self.process} | {self.minutes:.1f} | {memory} | {self.num_fds} | {self.growth_fds:+.1f} |"

    @property
    def is_leak(self) -> bool:
        return self.growth_mib > GROWTH_MIB + GROWTH_SHARE * self.rss_mib or self.growth_fds > GROWTH_FDS


def growth_of(samples: Sequence[Usage]) -> Growth:
    first, last = samples[0], samples[-1]
    times = np.array([one.at_s - first.at_s for one in samples])
    slopes = [
        float(np.polyfit(times, values, 1)[0])
        for values in ([s.rss_mib for s in samples], [s.num_fds for s in samples])
    ]
    duration = last.at_s - first.at_s
    name = "server" if last.is_server else f"engine of {last.rss_mib:.0f} MiB"
    return Growth(name, duration / 60, last.rss_mib, slopes[0] * duration, last.num_fds, slopes[1] * duration)


def growths(usage: Sequence[Usage], since_s: float) -> list[Growth]:
    by_pid: dict[int, list[Usage]] = defaultdict(list)
    for one in usage:
        if one.at_s >= since_s:
            by_pid[one.pid].append(one)
    return [growth_of(samples) for samples in by_pid.values() if samples[-1].at_s - samples[0].at_s >= LEAST_S]


@dataclass(frozen=True)
class Report:
    """What a soak has found."""

    seed: int
    began_s: float
    seconds: float
    models: Sequence[Model]
    record: Record
    disruptions: Sequence[Disruption]
    counts: Counter[str]
    usage: Sequence[Usage]
    log: str
    """What the server said."""
    when: str = field(default_factory=lambda: datetime.now(UTC).strftime("%d %B %Y"))

    @cached_property
    def growths(self) -> list[Growth]:
        """After the last fault and a warm-up, in which caches fill."""
        ended = max((one.ended_s for one in self.disruptions), default=self.began_s)
        return growths(self.usage, ended + 0.25 * (self.began_s + self.seconds - ended))

    @property
    def problems(self) -> list[str]:
        leaks = [f"growth: {one}" for one in self.growths if one.is_leak]
        return [*self.record.problems, *leaks]

    def write(self, folder: Path) -> None:
        """soak.md, soak.json and the plots; the server's log, if there are problems."""
        images = folder / "images"
        images.mkdir(parents=True, exist_ok=True)
        self._plot(images)
        (folder / "soak.json").write_text(json.dumps(self.to_json(), indent=1) + "\n")
        (folder / "soak.md").write_text(self.markdown())
        if self.problems:
            (folder / "soak.log").write_text(self.log)

    def to_json(self) -> dict[str, Any]:
        return {
            "date": self.when,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "seed": self.seed,
            "minutes": self.seconds / 60,
            "models": [model.path for model in self.models],
            "outcomes": {kind: dict(found) for kind, found in sorted(self.record.outcomes.items())},
            "server_counters": dict(self.counts),
            "faults": [
                [round(one.began_s - self.began_s, 1), round(one.ended_s - one.began_s, 1), one.what]
                for one in self.disruptions
            ],
            "growth": [vars(one) for one in self.growths],
            "problems": self.problems,
        }

    def markdown(self) -> str:
        columns = ["answered", "refused", "cancelled", FAULT, UNEXPECTED, WRONG]
        rows = [
            f"| {kind} | " + " | ".join(f"{found[one]:,}" for one in columns) + " |"
            for kind, found in sorted(self.record.outcomes.items())
        ]
        total: Counter[str] = sum(self.record.outcomes.values(), Counter())
        rows.append("| all | " + " | ".join(f"{total[one]:,}" for one in columns) + " |")
        faults = Counter(one.what for one in self.disruptions)
        recovery = {
            what: [one.ended_s - one.began_s for one in self.disruptions if one.what == what] for what in faults
        }
        names = {
            "finished": "finished",
            "cancelled": "cancelled",
            "failed": "failed",
            "rejected": "refused",
            "running": "running",
        }
        counted = " + ".join(f"{self.counts[one]:,} {name}" for one, name in names.items())
        lines = [
            "# Soak test",
            "",
            "`make soak` runs a real server with traffic of all kinds and faults at once, compares every answer with",
            "the expected one, and writes this page ([testing.md](testing.md#soak)).",
            "",
            f"{self.when}, {os.cpu_count()} cores, {self.seconds / 60:.3g} minutes, seed {self.seed}; "
            f"models: {', '.join(model.path for model in self.models)}.",
            "",
            f"**{len(self.problems)} problems**: {total[WRONG]} wrong answers, {total[UNEXPECTED]} unexpected "
            f"failures, {sum(one.is_leak for one in self.growths)} processes that grow.",
            *(f"- {one}" for one in self.problems[:20]),
            "",
            "| traffic | " + " | ".join(columns) + " |",
            "| --- | " + " | ".join(["---:"] * len(columns)) + " |",
            *rows,
            "",
            "Counters of the server, as of the last scrape of each of its processes: "
            f"{self.counts['received_total']:,} received = {counted}.",
            "",
            "| fault | times | until ready again, median (s) |",
            "| --- | ---: | ---: |",
            *(f"| {what} | {count} | {np.median(recovery[what]):.1f} |" for what, count in sorted(faults.items())),
            "",
            "Growth after the last fault, by a line through one sample a second:",
            "",
            "| process | minutes | RSS (MiB) | growth (MiB) | descriptors | growth |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *(one.row() for one in self.growths),
            "",
            "![resident memory](images/soak-memory.svg)",
            "",
            "![open descriptors](images/soak-descriptors.svg)",
            "",
            "![requests](images/soak-requests.svg)",
            "",
        ]
        return "\n".join(lines)

    def _plot(self, images: Path) -> None:
        width = self.seconds / NUM_POINTS
        unit, scale = ("minutes", 60.0) if self.seconds >= 300 else ("seconds", 1.0)
        x = [round((number + 1) * width / scale, 1) for number in range(NUM_POINTS)]

        def bin_of(at_s: float) -> int:
            return min(NUM_POINTS - 1, max(0, int((at_s - self.began_s) / width)))

        def largest(is_server: bool, value: Callable[[Usage], float]) -> list[float]:
            """Of each part of the time; all engine processes together."""
            sums: dict[float, float] = defaultdict(float)
            for one in self.usage:
                if one.is_server == is_server:
                    sums[one.at_s] += value(one)
            found = [0.0] * NUM_POINTS
            for at_s, total in sums.items():
                found[bin_of(at_s)] = max(found[bin_of(at_s)], total)
            return found

        memory = {"server": largest(True, lambda one: one.rss_mib), "engines": largest(False, lambda one: one.rss_mib)}
        (images / "soak-memory.svg").write_text(line_chart("Resident memory", x, memory, x_label=unit, y_label="MiB"))
        fds = {"server": largest(True, lambda one: one.num_fds), "engines": largest(False, lambda one: one.num_fds)}
        (images / "soak-descriptors.svg").write_text(
            line_chart("Open descriptors", x, fds, x_label=unit, y_label="descriptors")
        )
        rates = {one: [0.0] * NUM_POINTS for one in ("answered", "refused", "cancelled", FAULT)}
        for at_s, outcome in self.record.times:
            if outcome in rates:
                rates[outcome][bin_of(at_s)] += 1 / width
        (images / "soak-requests.svg").write_text(
            line_chart("Requests by outcome", x, rates, x_label=unit, y_label="requests/s")
        )


# -- all of it --------------------------------------------------------------------------------------------------------


def soak(models: Sequence[Model], seconds: float, seed: int) -> Report:
    expected = {model.name: expect(model) for model in models}
    with tempfile.TemporaryDirectory(prefix="tokenmill-soak-") as folder:
        return asyncio.run(_soak(ServerUnderTest(Path(folder), models), expected, seconds, seed))


async def _soak(server: ServerUnderTest, expected: Mapping[str, Expected], seconds: float, seed: int) -> Report:
    traffic, counts, usage = Traffic(server, expected, seed), Counts(), list[Usage]()
    record = traffic.record
    await server.start()
    try:
        idle_fds = next(one.num_fds for one in server.usage() if one.is_server)
        began = time.monotonic()
        plan = plan_faults(seconds, seed, hangs=seconds >= 300)
        observing = asyncio.ensure_future(observe(server, record, counts, usage))
        faults = asyncio.ensure_future(inject_faults(server, plan, record, seed))
        await traffic.run(seconds)
        await faults
        observing.cancel()
        await asyncio.gather(observing, return_exceptions=True)
        try:
            await settle(server, idle_fds, counts)
        except (Problem, Failed) as problem:
            record.add_problem(f"after the traffic: {problem}")
    finally:
        code = await server.stop()
    if code:
        record.add_problem(f"exit code {code} at the end")
    total, log = counts.total, server.said()
    return Report(seed, began, seconds, server.models, record, server.disruptions, total, usage, log)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="duration of the traffic (20)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the plan (default: random)")
    parser.add_argument(
        "--models", nargs="+", choices=["fake", "exact"], default=["fake", "exact"], help="models (both)"
    )
    parser.add_argument("--report", type=Path, default=Path("docs"), help="directory of the report (docs)")
    options = parser.parse_args(arguments)
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    report = soak([{"fake": FAKE, "exact": EXACT}[name] for name in options.models], 60 * options.minutes, seed)
    report.write(options.report)
    print(report.markdown())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
