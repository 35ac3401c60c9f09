"""I08, I09, I13, T04, T05: messages, fields and paths that are wrong, or do not go together."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.server.refusals import (
    BODIES,
    CANCEL,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATING,
    MODELS,
    PART,
    RESPONSES,
    both,
    changed,
    check_refusal,
    nothing_runs,
    post,
    refuse,
)
from tests.server.serving import HI, Running, request

# -- I08: fields and messages -----------------------------------------------------------------------------------------

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD_MESSAGES: dict[str, list[dict[str, Any]]] = {
    "a system message": [{"role": "system", "content": "be brief"}, *HI],
    "a developer message": [{"role": "developer", "content": "be brief"}, *HI],
    "parts": [{"role": "user", "content": [PART, PART]}],
    "a name": [{"role": "user", "content": "hi", "name": "bob"}],
    "a call of a tool": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *HI],
    "a call without content": [*HI, {"role": "assistant", "tool_calls": [CALL]}, *HI],
    "a result of a tool": [*HI, {"role": "tool", "tool_call_id": "call_1", "content": "5"}],
    "unknown fields": [{"role": "user", "content": "hi", "mood": "good"}],
}
BAD_MESSAGES: dict[str, Any] = {
    "an unknown role": {"role": "king", "content": "hi"},
    "a role that is none": {"role": 5, "content": "hi"},
    "no role": {"content": "hi"},
    "a tool without an id": {"role": "tool", "content": "5"},
    "a tool with a number": {"role": "tool", "content": "5", "tool_call_id": 5},
    "no content": {"role": "user"},
    "content that is a number": {"role": "user", "content": 5},
    "content that is an object": {"role": "user", "content": PART},
    "a part that is a text": {"role": "user", "content": ["hi"]},
    "a part without a type": {"role": "user", "content": [{"text": "hi"}]},
    "a part without a text": {"role": "user", "content": [{"type": "text"}]},
    "a part of numbers": {"role": "user", "content": [{"type": "text", "text": 5}]},
    "a list": ["user", "hi"],
    "a text": "hi",
}


@pytest.mark.parametrize("what", GOOD_MESSAGES)
def test_i08_messages_of_all_kinds(server: Running, what: str) -> None:
    assert server.chat(messages=GOOD_MESSAGES[what]).status == 200
    assert server.chat(messages=GOOD_MESSAGES[what], stream=True).events()


@pytest.mark.parametrize("what", BAD_MESSAGES)
def test_i08_messages_that_are_none(server: Running, what: str) -> None:
    refuse(server, CHAT, {"messages": [*HI, BAD_MESSAGES[what]]})
    if "tool" not in what:
        refuse(server, RESPONSES, {"input": [*HI, BAD_MESSAGES[what]]})


def test_i08_unknown_fields_are_ignored(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    more = {"safety_identifier": "u-1", "user": "u", "store": False, "x": {"y": [1]}, "max_token": 5}
    with caplog.at_level(logging.DEBUG, logger="tokenmill"):
        for path in BODIES:
            caplog.clear()
            assert post(server, path, changed(path, **more)).status == 200
            assert "max_token" in caplog.text, path  # so that a typing mistake can be found
    assert post(server, CHAT, changed(CHAT, stream=True, **more)).events()


def test_i08_unknown_models(server: Running) -> None:
    for path in BODIES:
        with nothing_runs(server):
            for name in ("other", "Fake", "fake ", " fake", "", "x" * 10_000, "../fake", "fa\nke", "fake\0"):
                for body in both(path, changed(path, model=name)):
                    error = check_refusal(post(server, path, body), 404, "model", name)
                    assert error["code"] == "model_not_found"
        refuse(server, path, *({"model": name} for name in (5, True, ["fake"], {})))


# -- I09: paths -------------------------------------------------------------------------------------------------------

PATHS: list[tuple[str, str, int]] = [
    *((method, path, 405) for path in [*BODIES, CANCEL] for method in ("PUT", "DELETE", "PATCH")),
    *(("GET", path, 405) for path in [*BODIES, CANCEL] if path != CHAT),
    *((method, "/v1/models", 405) for method in ("POST", "PUT", "DELETE")),
    *((method, "/health", 405) for method in ("POST", "DELETE")),
    *(("POST", f"{path}/", 404) for path in [*BODIES, CANCEL]),
    *(("POST", f"/{path}", 404) for path in [*BODIES, CANCEL]),
    ("POST", "/v1//chat/completions", 404),
    ("POST", "/v1/chat//completions", 404),
    ("POST", "/v1/chat%2Fcompletions", 200),
    ("POST", "/V1/chat/completions", 404),
    ("POST", "/v1/chat", 404),
    ("POST", "/v2/chat/completions", 404),
    ("POST", "/v1/v1/chat/completions", 404),
    ("POST", "/v1/chat/completions/../completions", 404),
    ("POST", "/v1/requests//cancel", 404),
    ("POST", "/v1/requests/a%2Fb/cancel", 404),
    ("POST", "/", 405),
    ("GET", "/nothing", 404),
    ("GET", "/v1", 404),
    ("GET", "//v1/models", 404),
    ("GET", "/v1/models/other", 404),
    ("GET", "/v1/models/org%2Fname", 404),
    ("GET", "/v1/models/%00", 404),
    ("GET", "/v1/models/%ff%fe", 404),
    ("GET", "/v1/models/fake", 200),
    ("GET", "/v1/models?x=1", 200),
    ("GET", "/docs", 404),
    ("GET", "/redoc", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), PATHS)
def test_i09_wrong_paths_and_methods(server: Running, method: str, path: str, status: int) -> None:
    body = BODIES[CHAT] if method in ("POST", "PUT", "PATCH") else None
    reply = request(server.port, method, path, body)
    if status == 200:
        assert reply.status == 200
        return
    check_refusal(reply, status, "model" if path.startswith("/v1/models/") else None, path)
    assert "location" not in reply.headers
    if status == 405:
        assert method not in reply.headers["allow"].split(", ")


def test_i09_who_is_to_be_cancelled(server: Running) -> None:
    names = ["x", "chatcmpl-" + "0" * 32, "x" * 5000, "%00", "%ff%fe", "%ed%a0%80", "%F0%9F%98%80", "..", "*", "%25"]
    with nothing_runs(server):
        for name in names:
            for content in (None, b"", b"{", b"\xff", b'{"stream": true}'):
                reply = request(server.port, "POST", f"/v1/requests/{name}/cancel", content)
                assert check_refusal(reply, 404, None, name)["code"] == "request_not_found"


# -- I13, T04, T05: what goes together --------------------------------------------------------------------------------


def test_i13_what_does_not_go_together(server: Running) -> None:
    for path in (CHAT, COMPLETIONS):
        for stream in (False, None):
            refuse(server, path, *({"stream_options": one, "stream": stream} for one in ({"include_usage": True}, {})))
        wrong = [5, [], "a", {"include_usage": "yes"}]
        refuse(server, path, *({"stream_options": one, "stream": True} for one in wrong))
        refuse(server, path, {"min_tokens": 3, "max_tokens": 2})
    refuse(server, CHAT, {"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False})
    refuse(server, CHAT, {"continue_final_message": True, "add_generation_prompt": True})
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    forms = [{}, {"type": "json_schema"}, {"type": None}, {"type": "xml"}, {"schema": 1}, 5, "text"]
    refuse(server, CHAT, *({"response_format": value} for value in forms))
    refuse(server, CHAT, {"tools": [tool, tool]})
    refuse(server, CHAT, {"functions": [tool["function"]]})
    refuse(server, RESPONSES, {"tools": [{"type": "web_search"}]})
    refuse(server, RESPONSES, {"text": {"format": form}})
    refuse(server, RESPONSES, {"background": True, "store": False})
    refuse(server, RESPONSES, {"previous_response_id": "resp_1"})
    refuse(server, COMPLETIONS, {"suffix": "the end"})
    refuse(server, EMBEDDINGS, {"encoding_format": "hex"})


def test_i13_what_does(server: Running) -> None:
    choice = server.chat(logprobs=True).json()["choices"][0]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    assert server.chat(logprobs=False).json()["choices"][0]["logprobs"] is None
    assert server.chat(max_tokens=9, max_completion_tokens=1, ignore_eos=True).json()["usage"]["completion_tokens"] == 1
    assert server.chat(response_format={"type": "text"}, tool_choice="none", tools=None).status == 200
    assert server.chat(stream=True, stream_options={}).events()
    assert server.chat(stream=True, stream_options=None).events()
    assert post(server, EMBEDDINGS, changed(EMBEDDINGS, dimensions=16)).status == 200
    for path, model in MODELS.items():
        nothing = {name: None for name, field in model.model_fields.items() if field.default is None}
        for stream in (None, True) if path in GENERATING else (None,):
            assert post(server, path, {**nothing, **BODIES[path], "stream": stream}).status == 200, path


def test_t04_a_template_is_not_taken_from_a_request(server: Running) -> None:
    loop = "{% for i in range(100000) %}{% for j in range(100000) %}a{% endfor %}{% endfor %}"
    templates = [loop, "{{ messages }}", "", "{{ ''.__class__ }}", {}, [], 5, True]
    refuse(server, CHAT, *({"chat_template": template} for template in templates))
    assert server.chat(chat_template=None).status == 200


def test_t05_the_template_is_told_only_what_it_asks_for(server: Running) -> None:
    plain = server.chat(seed=5).json()["choices"]
    inner: dict[str, Any] = {"tokenize": True, "messages": [], "add_generation_prompt": "x", "__class__": 1}
    inner |= {"continue_final_message": True, "chat_template": "{{ 1 }}", "tools": [], "bos_token": "<s>", "": 1}
    wrong = [{name: value} for name, value in inner.items()]
    wrong += [{"enable_thinking": True, **one} for one in wrong]
    refuse(server, CHAT, *({"chat_template_kwargs": value} for value in [*wrong, 5, [], "a", True]))
    for value in (None, {}, {"enable_thinking": False}):
        assert server.chat(seed=5, chat_template_kwargs=value).json()["choices"] == plain
