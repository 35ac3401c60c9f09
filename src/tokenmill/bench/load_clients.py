"""One request to an OpenAI-compatible server, over a plain socket, with the time at which every piece of it came.

Each request has a connection of its own, and its clock starts before it connects. A server's answer is read as it is:
whatever is wrong with it becomes an error of that request, never an exception of the benchmark. `server_process` runs a
server to measure, which can be stopped while another one is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BUFFER_BYTES = 1 << 20
CALL_TIMEOUT_S = 60.0
DETAIL_CHARS = 200
"""Of what a server said about an error."""


class HttpFailure(Exception):
    """A request did not get its answer. `kind` is what such failures are counted by, `detail` is about this one."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Target:
    """A server, and the key that it wants to see."""

    base_url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        url = self.base_url.rstrip("/").removesuffix("/v1")  # paths have it already
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.base_url!r} is no http:// or https:// address")
        object.__setattr__(self, "base_url", url)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(self.base_url)
        is_tls = url.scheme == "https"
        port = url.port or (443 if is_tls else 80)
        return await asyncio.open_connection(url.hostname, port, ssl=is_tls or None, limit=BUFFER_BYTES)

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """As it goes over the wire; a body that is bytes is sent as it is."""
        url = urlsplit(self.base_url)
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {url.path}{path} HTTP/1.1", f"Host: {url.netloc}", "Connection: close"]
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        lines += ["Content-Type: application/json"] if content else []
        return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


@dataclass(frozen=True)
class HttpReply:
    """An answer whose body is still to be read."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        if self.status == 204:
            return
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
        elif "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        else:
            while piece := await self.reader.read(BUFFER_BYTES):
                yield piece

    async def content(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def failure(self) -> HttpFailure:
        """What an answer that is not 200 says."""
        content = (await self.content()).decode(errors="replace")
        try:
            error = json.loads(content)["error"]
            detail = str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, KeyError, TypeError):
            detail = content
        return HttpFailure(f"HTTP {self.status}", detail[:DETAIL_CHARS])


@asynccontextmanager
async def exchange(target: Target, method: str, path: str, body: Any = None) -> AsyncIterator[HttpReply]:
    """Send a request, read the head of its answer; the connection is closed at the end, whatever has happened."""
    reader, writer = await target.connect()
    try:
        writer.write(target.request(method, path, body))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = re.match(r"HTTP/1\.\d (\d{3})\b", head)
        if status is None:
            raise HttpFailure("no HTTP", head[:DETAIL_CHARS].strip())
        headers = dict(line.split(":", 1) for line in head.split("\r\n")[1:] if ":" in line)
        yield HttpReply(int(status[1]), {name.lower(): value.strip() for name, value in headers.items()}, reader)
    finally:
        writer.close()


async def call(target: Target, method: str, path: str, body: Any = None) -> Any:
    """A request that is answered with JSON at once; `HttpFailure` if it is not."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S), exchange(target, method, path, body) as answer:
            if answer.status >= 300:
                raise await answer.failure()
            content = await answer.content()
            return json.loads(content) if content else None
    except TimeoutError:
        raise HttpFailure("timeout", f"no answer to {method} {path} within {CALL_TIMEOUT_S:g} s") from None
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise HttpFailure(type(error).__name__, f"{method} {target.base_url}{path}: {error}") from error


async def first_model(target: Target) -> str:
    """The first one that the server names."""
    answer = await call(target, "GET", "/v1/models")
    if not answer.get("data"):
        raise HttpFailure("no model", f"{target.base_url}/v1/models names none")
    return str(answer["data"][0]["id"])


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of a stream's events; comments and empty lines are left out."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


