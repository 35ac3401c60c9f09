"""A server over the fake model, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.serving import KEY, Running, running
from tests.text.tool_templates import WRITTEN, use_template
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig, hash_key

THINKS = WRITTEN["tagged JSON"].replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% endif %}",
)
"""Opens the thinking itself, unless told not to."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=4096, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=32_768)
    config = ServerConfig(key_hashes=(hash_key("other"), hash_key(KEY)), keep_alive_s=0.2)
    with running(llm, config) as one:
        yield one


@contextmanager
def serving_template(source: str) -> Iterator[Running]:
    """A server whose chats are written by this template."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=4096, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=32_768)
    use_template(llm, source)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as one:
        yield one


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A server whose model reasons."""
    with serving_template(THINKS) as one:
        yield one


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the server that it used is idle again."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_until_idle()
