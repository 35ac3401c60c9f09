"""Ollama's API, over real sockets; the official client's own checks are in tests/clients."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.serving import HI, KEY, Reply, Running, child, raw_request, request, running
from tests.server.splitting import PIECES, whole_and_split
from tests.server.wire import LETTERS, LONG, Wire, until
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.api.ollama import Lines, _seconds, joined_lines
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.models import ModelSpec

CHAT, GENERATE = "/api/chat", "/api/generate"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
PLAIN: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS, "num_predict": 8}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
CALLING = {"regex": CALL.replace("{", r"\{").replace("}", r"\}"), "num_predict": 200}
"""Makes the model call the tool: Ollama's API has no other way to ask for that."""


def chat(server: Running, **changes: Any) -> Reply:
    return server.post(CHAT, {"model": "fake", "messages": HI, "options": PLAIN, "stream": False, **changes})


def lines_of(reply: Reply) -> list[dict[str, Any]]:
    """The lines of a stream; only the last one is done."""
    assert reply.headers["content-type"] == "application/x-ndjson"
    *lines, rest = reply.body.decode().split("\n")
    assert rest == ""
    found = [json.loads(line) for line in lines]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def said(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return joined_lines([line["message"] for line in lines])


def error_of(reply: Reply, status: int) -> str:
    assert reply.status == status, reply.body
    told = reply.json()
    assert set(told) == {"error"}
    assert isinstance(told["error"], str), "OpenAI's is an object"
    return told["error"]


# -- chat and generate ------------------------------------------------------------------------------------------------


def test_a_chat_has_ollama_s_shape(server: Running) -> None:
    told = chat(server).json()
    assert told["message"]["role"] == "assistant"
    assert len(told["message"]["content"]) == 8
    assert (told["model"], told["done"], told["done_reason"]) == ("fake", True, "length")
    assert told["eval_count"] == 8
    assert told["created_at"].endswith("Z")
    durations = [told[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration")]
    assert all(type(one) is int and one >= 0 for one in durations)
    assert abs(told["total_duration"] - sum(durations)) <= 1000
    assert told["total_duration"] > 100_000, "nanoseconds"


def test_a_chat_is_streamed_unless_told_otherwise_and_says_the_same(server: Running) -> None:
    whole = chat(server).json()
    lines = lines_of(chat(server, stream=None))
    assert said(lines)["content"] == whole["message"]["content"]
    last = lines[-1]
    assert (last["message"], last["done_reason"]) == ({"role": "assistant", "content": ""}, "length")
    assert (last["eval_count"], last["prompt_eval_count"]) == (8, whole["prompt_eval_count"])
    assert len(lines_of(chat(server, stream=None, options={"num_predict": 400}))) > 4, "as it is generated"


def test_generate_answers_a_prompt(server: Running) -> None:
    asked = {"model": "fake", "prompt": "hi", "options": PLAIN}
    whole = server.post(GENERATE, {**asked, "stream": False}).json()
    assert whole["response"] == chat(server).json()["message"]["content"], "by the chat template"
    lines = lines_of(server.post(GENERATE, asked))
    assert "".join(line["response"] for line in lines) == whole["response"]
    briefed = server.post(GENERATE, {**asked, "system": "be brief", "stream": False}).json()
    assert briefed["prompt_eval_count"] > whole["prompt_eval_count"]


def test_raw_prompts_are_continued_without_the_template(server: Running) -> None:
    asked = {"model": "fake", "prompt": "hi", "options": PLAIN, "stream": False}
    told = server.post(GENERATE, {**asked, "raw": True}).json()
    completion = {**{name: PLAIN[name] for name in PLAIN if name != "num_predict"}, "max_tokens": 8}
    same = server.post("/v1/completions", {"model": "fake", "prompt": "hi", **completion}).json()
    assert told["response"] == same["choices"][0]["text"]
    assert told["prompt_eval_count"] == same["usage"]["prompt_tokens"]


def test_names_may_end_in_latest(server: Running) -> None:
    assert chat(server, model="fake:latest").json()["model"] == "fake:latest"
    assert "does not exist" in error_of(chat(server, model="other:latest"), 404)


def test_options_are_sampling_parameters(server: Running) -> None:
    text = chat(server).json()["message"]["content"]
    stopped = chat(server, options={**PLAIN, "stop": ["0", "1", "2", "3", "4", text[4]]}).json()
    assert stopped["message"]["content"] == text[: text.index(text[4])]
    assert stopped["done_reason"] == "stop"
    one = {"num_predict": 8, "seed": 5, "temperature": 1.0}
    again = [chat(server, options=one).json()["message"]["content"] for _ in range(2)]
    assert again[0] == again[1]
    set_up = {"num_ctx": 2048, "num_gpu": 1, "num_thread": 2, "repeat_last_n": 64, "mirostat": 0, "tfs_z": 1.0}
    assert chat(server, options={**PLAIN, **set_up}).json()["message"]["content"] == text
    penalized = {**PLAIN, "repeat_penalty": 1.7}
    ours = {name: value for name, value in penalized.items() if name not in ("num_predict", "repeat_penalty")}
    same = server.chat(**ours, repetition_penalty=1.7).json()["choices"][0]["message"]["content"]
    assert chat(server, options=penalized).json()["message"]["content"] == same


def test_log_probabilities_cover_every_token(server: Running) -> None:
    whole = chat(server, logprobs=True, top_logprobs=2).json()["logprobs"]
    assert len(whole) == 8
    assert all(len(one["top_logprobs"]) == 2 for one in whole)
    streamed = lines_of(chat(server, logprobs=True, top_logprobs=2, stream=True))
    assert [one for line in streamed for one in line.get("logprobs", ())] == whole


@pytest.mark.parametrize("stream", [False, True])
def test_format_constrains_the_answer(server: Running, stream: bool) -> None:
    schema = {**PARAMETERS, "additionalProperties": False}
    reply = chat(server, format=schema, options={"num_predict": 200, "seed": 1}, stream=stream)
    message = said(lines_of(reply)) if stream else reply.json()["message"]
    assert set(json.loads(message["content"])) == {"city", "days"}


def test_format_may_be_any_json(server: Running) -> None:
    told = chat(server, format="json", options={"num_predict": 400, "seed": 2, "logit_bias": {"125": 30}}).json()
    assert isinstance(json.loads(told["message"]["content"]), dict)


# -- tools and thinking -----------------------------------------------------------------------------------------------


def test_a_tool_call_has_its_arguments_as_an_object(server: Running) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "options": CALLING}
    whole = chat(server, **asked).json()
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Rome", "days": 3}}
    assert whole["done_reason"] == "stop"
    lines = lines_of(chat(server, **asked, stream=True))
    (same,) = said(lines)["tool_calls"]
    assert same["function"] == call["function"]


def test_results_belong_to_calls_by_name_and_order(server: Running) -> None:
    """The same prompt as with OpenAI's ids."""
    function = {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}
    theirs = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}, {"function": function}]},
        {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
        {"role": "tool", "content": "cold", "tool_name": "get_weather"},
    ]
    written = {**function, "arguments": json.dumps(function["arguments"])}
    calls = [{"id": f"call{i:05}", "type": "function", "function": written} for i in range(2)]
    ours = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_call_id": "call00000"},
        {"role": "tool", "content": "cold", "tool_call_id": "call00001"},
    ]
    told = chat(server, messages=theirs, tools=TOOLS).json()
    used = server.chat(messages=ours, tools=TOOLS).json()["usage"]
    assert used["prompt_tokens"] == told["prompt_eval_count"]
    assert used["prompt_tokens_details"]["cached_tokens"] >= used["prompt_tokens"] - 1


