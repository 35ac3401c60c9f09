"""The middleware: one ASGI layer in front of all routes, and the log.

It names, counts and logs every request, and admits or refuses it: while the server loads or stops, by its host, by its
API key, by the size and type of its body. Rules go by the routed path and nothing else. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.errors import ConfigError
from tokenmill.outputs import Usage
from tokenmill.server.config import LOOPBACK, ServerConfig, hash_key
from tokenmill.server.errors import ApiError
from tokenmill.server.telemetry.figures import CLIENT_GONE, Endpoints, Outcome, outcome_of
from tokenmill.server.telemetry.hub import Telemetry
from tokenmill.server.telemetry.timeline import Delivery
from tokenmill.session.records import MEDIA_TYPE

access = logging.getLogger("tokenmill.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""A client's own id for a request is used if it looks like this."""
KEY_HEADERS = (b"x-api-key", b"api-key")
"""Where some clients put the key instead."""
KEY_DIGITS = 8
"""Of a key's hash, in the log."""
BLOCKED_S = 0.002
"""Sending that takes longer waits for the client."""
MOST_BLOCKED = 1024
CLOSE = {"Connection": "close"}
"""On an error that is sent before the whole body was read."""
LINGER_BYTES, LINGER_S = 16 << 20, 5.0

UNKNOWN_HOST = ApiError(421, "unknown Host header; see --allowed-host", code="unknown_host")
INVALID_KEY = ApiError(
    401,
    "Incorrect API key provided. Send a valid one: Authorization: Bearer KEY",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
COMPRESSED = ApiError(415, "compressed bodies are not supported", headers=CLOSE)
NO_JSON = ApiError(415, "the body must be JSON, with Content-Type: application/json", headers=CLOSE)
NO_FILE = ApiError(415, f"the body must be a session file, with Content-Type: {MEDIA_TYPE}", headers=CLOSE)


# -- what is known of a request ---------------------------------------------------------------------------------------


@dataclass
class Caller:
    """What is known of a request before its body is read, and what is noted for the log while it runs."""

    request_id: str
    abort: Callable[[], None]
    """Drops its connection at once: unsent data is discarded."""
    key: str = ""
    """The hash of the API key it came with; empty where none is needed."""
    call_id: str = "-"
    """The id of what it runs, as its answer has it: chatcmpl-..."""
    model: str = "-"
    """The model that it uses, by the name that it is served under."""
    body_bytes: int = 0
    """Size of its body, once read: about how much there is to tokenize."""
    outcome: Outcome | None = None
    """How it ended, where its status does not say: a stream's was sent before."""
    usage: Usage | None = None
    """Tokens so far, if anything was run for it."""
    began: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    blocked: list[tuple[float, float]] = field(default_factory=list)
    """When sending waited for the client."""
    differs_in: tuple[int, str] | None = None
    """The message in which a chat's prompt diverges from the cached prefix: its number and its role."""

    def charge(self, usage: Usage) -> None:
        """Add the tokens of something that ran for it."""
        so_far = self.usage or Usage(0, 0)
        self.usage = Usage(
            so_far.prompt_tokens + usage.prompt_tokens,
            so_far.completion_tokens + usage.completion_tokens,
            so_far.cached_tokens + usage.cached_tokens,
        )


def caller_of(scope: Scope) -> Caller:
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


@dataclass
class Gate:
    """How many requests are inside, and the error for new ones while it is closed."""

    closed: ApiError | None = None
    num_inside: int = 0


@dataclass(frozen=True)
class Paths:
    """The paths that have rules of their own, as the routes define them."""

    endpoints: Endpoints
    """All of them, by the label they have in metrics."""
    public: frozenset[str] = frozenset()
    """These need no key, answer while the gate is closed, and are not waited for on shutdown."""
    endless: frozenset[str] = frozenset()
    """Streams that end only when the server stops: not waited for on shutdown."""
    uploads: frozenset[str] = frozenset()
    """These take a session file; all others take JSON."""


# -- the layer --------------------------------------------------------------------------------------------------------


class Middleware:
    """The one layer before the routes. With CORS, Starlette's answers sit between its two halves, so that they are
    named and logged as all others.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, gate: Gate, paths: Paths, telemetry: Telemetry) -> None:
        self._app = app
        self._gate = gate
        self._paths = paths
        self._telemetry = telemetry
        self._key_hashes = config.every_key_hash
        # Where a key is needed, a web page that makes its own name resolve to this machine has none.
        is_open = not config.key_hashes and not config.insecure
        hosts = {name.lower() for name in config.allowed_hosts | LOOPBACK | {config.host}}
        self._hosts = hosts if is_open else None
        self._max_body_bytes = config.max_body_bytes
        self._too_large = ApiError(413, f"a body may have {config.max_body_bytes} bytes", headers=CLOSE)
        self._admitted: ASGIApp = self._admit
        if config.cors_origins:
            self._admitted = CORSMiddleware(
                self._admit,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name, count and log the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, status = scope["path"], CLIENT_GONE
        caller = scope["state"]["caller"] = Caller(_request_id(scope), scope["state"].pop("abort"))
        REQUEST_ID.set(caller.request_id)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", caller.request_id.encode())]
            begin = time.monotonic()
            await send(message)
            end = time.monotonic()
            if end - begin > BLOCKED_S and len(caller.blocked) < MOST_BLOCKED:
                caller.blocked.append((begin, end))

        is_public = path in self._paths.public
        is_waited_for = not is_public and path not in self._paths.endless
        endpoint = self._paths.endpoints.label(path)
        self._telemetry.traffic.enter(endpoint)
        self._gate.num_inside += is_waited_for
        try:
            await self._admitted(scope, receive, send_named)
        except Exception:
            caller.outcome = Outcome.FAILED
            raise
        finally:
            self._gate.num_inside -= is_waited_for
            ended = time.monotonic()
            outcome, seconds = caller.outcome or outcome_of(status), ended - caller.began
            if caller.call_id != "-":
                delivery = Delivery(caller.began, ended, tuple(caller.blocked), caller.differs_in)
                self._telemetry.note_done(caller.call_id, delivery)
            self._telemetry.traffic.leave(endpoint, outcome, seconds)
            _log(logging.DEBUG if is_public else logging.INFO, scope, caller, status, outcome, seconds)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with the error that keeps it out."""
        headers = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            if "Connection" in refusal.headers:
                await _discard(receive)
            await JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)(scope, receive, send)
            return
        num_read = 0

        async def receive_counted() -> Message:
            nonlocal num_read
            message = await receive()
            if message["type"] == "http.request":
                num_read += len(message.get("body", b""))
                if num_read > self._max_body_bytes:
                    raise HTTPException(413, self._too_large.message, headers=CLOSE)
            return message

        # With a length, the parser reads no more than that.
        await self._app(scope, receive_counted if b"transfer-encoding" in headers else receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        """Why the request is not admitted, if so. Notes whose it is."""
        is_public = scope["path"] in self._paths.public
        if self._gate.closed is not None and not is_public:
            return replace(self._gate.closed, headers={**self._gate.closed.headers, **CLOSE})
        if self._hosts is not None and b"host" in headers and _host_name(headers[b"host"]) not in self._hosts:
            return UNKNOWN_HOST
        # A browser sends OPTIONS without a key, to ask whether it may send one; no route answers to it.
        if self._key_hashes and not is_public and scope["method"] != "OPTIONS":
            known = known_key(_given_key(scope), self._key_hashes)
            if known is None:
                return INVALID_KEY
            caller_of(scope).key = known.hex()
        return self._body_refusal(scope["path"], headers)

    def _body_refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        """Nothing is decompressed, so nothing expands to gigabytes. A form on some web page can send neither JSON nor
        session files.
        """
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return self._too_large
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return COMPRESSED
        if not length.strip(b"0") and b"transfer-encoding" not in headers:
            return None
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if path in self._paths.uploads:
            return None if kind == MEDIA_TYPE.encode() else NO_FILE
        is_json = kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
        return None if is_json else NO_JSON


def _request_id(scope: Scope) -> str:
    """The client's own, if it sent a sane one; else a new one."""
    given: list[str] = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and SANE_ID.fullmatch(given[0]):
        return given[0]
    return f"req-{secrets.token_hex(16)}"


def _host_name(header: bytes) -> str:
    """Without the port."""
    text = header.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.rpartition(":")[2].isdigit() and ":" in text else text


def known_key(key: bytes | None, key_hashes: tuple[bytes, ...]) -> bytes | None:
    """The hash of a key that is allowed. All hashes are compared, each in constant time."""
    if key is None:
        return None
    given, found = hash_key(key), None
    for known in key_hashes:
        if hmac.compare_digest(known, given):
            found = known
    return found


def _given_key(scope: Scope) -> bytes | None:
    """The one key that a request has; none if it has several that differ."""
    keys = set()
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            keys.add(key if scheme.lower() == b"bearer" else None)
        elif name in KEY_HEADERS:
            keys.add(value)
    return keys.pop() if len(keys) == 1 else None


async def _discard(receive: Receive) -> None:
    """Read a body without using it, up to a limit: many clients read the answer only after sending all of it."""
    num_read = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_read < LINGER_BYTES:
                message = await receive()
                num_read += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


# -- the log: to standard error, each line with the request's id. No prompts, answers or keys -------------------------

FORMAT = "%(asctime)s %(levelname)s %(request_id)s %(name)s: %(message)s"
LEVELS = ("debug", "info", "warning", "error")
STYLES = ("text", "json")


def configure_logs(level: str, style: str = "text") -> None:
    """One handler for tokenmill's and uvicorn's loggers: lines of text, or one JSON object a line."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is not supported; supported: {', '.join(LEVELS)}")
    if style not in STYLES:
        raise ConfigError(f"log format {style!r} is not supported; supported: {', '.join(STYLES)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else logging.Formatter(FORMAT))
    handler.addFilter(_add_request_id)
    for name in ("tokenmill", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "tokenmill" else logging.WARNING)


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger; then the fields of a request that has ended, or a message."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        request = getattr(record, "request", None)
        if request is not None:
            line |= request
        else:
            line |= {"id": getattr(record, "request_id", "-"), "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = REQUEST_ID.get()
    return True


def _log(level: int, scope: Scope, caller: Caller, status: int, outcome: Outcome, seconds: float) -> None:
    """One line for each request; as JSON it says more."""
    if not access.isEnabledFor(level):
        return
    path = ascii(scope["path"])[1:-1][:200]  # nothing in it may look like a line of the log
    key, usage, first = caller.key[:KEY_DIGITS] or "-", caller.usage, caller.first_token_at
    request = {
        "id": caller.request_id,
        "call_id": caller.call_id,
        "method": scope["method"],
        "path": path,
        "status": status,
        "outcome": outcome.value,
        "ms": round(1000 * seconds, 1),
        "key": key,
        "model": caller.model,
        "prompt_tokens": usage and usage.prompt_tokens,
        "cached_tokens": usage and usage.cached_tokens,
        "completion_tokens": usage and usage.completion_tokens,
        "ttft_ms": None if first is None else round(1000 * (first - caller.began), 1),
    }
    what = (scope["method"], path, status, 1000 * seconds, caller.call_id, key)
    access.log(level, "%s %s %d %.0f ms %s key=%s", *what, extra={"request": request})
