"""64 streams at once, on fewer rows than that and with little KV: each client gets its own answer, byte for byte.

The fake model's next token is a function of all tokens before it, so an answer proves which prompt it belongs to. What
it should be is computed offline, without a server.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.planting import PlantedBug, plant
from tests.server.serving import KEY, Reply, Running, raw_request, running
from tests.server.wire import Wire, assert_no_leak, diary_of, production_loop
from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.engine.events import Phase
from tokenmill.server import sse, streaming
from tokenmill.server.config import ServerConfig, hash_key

NUM_CLIENTS = 64
NUM_TOKENS = 40
FAKE = FakeConfig(vocab_size=258, max_context=512, depth=1)
DRAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "seed": 11}}


def prompt(i: int) -> str:
    """Its client's own, of its own length; some have a long beginning in common, which may be shared in KV."""
    return ("all of us begin like this: " if i % 3 == 0 else "") + f"marker-{i:03}" + "!" * (i % 7)


@contextmanager
def make_server() -> Iterator[Running]:
    """16 rows; half of what they can grow to fits into KV, so some are preempted."""
    engine = EngineConfig(max_num_seqs=16, max_queue=NUM_CLIENTS, max_num_batched_tokens=128)
    llm = AsyncLLM(FakeModel(FAKE), config=engine, kv_cache_tokens=768)
    with ExitStack() as stack:
        with production_loop():
            one = stack.enter_context(running(llm, ServerConfig(key_hashes=(hash_key(KEY),))))
        yield one


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with make_server() as one:
        yield one


@pytest.fixture(scope="module")
def expected() -> dict[str, list[str]]:
    """What each client should hear."""
    texts = {}
    with LLM(FakeModel(FAKE)) as llm:
        for name, draw in DRAWS.items():
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **draw)
            outputs = llm.generate([prompt(i) for i in range(NUM_CLIENTS)], params)
            texts[name] = [output.outputs[0].text for output in outputs]
    assert len(set(texts["greedy"] + texts["seeded"])) == 2 * NUM_CLIENTS
    return texts


def connect_all(server: Running, draw: str) -> list[Wire]:
    clients = [Wire(server.port) for _ in range(NUM_CLIENTS)]
    for i, client in enumerate(clients):
        body = {"model": "fake", "prompt": prompt(i), "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        client.send(raw_request("/v1/completions", {**body, **DRAWS[draw]}, headers=f"x-request-id: client-{i}\r\n"))
    return clients


def check_stream(reply: Reply | None, i: int, text: str) -> None:
    """One end, one [DONE], one id; and the text is this client's."""
    assert reply is not None, f"client {i} got no answer"
    assert reply.status == 200
    assert reply.headers["x-request-id"] == f"client-{i}"
    assert reply.body.count(b"[DONE]") == 1
    events = reply.events()
    assert len({event["id"] for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"
    assert "".join(choice["text"] for choice in choices).encode() == text.encode(), f"client {i} heard another's answer"


def all_read(server: Running, expected: dict[str, list[str]], draw: str) -> None:
    clients = connect_all(server, draw)
    try:
        for i, client in enumerate(clients):
            check_stream(client.read_reply(), i, expected[draw][i])
    finally:
        for client in clients:
            client.socket.close()
    assert_no_leak(server)


def a_third_leaves(server: Running, expected: dict[str, list[str]], draw: str, seed: int) -> None:
    """In some order, each after some bytes of its answer or before it, with a FIN or a RST. The others don't notice."""
    chance = random.Random(seed)
    leaving = chance.sample(range(NUM_CLIENTS), NUM_CLIENTS // 3)
    clients = connect_all(server, draw)
    try:
        for i in leaving:
            clients[i].read_bytes(chance.choice([0, 1, 300, 1500, 4000]))
            clients[i].leave(chance.choice(["FIN", "RST"]))
        for i, client in enumerate(clients):
            if i not in leaving:
                check_stream(client.read_reply(), i, expected[draw][i])
    finally:
        for client in clients:
            client.socket.close()
    assert_no_leak(server)


@pytest.mark.fault("O04")
@pytest.mark.parametrize("draw", DRAWS)
def test_64_streams_do_not_mix(server: Running, expected: dict[str, list[str]], draw: str) -> None:
    with diary_of(server) as diary:
        all_read(server, expected, draw)
    assert sum(Phase.PREEMPTED in phases for phases in diary.phases.values()) > 0, "KV was not short"


@pytest.mark.fault("F01")
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", range(3))
def test_a_third_of_64_streams_leaves(server: Running, expected: dict[str, list[str]], draw: str, seed: int) -> None:
    a_third_leaves(server, expected, draw, seed)


Check = Callable[[Running, dict[str, list[str]]], None]
BUGS: list[tuple[PlantedBug, Check]] = [
    (
        PlantedBug(
            "everybody hears the first one's answer",
            streaming.Call,
            "generate",
            "self.llm.generation(prompt, params, name, **more)",
            "self.llm.generation(self.llm.__dict__.setdefault('first_prompt', prompt), params, name, **more)",
        ),
        lambda server, expected: all_read(server, expected, "greedy"),
    ),
    (
        PlantedBug(
            "two ends", streaming.Call, "take", "return piece + writer.closing()", "return piece + 2 * writer.closing()"
        ),
        lambda server, expected: all_read(server, expected, "greedy"),
    ),
    (
        PlantedBug(
            "a piece is lost",
            streaming.Call,
            "take",
            "piece += writer.delta(delta)",
            "piece += writer.delta(delta) if delta.offset % 16 != 15 else b''",
        ),
        lambda server, expected: all_read(server, expected, "greedy"),
    ),
    (
        PlantedBug("calls stay open", sse.EventStream, "__call__", "await self._events.close()", "pass"),
        lambda server, expected: a_third_leaves(server, expected, "greedy", seed=0),
    ),
]


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(
    bug: PlantedBug, check: Check, expected: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_server() as server:
        plant(bug, monkeypatch)
        with pytest.raises(AssertionError):
            check(server, expected)