def test_thinking_is_told_apart(thinking: Running) -> None:
    asked = {"options": {"num_predict": 10, "seed": 3}}
    for think in (None, True, "low"):
        message = chat(thinking, **asked, think=think).json()["message"]
        assert message["thinking"]
        assert message["content"] == ""
        assert said(lines_of(chat(thinking, **asked, think=think, stream=True)))["thinking"] == message["thinking"]
    message = chat(thinking, **asked, think=False).json()["message"]
    assert "thinking" not in message
    assert message["content"]
    told = thinking.post(GENERATE, {"prompt": "hi", **asked, "stream": False}).json()
    assert (bool(told["thinking"]), told["response"]) == (True, "")


# -- the stage by itself ----------------------------------------------------------------------------------------------


@given(PIECES, st.data())
def test_a_stream_says_the_same_at_every_split(pieces: list[tuple[str, str]], data: st.DataObject) -> None:
    expected = {
        "content": "".join(text for kind, text in pieces if kind == "content"),
        "thinking": "".join(text for kind, text in pieces if kind == "reasoning"),
        "calls": [json.loads(text) for kind, text in pieces if kind == "call"],
    }
    for parts in whole_and_split(pieces, data):
        lines = Lines()
        told = joined_lines([*(line for part in parts for line in lines.add(part)), *lines.end()])
        assert told["content"] == expected["content"]
        assert told.get("thinking", "") == expected["thinking"]
        assert [call["function"]["arguments"] for call in told.get("tool_calls", ())] == expected["calls"]


