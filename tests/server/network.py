"""What tests of the network share: servers with short deadlines, and a client that does nothing wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest

from tests.server.serving import KEY, MOST_IDLE_S, WAIT_S, Reply, Running, running
from tests.server.wire import (
    chat_body,
    chat_request,
    production_loop,
)
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.config import MIB, ServerConfig, hash_key

CHUNK = 64
"""Prompt tokens a step."""
SHORT_S = 0.4
"""The deadlines of the server that has short ones."""
GRACE_S = 10.0
"""Beyond a deadline, for a busy machine; less than any deadline that a server has by itself."""
HALF_A_HEAD = b"GET /health HTTP/1.1\r\nHost: te"
HALF_A_BODY = chat_request()[:-100]
LEAVING = ["FIN", "RST"]
STREAM = [True, False]
CLOSE = "Connection: close\r\n"


def make_server(most_idle_s: float = MOST_IDLE_S, **settings: Any) -> AbstractContextManager[Running]:
    """One request runs at a time, a chunk a step, and no comments fill a silence."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=32_768))
    engine = EngineConfig(max_num_seqs=1, max_queue=8, max_num_batched_tokens=CHUNK)
    llm = AsyncLLM(model, config=engine, kv_cache_tokens=65_536)
    config = ServerConfig(key_hashes=(hash_key(KEY),), keep_alive_s=20.0, **settings)
    return running(llm, config, most_idle_s=most_idle_s)


@contextmanager
def server_on(loop: str) -> Iterator[Running]:
    """Each event loop tells of a client's end in its own way; `tokenmill serve` takes uvloop where it is installed."""
    with ExitStack() as stack:
        with production_loop() if loop == "uvloop" else nullcontext():
            one = stack.enter_context(make_server(max_body_bytes=65_536))
        yield one


@contextmanager
def strict_server(most_idle_s: float = 2 * WAIT_S) -> Iterator[Running]:
    """Short deadlines for what comes in and for what goes out. Where they end a connection, idleness has not."""
    deadlines = {"header_timeout_s": SHORT_S, "body_timeout_s": SHORT_S, "send_timeout_s": SHORT_S}
    with make_server(most_idle_s, **deadlines, max_body_bytes=2 * MIB) as one:
        yield one
        one.wait_until_idle()


def ask(server: Running, **changes: Any) -> str:
    """What a client that does nothing wrong is told."""
    answer = server.post("/v1/chat/completions", chat_body(**changes))
    assert answer.status == 200, answer.body
    return text_of(answer)


def text_of(reply: Reply | None) -> str:
    """The answer in it, whole or streamed to its end."""
    assert reply is not None
    assert reply.status == 200, reply.body
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["message"]["content"])
    choices = [event["choices"][0] for event in reply.events()]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content", "") for choice in choices)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