@dataclass(frozen=True)
class Sample:
    """What became of one request. Moments are those of `time.perf_counter`."""

    sent_s: float
    chunk_times_s: tuple[float, ...] = ()
    """When each piece of text came."""
    ended_s: float = 0.0
    """When the last piece came, or the finish reason after it."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them; the pieces, where it does not."""
    text: str = ""
    queued_s: float = 0.0
    """How long it waited before it was sent, because so many others ran."""
    error: str = ""
    """The kind of its failure; empty if it got its answer."""
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        """To the first piece of text, or to the finish reason of an answer that has none."""
        return (self.chunk_times_s[0] if self.chunk_times_s else self.ended_s) - self.sent_s

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """The mean time of a token after the first; 0 where there is none."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece and the next."""
        return [b - a for a, b in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]


class Stream:
    """A request whose answer is streamed. What has come so far can be seen at any time, also when it was cancelled."""

    def __init__(self, target: Target, path: str, body: Mapping[str, Any], timeout_s: float) -> None:
        self._target = target
        self._path = path
        self._body = body
        self._timeout_s = timeout_s
        self._sent_s = self._ended_s = 0.0
        self._times: list[float] = []
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] = {}
        self._has_finish = False
        self._is_over = False
        self._failure: HttpFailure | None = None
        self._news = asyncio.Event()

    @property
    def num_chunks(self) -> int:
        """Pieces of text so far."""
        return len(self._times)

    async def run(self) -> Sample:
        """Send it and read its answer to the end; never raises."""
        self._sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read()
        except TimeoutError:
            self._failure = HttpFailure("timeout", f"not answered within {self._timeout_s:g} s")
        except HttpFailure as error:
            self._failure = error
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            self._failure = HttpFailure(type(error).__name__, str(error)[:DETAIL_CHARS])
        finally:
            self._is_over = True
            self._news.set()
        return self.sample()

    async def wait_for_chunks(self, count: int) -> None:
        """Until so many pieces of text have come; `HttpFailure` if it ends before."""
        while self.num_chunks < count:
            if self._is_over:
                raise self._failure or HttpFailure("ended", f"after {self.num_chunks} pieces of {count}")
            self._news.clear()
            await self._news.wait()

    def sample(self, queued_s: float = 0.0) -> Sample:
        return Sample(
            self._sent_s,
            tuple(self._times),
            self._ended_s,
            int(self._usage.get("prompt_tokens") or 0),
            int(self._usage.get("completion_tokens") or len(self._times)),
            "".join(self._texts),
            queued_s,
            self._failure.kind if self._failure else "",
            self._failure.detail if self._failure else "",
        )

    async def _read(self) -> None:
        async with exchange(self._target, "POST", self._path, self._body) as answer:
            if answer.status != 200:
                raise await answer.failure()
            async for data in events(answer.pieces()):
                if data == b"[DONE]":
                    break
                self._hear(data)
        if not self._times and not self._has_finish:
            raise HttpFailure("empty stream", "it ended without a token")
        if not self._has_finish:
            raise HttpFailure("cut off", f"after {self.num_chunks} pieces, without a finish reason")

    def _hear(self, data: bytes) -> None:
        now = time.perf_counter()
        chunk = json.loads(data)
        if error := chunk.get("error"):
            detail = error.get("message", error) if isinstance(error, dict) else error
            raise HttpFailure("error event", str(detail)[:DETAIL_CHARS])
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            if text := text_of(choice):
                self._times.append(now)
                self._texts.append(text)
            if text or choice.get("finish_reason"):
                self._ended_s = now
                self._has_finish = self._has_finish or bool(choice.get("finish_reason"))
        self._news.set()


def text_of(choice: Mapping[str, Any]) -> str:
    """What a chunk of a completion or of a chat says; reasoning counts, a role alone does not."""
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")


# -- bodies -----------------------------------------------------------------------------------------------------------

STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def completion_body(model: str, prompt: str | Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Of /v1/completions."""
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, **STREAMED, **more}


def chat_body(model: str, messages: Sequence[Mapping[str, str]], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Of /v1/chat/completions."""
    return {"model": model, "messages": list(messages), "max_completion_tokens": max_tokens, **STREAMED, **more}


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
    def pid(self) -> int:
        return self._process.pid

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
