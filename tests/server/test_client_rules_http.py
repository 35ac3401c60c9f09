"""What real clients rely on in errors, headers and addresses. Each test is named by its rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Model

from tests.server.rules import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    GENERATING,
    RESPONSE,
    assert_error,
    fake_server,
    strict,
)
from tests.server.serving import HI, KEY, WAIT_S, Reply, Running, request
from tokenmill.backends.fake import FaultKind
from tokenmill.config import EngineConfig

PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def open_server() -> Iterator[Running]:
    """No keys, and a model with a slash in its name."""
    with fake_server(name="org/name", key_hashes=()) as one:
        yield one


# -- errors -----------------------------------------------------------------------------------------------------------

TOO_LARGE = b" " * 9_000_000
TOO_LONG: list[Any] = [{"role": "user", "content": "x" * 5000}]
WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "other"}, 404, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    ({"messages": [{"role": "nobody", "content": "hi"}]}, 400, "messages"),
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
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"messages": TOO_LONG}, 400, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "status", "param"), WRONG)
def test_c15_wrong_requests_get_openais_errors_and_run_nothing(
    server: Running, change: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    server.wait_until_idle()
    before = server.tick()
    assert_error(server.chat(**change, stream=stream), status, param)
    assert server.tick() == before


def test_c15_options_of_a_stream_without_one(server: Running) -> None:
    assert_error(server.chat(stream_options={"include_usage": True}), 400, "stream_options")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"hi"', b"\xff\xfe", b'{"a":' * 50_000, b'{"n": NaN}'])
def test_c15_bodies_that_are_none(server: Running, body: bytes) -> None:
    for path, _ in [*GENERATING, EMBEDDING]:
        assert_error(server.post(path, body), 400)


def test_c15_other_statuses(server: Running) -> None:
    assert_error(server.post("/v1/nothing", {}), 404)
    assert_error(server.get("/v1/completions"), 405)
    assert_error(server.get("/v1/models", key="wrong"), 401)
    assert_error(server.post("/v1/chat/completions", TOO_LARGE), 413)
    server.inject(FaultKind.NAN)
    assert_error(server.chat(), 500)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("what", "change"),
    [
        (CHAT, {"messages": TOO_LONG}),
        (CHAT, {"max_tokens": 5000}),
        (COMPLETION, {"prompt": "x" * 5000}),
        (COMPLETION, {"prompt": [1] * 4096}),
        (RESPONSE, {"input": "x" * 5000}),
        (EMBEDDING, {"input": "x" * 5000}),
    ],
)
def test_c16_too_long_a_context_is_said_in_the_words_that_clients_look_for(
    server: Running, what: tuple[str, Any], change: dict[str, Any], stream: bool
) -> None:
    reply = server.post(what[0], {**what[1], **change, "stream": stream})
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["type"] == "invalid_request_error"
    assert "This model's maximum context length is 4096 tokens" in reply.error["message"]


def test_c16_the_client_has_the_code(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        server.client.chat.completions.create(model="fake", messages=TOO_LONG)
    assert found.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("what", "change"),
    [(CHAT, {"n": 8}), (COMPLETION, {"n": 8}), (COMPLETION, {"prompt": ["a", "b", "c", "d"] * 4})],
    ids=["choices of a chat", "choices of a completion", "prompts"],
)
def test_c17_too_many_requests_are_told_when_to_come_back(what: tuple[str, Any], change: dict[str, Any]) -> None:
    with fake_server(EngineConfig(max_num_seqs=1, max_queue=1)) as server:
        reply = server.post(what[0], {**what[1], **change, "ignore_eos": True})
        assert_error(reply, 429)
        assert int(reply.headers["retry-after"]) >= 1
        server.wait_until_idle()
        assert server.chat().status == 200


def test_c17_a_server_that_stops_says_when_to_come_back() -> None:
    with fake_server() as server:
        server.served.drain()
        for reply in (server.chat(), server.get("/health"), server.get("/health/ready")):
            assert reply.status == 503
            assert int(reply.headers["retry-after"]) >= 1
        with pytest.raises(openai.InternalServerError) as found:
            server.client.models.list()
        assert found.value.response.headers["retry-after"]


# -- names of requests ------------------------------------------------------------------------------------------------


def test_c18_every_answer_has_the_name_of_its_request(server: Running) -> None:
    replies = [
        *(server.post(*what) for what in [*GENERATING, EMBEDDING]),
        server.chat(stream=True),
        server.chat(temperature=-1),
        server.get("/v1/models"),
        server.get("/v1/nothing"),
        server.get("/v1/chat/completions"),
        server.get("/v1/models", key=None),
        server.get("/health"),
        server.post("/v1/chat/completions", b"{"),
        server.post("/v1/chat/completions", TOO_LARGE),
        request(server.port, "OPTIONS", "/v1/models"),
    ]
    server.inject(FaultKind.NAN)
    replies.append(server.chat())
    assert {reply.status for reply in replies} == {200, 400, 401, 404, 405, 413, 500}
    names = {reply.headers["x-request-id"] for reply in replies}
    assert len(names) == len(replies)


def test_c18_what_is_no_http_has_a_name_too(server: Running) -> None:
    with server.connect() as connection, connection.makefile("rb") as answer:
        connection.sendall(b"nonsense\r\n\r\n")
        assert b"\r\nx-request-id: req-" in answer.read()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/health"])
def test_c18_a_clients_own_name_is_kept_if_it_is_sane(server: Running, path: str) -> None:
    assert server.get(path, headers={"X-Request-Id": "trace-7.a:b_c"}).headers["x-request-id"] == "trace-7.a:b_c"
    for insane in ("", "a b", "x" * 200, "<script>", "é"):
        found = server.get(path, headers={"X-Request-Id": insane}).headers["x-request-id"]
        assert re.fullmatch(r"req-[0-9a-f]{32}", found)


def test_c18_the_client_knows_the_name(server: Running) -> None:
    answer = server.client.chat.completions.create(model="fake", messages=HI, max_tokens=1)
    assert answer._request_id
    assert answer._request_id.startswith("req-")
    with pytest.raises(openai.NotFoundError) as found:
        server.client.models.retrieve("other")
    assert found.value.request_id
    assert found.value.request_id.startswith("req-")


# -- models -----------------------------------------------------------------------------------------------------------


def test_c19_the_list_of_models(server: Running) -> None:
    for path in ("/v1/models", "/models"):
        listed = server.get(path).json()
        assert listed["object"] == "list"
        (one,) = listed["data"]
        assert (
            strict(
                Model, one, more=frozenset({"root", "max_model_len", "status", "aliases", "default_sampling_params"})
            ).id
            == "fake"
        )
        assert one["root"] == "fake"
        assert one["max_model_len"] == 4096
    assert server.get("/v1/models/fake").json() == one


def test_c19_a_model_with_a_slash_in_its_name(open_server: Running) -> None:
    client = open_server.client
    assert [model.id for model in client.models.list()] == ["org/name"]
    assert client.models.retrieve("org/name").id == "org/name"  # sent as org%2Fname
    for path in ("/v1/models/org%2Fname", "/v1/models/org%2fname", "/v1/models/org/name"):
        assert open_server.get(path).json()["id"] == "org/name"
    assert client.chat.completions.create(model="org/name", messages=HI, max_tokens=1).model == "org/name"
    for path in ("/v1/models/org%2Fother", "/v1/models/org"):
        assert open_server.get(path).error["code"] == "model_not_found"


# -- who may come in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"Authorization": f"Bearer {KEY}", "api-key": KEY, "X-Api-Key": KEY},
    ],
)
def test_c21_a_key_may_come_in_three_headers(server: Running, headers: dict[str, str]) -> None:
    assert server.get("/v1/models", key=None, headers=headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic c2s="},
        {"Authorization": KEY},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {"api-key": f"Bearer {KEY}"},
        {"Authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
    ],
)
def test_c21_without_a_key_only_health_is_open(server: Running, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/models", "/openapi.json", "/v1/nothing", "//v1/models", "/tokenize", "/web/"):
        reply = server.get(path, key=None, headers=headers)
        assert reply.status == 401, path
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.error["code"] == "invalid_api_key"
    for path in ("/health", "/health/live", "/health/ready"):
        assert server.get(path, key=None, headers=headers).status == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer anything"}, {"x-api-key": "x"}, {"api-key": ""}])
def test_c21_where_no_key_is_set_any_will_do(open_server: Running, headers: dict[str, str]) -> None:
    assert open_server.get("/v1/models", key=None, headers=headers).status == 200


def preflight(server: Running, origin: str = PAGE) -> Reply:
    asks = {"Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang,x-request-id"
    return request(server.port, "OPTIONS", CHAT[0], key=None, headers={"Origin": origin, **asks})


def test_c22_a_page_that_is_known_may_ask_without_a_key() -> None:
    with fake_server(cors_origins=(PAGE,)) as server:
        reply = preflight(server)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert "POST" in reply.headers["access-control-allow-methods"]
        allowed = reply.headers["access-control-allow-headers"].lower()
        assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-lang", "x-request-id"))
        origin = {"Origin": PAGE}
        replies = [
            server.post(*CHAT, headers=origin),
            server.post(CHAT[0], {**CHAT[1], "stream": True}, headers=origin),
            server.post(*CHAT, headers=origin, key="wrong"),
            server.post(CHAT[0], {**CHAT[1], "n": 0}, headers=origin),
            server.get("/v1/nothing", headers=origin),
        ]
        assert [one.status for one in replies] == [200, 200, 401, 400, 404]
        for one in replies:
            assert one.headers["access-control-allow-origin"] == PAGE
            assert one.headers["access-control-expose-headers"].lower().startswith("x-request-id, retry-after, ")
        stranger = preflight(server, "https://other.example")
        assert "access-control-allow-origin" not in stranger.headers
        answer = server.get("/v1/models", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_c22_without_a_list_no_page_may(server: Running) -> None:
    assert preflight(server).status == 405
    replies = [preflight(server), server.get("/v1/models", headers={"Origin": PAGE})]
    assert not any(name.startswith("access-control-") for reply in replies for name in reply.headers)


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
def test_c25_a_base_url_with_or_without_v1(server: Running, base: str) -> None:
    address = f"http://127.0.0.1:{server.port}{base}"
    with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        assert client.models.list().data[0].id == client.models.retrieve("fake").id == "fake"
        assert client.chat.completions.create(model="fake", messages=HI, max_tokens=2).choices
        assert client.completions.create(model="fake", prompt="hi", max_tokens=2).choices
        assert client.responses.create(model="fake", input="hi", max_output_tokens=2).output
        assert client.embeddings.create(model="fake", input="hi").data


def test_c25_no_redirects(server: Running) -> None:
    paths = [path for path, _ in [*GENERATING, EMBEDDING]] + ["/tokenize", "/v1/models", "/health"]
    for path in [*paths, *(path.removeprefix("/v1") for path in paths)]:
        for reply in (server.post(f"{path}/", {}), server.get(f"{path}/"), server.get(f"/{path}")):
            assert not 300 <= reply.status < 400, path
            assert "location" not in reply.headers
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()
