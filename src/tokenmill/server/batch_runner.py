"""`Batches`: files of requests that run in the background, in the time that live requests leave.

A batch is a document; its results are two files that only grow, answers and errors, one line each, synced in groups.
What is in them is done. So after a crash a batch goes on with the lines that are in neither, and each line is answered
once. When all are done the two files become files of the batch's key.

Runs on the event loop; files are read and written on threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Any

from starlette.responses import Response

from tokenmill.errors import SessionMoved, TokenmillError
from tokenmill.outputs import Usage
from tokenmill.server.errors import ApiError, log_failure, to_api_error
from tokenmill.server.fields import read_json
from tokenmill.server.keys import KeyRing
from tokenmill.server.middleware import REQUEST_ID, Caller
from tokenmill.server.protocol import Connection
from tokenmill.server.sse import escaped
from tokenmill.server.stored_files import FILE_TTL_S, Files, StoredFile, durable, durable_call
from tokenmill.server.telemetry.figures import BatchFigures, Outcome
from tokenmill.session.blobs import Blobs, Claim
from tokenmill.session.documents import Document, Documents

log = logging.getLogger(__name__)

KIND = "batch"
WINDOW = re.compile(r"([1-9]\d{0,2})([mhd])")
UNITS_S = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 7 * 86400
MAX_LINES = 50_000
"""Of one batch, as OpenAI has it."""
MAX_UNFINISHED = 64
"""Batches of a key."""
MAX_FINISHED = 1000
"""Batches of a key that are over; older ones are forgotten, their files stay."""
MAX_LINE_ERRORS = 100
"""That a batch which can't run tells."""
MAX_UNWRITTEN = 256
"""Results that wait for the disk; then no more lines are begun."""
RETRY_S = 1.0
CLOSE_S = 5.0
"""For results that are being written when the server stops."""
MOST_RETRY_S = 30.0
RETRIED = frozenset({429, 503})
"""Statuses after which a line is tried again: the server was busy, or on its way down or up."""
LOAD_TRIES = 3
"""How often a line is tried whose model can't be loaded."""
TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")

AnswerLine = Callable[[str, Caller, bytes], Awaitable[Response]]
"""Answers a line: the endpoint's path, the caller, the line."""


class Status(Enum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in OVER


OVER = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})


@dataclass
class BatchJob:
    """The state of a batch. What `body` has is durable."""

    id: str
    key: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_ttl_s: int = FILE_TTL_S
    """For how long the files of its results are kept."""
    status: Status = Status.VALIDATING
    times: dict[str, int] = field(default_factory=dict)
    """When it came into each status."""
    errors: list[dict[str, Any]] | None = None
    """Why it can't run, by line."""
    model: str | None = None
    """The one that its first line names."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    is_settled: bool = False
    """All results are written: what is left is to make files of them."""
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKENS, 0))

    @classmethod
    def of(cls, body: dict[str, Any]) -> BatchJob:
        return cls(**{**body, "status": Status(body["status"])})

    def body(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status.value}

    def become(self, status: Status) -> None:
        self.status = status
        self.times.setdefault(f"{status.value}_at", int(time.time()))

    def note(self, is_answer: bool, used: dict[str, int]) -> None:
        """One line is done."""
        self.completed += is_answer
        self.failed += not is_answer
        for name, count in used.items():
            self.tokens[name] += count

    def shape(self) -> dict[str, Any]:
        """As OpenAI shows it."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        tokens = self.tokens
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": None if self.errors is None else {"object": "list", "data": self.errors},
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "expires_at": self.expires_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": tokens["input_tokens"],
                "input_tokens_details": {"cached_tokens": tokens["cached_tokens"]},
                "output_tokens": tokens["output_tokens"],
                "output_tokens_details": {"reasoning_tokens": tokens["reasoning_tokens"]},
                "total_tokens": tokens["input_tokens"] + tokens["output_tokens"],
            },
            "metadata": self.metadata,
        }


def window_s(window: str) -> int:
    """A completion window in seconds: OpenAI's is always 24h."""
    found = WINDOW.fullmatch(window)
    seconds = int(found[1]) * UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        what = "must be a number of minutes, hours or days up to 7d, like 24h"
        raise ApiError(400, f"completion_window {what}", param="completion_window")
    return seconds