@pytest.mark.parametrize(
    ("given_", "seconds"),
    [("5m", 300), ("1h30m", 5400), (0, 0), (-1, -1), ("-1", -1), ("500ms", 0.5), (2.5, 2.5), ("-1m", -60)],
)
def test_durations(given_: Any, seconds: float) -> None:
    assert math.isclose(_seconds(given_), seconds)


# -- embeddings and models --------------------------------------------------------------------------------------------


def test_embeddings_are_those_of_the_other_api(server: Running) -> None:
    same = [one["embedding"] for one in server.post("/v1/embeddings", {"input": ["a", "bc"]}).json()["data"]]
    told = server.post("/api/embed", {"model": "fake", "input": ["a", "bc"]}).json()
    assert told["embeddings"] == same
    assert told["prompt_eval_count"] > 0
    assert server.post("/api/embed", {"model": "fake", "input": "a"}).json()["embeddings"] == same[:1]
    assert server.post("/api/embeddings", {"model": "fake", "prompt": "a"}).json() == {"embedding": same[0]}
    for nothing in ([], ""):
        assert server.post("/api/embed", {"model": "fake", "input": nothing}).json()["embeddings"] == []


def test_long_texts_are_cut_unless_told_otherwise(server: Running) -> None:
    asked = {"model": "fake", "input": "a" * 5000}
    assert len(server.post("/api/embed", asked).json()["embeddings"]) == 1
    assert "context" in error_of(server.post("/api/embed", {**asked, "truncate": False}), 400)
    assert "dimensions" in error_of(server.post("/api/embed", {**asked, "dimensions": 3}), 400)


def test_models_are_listed_and_shown(server: Running) -> None:
    (model,) = server.get("/api/tags").json()["models"]
    assert (model["name"], model["model"]) == ("fake", "fake")
    assert len(model["digest"]) == 64
    (loaded,) = server.get("/api/ps").json()["models"]
    assert (loaded["name"], loaded["digest"], loaded["context_length"]) == ("fake", model["digest"], 4096)
    for body in ({"model": "fake"}, {"name": "fake:latest"}):
        shown = server.post("/api/show", body).json()
        assert "tools" in shown["capabilities"]
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == 4096
        assert shown["template"]
    assert "thinking" not in shown["capabilities"]
    error_of(server.post("/api/show", {"model": "other"}), 404)
    error_of(server.post("/api/show", {}), 400)
    assert int(server.get("/api/version").json()["version"].split(".")[1]) > 6, "tools ask for a recent one"


def test_ollama_s_command_line_finds_a_server(server: Running) -> None:
    assert request(server.port, "HEAD", "/", key=KEY).status == 200


