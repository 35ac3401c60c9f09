"""The middleware: one ASGI layer in front of all routes, and the log.

It names, counts and logs every request, and admits or rejects it: while the server starts or stops, by host, by
API key and its limits, by size and type of the body. Rules depend on the routed path only. Runs on the
event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.errors import ConfigError
from tokenmill.outputs import Usage
from tokenmill.server.config import LOOPBACK, ServerConfig
from tokenmill.server.errors import ApiError, Dialect
from tokenmill.server.keys import Account, KeyRing, retry_headers
from tokenmill.server.protocol import Connection
from tokenmill.server.telemetry.figures import CLIENT_GONE, Endpoints, Outcome
from tokenmill.server.telemetry.hub import Telemetry
from tokenmill.server.telemetry.timeline import Delivery

access = logging.getLogger("tokenmill.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
HOST = re.compile(rb"\[([^\]]*).*|(.*?)(?::\d+)?")
"""A Host header: a bracketed address or a name, and optionally a port."""
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""A client's own request id is used if it matches."""
KEY_HEADERS = (b"x-api-key", b"api-key")
"""Where some clients send the key instead."""
ANTHROPIC_HEADER = b"anthropic-version"
"""Anthropic's clients send it with every request."""
TIMEOUT_HEADER = "x-request-timeout"
"""A client's timeout, in seconds."""
SESSION_HEADER = b"x-session-id"
"""On responses about a session: lets routers send requests of one conversation to the same server."""
REPLICA_HEADER = b"x-tokenmill-replica"
"""The name of the replica that has answered, on responses of servers that have a name."""
KEY_DIGITS = 8
"""Length of a key's hash in the log."""
BLOCKED_S, MOST_BLOCKED = 0.002, 1024
"""Shorter waits for the client are not recorded, nor are more than a number of them."""
LIMIT_HEADERS = (
    "retry-after-ms",
    "x-queue-position",
    *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)
"""Headers that report limits to clients, besides Retry-After."""
CLOSE = {"Connection": "close"}
"""On errors that are sent before the whole body was read."""
LINGER_BYTES, LINGER_S = 16 << 20, 5.0

