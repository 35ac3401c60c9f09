"""A real server on a real port, over the fake model: in this process, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import uvicorn

from tokenmill import AsyncLLM
from tokenmill.config import EngineConfig
from tokenmill.core import FakeConfig, FakeModel
from tokenmill.server.app import create_app
from tokenmill.server.config import ServerConfig, hash_key

KEY = "sk-test"
WAIT_S = 30.0


@dataclass
class Running:
    """A server, and what tests may want to look at behind it."""

    port: int
    llm: AsyncLLM
    client: openai.OpenAI

    @property
    def core(self) -> Any:
        return self.llm._client.pool.cores[0]  # type: ignore[attr-defined]

    def wait_until_idle(self) -> None:
        """All requests are gone from the engine; whatever stays would keep this from returning."""
        while self.core.call(lambda core: core.has_work).result(WAIT_S):
            pass


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=4096, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=32_768)
    config = ServerConfig(model_name="fake", key_hashes=(hash_key("other"), hash_key(KEY)), keep_alive_s=0.2)
    runner = uvicorn.Server(uvicorn.Config(create_app(llm, config), port=0, http="h11", log_level="warning"))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        assert thread.is_alive()
    port = runner.servers[0].sockets[0].getsockname()[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        yield Running(port, llm, client)
    runner.should_exit = True
    thread.join(WAIT_S)
    llm._client.close()
