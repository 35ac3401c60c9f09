"""`Served`: what the endpoints work with: the model once it is loaded, the settings, and what runs."""

from __future__ import annotations

import math
import time

from starlette.requests import Request as HttpRequest

from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.server.auth import PUBLIC
from tokenmill.server.calls import Call, OpenCalls
from tokenmill.server.config import ServerConfig
from tokenmill.server.context import Gate, caller_of
from tokenmill.server.errors import ApiError, model_not_found, unavailable
from tokenmill.server.requests import Hinted
from tokenmill.server.tokens import TokenForms

LOADING = unavailable("the model is being loaded", "loading")
STOPPING = unavailable("the server is stopping", "stopping")
TIMEOUT_HEADER = "x-request-timeout"
"""A client's own deadline, in seconds."""


class Served:
    """A server's state. Its gate is closed until the model is there, and again when it stops."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.started = int(time.time())
        self.calls = OpenCalls()
        self.gate = Gate(LOADING, stays_open=PUBLIC)
        self._llm: AsyncLLM | None = None

    def open(self, llm: AsyncLLM) -> None:
        """The model is there: let requests in, unless the server is stopping already."""
        self._llm = llm
        self.forms = TokenForms(llm.get_tokenizer())
        if self.gate.closed is LOADING:
            self.gate.closed = None

    def drain(self) -> None:
        """Let nobody in any more; who is inside may stay."""
        self.gate.closed = STOPPING

    @property
    def is_ready(self) -> bool:
        """Does it take requests, and do the engine's steps end?"""
        return self.gate.closed is None and self._llm is not None and self._llm.is_ready

    @property
    def llm(self) -> AsyncLLM:
        assert self._llm is not None, "the gate is closed until it is there"
        return self._llm

    def find(self, model: str | None) -> AsyncLLM:
        """The model of this name; the only one there is, where none is named."""
        if model is not None and model != self.config.model_name:
            raise model_not_found(model)
        return self.llm

    def call(self, http: HttpRequest, body: Hinted, prefix: str) -> Call:
        """A call of the engine for a request."""
        llm, key = self.find(body.model), caller_of(http.scope).key
        hints = body.hints(key, separate=len(self.config.key_hashes) > 1)
        deadlines = [self.config.max_request_s, _timeout(http), body.timeout_s]
        timeout_s = min(one for one in deadlines if one is not None)
        return Call(http, llm, self.config, self.calls, prefix, hints, timeout_s)


def _timeout(http: HttpRequest) -> float | None:
    """The deadline in the header, if there is one."""
    given = http.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"{TIMEOUT_HEADER} is a number of seconds, not {given!r:.40}", param=TIMEOUT_HEADER)
    return seconds