@pytest.fixture(scope="module")
def two() -> Iterator[Running]:
    """A server with a model that is loaded on first use, and unloaded when it is idle."""

    def make() -> AsyncLLM:
        model = FakeModel(FakeConfig(vocab_size=258, max_context=512, depth=1))
        return AsyncLLM(model, config=EngineConfig(max_num_seqs=2), kv_cache_tokens=2048)

    other = ModelSpec(name="other", load=make, keep_alive_s=600.0, at_start=False)
    config = ServerConfig(key_hashes=(hash_key(KEY),), admin_key_hashes=(hash_key("admin"),))
    with running(make(), config, others=[other]) as one:
        yield one


def _loaded(server: Running) -> list[str]:
    return [model["name"] for model in server.get("/api/ps").json()["models"]]


def test_a_request_without_words_loads_or_unloads(two: Running) -> None:
    assert _loaded(two) == ["fake"]
    told = two.post(GENERATE, {"model": "other"}).json()
    assert (told["response"], told["done"], told["done_reason"]) == ("", True, "load")
    assert sorted(_loaded(two)) == ["fake", "other"]
    assert two.post(CHAT, {"model": "other", "messages": [], "keep_alive": 0}).json()["done_reason"] == "unload"
    assert _loaded(two) == ["fake"]
    two.post(CHAT, {"model": "fake", "messages": [], "keep_alive": 0})
    assert _loaded(two) == ["fake"], "the server never unloads it"


def test_keep_alive_replaces_the_server_s_own_limit(two: Running) -> None:
    two.post(GENERATE, {"model": "other", "keep_alive": "5m"})
    (model,) = [one for one in two.served.models.loaded if one.name == "other"]
    assert model.keep_alive_s == 300
    two.post(GENERATE, {"model": "other", "keep_alive": -1})
    assert model.keep_alive_s == math.inf
    two.post(GENERATE, {"model": "other", "keep_alive": 1e300})
    assert two.get("/api/ps").status == 200, "no date is so late"
    for name in ("other", "fake"):  # the server never unloads the latter
        error = error_of(two.post(GENERATE, {"model": name, "keep_alive": "soon"}), 400)
        assert "keep_alive" in error


def test_models_are_pulled_and_deleted_by_admins(two: Running) -> None:
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        assert "admin" in error_of(request(two.port, method, path, {"model": "fake"}), 403)
    assert "started" in error_of(request(two.port, "DELETE", "/api/delete", {"model": "fake"}, key="admin"), 409)
    error_of(request(two.port, "DELETE", "/api/delete", {"model": "nothing-there"}, key="admin"), 404)
    reply = request(two.port, "POST", "/api/pull", {"model": "no such name"}, key="admin")
    first, last = [json.loads(line) for line in reply.body.splitlines()]
    assert first == {"status": "pulling manifest"}
    assert "no such name" in last["error"]


