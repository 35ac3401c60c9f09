"""The official client against the server: answers, streams, errors, cancel."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
from typing import Any

import numpy as np
import openai
import pytest

from tests.server.serving import HI, KEY, WAIT_S, Running
from tokenmill.core import Fault, FaultKind


def test_models(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == ["fake"]
    assert server.client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("org/other")


@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_stream_joined_is_the_answer(server: Running, n: int) -> None:
    options: dict[str, Any] = {"model": "fake", "messages": HI, "max_tokens": 40, "seed": 5, "n": n, "stop": ["zz"]}
    whole = server.client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    texts, reasons, usage = [""] * n, [None] * n, None
    for chunk in server.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]  # type: ignore[call-overload]
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) == n
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens == len(b"user: hi\nassistant: ")
    assert whole.choices[0].logprobs is not None
    assert all(len(token.top_logprobs) == 2 for token in whole.choices[0].logprobs.content or [])


def test_completions_of_several_prompts(server: Running) -> None:
    options: dict[str, Any] = {"model": "fake", "prompt": ["a", "b"], "max_tokens": 12, "seed": 1, "n": 2}
    whole = server.client.completions.create(**options, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [""] * 4
    for chunk in server.client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    ids = server.client.completions.create(model="fake", prompt=[97], max_tokens=12, seed=1)
    assert ids.choices[0].text == texts[0]
    scores = whole.choices[0].logprobs
    assert scores is not None
    assert scores.text_offset is not None
    assert len(scores.tokens or []) == len(scores.text_offset) == 12


def test_embeddings_and_tokens(server: Running) -> None:
    numbers = server.client.embeddings.create(model="fake", input=["a", "b"], encoding_format="float")
    coded = server.client.embeddings.create(model="fake", input="a", encoding_format="base64")
    raw: Any = coded.data[0].embedding
    vector = np.frombuffer(base64.b64decode(raw), dtype="<f4") if isinstance(raw, str) else np.asarray(raw)
    assert np.allclose(vector, numbers.data[0].embedding, atol=1e-6)
    assert numbers.usage.prompt_tokens == 2
    assert post(server, "/tokenize", {"prompt": "ab"})[1]["tokens"] == [97, 98]
    assert post(server, "/detokenize", {"tokens": [97, 98]})[1] == {"prompt": "ab"}


def post(server: Running, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    connection.request("POST", path, body if isinstance(body, (str, bytes)) else json.dumps(body), sent)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
        ({"n": 1_000_000}, 400, "n"),
        ({"n": 0}, 400, "n"),
        ({"n": True}, 400, "n"),
        ({"n": "3"}, 400, "n"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 2}, 400, "top_p"),
        ({"stop": ["a"] * 5}, 400, "stop"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, None),
    ],
)
def test_wrong_requests_get_openais_errors_and_run_nothing(
    server: Running, change: dict[str, Any], status: int, param: str | None
) -> None:
    server.wait_until_idle()
    before = server.core.call(lambda core: core.scheduler.tick).result(WAIT_S)
    for stream in (False, True):
        body = {"model": "fake", "messages": HI, "stream": stream, **change}
        if "stream_options" in change and stream:
            continue
        got, answer = post(server, "/v1/chat/completions", body)
        assert got == status, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["param"] == param
    assert server.core.call(lambda core: core.scheduler.tick).result(WAIT_S) == before


def test_bodies_that_are_none(server: Running) -> None:
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"a":' * 50_000):
        status, answer = post(server, "/v1/chat/completions", body)
        assert status == 400, (body[:20], answer)
        assert "error" in answer
    assert post(server, "/v1/nothing", {})[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("GET", "/v1/chat/completions", headers={"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == 405


def test_the_context_is_named(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        server.client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 5000}])
    assert found.value.code == "context_length_exceeded"


@pytest.mark.parametrize("header", [None, "Bearer ", "Bearer wrong", "Basic c2s=", KEY])
def test_without_a_key_only_health_is_open(server: Running, header: str | None) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/models", "/openapi.json", "/v1/nothing", "//v1/models", "/tokenize"):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 401, path
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert b"invalid_api_key" in body
    for path in ("/health", "/health/live", "/health/ready"):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        assert answer.headers["x-request-id"].startswith("req-")
    connection.close()


# -- clients that go, requests that end badly -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(server: Running, stream: bool) -> None:
    body = json.dumps({"model": "fake", "messages": HI, "max_tokens": 4000, "ignore_eos": True, "stream": stream})
    hold = Fault(FaultKind.STALL, after=5)
    server.core.call(lambda core: core._executor.backend.faults.add(hold)).result(WAIT_S)
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    assert hold.stalled.wait(WAIT_S)
    connection.close()
    hold.release.set()
    server.wait_until_idle()
    stats = server.core.call(lambda core: core.stats()).result(WAIT_S)
    assert stats.num_running == 0
    said = server.client.chat.completions.create(model="fake", messages=HI, max_tokens=3)
    assert said.usage is not None
    assert said.usage.completion_tokens <= 3


def test_leaving_the_clients_loop_cancels(server: Running) -> None:
    stream = server.client.chat.completions.create(
        model="fake", messages=HI, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in stream:
        break
    stream.close()
    server.wait_until_idle()


def test_an_engine_that_fails_ends_streams_with_one_error(server: Running) -> None:
    server.core.call(lambda core: core._executor.backend.faults.add(Fault(FaultKind.FATAL, after=4))).result(WAIT_S)

    def read() -> None:
        """Before the first token it is a status, after that an event in the stream."""
        with server.client.chat.completions.create(
            model="fake", messages=HI, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            for _ in stream:
                pass

    with pytest.raises(openai.APIError, match="engine failed"):
        read()
    assert server.client.chat.completions.create(model="fake", messages=HI, max_tokens=2).choices


def test_a_queue_that_is_full_answers_429(server: Running) -> None:
    hold = Fault(FaultKind.STALL)
    server.core.call(lambda core: core._executor.backend.faults.add(hold)).result(WAIT_S)
    statuses: list[int] = []

    def ask() -> None:
        status, _ = post(server, "/v1/chat/completions", {"model": "fake", "messages": HI, "max_tokens": 4})
        statuses.append(status)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    threads[0].start()
    assert hold.stalled.wait(WAIT_S)
    for thread in threads[1:]:
        thread.start()
    hold.release.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 12
    server.wait_until_idle()


def test_a_silent_stream_is_kept_alive(server: Running) -> None:
    hold = Fault(FaultKind.STALL, after=3)
    server.core.call(lambda core: core._executor.backend.faults.add(hold)).result(WAIT_S)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    body = {"model": "fake", "messages": HI, "max_tokens": 10, "stream": True, "ignore_eos": True}
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), sent)
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    read = b""
    while b": keep-alive\n\n" not in read:
        read += answer.read1(4096)
    hold.release.set()
    read += answer.read()
    connection.close()
    assert read.endswith(b"data: [DONE]\n\n")
    assert b"\r" not in read
    assert read.count(b'"finish_reason":"length"') == 1


def test_an_engine_that_hangs_is_not_ready(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.engine.async_llm.HANGS_AFTER_S", 0.05)

    def status(path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    assert status("/health") == 200
    hold = Fault(FaultKind.STALL)
    server.core.call(lambda core: core._executor.backend.faults.add(hold)).result(WAIT_S)
    asking = threading.Thread(target=post, args=(server, "/v1/chat/completions", {"model": "fake", "messages": HI}))
    asking.start()
    while status("/health/ready") == 200:
        pass
    assert status("/health") == 503
    assert status("/health/live") == 200
    hold.release.set()
    asking.join(WAIT_S)
    while status("/health/ready") == 503:
        pass
