"""I02 to I05: too much, too little, and numbers at their limits: refused at once with nothing run."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server.refusals import (
    BODIES,
    CANCEL,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    LARGE_S,
    LEFT_OUT,
    MODELS,
    PROMPTS,
    RESPONSES,
    TOKENIZE,
    VOCABULARY,
    both,
    changed,
    check_refusal,
    nothing_runs,
    post,
    refuse,
)
from tests.server.serving import HI, KEY, Reply, Running
from tokenmill.server.fields import MAX_JSON_WORK, json_work

# -- I02: too much of something ---------------------------------------------------------------------------------------

NO_COUNTS = [1_000_000, 0, -1, True, "3", 1.5, 1.0, [1], {}]
TOO_MUCH: list[tuple[str, str, list[Any]]] = [
    (CHAT, "n", NO_COUNTS),
    (COMPLETIONS, "n", NO_COUNTS),
    (COMPLETIONS, "best_of", [*NO_COUNTS, 2]),
    (CHAT, "max_tokens", [0, -1, True, "3", 1.5]),
    (CHAT, "max_completion_tokens", [0, -1, True, "3", 1.5]),
    (RESPONSES, "max_output_tokens", [0, -1, True, "3", 1.5]),
    (COMPLETIONS, "logprobs", [6, -1, True, "3"]),
    (CHAT, "prompt_logprobs", [21, -1, True, "3"]),
    (RESPONSES, "top_logprobs", [21, -1, True, "3"]),
    (CHAT, "stop", [["a"] * 5, "x" * 1_000_000, "", ["a", ""], 5, [5], {}]),
    (COMPLETIONS, "stop", [["a"] * 5, "x" * 1_000_000, "", ["a", ""], 5, [5], {}]),
    (COMPLETIONS, "prompt", [["a"] * 10_000, [[97]] * 10_000]),
    (EMBEDDINGS, "input", [["a"] * 10_000, [[97]] * 10_000]),
    (CHAT, "logit_bias", [{str(i): 1 for i in range(2000)}, {"97": 101}, {"97": True}, {"97": "1"}, {"a": 1}, [97]]),
    (CHAT, "messages", [HI * 3000, [{"role": "user", "content": [{"type": "text", "text": "a"}] * 65}]]),
    (RESPONSES, "input", [HI * 3000]),
    (CHAT, "temperature", ["hot", "1", -1, 101, True, [1]]),
    (COMPLETIONS, "top_p", ["1", -1, 0, 2, True]),
    (CHAT, "priority", [-1, 101, True, "3"]),
    (CHAT, "timeout_s", [0, -1, "3", True]),
    (CHAT, "cache_salt", ["", "x" * 257, 5]),
]


@pytest.mark.parametrize(("path", "param", "values"), TOO_MUCH, ids=lambda it: it if isinstance(it, str) else "")
def test_i02_too_much_is_refused_with_its_name(server: Running, path: str, param: str, values: list[Any]) -> None:
    refuse(server, path, *({param: value} for value in values))


@pytest.mark.parametrize("stop", ["", "x" * 257, ["a", ""], ["a"] * 5])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_21_8_the_limits_of_stop_strings_are_this_servers(server: Running, path: str, stop: Any) -> None:
    error = check_refusal(post(server, path, changed(path, stop=stop)), 400, "stop")
    assert error["message"] == "stop must have at most 4 strings of 1 to 256 characters each"
    assert post(server, path, changed(path, stop=["x" * 256] * 4)).status == 200


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "max_tokens"), (COMPLETIONS, "max_tokens"), (RESPONSES, "max_output_tokens")]
)
def test_21_8_a_short_prompt_is_never_too_long(server: Running, path: str, name: str) -> None:
    error = server.post(path, changed(path, **{name: 10**9})).error
    assert error["code"] == "context_length_exceeded"
    found = re.search(r"(\d+) of the prompt and 1000000000 to be generated\. (.*)", error["message"])
    assert found is not None
    room = 4096 - int(found.group(1))
    assert found.group(2) == f"Ask for at most {room} tokens to be generated, or shorten the prompt."
    assert server.post(path, changed(path, **{name: room, "timeout_s": 1e-6})).status == 503  # it would have run


def test_21_8_a_prompt_that_leaves_no_room_is_too_long(server: Running) -> None:
    error = server.post(COMPLETIONS, changed(COMPLETIONS, prompt="x" * 4096, max_tokens=10**9)).error
    assert error["message"].endswith("The prompt is too long: shorten it.")


def test_i02_more_log_probabilities_than_there_may_be(server: Running) -> None:
    refuse(server, CHAT, *({"top_logprobs": count, "logprobs": True} for count in (21, -1, "3", True)))


MANY = 1_000_000
LARGE: dict[str, tuple[str, str, Any]] = {
    "empty messages": (CHAT, "messages", [{}] * MANY),
    "messages that are numbers": (CHAT, "messages", [1] * MANY),
    "good messages": (CHAT, "messages", [{"role": "user"}] * (MANY // 3)),
    "empty items": (RESPONSES, "input", [{}] * MANY),
    "stops that are numbers": (CHAT, "stop", [1] * MANY),
    "good stops": (COMPLETIONS, "stop", ["a"] * MANY),
    "ids that are texts": (COMPLETIONS, "stop_token_ids", ["a"] * MANY),
    "ids of a text that are texts": (DETOKENIZE, "tokens", ["a"] * MANY),
    "empty prompts": (COMPLETIONS, "prompt", [""] * MANY),
    "empty inputs": (EMBEDDINGS, "input", [[]] * MANY),
    "biases": (CHAT, "logit_bias", {f"{i:x}": "a" for i in range(MANY // 2)}),
    "metadata": (RESPONSES, "metadata", {f"{i:x}": 1 for i in range(MANY // 2)}),
    "names for the template": (CHAT, "chat_template_kwargs", {f"{i:x}": 1 for i in range(MANY // 2)}),
}


@pytest.mark.parametrize("what", LARGE)
def test_i02_a_million_of_something_takes_no_longer(server: Running, what: str) -> None:
    path, param, value = LARGE[what]
    content = json.dumps(changed(path, **{param: value}), separators=(",", ":"))
    assert len(content) < server.served.config.max_body_bytes
    is_parsed = json_work(content.encode(), MAX_JSON_WORK) <= MAX_JSON_WORK
    with nothing_runs(server):
        check_refusal(post(server, path, content, LARGE_S), 400, param if is_parsed else None, what)


def test_i02_a_body_that_is_larger_than_any_may_be(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.server.middleware.LINGER_S", 0.2)  # for a body that does not come
    content = json.dumps(changed(CHAT, messages=HI * 300_000))
    with nothing_runs(server), ExitStack() as connections:
        asked = []
        for path in [*BODIES, CANCEL, "/v1/nothing"]:
            connection = connections.enter_context(server.connect())
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
            connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode())
            asked.append(connection)
        for connection in asked:
            answer = connection.makefile("rb").read()  # without a byte of it
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b'"error"' in answer


# -- I03, I04: prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "param"), PROMPTS)
def test_i03_empty_prompts(server: Running, path: str, param: str) -> None:
    empty = ["", [], [[]], [""], ["a", ""], [[97], []], ["a", []], None, LEFT_OUT, {}, 5, True]
    refuse(server, path, *({param: value} for value in empty))
    end = VOCABULARY - 1
    for value in ([end], [[end]], [end] * 5, "a", ["a"], [97], [[97]]):
        assert post(server, path, changed(path, **{param: value})).status == 200, value


def test_i03_empty_conversations(server: Running) -> None:
    nobody = [{"role": "user", "content": None}, {"role": "user"}, {"role": "user", "content": []}, {"content": "a"}]
    for path, param in ((CHAT, "messages"), (RESPONSES, "input")):
        values = [[], None, LEFT_OUT, {}, 5, [[]], [None], [{}], *([one] for one in nobody)]
        refuse(server, path, *({param: value} for value in values))
        empty = [{"role": "user", "content": ""}]
        assert post(server, path, changed(path, **{param: empty})).status == 200
    refuse(server, CHAT, {"messages": ""})
    assert post(server, RESPONSES, changed(RESPONSES, input="")).status == 200


def test_i03_empty_texts_have_no_tokens(server: Running) -> None:
    assert post(server, TOKENIZE, {"prompt": ""}).json()["tokens"] == []
    assert post(server, DETOKENIZE, {"tokens": []}).json() == {"prompt": ""}
    for path, param in ((TOKENIZE, "prompt"), (DETOKENIZE, "tokens")):
        refuse(server, path, *({param: value} for value in (None, LEFT_OUT, {}, 5, True)))


NO_IDS: list[Any] = [-1, VOCABULARY, 2**31, 2**32 + 97, 2**63, 2**64 + 97, 10**400]
NO_IDS += [1.0, 97.5, True, None, "97", [97], {}]


@pytest.mark.parametrize(
    ("path", "param"),
    [*PROMPTS, (DETOKENIZE, "tokens"), (CHAT, "stop_token_ids"), (CHAT, "allowed_token_ids")],
)
def test_i04_ids_that_are_none(server: Running, path: str, param: str) -> None:
    with nothing_runs(server):
        for wrong in NO_IDS:
            for ids in ([wrong], [97, wrong]):
                if ids not in (["97"], [[97]]) or (path, param) not in PROMPTS:  # a text, and a list of prompts
                    check_refusal(post(server, path, changed(path, **{param: ids})), 400, param, ids)


@pytest.mark.parametrize(("path", "param"), PROMPTS)
def test_i04_one_bad_prompt_of_several(server: Running, path: str, param: str) -> None:
    refuse(server, path, *({param: [[97], [wrong], [98]]} for wrong in NO_IDS))


def test_i04_biases_of_no_token(server: Running) -> None:
    names = ["-1", str(VOCABULARY), str(2**63), "1" * 400, "1" * 5000]
    names += ["9.0", "", "0x61", "a", "²", "٣" * 300, "9_7", " 97"]
    refuse(server, CHAT, *({"logit_bias": {name: 1}} for name in names))


@pytest.mark.parametrize("key", ["a", "", "-1", "9.0"])
def test_21_8_a_bias_of_no_token_is_said_to_be_one(server: Running, key: str) -> None:
    error = check_refusal(post(server, CHAT, changed(CHAT, logit_bias={"97": 1, key: 1})), 400, "logit_bias")
    assert error["message"] == f"logit_bias must be a mapping of token ids to numbers; {key!r} is not a token id"


# -- I05: numbers at their limits -------------------------------------------------------------------------------------

INTEGERS = [-1, 0, 2**31, 2**63, 10**400]
GOOD_INTEGERS: dict[str, list[int]] = {
    "seed": [-1, 0, 2**31],
    "top_k": [-1, 0],
    "priority": [0],
    "min_tokens": [0],
    "logprobs": [0],
    "top_logprobs": [0],
    "prompt_logprobs": [0],
    "thinking_token_budget": [0],
}
FLOATS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "-0.0", "1e308", "-1e308", "1e-320", "1" + "0" * 400]
GOOD_FLOATS: dict[str, list[str]] = {
    "temperature": ["-0.0", "1e-320"],
    "top_p": ["1e-320"],
    "min_p": ["-0.0", "1e-320"],
    "typical_p": ["1e-320"],
    "repetition_penalty": ["1e-320"],
    "presence_penalty": ["-0.0", "1e-320"],
    "frequency_penalty": ["-0.0", "1e-320"],
    "dry_multiplier": ["-0.0", "1e-320"],
    "dry_base": [],
    "xtc_probability": ["-0.0", "1e-320"],
    "xtc_threshold": ["-0.0", "1e-320"],
    "timeout_s": ["1e308"],
}


def numbers(kind: str) -> list[tuple[str, str]]:
    """The fields of all bodies that have numbers of this kind."""
    found = []
    for path, model in MODELS.items():
        for name, about in model.model_json_schema()["properties"].items():
            if any(one.get("type") == kind for one in about.get("anyOf", [about])):
                found.append((path, name))
    return found


@pytest.mark.parametrize(("path", "name"), numbers("integer"))
def test_i05_whole_numbers(server: Running, path: str, name: str) -> None:
    more = {"logprobs": True} if (path, name) == (CHAT, "top_logprobs") else {}
    good = GOOD_INTEGERS.get(name, [])
    for value in good:
        assert post(server, path, changed(path, **{name: value}, **more)).status == 200, value
    with nothing_runs(server):
        for value in INTEGERS:
            for body in both(path, changed(path, **{name: value}, **more)) if value not in good else []:
                check_refusal(post(server, path, body), 400, name, value)


@pytest.mark.parametrize(("path", "name"), numbers("number"))
def test_i05_other_numbers(server: Running, path: str, name: str) -> None:
    def send(value: str) -> Reply:
        return post(server, path, json.dumps(changed(path, **{name: "HERE"})).replace('"HERE"', value))

    for value in GOOD_FLOATS[name]:
        assert send(value).status == 200, value
    late = ["1e-320"] if name == "timeout_s" else []  # a deadline that is over before it starts
    for value in late:
        assert send(value).status == 503
    with nothing_runs(server):
        for value in FLOATS:
            if value not in GOOD_FLOATS[name] and value not in late:
                no_json = value.lstrip("-")[0] in "NI"
                check_refusal(send(value), 400, None if no_json else name, value)


def test_i05_numbers_within_something(server: Running) -> None:
    with nothing_runs(server):
        for value in ("NaN", "Infinity", "-Infinity", "1e400", "1e308", "-1e400", "1" + "0" * 400, "true", "null"):
            body = json.dumps(changed(CHAT, logit_bias={"5": "HERE"})).replace('"HERE"', value)
            check_refusal(post(server, CHAT, body), 400, None if value.lstrip("-")[0] in "NI" else "logit_bias", value)
        for value in ("NaN", "inf", "-1", "0", "-0.0", "abc", "", "1" + "0" * 400, "1,5", "0x10"):
            reply = post(server, CHAT, BODIES[CHAT], headers={"x-request-timeout": value})
            check_refusal(reply, 400, "x-request-timeout", value)
