"""What tests of the queue share: a server on which one request runs at a time, and time that passes when told."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tests.server.serving import KEY, Reply, Running, running
from tests.server.wire import (
    Wire,
)
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig, hash_key

CHUNK = 64
"""Prompt tokens a step."""
CONTEXT = 8192
MAX_QUEUE = 8
QUEUE_TIMEOUT_S = 50.0
MAX_REQUEST_S = 600.0
OTHER_KEY = "sk-other"
STREAM = [True, False]
CHAT = "/v1/chat/completions"


def make_server(kv_cache_tokens: int, context: int = CONTEXT, **settings: Any) -> AbstractContextManager[Running]:
    """One request runs at a time, a chunk a step."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=context))
    engine = EngineConfig(
        max_num_seqs=1, max_queue=MAX_QUEUE, max_num_batched_tokens=CHUNK, queue_timeout_s=QUEUE_TIMEOUT_S
    )
    keys = (hash_key(KEY), hash_key(OTHER_KEY))
    config = ServerConfig(key_hashes=keys, max_request_s=MAX_REQUEST_S, **{"keep_alive_s": 20.0, **settings})
    return running(AsyncLLM(model, config=engine, kv_cache_tokens=kv_cache_tokens), config)


class Clock:
    """The engine's time, which can be made to pass."""

    def __init__(self, server: Running) -> None:
        self._bus = server.core.events
        self._real = self._bus.clock
        self._passed_s = 0.0
        self._bus.clock = self

    def __call__(self) -> float:
        return float(self._real()) + self._passed_s

    def wind(self, seconds: float) -> None:
        self._passed_s += seconds


def assert_overloaded(reply: Reply) -> None:
    """It may come again."""
    assert reply.status == 429, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.error["code"] == "rate_limit_exceeded"


def read(client: Wire) -> Reply:
    reply = client.read_reply()
    assert reply is not None, "closed without an answer"
    return reply