UNKNOWN_HOST = ApiError(421, "unknown Host header; see --allowed-host", code="unknown_host")
INVALID_KEY = ApiError(
    401,
    "Incorrect API key provided. Send a valid one: Authorization: Bearer KEY",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
COMPRESSED = ApiError(415, "compressed bodies are not supported", headers=CLOSE)
UNTYPED = (b"", b"application/x-www-form-urlencoded")
"""Media types that clients send by default, such as curl's `-d`."""
NO_JSON = ApiError(415, "the body must be JSON, with Content-Type: application/json", headers=CLOSE)
CROSS_ORIGIN = ApiError(403, "forms of other web pages are not accepted; see --cors-origin", headers=CLOSE)
FORM_TYPE, FORM_BYTES = "multipart/form-data", 1 << 16
"""File uploads: the media type, and the allowance for the form around the file."""


def too_large(most: int) -> ApiError:
    return ApiError(413, f"a body may have {most} bytes", headers=CLOSE)


# -- request state ----------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """What is known of a request before its body is read, and what is recorded for the log while it runs."""

    request_id: str
    connection: Connection
    account: Account
    """The account whose limits apply, and that is charged."""
    key: str = ""
    """The hash of its API key; empty if none is required."""
    dialect: Dialect = Dialect.OPENAI
    """The API dialect, which decides the format of errors."""
    timeout: str | None = None
    """Timeout in seconds, from the header."""
    background_s: float | None = None
    """For a line of a batch, which runs in the background: its time limit."""
    queue_position: int | None = None
    """Number of requests queued before it."""
    reserved: int = 0
    """Tokens reserved from the account's limit until the request ends."""
    is_left_to_task: bool = False
    """Continues in the background after its response, charged to its key until it has ended."""
    call_id: str = "-"
    """The id in its response: chatcmpl-..."""
    session_id: str | None = None
    """Its session, reported to routers."""
    model: str = "-"
    """Its model, by served name."""
    body_bytes: int = 0
    """Size of its body once read: a bound on the text to tokenize."""
    outcome: Outcome | None = None
    """How it ended, if its status does not tell: a stream's was sent before."""
    usages: list[Usage] = field(default_factory=list)
    """Tokens used."""
    began: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    blocked: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which sending waited for the client."""
    differs_in: tuple[int, str] | None = None
    """The message in which a chat's prompt diverges from the cached prefix: its index and role."""

    def charge(self, usage: Usage) -> None:
        """Record tokens used."""
        self.usages.append(usage)
        self.account.charge(usage, self.reserved)
        self.reserved = 0

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return self.dialect.error_body(error, self.request_id)

    async def note_blocked(self, sending: Awaitable[None]) -> None:
        """Send, recording the time that the client makes it wait."""
        began = time.monotonic()
        await sending
        ended = time.monotonic()
        if ended - began > BLOCKED_S and len(self.blocked) < MOST_BLOCKED:
            self.blocked.append((began, ended))


@dataclass
class Gate:
    """Number of requests inside, and the error for new ones while the gate is closed."""

    closed: ApiError | None = None
    num_inside: int = 0


@dataclass(frozen=True)
class Paths:
    """Paths with rules of their own, as declared by the routes."""

    endpoints: Endpoints
    """All paths, by their label in metrics."""
    public: frozenset[str] = frozenset()
    """Require no key, answer while the gate is closed, and are not waited for on shutdown."""
    endless: frozenset[str] = frozenset()
    """Streams that end only with the server: not waited for on shutdown."""
    dialects: Mapping[str, Dialect] = field(default_factory=dict)
    """The dialect of each path that is not OpenAI's."""
    ollama_prefix: str | None = None
    """Unknown paths below it get errors in Ollama's format, too."""
    uploads: Mapping[str, str] = field(default_factory=dict)
    """The body type of each path that does not accept JSON."""
    metered: frozenset[str] = frozenset()
    """Labels of the generating endpoints, to which limits on requests and tokens apply."""


# -- the layer --------------------------------------------------------------------------------------------------------


class Middleware:
    """The one layer before the routes. Starlette's CORS layer is inside, so that its responses are named and logged
    like all others.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, gate: Gate, paths: Paths, telemetry: Telemetry, keys: KeyRing
    ) -> None:
        self._app = app
        self._gate = gate
        self._paths = paths
        self._telemetry = telemetry
        self._keys = keys
        # Without API keys, DNS rebinding would let a web page call this server: check the Host header.
        is_open = not config.key_hashes and config.keys_file is None and not config.insecure
        hosts = {name.lower().encode() for name in config.allowed_hosts | LOOPBACK | {config.host}}
        self._hosts = hosts if is_open else None
        self._replica = None if config.replica is None else config.replica.encode()
        self._max_body_bytes = config.max_body_bytes
        forms = [path for path, kind in paths.uploads.items() if kind == FORM_TYPE]
        self._max_form_bytes = dict.fromkeys(forms, config.max_file_bytes + FORM_BYTES)
        """By path, where it differs from JSON."""
        self._origins = frozenset(config.cors_origins)
        self._cors: dict[str, Any] | None = None
        if config.cors_origins:
            self._cors = {
                "allow_origins": config.cors_origins,
                "allow_methods": ["GET", "POST", "DELETE"],
                "allow_headers": ["*"],
                "expose_headers": ["x-request-id", "retry-after", *LIMIT_HEADERS],
            }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name and count the request, and pass it on if it is admitted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers, status = scope["path"], dict(scope["headers"]), CLIENT_GONE
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
        is_named = len(given) == 1 and SANE_ID.fullmatch(given[0]) is not None
        request_id = given[0] if is_named else f"req-{secrets.token_hex(16)}"
        caller = scope["state"]["caller"] = Caller(request_id, scope["state"]["connection"], self._keys.anonymous)
        if ANTHROPIC_HEADER in headers:
            caller.dialect = Dialect.ANTHROPIC
        elif path in self._paths.dialects:
            caller.dialect = self._paths.dialects[path]
        elif self._paths.ollama_prefix is not None and path.startswith(self._paths.ollama_prefix):
            caller.dialect = Dialect.OLLAMA
        kind = headers.get(b"content-type", b"")
        if caller.dialect is Dialect.OLLAMA and kind in UNTYPED and b"origin" not in headers:
            # Every example for Ollama is a `curl -d`. A form on a web page has an origin.
            headers[b"content-type"] = b"application/json"
            scope["headers"] = list(headers.items())
        if (timeout := headers.get(TIMEOUT_HEADER.encode())) is not None:
            caller.timeout = timeout.decode("latin-1")
        REQUEST_ID.set(request_id)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if caller.session_id is not None:
                    message["headers"].append((SESSION_HEADER, caller.session_id.encode()))
                if self._replica is not None and all(name != REPLICA_HEADER for name, _ in message["headers"]):
                    message["headers"].append((REPLICA_HEADER, self._replica))
                if caller.dialect is Dialect.ANTHROPIC:
                    message["headers"].append((b"request-id", request_id.encode()))
                if is_metered:
                    self._add_limits(message, caller)
            if caller.connection.flow.write_paused:
                await caller.note_blocked(send(message))
            else:
                await send(message)

        endpoint, app = self._paths.endpoints[path], self._app
        is_metered = endpoint in self._paths.metered and scope["method"] == "POST"
        refusal, is_admitted = self._refusal(scope, headers, caller), False
        if refusal is None and is_metered:
            caller.queue_position = self._telemetry.num_waiting
            refusal = caller.account.admit()
            is_admitted = refusal is None
        if refusal is not None:
            app = self._refuse(refusal, caller)
        elif b"transfer-encoding" in headers:  # with a length, the parser reads no more than that
            receive = self._counted(receive, self._max_form_bytes.get(path, self._max_body_bytes))
        if self._cors is not None:
            app = CORSMiddleware(app, **self._cors)
        is_waited_for = path not in self._paths.public and path not in self._paths.endless
        self._telemetry.traffic.enter(endpoint)
        self._gate.num_inside += is_waited_for
        try:
            await app(scope, receive, send_named)
        except Exception:
            caller.outcome = Outcome.FAILED
            raise
        finally:
            self._gate.num_inside -= is_waited_for
            if is_admitted and not caller.is_left_to_task:
                caller.account.leave(status, caller.reserved)
            self._finish(scope, caller, status, endpoint)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes], caller: Caller) -> ApiError | None:
        """The error for a request that is not admitted. Sets its account."""
        is_public = scope["path"] in self._paths.public
        if self._gate.closed is not None and not is_public:
            return replace(self._gate.closed, headers={**self._gate.closed.headers, **CLOSE})
        if self._hosts is not None and b"host" in headers:
            host = HOST.fullmatch(headers[b"host"].strip().lower())
            if host is None or (host[1] or host[2]) not in self._hosts:
                return UNKNOWN_HOST
        # Browsers send CORS preflights without a key; no route answers OPTIONS.
        if self._keys.is_required and not is_public and scope["method"] != "OPTIONS":
            account = self._keys.find(_given_key(scope))
            if account is None:
                return INVALID_KEY
            caller.account, caller.key = account, account.key.id
        # Nothing is decompressed, so there are no zip bombs. An HTML form can send neither JSON nor
        # session files.
        length = headers.get(b"content-length", b"0")
        path = scope["path"]
        most = self._max_form_bytes.get(path, self._max_body_bytes)
        if length.isdigit() and int(length[:20]) > most:
            return too_large(most)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return COMPRESSED
        if not length.strip(b"0") and b"transfer-encoding" not in headers:
            return None
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if (wanted := self._paths.uploads.get(path)) is not None:
            if kind != wanted.encode():
                return ApiError(415, f"the body must have Content-Type: {wanted}", headers=CLOSE)
            return CROSS_ORIGIN if wanted == FORM_TYPE and self._is_other_page(headers) else None
        is_json = kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
        return None if is_json else NO_JSON

    def _add_limits(self, message: Message, caller: Caller) -> None:
        """Headers with the caller's limits, and after a 429 from the queue the expected wait."""
        account, headers = caller.account, message["headers"]
        position = caller.queue_position
        if message["status"] == 429 and not any(name.lower() == b"retry-after" for name, _ in headers):
            position = self._telemetry.num_waiting + account.num_refused_ahead()
            wait = retry_headers(account.retry_s())
            headers += [(name.lower().encode(), value.encode()) for name, value in wait.items()]
        if position is not None:
            headers.append((b"x-queue-position", str(position).encode()))
        if account.is_rated:
            headers += account.rate_headers()

    def _refuse(self, refusal: ApiError, caller: Caller) -> ASGIApp:
        """Responds with the error that rejects a request."""

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            if "Connection" in refusal.headers:
                await _discard(receive)
            answer = JSONResponse(caller.error_body(refusal), refusal.status, headers=refusal.headers)
            await answer(scope, receive, send)

        return refuse

    def _is_other_page(self, headers: dict[bytes, bytes]) -> bool:
        """Whether this is a cross-origin form, for which browsers send no preflight."""
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        own = headers.get(b"host", b"").decode("latin-1").lower()
        is_listed = "*" in self._origins or origin in self._origins
        return bool(origin) and not is_listed and origin.partition("://")[2] != own

    def _counted(self, receive: Receive, most: int) -> Receive:
        """A body without a length may be as large as one with a length."""
        num_read = 0

        async def receive_counted() -> Message:
            nonlocal num_read
            message = await receive()
            if message["type"] == "http.request":
                num_read += len(message.get("body", b""))
                if num_read > most:
                    raise HTTPException(413, too_large(most).message, headers=CLOSE)
            return message

        return receive_counted

    def _finish(self, scope: Scope, caller: Caller, status: int, endpoint: str) -> None:
        """Count the request as done, and log it in one line; in JSON with more fields."""
        ended = time.monotonic()
        seconds = ended - caller.began
        if caller.call_id != "-":
            delivery = Delivery(caller.began, ended, tuple(caller.blocked), caller.differs_in)
            self._telemetry.note_done(caller.call_id, delivery)
        outcome = self._telemetry.traffic.leave(endpoint, status, caller.outcome, seconds)
        level = logging.DEBUG if scope["path"] in self._paths.public else logging.INFO
        if not access.isEnabledFor(level):
            return
        path = ascii(scope["path"])[1:-1][:200]  # no field may contain a line break
        key, used, first = caller.key[:KEY_DIGITS] or "-", caller.usages, caller.first_token_at
        client = ascii((scope["client"] or ("-",))[0])[1:-1][:64]  # from a header, behind a proxy
        request = {
            "id": caller.request_id,
            "client": client,
            "call_id": caller.call_id,
            "method": scope["method"],
            "path": path,
            "status": status,
            "outcome": outcome.value,
            "ms": round(1000 * seconds, 1),
            "key": key,
            "model": caller.model,
            "prompt_tokens": sum(usage.prompt_tokens for usage in used) if used else None,
            "cached_tokens": sum(usage.cached_tokens for usage in used) if used else None,
            "completion_tokens": sum(usage.completion_tokens for usage in used) if used else None,
            "ttft_ms": None if first is None else round(1000 * (first - caller.began), 1),
        }
        what = (scope["method"], path, status, 1000 * seconds, caller.call_id, key, client)
        access.log(level, "%s %s %d %.0f ms %s key=%s client=%s", *what, extra={"request": request})


def _given_key(scope: Scope) -> bytes | None:
    """The request's API key; none if it has several that differ."""
    keys = set()
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            keys.add(key if scheme.lower() == b"bearer" else None)
        elif name in KEY_HEADERS:
            keys.add(value)
    return keys.pop() if len(keys) == 1 else None


async def _discard(receive: Receive) -> None:
    """Read and discard a body, up to a limit: many clients read the response only after sending everything."""
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
    """One handler for tokenmill's and uvicorn's loggers: lines of text or of JSON."""
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
    """One JSON object per line: time, level, logger; then the fields of a completed request, or a message."""

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
