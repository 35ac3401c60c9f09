"""Several workers behind one server: one that hangs or fails costs its own requests, and sessions continue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.conversing import converse
from tests.server.serving import KEY, Reply, Running, running
from tests.server.test_hanging_engine import GREEDY, OPTIONS, chat, read
from tests.server.wire import Wire, until
from tokenmill import AsyncLLM
from tokenmill.server.config import ServerConfig, hash_key

NUM_STREAMS, NUM_TOKENS = 6, 1500
"""More streams than one worker takes for the sake of a prefix; still running when one of them hangs."""


@contextmanager
def served(file: Path, engine: str) -> Iterator[Running]:
    """A server with two workers; the next step of one of them hangs once the file exists."""
    llm = AsyncLLM(
        "fake",
        engine=engine,
        extra={**OPTIONS, "hang_file": str(file)},
        hang_timeout_s=1.5,
        workers=2,
        max_num_seqs=16,
        kv_cache_tokens=131_072,
    )
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as server:
        yield server


def text_of(reply: Reply) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in reply.events() if "choices" in event)


@pytest.mark.slow
@pytest.mark.req("R32", "G13")
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_worker_that_hangs_fails_only_its_own_requests(tmp_path: Path, engine: str) -> None:
    """Its sessions continue elsewhere; an engine process is replaced when the others' requests are done."""
    file = tmp_path / "hang"
    with served(file, engine) as server, ExitStack() as stack:
        client: Any = server.served.models.loaded[0].llm.client
        pid = client.process.pid if engine == "process" else None
        told, *talks = (converse(server, system=f"{i}", allowed_token_ids=None) for i in (0, 0, 0))
        for said in ("one", "two"):
            told.ask(said)
        for talk in talks:
            talk.ask("one")
        streams = [stack.enter_context(Wire(server.port)) for _ in range(NUM_STREAMS)]
        for stream in streams:
            stream.send(chat(stream=True, max_tokens=NUM_TOKENS))
        for stream in streams:
            stream.first_id()
        file.touch()
        replies = [read(stream) for stream in streams]
        failed = [reply for reply in replies if any("error" in event for event in reply.events())]
        assert 0 < len(failed) < NUM_STREAMS
        for reply in failed:
            assert [event["error"]["code"] for event in reply.events() if "error" in event] == ["error"]
        texts = {text_of(reply) for reply in replies if reply not in failed}
        assert len(texts) == 1
        assert all(texts.copy().pop().startswith(text_of(reply)) for reply in failed)
        assert (server.get("/health/ready").status, server.get("/health/live").status) == (200, 200)
        assert server.chat(**GREEDY).status == 200
        for talk in talks:
            talk.ask("two")
            assert talk.said() == told.said()
        until(lambda: server.served.gate.num_inside == 0)
        if engine == "process":
            until(lambda: client.process.pid != pid and client.cores_alive == [0, 1] and client._retired is None)
            assert server.chat(**GREEDY).status == 200
            for talk in (told, *talks):
                talk.ask("three")
                assert talk.said() == told.said()
        else:
            assert client.cores_alive in ([0], [1])
