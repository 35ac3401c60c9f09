"""A request of the load generator, against servers that answer byte for byte what a test wants."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.bench.scripted import DONE, HEAD, USAGE, answering, chunk, event, plain
from tokenmill.bench.load_clients import HttpFailure, Sample, Stream, Target, call, chat_body, first_model
from tokenmill.bench.workloads import learn_words

BODY = chat_body("m", [{"role": "user", "content": "hi"}], 8)


def send(answer: bytes, timeout_s: float = 30.0, *, hangs: bool = False) -> Sample:
    async def run() -> Sample:
        async with answering(answer, hangs=hangs) as target:
            return await Stream(target, "/v1/chat/completions", BODY, timeout_s).run()

    return asyncio.run(run())


def streamed(*events: bytes) -> bytes:
    """An answer in chunks, cut where it hurts."""
    data = b"".join(events)
    pieces = [data[i : i + 7] for i in range(0, len(data), 7)]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces)


def test_a_stream_is_read_and_its_usage_is_believed() -> None:
    sample = send(streamed(chunk("He"), chunk("llo"), chunk(finish_reason="stop"), USAGE, DONE) + b"0\r\n\r\n")
    assert sample.is_ok, sample
    assert sample.text == "Hello"
    assert len(sample.chunk_times_s) == 2
    assert (sample.prompt_tokens, sample.output_tokens) == (11, 4)
    assert sample.sent_s <= sample.chunk_times_s[0] <= sample.chunk_times_s[1] <= sample.ended_s


def test_a_role_is_no_token_and_a_comment_is_nothing() -> None:
    opening = b": keep-alive\n\n" + chunk("", role="assistant")
    sample = send(HEAD + b"\r\n" + opening + chunk("a") + chunk(finish_reason="length") + USAGE + DONE)
    assert sample.is_ok
    assert len(sample.chunk_times_s) == 1


def test_an_answer_may_be_nothing_but_its_end() -> None:
    sample = send(HEAD + b"\r\n" + chunk("", "stop") + DONE)
    assert sample.is_ok
    assert sample.text == ""
    assert sample.ttft_s == sample.latency_s > 0


def test_without_usage_the_pieces_are_counted_and_crlf_is_fine() -> None:
    data = (chunk("a") + chunk("b") + chunk(finish_reason="stop") + DONE).replace(b"\n", b"\r\n")
    sample = send(HEAD + b"\r\n" + data)
    assert sample.is_ok
    assert sample.output_tokens == 2


def test_texts_of_completions_and_reasoning_count() -> None:
    text = event({"choices": [{"text": "x", "finish_reason": None}]})
    end = event({"choices": [{"text": "y", "finish_reason": "length"}]})
    assert send(HEAD + b"\r\n" + text + end + DONE).text == "xy"
    assert send(HEAD + b"\r\n" + chunk(reasoning_content="hm") + chunk("", "stop") + DONE).text == "hm"


ERROR = json.dumps({"error": {"message": "the queue is full", "code": "rate_limit_exceeded"}}).encode()


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (b"HTTP/1.1 429 No\r\nContent-Length: %d\r\n\r\n%s" % (len(ERROR), ERROR), "HTTP 429", "the queue is full"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "HTTP 502", "<html>"),
        (HEAD + b"\r\n" + chunk("a") + b"data: " + ERROR + b"\n\n" + DONE, "error event", "the queue is full"),
        (HEAD + b"\r\n" + chunk("a") + chunk("b"), "cut off", "after 2 pieces"),
        (HEAD + b"\r\n" + DONE, "empty stream", "without a token"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\nhalf", "IncompleteReadError", "bytes"),
        (HEAD + b"\r\ndata: {no json\n\n", "JSONDecodeError", "Expecting"),
        (b"SSH-2.0\r\n\r\n", "no HTTP", "SSH-2.0"),
        (b"", "IncompleteReadError", "bytes"),
    ],
)
def test_what_goes_wrong_is_an_error_of_that_request(answer: bytes, kind: str, detail: str) -> None:
    sample = send(answer)
    assert not sample.is_ok
    assert sample.error == kind
    assert detail in sample.detail


def test_a_request_gives_up_after_its_time() -> None:
    sample = send(HEAD + b"\r\n" + chunk("a"), timeout_s=0.1, hangs=True)
    assert sample.error == "timeout"
    assert "0.1 s" in sample.detail


def test_a_server_that_is_not_there_is_an_error_too() -> None:
    async def run() -> Sample:
        async with answering(b"") as target:
            pass
        return await Stream(target, "/v1/completions", {}, 30.0).run()

    assert asyncio.run(run()).error == "ConnectionRefusedError"


def test_what_has_come_can_be_waited_for_and_outlives_a_cancel() -> None:
    async def run() -> Sample:
        async with answering(HEAD + b"\r\n" + chunk("a") + chunk("b"), hangs=True) as target:
            stream = Stream(target, "/v1/completions", {}, 30.0)
            task = asyncio.create_task(stream.run())
            await stream.wait_for_chunks(2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with pytest.raises(HttpFailure, match="after 2 pieces of 3"):
                await stream.wait_for_chunks(3)
            return stream.sample()

    assert asyncio.run(run()).text == "ab"


def test_a_request_says_who_it_is_and_asks_for_usage() -> None:
    heard: list[bytes] = []

    async def run() -> None:
        async with answering(HEAD + b"\r\n" + DONE, heard) as target:
            await Stream(target, "/v1/chat/completions", BODY, 30.0).run()

    asyncio.run(run())
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")  # not /v1/v1
    assert b"Authorization: Bearer sk-load" in head
    assert json.loads(body)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("url", ["ftp://here", "here:8000", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no http"):
        Target(url)


def test_plain_calls() -> None:
    async def run() -> None:
        async with answering(plain(200, {"data": [{"id": "one"}, {"id": "two"}]})) as target:
            assert await first_model(target) == "one"
        async with answering(plain(200, {"data": []})) as target:
            with pytest.raises(HttpFailure, match="names none"):
                await first_model(target)
        async with answering(plain(404, {"error": "path not found"})) as target:
            with pytest.raises(HttpFailure, match="HTTP 404: path not found"):
                await call(target, "GET", "/nowhere")
        with pytest.raises(HttpFailure, match="ConnectionRefusedError"):
            await call(target, "GET", "/v1/models")

    asyncio.run(run())


def test_words_have_ids_where_the_server_tells_them() -> None:
    async def run() -> None:
        async with answering(plain(200, {"tokens": [5, 6]})) as target:
            words = await learn_words(target, "m")
            assert {word.ids for word in words} == {(5, 6)}
        for answer in (plain(404, {"error": "path not found"}), plain(200, ["what?"])):
            async with answering(answer) as target:
                words = await learn_words(target, "m")
                assert {word.num_tokens for word in words} == {1}
                assert not any(word.ids for word in words)

    asyncio.run(run())
