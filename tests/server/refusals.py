"""What tests of wrong requests share: a good body for each endpoint, and what a refusal looks like."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import tokenmill
from tests.server.serving import HI, Reply, Running
from tokenmill.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponsesRequest,
    TokenizeRequest,
)

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"
CANCEL = "/v1/requests/x/cancel"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": HI, "max_tokens": 2},
    COMPLETIONS: {"model": "fake", "prompt": "hi", "max_tokens": 2},
    RESPONSES: {"model": "fake", "input": "hi", "max_output_tokens": 2},
    EMBEDDINGS: {"model": "fake", "input": "hi"},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [97]},
}
MODELS: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    EMBEDDINGS: EmbeddingRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}
GENERATING = (CHAT, COMPLETIONS, RESPONSES)
VOCABULARY = 258
LEFT_OUT = object()
"""As a field's value: the field is not sent."""
PROMPTS = [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")]
PART = {"type": "text", "text": "hi"}
DEEP = 200_000
NO_BODIES = [b"", b" ", b"{", b"[", b"null", b"5", b'"a"', b"[]", b"[{}]", b"{}{}", b"{} x"]
NO_BODIES += [b"{'a':1}", b"{a:1}", b"a=1&b=2", b"<a/>", b"\x80\x04\x95", b"\0" * 1000]
NO_BODIES += [b'{"a":' * DEEP, b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP]
NO_BODIES += [b'{"model":"fake",}', b'{"model":"fake"', b'{"model":"fa', b'{"a":01}']
QUICK_S, LARGE_S = 10.0, 20.0
"""Far more than a refusal takes; a large body has to be read at least, but not to be gone through item by item."""
INSIDE = re.compile(
    r"pydantic|https?://|Traceback|File \"|\.py\b|site-packages|0x[0-9a-fA-F]{4,}|/(?:home|usr|etc|tmp|var|opt|root)/"
)
INSIDE_PATHS = (sys.prefix, str(Path(tokenmill.__file__).parents[2]))


def changed(path: str, **change: Any) -> dict[str, Any]:
    body = {**BODIES[path], **change}
    return {name: value for name, value in body.items() if value is not LEFT_OUT}


def both(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """As an answer, and as a stream where there is one."""
    return [body, {**body, "stream": True}] if path in GENERATING and "stream" not in body else [body]


def check_words(message: str) -> None:
    """Nothing of what is inside is told."""
    assert not INSIDE.search(message), message
    assert not any(path in message for path in INSIDE_PATHS), message
    assert len(message) < 500


def check_refusal(reply: Reply, status: int, param: str | None, what: Any = None) -> dict[str, Any]:
    shown = f"{what!r:.120}"
    assert reply.status == status, (shown, reply.status, reply.body[:300])
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    error = reply.error
    assert error["type"] == "invalid_request_error", shown
    assert error["param"] == param, (shown, error)
    assert error["message"]
    check_words(error["message"])
    return error


def post(server: Running, path: str, body: Any, within_s: float = QUICK_S, **options: Any) -> Reply:
    began = time.monotonic()
    reply = server.post(path, body, **options)
    assert time.monotonic() - began < within_s
    return reply


@contextmanager
def nothing_runs(server: Running) -> Iterator[None]:
    """No step is taken in here, and the next request is fine."""
    server.wait_until_idle()
    before = server.tick()
    yield
    server.wait_until_idle()
    assert server.tick() == before
    assert server.chat().status == 200


def refuse(server: Running, path: str, *changes: dict[str, Any], status: int = 400) -> None:
    """Each of these is refused, with the name of its first field."""
    with nothing_runs(server):
        for change in changes:
            for body in both(path, changed(path, **change)):
                check_refusal(post(server, path, body), status, next(iter(change)), change)
