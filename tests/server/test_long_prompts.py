"""Prompts that are long or far too long: they are refused early, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.queueing import assert_overloaded
from tests.server.serving import KEY, Reply, Running, running
from tests.server.wire import Wire, chat_body, chat_request, until
from tests.text.test_pieces import default_tokenizer
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server import fields
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.telemetry import hub as telemetry
from tokenmill.server.telemetry.metrics import Metrics
from tokenmill.session.records import MEDIA_TYPE
from tokenmill.text import template as chat
from tokenmill.text.tokenizer import ByteTokenizer
from tokenmill.text.workers import KIB, SHORT_BYTES

CONTEXT = 128 * KIB
LONG = "the cat sat " * (SHORT_BYTES // 12 + 100)
"""It fits the context: a byte is a token here."""
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CALM_S = 0.2
HI: list[Any] = [{"role": "user", "content": "hi"}]


def fake_server(**settings: Any) -> Any:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=CONTEXT))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4), kv_cache_tokens=4 * CONTEXT)
    return running(llm, ServerConfig(key_hashes=(hash_key(KEY),), **settings))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with fake_server() as one:
        yield one


def session(server: Running, **options: Any) -> str:
    reply = server.post("/v1/sessions", {"model": "fake", "max_tokens": 1, **options})
    assert reply.status == 201, reply.body
    return f"/v1/sessions/{reply.json()['id']}"


# -- off the event loop -----------------------------------------------------------------------------------------------


def restore(server: Running) -> Reply:
    talk = session(server)
    server.post(f"{talk}/append", {"input": LONG})
    saved = server.post(f"{talk}/save", {})
    assert saved.status == 200, saved.body
    return server.post("/v1/sessions/restore", saved.body, headers={"Content-Type": MEDIA_TYPE})


def edit(server: Running) -> Reply:
    talk = session(server)
    server.post(f"{talk}/generate", {"input": "hi", "stream": False})
    return server.post(f"{talk}/edit", {"turn": 0, "content": LONG})


ROUTES: dict[str, Callable[[Running], Reply]] = {
    "chat": lambda server: server.chat(messages=[{"role": "user", "content": LONG}], max_tokens=1),
    "chat, 500 messages": lambda server: server.chat(messages=HI * 500 + [{"role": "user", "content": LONG}]),
    "chat, in a session": lambda server: server.chat(
        messages=[{"role": "user", "content": LONG}], session_id=session(server).rsplit("/", 1)[-1]
    ),
    "completion": lambda server: server.post(COMPLETIONS, {"model": "fake", "prompt": LONG, "max_tokens": 1}),
    "completions": lambda server: server.post(
        COMPLETIONS, {"model": "fake", "prompt": ["x" * 3000] * 3, "max_tokens": 1}
    ),
    "response": lambda server: server.post(RESPONSES, {"model": "fake", "input": LONG, "max_output_tokens": 1}),
    "response, not stored": lambda server: server.post(
        RESPONSES, {"model": "fake", "input": LONG, "max_output_tokens": 1, "store": False}
    ),
    "embedding": lambda server: server.post("/v1/embeddings", {"model": "fake", "input": [LONG, "x"]}),
    "tokenize": lambda server: server.post("/tokenize", {"prompt": LONG}),
    "tokenize a chat": lambda server: server.post("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    "session, its system": lambda server: server.post("/v1/sessions", {"system": LONG}),
    "session, its past": lambda server: server.post("/v1/sessions", {"messages": LONG}),
    "append": lambda server: server.post(f"{session(server)}/append", {"input": LONG}),
    "append raw": lambda server: server.post(f"{session(server)}/append", {"input": LONG, "raw": True}),
    "generate": lambda server: server.post(f"{session(server)}/generate", {"input": LONG, "stream": False}),
    "edit": edit,
    "restore": restore,
}


@pytest.mark.parametrize("name", ROUTES)
def test_21_1_long_texts_are_parsed_rendered_and_tokenized_off_the_event_loop(
    server: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[str, set[str]] = {"parse": set(), "render": set(), "tokenize": set()}

    def watch(owner: Any, attribute: str, what: str, size: Callable[..., int]) -> None:
        original = getattr(owner, attribute)

        def watched(*args: Any, **options: Any) -> Any:
            if size(*args) > 4 * KIB:
                used[what].add(threading.current_thread().name)
            return original(*args, **options)

        monkeypatch.setattr(owner, attribute, watched)

    watch(fields.pydantic_core, "from_json", "parse", len)
    watch(chat, "run_template", "render", lambda _, variables: len(str(variables)))
    watch(ByteTokenizer, "encode_template", "tokenize", lambda _, text: 4 * len(text))
    reply = ROUTES[name](server)
    assert reply.status in (200, 201), reply.body
    threads = used["parse"] | used["render"] | used["tokenize"]
    assert used["tokenize"]
    assert all(thread.startswith("tokenmill-text") for thread in threads), used


@contextmanager
def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Long texts are not done before this ends; they are listed as they are begun."""
    begun: list[str] = []
    may_end = threading.Event()
    encode = ByteTokenizer.encode_template

    def slowly(self: ByteTokenizer, text: str, **options: Any) -> list[int]:
        if len(text) > SHORT_BYTES:
            begun.append(text)
            assert may_end.wait(60)
        return encode(self, text, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_template", slowly)
        try:
            yield begun
        finally:
            may_end.set()


def test_21_1_nobody_waits_for_others_long_prompts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = session(server)
    with ThreadPoolExecutor(8) as clients, Wire(server.port) as stream:
        stream.send(chat_request(stream=True, max_tokens=400))
        with slow_tokenizer(monkeypatch) as begun:
            answers: list[Future[Reply]] = [
                clients.submit(server.post, CHAT, chat_body(f"{LONG} {number}", max_tokens=1)) for number in range(8)
            ]
            until(lambda: begun)
            for _ in range(5):
                assert server.get("/health").status == 200
                assert server.chat(max_tokens=4).status == 200
                assert server.chat(messages=[{"role": "user", "content": "x" * 30_000}], max_tokens=1).status == 200
                assert server.post("/tokenize", {"prompt": "x" * 60_000}).json()["count"] == 60_000
                assert server.post(f"{talk}/generate", {"input": "hi", "stream": False}).status == 200
            text = stream.read_reply()
            assert text is not None
            assert text.events()[-1]["choices"][0]["finish_reason"] == "length"
            assert len(begun) == 1, "one long text at a time, and a thread for short ones"
        assert [answer.result().status for answer in answers] == [200] * 8


def test_21_1_a_client_that_leaves_is_not_tokenized_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as clients, slow_tokenizer(monkeypatch) as begun:
        first = clients.submit(server.post, CHAT, chat_body(f"{LONG} first", max_tokens=1))
        until(lambda: begun)
        client = Wire(server.port)
        client.send(chat_request(f"{LONG} left", max_tokens=1))
        texts = server.served.texts
        until(lambda: texts._long)
        client.leave("RST")
        until(lambda: not texts._long)
    assert first.result().status == 200
    server.wait_until_idle()
    assert len(begun) == 1


@pytest.mark.req("R35")
def test_a_request_times_out_while_its_prompt_is_tokenized(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_tokenizer(monkeypatch) as begun:
        late = server.post(CHAT, chat_body(f"{LONG} late", max_tokens=1, timeout_s=0.05))
        assert (late.status, late.error["code"]) == (503, "timeout")
        assert int(late.headers["retry-after"]) >= 1
        assert server.chat().status == 200
        assert len(begun) <= 1
    server.wait_until_idle()


def test_21_1_the_bytes_of_long_prompts_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(max_tokenizing_bytes=len(LONG) + 4 * KIB) as server:
        with ThreadPoolExecutor(1) as clients, slow_tokenizer(monkeypatch) as begun:
            first = clients.submit(server.post, CHAT, chat_body(LONG, max_tokens=1))
            until(lambda: begun)
            assert_overloaded(server.post(CHAT, chat_body(f"{LONG} more")))
            assert server.chat().status == 200
        assert first.result().status == 200
        assert server.post(CHAT, chat_body(LONG, max_tokens=1)).status == 200


# -- refused early ----------------------------------------------------------------------------------------------------


def test_21_1_what_can_not_fit_is_refused_by_its_length(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """In OpenAI's words, before any of it is tokenized."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was guarded")

    monkeypatch.setattr(chat.ChatTemplate, "_rendered_guarded", never)
    text, before = "x" * 8_000_000, server.get("/v1/sessions?limit=100").json()["data"]
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (CHAT, {"messages": [{"role": "user", "content": text[:16_000]}] * 500}),
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": ["x", text]}),
        (COMPLETIONS, {"prompt": [120] * (CONTEXT + 1)}),
        (RESPONSES, {"input": text}),
        (RESPONSES, {"input": text, "store": False}),
        ("/v1/embeddings", {"input": text}),
        ("/v1/sessions", {"messages": text}),
        ("/v1/sessions", {"system": text}),
    ):
        reply = server.post(path, {"model": "fake", **body})
        assert reply.status == 400, reply.body[:500]
        assert reply.error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens, but" in reply.error["message"]
        assert "The prompt is too long: shorten it." in reply.error["message"]
    assert server.get("/v1/sessions?limit=100").json()["data"] == before


def test_21_1_a_body_of_millions_of_values_is_not_parsed(server: Running) -> None:
    content = b'{"model": "fake", "prompt": [' + b"1," * (1 << 21) + b"1]}"
    reply = server.post(COMPLETIONS, content)
    assert reply.status == 400
    assert reply.error["message"].startswith("too many values in the body: ")


def test_21_1_long_answers_of_tokenize_are_whole(server: Running) -> None:
    text = "aé" * 40_000
    reply = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert bytes(reply["tokens"]) == text.encode()
    assert (reply["count"], len(reply["token_strs"])) == (120_000, 120_000)
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}
    refused = server.post("/tokenize", {"prompt": "x" * ((1 << 20) + 1)})
    assert refused.status == 400
    assert "the limit is 1048576" in refused.error["message"]


# -- the event loop ---------------------------------------------------------------------------------------------------


class LoopProbe:
    """How long the server's event loop left a callback waiting that is due all the time."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self.worst_s = 0.0

    def __enter__(self) -> LoopProbe:
        assert self._server.loop is not None
        self._probing = asyncio.run_coroutine_threadsafe(self._probe(), self._server.loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._probing.cancel()

    async def _probe(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.worst_s, before = max(self.worst_s, now - before), now


@pytest.mark.parametrize("kind", ["one run", "words"])
def test_21_1_a_large_prompt_does_not_freeze_the_server(kind: str) -> None:
    """A real tokenizer: for as many bytes, `tokenizers.encode` stops every thread for a second and more."""
    tokenizer = default_tokenizer()
    model = FakeModel(FakeConfig(vocab_size=tokenizer.vocab_size, max_context=1 << 20))
    llm = AsyncLLM(model, tokenizer=tokenizer, kv_cache_tokens=32_768, max_model_len=15_000)
    text = "-" * 1_200_000 if kind == "one run" else " ".join(["internationalization"] * 55_000)
    assert tokenizer.min_num_tokens(text) < llm.max_model_len
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as server:
        worst: list[float] = []
        while not worst or (worst[-1] > CALM_S and len(worst) < 3):  # a busy machine may stop any thread, now and then
            with LoopProbe(server) as probe:
                reply = server.post(COMPLETIONS, {"model": "fake", "prompt": text})
                assert reply.error["code"] == "context_length_exceeded"
            worst.append(probe.worst_s)
        assert min(worst) < CALM_S, worst


def test_21_1_the_loop_lag_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that comes late hides others: all that were due meanwhile count."""

    async def scene() -> None:
        watched = telemetry.Telemetry()
        loop = asyncio.get_running_loop()
        real, ahead = loop.time, [0.0]
        monkeypatch.setattr(loop, "time", lambda: real() + ahead[0])
        watching = asyncio.create_task(watched.watch_loop())
        await asyncio.sleep(0)
        ahead[0] = 2.0 + telemetry.PROBE_S
        while not watched.loop_lag_s.count:
            await asyncio.sleep(0)
        watching.cancel()
        assert 100 <= watched.loop_lag_s.count <= 110  # 2 s, a probe every 20 ms
        late = {float(bound): count for bound, count in watched.loop_lag_s.cumulative()}
        assert 48 <= late[1.0] <= 55
        lines = Metrics(watched).text().decode().splitlines()
        assert any(line.startswith("tokenmill_event_loop_lag_seconds_bucket") for line in lines)

    asyncio.run(scene())


def test_21_1_chunked_bodies_count_by_what_was_read(server: Running) -> None:
    """Without a Content-Length a long prompt is one all the same."""
    content = json.dumps(chat_body(LONG, max_tokens=1)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    sizes: list[int] = []
    run = server.served.texts.run

    async def noted(num_bytes: int, work: Any) -> Any:
        sizes.append(num_bytes)
        return await run(num_bytes, work)

    with pytest.MonkeyPatch.context() as patch, Wire(server.port) as client:
        patch.setattr(server.served.texts, "run", noted)
        client.send(head.encode() + f"{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n")
        reply = client.read_reply()
    assert reply is not None
    assert reply.status == 200
    assert sizes == [len(content)] * 2
