"""Eight clients post prompts that are far too long for the default model, while another one is being answered."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flood import SHAPES, SHARE, flood_body
from tests.server.serving import KEY, Running, raw_request, running
from tests.server.test_long_prompts import LoopProbe
from tests.server.wire import Wire
from tokenmill import AsyncLLM
from tokenmill.server.config import ServerConfig, hash_key

NAME = "smollm2-135m"
CONTEXT = 2048
CALM_S = 1.0
"""Neither the event loop nor the stream may stand still for longer, on a busy machine. They did for 5 s and more."""


@pytest.fixture(scope="module")
def server(default_model: Path, backend: dict[str, Any]) -> Iterator[Running]:
    llm = AsyncLLM(str(default_model), max_model_len=CONTEXT, kv_cache_tokens=2 * CONTEXT, **backend)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),)), NAME) as one:
        yield one


def largest(server: Running) -> int:
    """Bytes of the largest prompt that is not refused by its length alone."""
    size = 1 << 20
    return CONTEXT * size // server.llm.get_tokenizer().min_num_tokens("x" * size)


class StreamReader(threading.Thread):
    """Reads an answer as it comes, until it is closed; when each piece of it came."""

    def __init__(self, client: Wire) -> None:
        super().__init__(daemon=True)
        self._client = client
        self.has_begun = threading.Event()
        self.times: list[float] = []

    def run(self) -> None:
        with suppress(OSError):
            while data := self._client.socket.recv(1 << 16):
                self.times += [time.perf_counter()] * (b"data:" in data)
                self.has_begun.set()

    def worst_s(self, begin: float, end: float) -> float:
        """The longest wait for a piece in this time."""
        moments = [begin, *(one for one in self.times if begin < one < end), end]
        return max(b - a for a, b in itertools.pairwise(moments))


@pytest.mark.req("R37")
def test_21_1_a_stream_goes_on_while_prompts_are_refused(server: Running) -> None:
    size = int(SHARE * largest(server))
    bodies = [flood_body(NAME, shape, size) for shape in SHAPES]
    answer = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with Wire(server.port) as client, ThreadPoolExecutor(8) as clients, LoopProbe(server) as probe:
        client.send(raw_request("/v1/completions", answer))
        stream = StreamReader(client)
        stream.start()
        assert stream.has_begun.wait(60)
        began = time.perf_counter()
        replies = list(clients.map(lambda body: server.post("/v1/chat/completions", body), bodies * 4))
        ended = time.perf_counter()
    for reply in replies:
        assert reply.status == 400, reply.body[:500]
        assert reply.error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens, but at least" in reply.error["message"]
    assert probe.worst_s < CALM_S
    assert stream.worst_s(began, ended) < CALM_S
