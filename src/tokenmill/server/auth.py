"""Who may come in: every path but a short list needs a key. Pure ASGI, by the path that is routed, nothing else."""

from __future__ import annotations

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenmill.server.config import hash_key
from tokenmill.server.errors import ApiError

PUBLIC = frozenset({"/health", "/health/live", "/health/ready"})
CHALLENGE = {"WWW-Authenticate": "Bearer"}


class ApiKeys:
    """Lets requests with a known key pass; keys are compared by their hashes, all of them, in constant time."""

    def __init__(self, app: ASGIApp, key_hashes: tuple[bytes, ...]) -> None:
        self._app = app
        self._key_hashes = key_hashes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._key_hashes or scope["path"] in PUBLIC:
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and self._is_known(given[0]):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        response = JSONResponse(refusal.body(), refusal.status, headers=CHALLENGE)
        await response(scope, receive, send)

    def _is_known(self, header: bytes) -> bool:
        scheme, _, key = header.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return False
        found = False
        for known in self._key_hashes:
            found |= hmac.compare_digest(known, hash_key(key))
        return found
