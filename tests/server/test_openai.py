"""The official client against the server: answers, streams, errors, cancel."""

from __future__ import annotations

import base64
import threading
from typing import Any

import numpy as np
import openai
import pytest

from examples.agents import openai_agent
from tests.server.serving import HI, KEY, WAIT_S, Running, raw_request
from tokenmill.backends.fake import FaultKind


def test_models(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == ["fake"]
    assert server.client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("org/other")


@pytest.mark.req("R34")
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


@pytest.mark.req("R33")
def test_a_prediction_does_not_change_the_answer(server: Running) -> None:
    options: dict[str, Any] = {"model": "fake", "messages": HI, "max_tokens": 40, "seed": 5, "temperature": 1}
    plain = server.client.chat.completions.create(**options)
    said = plain.choices[0].message.content or ""
    for content in (said, [{"type": "text", "text": said[:9]}, {"type": "text", "text": " and something else"}], ""):
        prediction: Any = {"type": "content", "content": content}
        predicted = server.client.chat.completions.create(**options, prediction=prediction)
        assert predicted.choices[0].message.content == said
        assert predicted.usage is not None
        details = predicted.usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens is not None
        assert 0 <= details.accepted_prediction_tokens <= predicted.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="prediction"):
        server.client.chat.completions.create(**options, prediction={"type": "file", "content": "a"})  # type: ignore[typeddict-item]
    with pytest.raises(openai.BadRequestError, match="speculation"):
        server.client.chat.completions.create(**options, extra_body={"speculation": "always"})


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
    assert server.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]
    assert server.post("/detokenize", {"tokens": [97, 98]}).json() == {"prompt": "ab"}


# -- clients that go, requests that end badly -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(server: Running, stream: bool) -> None:
    body = {"model": "fake", "messages": HI, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    hold = server.inject(FaultKind.STALL, after=5)
    with server.connect() as connection:
        connection.sendall(raw_request("/v1/chat/completions", body))
        assert hold.stalled.wait(WAIT_S)
    hold.release.set()
    server.wait_until_idle()
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


@pytest.mark.fault("L02")
def test_an_engine_that_fails_ends_streams_with_one_error(server: Running) -> None:
    server.inject(FaultKind.FATAL, after=4)

    def read() -> None:
        """Before the first token it is a status, after that an event in the stream."""
        with server.client.chat.completions.create(
            model="fake", messages=HI, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            for _ in stream:
                pass

    with pytest.raises(openai.APIError, match="the request failed"):
        read()
    assert server.client.chat.completions.create(model="fake", messages=HI, max_tokens=2).choices


def test_a_queue_that_is_full_answers_429(server: Running) -> None:
    hold = server.inject(FaultKind.STALL)
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(server.chat().status)) for _ in range(20)]
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


@pytest.mark.req("G13")
def test_an_engine_that_hangs_is_not_ready(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.entrypoints.async_llm.HANGS_AFTER_S", 0.05)

    assert server.get("/health").status == 200
    hold = server.inject(FaultKind.STALL)
    asking = threading.Thread(target=server.chat)
    asking.start()
    while server.get("/health/ready").status == 200:
        pass
    assert server.get("/health").status == 503
    assert server.get("/health/live").status == 200
    hold.release.set()
    asking.join(WAIT_S)
    while server.get("/health/ready").status == 503:
        pass


def test_the_example_agent_calls_each_tool_and_gives_typed_advice(server: Running) -> None:
    advice, results = openai_agent.run(f"http://127.0.0.1:{server.port}/v1", KEY, "fake")
    assert isinstance(advice, openai_agent.Advice)
    assert sorted(result.partition(": ")[2] for result in results) == ["rain until noon, then sun", "sunset at 20:14"]