# -- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A request in the input file."""

    number: int
    """From 1, as editors count."""
    custom_id: str
    begin: int
    """Its place in the file (bytes)..."""
    num_bytes: int


class _WrongLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass
class InputFile:
    """The lines of an input file, and what is wrong with them."""

    lines: list[Line] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    model: str | None = None

    def add_error(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        if len(self.errors) < MAX_LINE_ERRORS:
            self.errors.append({"code": code, "line": line, "message": message, "param": param})


def read_input(path: Path, endpoint: str, max_line_bytes: int) -> InputFile:
    """Read and check an input file; each line that is wrong has an error of its own. For any thread."""
    read, seen, begin = InputFile(), dict[str, int](), 0
    with path.open("rb") as file:
        for number, raw in enumerate(_lines(file, max_line_bytes), 1):
            at, begin = begin, begin + len(raw)
            if not raw.strip():
                continue
            if len(read.lines) + len(read.errors) >= MAX_LINES:
                read.add_error("too_many_requests", f"a batch may have {MAX_LINES} requests", number)
                break
            try:
                request = _check_line(raw, endpoint, max_line_bytes)
                first = seen.setdefault(request["custom_id"], number)
                if first != number:
                    raise _WrongLine("duplicate_custom_id", f"line {first} has the same custom_id", "custom_id")
            except _WrongLine as error:
                read.add_error(error.code, str(error), number, error.param)
                continue
            model = request["body"].get("model")
            read.model = read.model or (model if isinstance(model, str) else None)
            read.lines.append(Line(number, request["custom_id"], at, len(raw)))
    if not read.lines and not read.errors:
        read.add_error("empty_file", "the input file has no requests")
    return read


def _lines(file: Any, max_line_bytes: int) -> Iterator[bytes]:
    """Lines with their ends. One that is too long ends the file: nothing after it can be trusted to be a line."""
    while raw := file.readline(max_line_bytes + 2):
        yield raw
        if len(raw) > max_line_bytes + 1:
            return


def _check_line(raw: bytes, endpoint: str, max_line_bytes: int) -> dict[str, Any]:
    if len(raw) > max_line_bytes + 1:
        raise _WrongLine("line_too_long", f"a line may have {max_line_bytes} bytes")
    try:
        request = read_json(raw, "the line")
    except ValueError as error:
        raise _WrongLine("invalid_json_line", str(error)) from None
    if not isinstance(request, dict):
        raise _WrongLine("invalid_json_line", "the line must be a JSON object")
    for name, kind, words in (("custom_id", str, "a string"), ("body", dict, "an object")):
        if not isinstance(request.get(name), kind) or not request[name]:
            raise _WrongLine("missing_required_parameter", f"{name} is required, and must be {words}", name)
    if len(request["custom_id"]) > 512:
        raise _WrongLine("invalid_custom_id", "custom_id may have 512 characters", "custom_id")
    if request.get("method", "POST") != "POST":
        raise _WrongLine("invalid_method", "method must be POST", "method")
    if request.get("url") != endpoint:
        raise _WrongLine("invalid_url", f"url must be that of the batch, {endpoint}", "url")
    return request


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What became of a line."""

    is_answer: bool
    """It goes to the output file, not to the error file."""
    text: bytes
    used: dict[str, int] = field(default_factory=dict)


def answered(line: Line, caller: Caller, status: int, body: bytes) -> Result:
    """The result of a line that has a response."""
    head = _head(line)
    about = f'"response":{{"status_code":{status},"request_id":{json.dumps(caller.request_id)},"body":'
    told = body if body.isascii() else escaped(body.decode()).encode()
    text = f"{head},{about}".encode() + told + b'},"error":null}\n'
    return Result(status < 400, text, _used(caller.usages))


def not_run(line: Line, code: str, message: str) -> Result:
    """The result of a line that was not run."""
    error = json.dumps({"code": code, "message": message}, separators=(",", ":"))
    return Result(False, f'{_head(line)},"response":null,"error":{error}}}\n'.encode())


def _head(line: Line) -> str:
    return f'{{"id":"batch_req_{secrets.token_hex(16)}","custom_id":{json.dumps(line.custom_id)}'


def _used(usages: Sequence[Usage]) -> dict[str, int]:
    return {
        "input_tokens": sum(one.prompt_tokens for one in usages),
        "cached_tokens": sum(one.cached_tokens for one in usages),
        "output_tokens": sum(one.completion_tokens for one in usages),
        "reasoning_tokens": sum(one.reasoning_tokens for one in usages),
    }


class ResultFiles:
    """The results of a batch as they grow. Appended in groups, each of which is one write and one sync a file."""

    def __init__(
        self, folder: Path, batch: BatchJob, figures: BatchFigures, shared: tuple[Blobs, Claim] | None = None
    ) -> None:
        self.answers, self.errors = (folder / f"{batch.id}.{name}.jsonl" for name in ("output", "errors"))
        self._batch = batch
        self._figures = figures
        self._shared = shared
        """Where they are durable, if not here; and that this server may write there."""
        self._moved: SessionMoved | None = None
        self.num_bytes = 0
        """Of all results, those that wait included."""
        self._unwritten: dict[bool, list[Result]] = {True: [], False: []}
        """Answers, and errors."""
        self._writing: asyncio.Task[None] | None = None

    def file_id(self, path: Path) -> str:
        """Of the file that one of them becomes."""
        return f"file-{self._batch.id.removeprefix('batch_')}{'o' if path is self.answers else 'e'}"

    async def fetch(self) -> None:
        """Have here what other servers have written."""
        if self._shared is None:
            return
        blobs, _ = self._shared
        for path in (self.answers, self.errors):
            path.unlink(missing_ok=True)
            await durable_call(blobs.fetch, self.file_id(path), path)

    def check(self) -> None:
        """`SessionMoved` if another server has taken the batch over."""
        if self._moved is not None:
            raise self._moved

    def replay(self) -> set[str]:
        """The lines that are done; what a crash left of an unfinished line is cut off. For any thread."""
        done: set[str] = set()
        for path, is_answer in ((self.answers, True), (self.errors, False)):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("a+b") as file:
                file.seek(0)
                end = 0
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break
                    end += len(raw)
                    result = json.loads(raw)
                    done.add(result["custom_id"])
                    self._batch.note(is_answer, _told(result))
                file.truncate(end)
                self.num_bytes += end
        return done

    def add(self, result: Result) -> None:
        """Append a result soon; it counts once it is on the disk."""
        self._unwritten[result.is_answer].append(result)
        self.num_bytes += len(result.text)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())

    @property
    def num_unwritten(self) -> int:
        return sum(map(len, self._unwritten.values()))

    async def flush(self) -> None:
        """Wait until all results are on the disk."""
        while self._writing is not None and not self._writing.done():
            await asyncio.shield(self._writing)
        self.check()

    async def close(self) -> None:
        """Write what can be written now."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=CLOSE_S)
            self._writing.cancel()

    async def _write_all(self) -> None:
        while self.num_unwritten:
            for is_answer in (True, False):
                await self._write(is_answer)

    async def _write(self, is_answer: bool) -> None:
        """Append all that waits for one of the files. What fails is tried again, and nothing of the other one."""
        waiting = self._unwritten[is_answer]
        group = list(waiting)
        if not group:
            return
        path, data = self.answers if is_answer else self.errors, b"".join(one.text for one in group)
        try:
            await asyncio.to_thread(_append, path, data)
            if self._shared is not None:
                await self._share(path, data, *self._shared)
        except SessionMoved as error:
            self._moved = error
            for others in self._unwritten.values():
                others.clear()
            return
        except (OSError, ApiError) as error:
            log.warning("results of %s could not be written, trying again: %s", self._batch.id, error)
            await asyncio.sleep(RETRY_S)
            return
        del waiting[: len(group)]
        for result in group:
            self._batch.note(result.is_answer, result.used)
            self._figures.lines[Outcome.FINISHED if result.is_answer else Outcome.FAILED] += 1

    async def _share(self, path: Path, data: bytes, blobs: Blobs, claim: Claim) -> None:
        """Append to a file in the database what was appended here; it is not here either if that fails."""
        begin = path.stat().st_size - len(data)
        try:
            await durable(blobs.append(self.file_id(path), begin, data, claim))
        except BaseException:
            os.truncate(path, begin)
            raise


def _append(path: Path, data: bytes) -> None:
    """All of it, or nothing."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) != len(data):
                raise OSError("the disk is full")
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def _told(result: dict[str, Any]) -> dict[str, int]:
    """Tokens of a result, by its body."""
    body = (result.get("response") or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return {}
    into = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    out = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return {
        "input_tokens": usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        "cached_tokens": into.get("cached_tokens", 0),
        "output_tokens": usage.get("completion_tokens", usage.get("output_tokens", 0)),
        "reasoning_tokens": out.get("reasoning_tokens", 0),
    }


# -- all of them ------------------------------------------------------------------------------------------------------


class Batches:
    """The batches of a server."""

    def __init__(
        self,
        files: Files,
        documents: Documents,
        keys: KeyRing,
        figures: BatchFigures,
        capacity: Callable[[], int],
        max_line_bytes: int,
        blobs: Blobs | None = None,
        look_s: float = 3.0,
    ) -> None:
        self._files = files
        self._documents = documents
        self._keys = keys
        self._figures = figures
        self._capacity = capacity
        """Lines that may run now, beside the live requests."""
        self._max_line_bytes = max_line_bytes
        self._blobs = blobs
        """Where other servers share the batches: each is claimed by the one that runs it."""
        self._look_s = look_s
        """How often to look for batches whose server is gone."""
        self._claims: dict[str, Claim] = {}
        self._claiming: set[str] = set()
        """Batches that are being created or claimed here."""
        self._looking: asyncio.Task[None] | None = None
        self._saving = asyncio.Lock()
        self._answer: AnswerLine | None = None
        self._batches: dict[str, BatchJob] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelling: dict[str, asyncio.Event] = {}
        self._has_room = asyncio.Condition()
        self._num_lines = 0
        """Lines that run."""
        figures.by_status = self._num_by_status
        files.is_used = self.uses

    async def start(self, answer: AnswerLine) -> None:
        """Go on with what an earlier process left."""
        self._answer = answer
        await self._files.load()
        if self._blobs is not None:
            self._looking = asyncio.create_task(self._look(), name="tokenmill-batches")
            return
        await self._read_all()
        for batch in self._batches.values():
            if not batch.status.is_over:
                self._begin(batch)

    async def _read_all(self) -> None:
        page = await durable(self._documents.list(KIND, None))
        stored = {} if page is None else {one.id: BatchJob.of(one.body) for one in page.documents}
        running = {name: batch for name, batch in self._batches.items() if name in self._running}
        self._batches = {**stored, **running}

    async def refresh(self) -> None:
        """Know the batches of other servers, as they were last stored."""
        if self._blobs is not None:
            await self._read_all()

    async def _look(self) -> None:
        """Go on with what servers have left that are gone, and tell others how far the batches of this one are."""
        while True:
            try:
                await self._files.refresh()
                await self.refresh()
                for batch in list(self._batches.values()):
                    if batch.id in self._running:
                        try:
                            await self._save(batch)
                        except SessionMoved as error:
                            log.warning("%s is given up: %s", batch.id, error)
                            if (task := self._running.get(batch.id)) is not None:
                                task.cancel()
                            self._claims.pop(batch.id, None)
                    elif not batch.status.is_over and await self._claim(batch.id):
                        self._begin(self._batches[batch.id])
            except (ApiError, TokenmillError) as error:
                log.warning("batches of other servers cannot be looked for: %s", getattr(error, "cause", None) or error)
            await asyncio.sleep(self._look_s)

    async def _claim(self, name: str) -> bool:
        """Have a batch that is not over for this server alone, as it is now."""
        if self._blobs is None:
            return True
        if name in self._claims or name in self._claiming:
            return False
        self._claiming.add(name)
        try:
            claim = await durable(self._blobs.claim(name))
            if claim is None:
                return False
            await self._read_all()
            if name not in self._batches or self._batches[name].status.is_over:
                await durable(self._blobs.release(claim, is_over=True))
                return False
            self._claims[name] = claim
        finally:  # a claim that is not kept is made again, by this server or after its lease
            self._claiming.discard(name)
        return True

    async def _release(self, name: str, *, is_over: bool = False) -> None:
        claim = self._claims.pop(name, None)
        if claim is not None and self._blobs is not None:
            with suppress(ApiError):  # then its lease ends
                await durable(self._blobs.release(claim, is_over=is_over))

    async def stop(self) -> None:
        """Lines that run are given up; after a restart they are run again."""
        tasks = [*self._running.values(), *([] if self._looking is None else [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in list(self._claims):
            await self._release(name)

    # -- those of a key -----------------------------------------------------------------------------------------------

    async def create(
        self,
        key: str,
        endpoint: str,
        file: StoredFile,
        window: str,
        metadata: dict[str, str] | None,
        *,
        output_ttl_s: int = FILE_TTL_S,
    ) -> BatchJob:
        now = int(time.time())
        if sum(not one.status.is_over for one in self.of(key)) >= MAX_UNFINISHED:
            what = f"an API key may have {MAX_UNFINISHED} batches that are not over"
            raise ApiError(429, what, "rate_limit_error", "too_many_batches")
        name = f"batch_{secrets.token_hex(16)}"
        batch = BatchJob(name, key, endpoint, file.id, window, now, now + window_s(window), metadata, output_ttl_s)
        self._batches[batch.id] = batch  # its file is in use from now on
        self._claiming.add(name)
        try:
            await self._remove_old(key)
            if self._blobs is not None and (claim := await durable(self._blobs.claim(name))) is not None:
                self._claims[name] = claim
            await self._save(batch)
        except BaseException:
            self._batches.pop(batch.id, None)
            await self._release(name, is_over=True)
            raise
        finally:
            self._claiming.discard(name)
        self._batches[batch.id] = batch
        self._begin(batch)
        return batch

    async def _remove_old(self, key: str) -> None:
        """Forget batches of a key that were over long ago, or that are too many."""
        over = [one for one in self.of(key) if one.status.is_over]
        oldest = time.time() - FILE_TTL_S
        for place, old in enumerate(over):
            if old.created_at < oldest or len(over) - place > MAX_FINISHED:
                del self._batches[old.id]
                await durable(self._documents.delete(KIND, old.id, key))

    def find(self, key: str, batch_id: str) -> BatchJob:
        """One of this key's; those of others are not found."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.key != key:
            raise ApiError(404, f"no batch {batch_id!r:.80}", code="batch_not_found")
        return batch

    def of(self, key: str) -> list[BatchJob]:
        """All of this key's, oldest first."""
        return [batch for batch in self._batches.values() if batch.key == key]

    async def cancel(self, batch: BatchJob) -> BatchJob:
        """End a batch: lines that run are given up, results so far can be read. `SessionElsewhere` says where."""
        if self._blobs is not None and not batch.status.is_over and batch.id not in self._running:
            is_ours = await self._claim(batch.id)
            elsewhere = None if is_ours else await durable(self._blobs.owner(batch.id))
            if elsewhere is not None:
                raise elsewhere
            batch = self.find(batch.key, batch.id)
            if batch.id in self._claims and batch.id not in self._running:
                self._begin(batch)
        if batch.status.is_over or batch.status in (Status.CANCELLING, Status.FINALIZING):
            raise ApiError(409, f"the batch is {batch.status.value}", code="batch_not_cancellable")
        batch.become(Status.CANCELLING)
        if (event := self._cancelling.get(batch.id)) is not None:
            event.set()
        await self._save(batch)
        return batch

    def uses(self, file: StoredFile) -> bool:
        """Does a batch that is not over read this file?"""
        return any(one.input_file_id == file.id and not one.status.is_over for one in self._batches.values())

    def _num_by_status(self) -> Counter[str]:
        return Counter(batch.status.value for batch in self._batches.values())

    async def _save(self, batch: BatchJob) -> None:
        async with self._saving:  # a later state is not overtaken by an earlier one
            document = Document(KIND, batch.id, batch.key, batch.body(), batch.created_at)
            if self._blobs is None:
                await durable(self._documents.put(document))
            elif (claim := self._claims.get(batch.id)) is not None:
                await durable(self._documents.put(document, hold=claim.hold))
            else:
                raise SessionMoved(f"another server runs {batch.id}")

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _begin(self, batch: BatchJob) -> None:
        self._cancelling[batch.id] = asyncio.Event()
        if batch.status is Status.CANCELLING:
            self._cancelling[batch.id].set()
        task = self._running[batch.id] = asyncio.create_task(self._run(batch), name=f"tokenmill-{batch.id}")
        task.add_done_callback(lambda _: self._running.pop(batch.id, None))

    async def _run(self, batch: BatchJob) -> None:
        """From wherever it is to its end. If the disk fails on the way, once more after a while."""
        while True:
            try:
                await self._run_once(batch)
            except SessionMoved as error:
                log.warning("%s is given up: %s", batch.id, error)
                self._claims.pop(batch.id, None)
                return
            except Exception as error:
                is_known = isinstance(error, ApiError | OSError | TokenmillError)
                what = getattr(error, "cause", None) or error
                log.warning("%s is interrupted, trying again: %r", batch.id, what, exc_info=not is_known)
                await asyncio.sleep(MOST_RETRY_S)
            else:
                self._cancelling.pop(batch.id, None)
                await self._release(batch.id, is_over=True)
                log.info("%s is %s: %d of %d", batch.id, batch.status.value, batch.completed, batch.total)
                return

    async def _run_once(self, batch: BatchJob) -> None:
        shared = None if self._blobs is None else (self._blobs, self._claims[batch.id])
        results = ResultFiles(self._files.directory / "batches", batch, self._figures, shared)
        await results.fetch()
        if batch.is_settled:
            await self._finalize(batch, results)
            return
        try:
            path = await self._files.content(batch.input_file_id)
            given = await asyncio.to_thread(read_input, path, batch.endpoint, self._max_line_bytes)
        except FileNotFoundError:  # results so far can be read
            what = "the input file is not there any more"
            batch.errors = [{"code": "file_not_found", "line": None, "message": what, "param": "input_file_id"}]
            await self._finalize(batch, results)
            return
        if given.errors:
            batch.errors = given.errors
            batch.become(Status.FAILED)
            await self._save(batch)
            return
        batch.total, batch.model = len(given.lines), given.model
        if batch.status is Status.VALIDATING:
            batch.become(Status.IN_PROGRESS)
            await self._save(batch)
        batch.completed = batch.failed = 0
        batch.tokens = dict.fromkeys(TOKENS, 0)
        done = await asyncio.to_thread(results.replay)
        with self._files.growing(batch.key, lambda: results.num_bytes):
            await self._run_lines(batch, [one for one in given.lines if one.custom_id not in done], results)
            await self._finalize(batch, results)

    async def _run_lines(self, batch: BatchJob, lines: Sequence[Line], results: ResultFiles) -> None:
        """Until all lines are done, the batch is cancelled or its time is up."""
        working = asyncio.ensure_future(self._answer_all(batch, lines, results))
        cancelled = asyncio.ensure_future(self._cancelling[batch.id].wait())
        either: set[asyncio.Future[Any]] = {working, cancelled}
        try:
            left_s = max(0.0, batch.expires_at - time.time())
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        except BaseException:
            await results.close()
            raise
        finally:
            working.cancel()
            cancelled.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)
        await results.flush()
        if batch.status is not Status.CANCELLING and batch.completed + batch.failed < batch.total:
            done = await asyncio.to_thread(self._done, results)
            for line in lines:
                if line.custom_id not in done:
                    what = "This request could not be executed before the completion window expired."
                    results.add(not_run(line, "batch_expired", what))
            batch.times.setdefault("expired_at", int(time.time()))
            await results.flush()

    @staticmethod
    def _done(results: ResultFiles) -> set[str]:
        done: set[str] = set()
        for path in (results.answers, results.errors):
            with path.open("rb") as file:  # line by line: it may be large
                done.update(json.loads(raw)["custom_id"] for raw in file)
        return done

    async def _answer_all(self, batch: BatchJob, lines: Sequence[Line], results: ResultFiles) -> None:
        running: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []

        def note_end(task: asyncio.Task[None]) -> None:
            running.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                failures.append(error)

        given = self._files.path(batch.input_file_id).open("rb")
        try:
            for line in lines:
                results.check()
                while results.num_unwritten > MAX_UNWRITTEN:
                    await asyncio.sleep(RETRY_S)
                try:
                    self._files.check_room(batch.key)
                except ApiError as error:  # it goes on: some may be deleted meanwhile
                    results.add(not_run(line, error.code or "file_storage_full", error.message))
                    continue
                await self._take_place(batch)
                task = asyncio.create_task(self._answer_line(batch, line, given, results))
                running.add(task)
                task.add_done_callback(note_end)
            await asyncio.gather(*running)
            if failures:
                raise failures[0]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            given.close()

    async def _take_place(self, batch: BatchJob) -> None:
        """Wait until there is room for one more line beside live requests, and within the rates of its key."""
        await self._take_room()
        while wait_s := self._wait_s(batch.key):  # without a place: others may be in time
            await asyncio.shield(self._leave_place())
            await asyncio.sleep(wait_s)
            await self._take_room()

    async def _take_room(self) -> None:
        async with self._has_room:
            await self._has_room.wait_for(lambda: self._num_lines < self._capacity())
            self._num_lines += 1
            self._figures.running = self._num_lines

    async def _leave_place(self) -> None:
        async with self._has_room:
            self._num_lines -= 1
            self._figures.running = self._num_lines
            self._has_room.notify(2)

    def _wait_s(self, key: str) -> float:
        """How long the next line of a key has to wait; one whose key is not valid any more waits for that."""
        account = self._keys.account_of(key)
        return MOST_RETRY_S if account is None else min(account.admit_line(), MOST_RETRY_S)

    async def _answer_line(self, batch: BatchJob, line: Line, given: IO[bytes], results: ResultFiles) -> None:
        """Run a line until it has an answer, or an error that would be the same once more."""
        tries, has_place = 0, True
        try:
            given.seek(line.begin)
            raw = given.read(line.num_bytes)
            while (result := await self._try_line(batch, line, raw, tries)) is None:
                has_place = False
                await asyncio.shield(self._leave_place())
                await asyncio.sleep(min(RETRY_S * 2**tries, MOST_RETRY_S))
                await self._take_room()
                has_place = True
                tries += 1
            results.add(result)
        finally:
            if has_place:
                await asyncio.shield(self._leave_place())

    async def _try_line(self, batch: BatchJob, line: Line, raw: bytes, tries: int) -> Result | None:
        """Its result; None if it is to be tried again."""
        account = self._keys.account_of(batch.key)
        if account is None or self._answer is None:
            return None
        caller = Caller(f"{batch.id}-{line.number}", Connection.detached(), account, batch.key)
        caller.body_bytes, caller.background_s = len(raw), max(1.0, batch.expires_at - time.time())
        REQUEST_ID.set(caller.request_id)
        try:
            response = await self._answer(batch.endpoint, caller, raw)
            return answered(line, caller, response.status_code, bytes(response.body))
        except Exception as error:
            told = to_api_error(error)
            is_load = told.code == "model_load_failed" and tries + 1 >= LOAD_TRIES
            if told.status in RETRIED and not is_load:
                return None
            log_failure(told, error)
            body = json.dumps(told.body(), separators=(",", ":")).encode()
            return answered(line, caller, told.status, body)
        finally:
            account.leave_line(caller.reserved)

    async def _finalize(self, batch: BatchJob, results: ResultFiles) -> None:
        """Make files of the results. Each step can be repeated after a crash."""
        end = Status.EXPIRED if "expired_at" in batch.times else Status.COMPLETED
        if batch.errors is not None:
            end = Status.FAILED
        if "cancelling_at" in batch.times:
            end = Status.CANCELLED
        else:
            batch.become(Status.FINALIZING)
        batch.is_settled = True
        await self._save(batch)
        for path, purpose in ((results.answers, "output"), (results.errors, "error")):
            filename = f"{batch.id}_{purpose}.jsonl"
            about = (filename, "batch_output", batch.output_ttl_s)
            made = await self._files.adopt(results.file_id(path), batch.key, path, *about)
            setattr(batch, f"{purpose}_file_id", None if made is None else made.id)
        batch.become(end)
        await self._save(batch)
