"""Who may come in: every path but a short list needs a key. Pure ASGI, by the path that is routed, nothing else."""

from __future__ import annotations

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenmill.server.config import LOOPBACK, ServerConfig, hash_key
from tokenmill.server.context import Caller, caller_of
from tokenmill.server.errors import ApiError

PUBLIC = frozenset({"/health", "/health/live", "/health/ready"})
KEY_HEADERS = (b"x-api-key", b"api-key")
"""Where some clients put the key instead."""
CHALLENGE = {"WWW-Authenticate": "Bearer"}


class HostCheck:
    """Lets in only requests for a name of this machine: a web page that has made its own name mean it stays outside.

    Where there are keys such a page has none, and this is not needed.
    """

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app = app
        self._allowed = {name.lower() for name in allowed | LOOPBACK}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value for name, value in scope["headers"] if name == b"host"] if scope["type"] == "http" else []
        if all(_host_name(value) in self._allowed for value in given):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(421, "this server is not called that: see --allowed-host", code="unknown_host")
        await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)


def _host_name(header: bytes) -> str:
    """Without the port."""
    text = header.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.rpartition(":")[2].isdigit() and ":" in text else text


class ApiKeys:
    """Lets requests with a known key pass; keys are compared by their hashes, all of them, in constant time."""

    def __init__(self, app: ASGIApp, key_hashes: tuple[bytes, ...], public: frozenset[str] = PUBLIC) -> None:
        self._app = app
        self._key_hashes = key_hashes
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A browser asks with OPTIONS, without a key, whether it may send one; no route of ours answers to it.
        is_open = scope["type"] != "http" or scope["path"] in self._public or scope["method"] == "OPTIONS"
        if is_open or not self._key_hashes:
            await self._app(scope, receive, send)
            return
        known = self._known(_given(scope))
        if known is None:
            refusal = ApiError(
                401,
                "Incorrect API key provided. A valid one is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
            )
            await JSONResponse(refusal.body(), refusal.status, headers=CHALLENGE)(scope, receive, send)
            return
        caller_of(scope).key = known.hex()
        await self._app(scope, receive, send)

    def _known(self, key: bytes | None) -> bytes | None:
        """The hash of a key that may come in."""
        if key is None:
            return None
        given, found = hash_key(key), None
        for known in self._key_hashes:
            if hmac.compare_digest(known, given):
                found = known
        return found


def check_admin(caller: Caller, config: ServerConfig) -> None:
    """Raise unless the caller may load and unload models: by a key for that, or where there are no keys at all."""
    is_admin = any(hmac.compare_digest(known.hex(), caller.key) for known in config.admin_key_hashes)
    if not is_admin and (config.key_hashes or config.admin_key_hashes):
        raise ApiError(403, "this needs a key that was given as --admin-key", code="admin_key_needed")


def _given(scope: Scope) -> bytes | None:
    """The one key that a request has; none if it has several that differ."""
    keys = set()
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            keys.add(key if scheme.lower() == b"bearer" else None)
        elif name in KEY_HEADERS:
            keys.add(value)
    return keys.pop() if len(keys) == 1 else None
