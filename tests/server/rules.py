"""What the tests of client rules share: other clients' parsers in a few lines, OpenAI's types, read strictly."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
from pydantic import TypeAdapter

from tests.server.serving import HI, KEY, WAIT_S, Reply, Running, raw_request, running
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.models import ModelSpec

CHAT = ("/v1/chat/completions", {"model": "fake", "messages": HI, "max_tokens": 12, "seed": 1})
COMPLETION = ("/v1/completions", {"model": "fake", "prompt": "hi", "max_tokens": 12, "seed": 1})
RESPONSE = ("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 12, "seed": 1})
EMBEDDING = ("/v1/embeddings", {"model": "fake", "input": ["a", "bc"]})
GENERATING = [CHAT, COMPLETION, RESPONSE]
NAMES = ["chat", "completions", "responses"]


@contextmanager
def fake_server(
    engine: EngineConfig | None = None, name: str = "fake", others: Sequence[ModelSpec] = (), **settings: Any
) -> Iterator[Running]:
    """A server over the fake model with settings of its own; one that is silent does not begin a stream."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=4096, depth=1))
    llm = AsyncLLM(model, config=engine or EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=32_768)
    usual = {"key_hashes": (hash_key(KEY),), "keep_alive_s": 60.0}
    with running(llm, ServerConfig(**{**usual, **settings}), name, others=others) as one:
        yield one


# -- what goes over the wire ------------------------------------------------------------------------------------------


def http_chunks(server: Running, path: str, body: dict[str, Any]) -> list[bytes]:
    """The pieces in which a streamed answer was sent."""
    with server.connect() as connection, connection.makefile("rb") as answer:
        connection.sendall(raw_request(path, {**body, "stream": True}, headers="Connection: close\r\n"))
        assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
        while answer.readline() != b"\r\n":
            pass
        chunks = []
        while size := int(answer.readline(), 16):
            chunks.append(answer.read(size))
            assert answer.read(2) == b"\r\n"
        return chunks


def begin(
    connection: http.client.HTTPConnection, what: tuple[str, dict[str, Any]], request_id: str = "a", **changes: Any
) -> http.client.HTTPResponse:
    """A stream that has begun and is not yet read."""
    path, body = what
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "X-Request-Id": request_id}
    connection.request("POST", path, json.dumps({**body, "stream": True, **changes}), headers)
    return connection.getresponse()


def read_until(answer: http.client.HTTPResponse, what: bytes) -> bytes:
    """What has come when this has."""
    read = b""
    while what not in read:
        piece = answer.read1(4096)
        assert piece, f"it ended without {what!r}"
        read += piece
    return read


def broken_stream(server: Running, what: tuple[str, dict[str, Any]], **changes: Any) -> bytes:
    """A stream whose model fails when some of its text has been read."""
    texts = {CHAT[0]: b'"delta":{"content"', COMPLETION[0]: b'"text":', RESPONSE[0]: b"response.output_text.delta"}
    hold = server.inject(FaultKind.STALL, after=4)
    server.inject(FaultKind.NAN, after=8)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    answer = begin(connection, what, **changes)
    read = read_until(answer, texts[what[0]])
    hold.release.set()
    read += answer.read()
    connection.close()
    return read


# -- how clients read it ----------------------------------------------------------------------------------------------


def bench_events(pieces: Iterable[bytes]) -> list[Any]:
    """`vllm bench serve`: each piece is text by itself, and an empty line ends an event."""
    buffer, found = "", []
    for piece in pieces:
        buffer += piece.decode("utf-8")
        while "\n\n" in buffer:
            message, buffer = buffer.split("\n\n", 1)
            message = message.strip()
            if message and not message.startswith(":"):
                found.append(message.removeprefix("data: "))
    assert buffer == ""
    assert found.pop() == "[DONE]"
    return [json.loads(message) for message in found]


def line_events(lines: Iterable[str]) -> list[Any]:
    """Clients that take a stream line by line, whatever they think a line is; `[DONE]` without quotes ends it."""
    found = []
    for line in lines:
        if line.startswith("data:"):
            data = line[len("data:") :].strip()
            if data.startswith("[DONE]"):
                return found
            found.append(json.loads(data))
        else:
            assert line == "" or line.startswith((":", "event: ")), f"a line that says nothing: {line!r}"
    raise AssertionError("the stream has no end")


def accumulated(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """openai's `accumulate_delta`, for what has no lists: texts and numbers are added to those before them."""
    total: dict[str, Any] = {}
    for delta in deltas:
        for name, value in delta.items():
            total[name] = value if total.get(name) is None else total[name] + value
    return total


def texts_of(events: Iterable[Any], n: int = 1) -> list[str]:
    """The texts of a chat's or a completion's choices, joined."""
    texts = [""] * n
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return texts


# -- OpenAI's types ---------------------------------------------------------------------------------------------------


def strict(kind: Any, data: Any, more: frozenset[str] = frozenset()) -> Any:
    """The data as one of the client's types: nothing converted, every literal known, no fields but `more` unknown."""
    read = TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
    unknown = unknown_fields(read) - more
    assert not unknown, f"{unknown} in {type(read).__name__}"
    return read


def unknown_fields(value: Any) -> set[str]:
    if isinstance(value, (list, tuple)):
        return set().union(*map(unknown_fields, value))
    if isinstance(value, dict):
        return unknown_fields(list(value.values()))
    if isinstance(value, openai.BaseModel):
        known = [getattr(value, name) for name in type(value).model_fields]
        return set(value.model_extra or {}) | unknown_fields(known)
    return set()


def strict_json(body: bytes) -> Any:
    """JSON as browsers read it: NaN and Infinity are none."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(body, parse_constant=refuse)


def assert_error(reply: Reply, status: int, param: str | None = None) -> None:
    """OpenAI's form: four fields, of which the last two may be null."""
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    error = reply.error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str), error
    assert error["code"] is None or isinstance(error["code"], str), error
    assert error["param"] == param, error
