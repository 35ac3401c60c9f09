"""What tests of several models share: one that is loaded as a test wants, and a server that has it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.server.conversing import SAME
from tests.server.rules import fake_server
from tests.server.serving import HI, KEY, WAIT_S, Reply, Running
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.models import ModelSpec

CHAT = "/v1/chat/completions"


@dataclass
class Store:
    """A model that can be loaded, and what has become of it."""

    may_load: threading.Event = field(default_factory=threading.Event)
    may_close: threading.Event = field(default_factory=threading.Event)
    happened: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    """Of the next attempts to load it."""

    def __post_init__(self) -> None:
        self.may_load.set()
        self.may_close.set()

    def load(self) -> AsyncLLM:
        """A model that says other things than the first one does."""
        self.happened.append("load")
        assert self.may_load.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop(0)
        model = FakeModel(FakeConfig(vocab_size=258, max_context=512, depth=1))
        model.replace_weight("salt", None)
        llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4), kv_cache_tokens=4096)
        close = llm.close

        async def closed(timeout_s: float | None = None) -> bool:
            await asyncio.to_thread(self.may_close.wait, WAIT_S)
            has_stopped = await close(timeout_s)
            self.happened.append("close")
            return has_stopped

        llm.close = closed  # type: ignore[method-assign]
        return llm

    def spec(self, **options: Any) -> ModelSpec:
        usual: dict[str, Any] = {"name": "second", "aliases": frozenset({"two", "org/second"}), "at_start": False}
        return ModelSpec(load=self.load, **{**usual, **options})


@contextmanager
def two_models(store: Store | None = None, *, spec: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    store = store or Store()
    with fake_server(others=[store.spec(**(spec or {}))], **settings) as server:
        yield server
        store.may_load.set()
        store.may_close.set()


def chat(server: Running, model: str, **changes: Any) -> Reply:
    return server.post(CHAT, {"model": model, "messages": HI, "max_tokens": 12, **SAME, **changes})


def status_of(server: Running, name: str = "second") -> dict[str, Any]:
    reply = server.get(f"/v1/models/{name}")
    assert reply.status == 200, reply.body
    return dict(reply.json())


def admin(server: Running, what: str, model: str = "second", key: str | None = KEY, **more: Any) -> Reply:
    return server.post(f"/v1/models/{what}", {"model": model, **more}, key=key)


def no_keys() -> dict[str, Any]:
    """Where there are none, everybody on this machine may load and unload."""
    return {"key_hashes": ()}


def behind(server: Running, name: str) -> Running:
    """The server, with the engine of another of its models to look at."""
    (model,) = [one for one in server.served.models.loaded if one.name == name]
    return replace(server, llm=model.llm)