# -- errors and clients that leave ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "arguments",
        ),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"stop": [""]}}, "stop"),
        ({"format": "xml"}, "format"),
        ({"format": {"type": "nothing"}}, "format"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"think": "hard"}, "think"),
        ({"context": [1, 2]}, "context"),
    ],
)
def test_what_is_wrong_is_said_in_ollama_s_shape(server: Running, changes: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        assert words in error_of(chat(server, **changes, stream=stream), 400)


def test_errors_of_the_gate_and_the_routes_have_the_same_shape(server: Running) -> None:
    error_of(server.post(CHAT, {"messages": HI}, key="wrong"), 401)
    error_of(server.post(CHAT, "{"), 400)
    error_of(server.post(CHAT, {"messages": HI}, headers={"Content-Type": "text/plain"}), 415)
    error_of(server.get(CHAT), 405)
    error_of(server.post("/api/create", {"model": "x"}), 404)  # one of Ollama's that is not served


def test_a_body_needs_no_type_unless_a_web_page_sends_it(server: Running) -> None:
    """As `curl -d` sends it, in every example for Ollama. A form on a web page is told apart by its origin."""
    body, page = {"model": "fake", "messages": HI, "stream": False, "options": PLAIN}, {"Origin": "https://evil.com"}
    for kind in ("application/x-www-form-urlencoded", ""):
        assert server.post(CHAT, body, headers={"Content-Type": kind}).json()["done"]
        error_of(server.post(CHAT, body, headers={"Content-Type": kind, **page}), 415)


def test_a_failure_within_a_stream_is_a_line(server: Running) -> None:
    wire = Wire(server.port)
    asked = {"model": "fake", "messages": HI, "options": {**PLAIN, "num_predict": LONG}}
    wire.send(raw_request(CHAT, asked, headers="x-request-id: to-cancel\r\n"))
    until(lambda: len(server.served.calls) == 1)
    wire.read_head()
    assert server.post("/v1/requests/to-cancel/cancel", {}).status == 200
    reply = wire.read_reply()
    assert reply is not None
    assert "cancelled" in json.loads(reply.body.splitlines()[-1])["error"]
    wire.leave("FIN")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(server: Running, stream: bool) -> None:
    wire = Wire(server.port)
    options = {**PLAIN, "num_predict": LONG}
    wire.send(raw_request(CHAT, {"messages": HI, "stream": stream, "options": options}))
    until(lambda: len(server.served.calls) == 1)
    wire.leave("RST")
    server.wait_until_idle()


# -- one conversation through all dialects ----------------------------------------------------------------------------


def _cached(server: Running, reply: Reply) -> tuple[int, int]:
    """Prompt tokens, and those of them that were cached, of a request."""
    assert reply.status == 200, reply.body
    (told,) = server.get(f"/v1/requests/{reply.headers['x-request-id']}/timeline").json()["generations"]
    return told["prompt_tokens"], told["cached_tokens"]


def test_29_a_conversation_continued_through_all_dialects_reuses_its_kv(server: Running) -> None:
    params = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS, "cache_salt": "dialects"}
    conversation: list[Any] = [{"role": "user", "content": "tell me about the sea " * 10}]
    known = 0
    ollama_options = {name: value for name, value in params.items() if name != "cache_salt"} | {"num_predict": 12}
    for turn in range(8):
        messages = {"model": "fake", "messages": conversation}
        if turn % 4 == 0:
            reply = server.post("/v1/chat/completions", {**messages, **params, "max_tokens": 12})
            answer = reply.json()["choices"][0]["message"]["content"]
        elif turn % 4 == 1:
            reply = server.post("/v1/messages", {**messages, **params, "max_tokens": 12})
            answer = reply.json()["content"][0]["text"]
        elif turn % 4 == 2:
            asked = {"model": "fake", "input": conversation, "store": turn > 4, "max_output_tokens": 12}
            reply = server.post("/v1/responses", {**asked, **params})
            answer = reply.json()["output"][0]["content"][0]["text"]
        else:
            body = {**messages, "options": ollama_options, "cache_salt": "dialects", "stream": False}
            reply = server.post(CHAT, body)
            answer = reply.json()["message"]["content"]
        num_prompt, num_cached = _cached(server, reply)
        assert num_prompt > known
        # The last token of an answer is drawn, not computed; this template writes its own end of turn after it.
        assert num_cached >= known - 1, (turn, num_cached, known)
        known = num_prompt + 12
        conversation += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"and {turn}?"}]


def test_a_second_port_serves_the_same(tmp_path: Path) -> None:
    with child(
        tmp_path / "log", "fake", "--ollama-port", "0", until=r" on http://[^:]+:(\d+)/v1[^$]*clients: "
    ) as served:
        until(lambda: served.said().endswith("\n"))
        port = int(served.said().rpartition(":")[2])
        assert port != served.port
        for one in (port, served.port):
            assert request(one, "GET", "/api/tags", key=None).json()["models"][0]["name"] == "fake"
        assert served.stop() == 0
