"""Wrong requests, by the fault matrix: refused at once, in our own words, with nothing run; the next one is fine."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import pickle
import re
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import BaseModel
from schemathesis import GenerationMode

import tokenmill
from tests.server.serving import HI, KEY, WAIT_S, Reply, Running, request, running
from tokenmill import AsyncLLM, errors
from tokenmill.config import EngineConfig
from tokenmill.core import FakeConfig, FakeModel, FaultKind
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponsesRequest,
    TokenizeRequest,
)

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"
CANCEL = "/v1/requests/x/cancel"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": HI, "max_tokens": 2},
    COMPLETIONS: {"model": "fake", "prompt": "hi", "max_tokens": 2},
    RESPONSES: {"model": "fake", "input": "hi", "max_output_tokens": 2},
    EMBEDDINGS: {"model": "fake", "input": "hi"},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [97]},
}
MODELS: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    EMBEDDINGS: EmbeddingRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}
GENERATING = (CHAT, COMPLETIONS, RESPONSES)
VOCABULARY = 258
LEFT_OUT = object()
"""As a field's value: the field is not sent."""
QUICK_S, LARGE_S = 2.0, 5.0
"""Far more than a refusal takes; a large body has to be read at least, but not to be gone through item by item."""
INSIDE = re.compile(
    r"pydantic|https?://|Traceback|File \"|\.py\b|site-packages|0x[0-9a-fA-F]{4,}|/(?:home|usr|etc|tmp|var|opt|root)/"
)
INSIDE_PATHS = (sys.prefix, str(Path(tokenmill.__file__).parents[2]))


def changed(path: str, **change: Any) -> dict[str, Any]:
    body = {**BODIES[path], **change}
    return {name: value for name, value in body.items() if value is not LEFT_OUT}


def both(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """As an answer, and as a stream where there is one."""
    return [body, {**body, "stream": True}] if path in GENERATING and "stream" not in body else [body]


def check_words(message: str) -> None:
    """Nothing of what is inside is told."""
    assert not INSIDE.search(message), message
    assert not any(path in message for path in INSIDE_PATHS), message
    assert len(message) < 500


def check_refusal(reply: Reply, status: int, param: str | None, what: Any = None) -> dict[str, Any]:
    shown = f"{what!r:.120}"
    assert reply.status == status, (shown, reply.status, reply.body[:300])
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    error = reply.error
    assert error["type"] == "invalid_request_error", shown
    assert error["param"] == param, (shown, error)
    assert error["message"]
    check_words(error["message"])
    return error


def post(server: Running, path: str, body: Any, within_s: float = QUICK_S, **options: Any) -> Reply:
    began = time.monotonic()
    reply = server.post(path, body, **options)
    assert time.monotonic() - began < within_s
    return reply


@contextmanager
def nothing_runs(server: Running) -> Iterator[None]:
    """No step is taken in here, and the next request is fine."""
    server.wait_until_idle()
    before = server.tick()
    yield
    server.wait_until_idle()
    assert server.tick() == before
    assert server.chat().status == 200


def refuse(server: Running, path: str, *changes: dict[str, Any], status: int = 400) -> None:
    """Each of these is refused, with the name of its first field."""
    with nothing_runs(server):
        for change in changes:
            for body in both(path, changed(path, **change)):
                check_refusal(post(server, path, body), status, next(iter(change)), change)


# -- I01: what the document says, and what it does not say ------------------------------------------------------------

NUM_EXAMPLES = 50
SETTINGS = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = [f"GET {path}" for path in ("/v1/models", "/v1/models/{name}", "/health", "/health/live", "/health/ready")]
OPERATIONS += [f"POST {path}" for path in (*BODIES, "/v1/requests/{request_id}/cancel")]
REFUSED = {"chat_template", "tools", "functions", "response_format", "chat_template_kwargs", "suffix", "background"}
REFUSED |= {"previous_response_id", "text", "prompt_logprobs", "top_logprobs", "stream_options", "best_of", "timeout_s"}


@pytest.fixture(scope="module")
def documented() -> Iterator[schemathesis.BaseSchema]:
    """A server whose answers are short, and its document."""
    model = FakeModel(FakeConfig(vocab_size=VOCABULARY, max_context=128, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=8192)
    with running(llm, ServerConfig(model_name="fake", key_hashes=(hash_key(KEY),))) as one:
        schema = schemathesis.openapi.from_dict(one.get("/openapi.json").json())
        key = {"Authorization": f"Bearer {KEY}"}
        schema.config.update(base_url=f"http://127.0.0.1:{one.port}", headers=key, request_timeout=WAIT_S)
        schema.hook("map_body")(_with_our_model)
        yield schema
        one.wait_until_idle()


def _with_our_model(_: schemathesis.HookContext, body: Any) -> Any:
    is_named = isinstance(body, dict) and isinstance(body.get("model"), str)
    return {**body, "model": "fake"} if is_named else body


def _within_limits(case: schemathesis.Case) -> None:
    """The document does not say how large numbers may be: of what may be left out at most two fields are kept."""
    body = case.body
    if isinstance(body, dict):
        required = case.operation.body[0].definition["schema"].get("required", ())
        others = sorted(name for name in body if name not in {*required, *REFUSED})
        first = len(str(body)) % max(len(others), 1)
        case.body = {name: body[name] for name in body if name in {*required, *others[first : first + 2]}}
        for message in case.body.get("messages", ()):
            message |= {"role": "user"} if message["role"] == "tool" else {}
            message |= {"content": "a"} if message.get("content") is None else {}


def check_examples(schema: schemathesis.BaseSchema, label: str, mode: GenerationMode) -> Counter[int]:
    """Requests that are made up, and all that is checked of their answers; how many of each status there were."""
    operation = next(one.ok() for one in schema.get_all_operations() if one.ok().label == label)
    statuses: Counter[int] = Counter()

    @SETTINGS
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            _within_limits(case)
        response = case.call()
        statuses[response.status_code] += 1
        assert response.elapsed < QUICK_S
        case.validate_response(response, excluded_checks=[schemathesis.checks.positive_data_acceptance])

    check()
    return statuses


@pytest.mark.parametrize("label", OPERATIONS)
def test_i01_requests_of_the_documents_shape(documented: schemathesis.BaseSchema, label: str) -> None:
    statuses = check_examples(documented, label, GenerationMode.POSITIVE)
    assert set(statuses) <= {200, 400, 404}
    if label.removeprefix("POST ") in BODIES:
        assert statuses[200] >= NUM_EXAMPLES // 10, statuses


@pytest.mark.parametrize("path", BODIES)
def test_i01_requests_of_any_other_shape(documented: schemathesis.BaseSchema, path: str) -> None:
    # What is wrong with an item of /v1/responses is looked at after the model's name.
    assert set(check_examples(documented, f"POST {path}", GenerationMode.NEGATIVE)) <= {400, 404}


def test_i01_every_operation_is_tried(documented: schemathesis.BaseSchema) -> None:
    assert sorted(one.ok().label for one in documented.get_all_operations()) == sorted(OPERATIONS)


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
    with nothing_runs(server):
        check_refusal(post(server, path, content, LARGE_S), 400, param, what)


def test_i02_a_body_that_is_larger_than_any_may_be(server: Running) -> None:
    content = json.dumps(changed(CHAT, messages=HI * 300_000))
    for path in [*BODIES, CANCEL, "/v1/nothing"]:
        with nothing_runs(server), server.connect() as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
            connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode())
            answer = connection.makefile("rb").read()  # without a byte of it
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"error"' in answer


# -- I03, I04: prompts ------------------------------------------------------------------------------------------------

PROMPTS = [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")]


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


# -- I06: text --------------------------------------------------------------------------------------------------------

TEXT_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a message": (CHAT, {"messages": [{"role": "user", "content": "HERE"}]}),
    "a part": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "HERE"}]}]}),
    "a name": (CHAT, {"messages": [{"role": "user", "content": "a", "name": "HERE"}]}),
    "a stop": (CHAT, {"stop": ["HERE"]}),
    "a model": (CHAT, {"model": "HERE"}),
    "a salt": (CHAT, {"cache_salt": "HERE"}),
    "an unknown field": (CHAT, {"HERE": 1}),
    "a prompt": (COMPLETIONS, {"prompt": "HERE"}),
    "one of some prompts": (COMPLETIONS, {"prompt": ["a", "HERE"]}),
    "an input": (RESPONSES, {"input": "HERE"}),
    "instructions": (RESPONSES, {"instructions": "HERE"}),
    "metadata": (RESPONSES, {"metadata": {"a": "HERE"}}),
    "an input of embeddings": (EMBEDDINGS, {"input": "HERE"}),
    "a text": (TOKENIZE, {"prompt": "HERE"}),
}
NO_TEXT = [rb"\ud800", rb"a\udc00b", rb"\udc00\ud800", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xff"]
NO_TEXT += [b"\xf5\x80\x80\x80", b"\x00", b"\x1f", b"\n", rb"\x41", rb"\u12", rb"\U0001f600"]
TEXTS = ["\0", "\ufeff", "\u202e", "\u2028", "\u2029", "\x85", "\x7f", "😀", "e\u0301", "\uffff", "\U0010ffff", "\r\n"]


@pytest.mark.parametrize("what", TEXT_FIELDS)
def test_i06_text_that_is_none(server: Running, what: str) -> None:
    path, change = TEXT_FIELDS[what]
    with nothing_runs(server):
        for wrong in NO_TEXT:
            for body in both(path, changed(path, **change)):
                reply = post(server, path, json.dumps(body).encode().replace(b"HERE", wrong))
                check_refusal(reply, 400, None, wrong)


def test_i06_bodies_in_other_encodings(server: Running) -> None:
    for path, body in BODIES.items():
        with nothing_runs(server):
            for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"):
                content = json.dumps(body).encode(encoding)
                if content != json.dumps(body).encode():
                    check_refusal(post(server, path, content), 400, None, encoding)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_i06_all_other_text_comes_back_as_it_went(server: Running, text: str) -> None:
    prompt = f"a{text}b"
    body = {"model": "fake", "prompt": prompt, "echo": True, "max_tokens": 0}
    assert post(server, COMPLETIONS, body).json()["choices"][0]["text"] == prompt
    events = post(server, COMPLETIONS, {**body, "stream": True}).events()
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == prompt
    ids = post(server, TOKENIZE, {"prompt": prompt}).json()["tokens"]
    assert ids == list(prompt.encode())
    assert post(server, DETOKENIZE, {"tokens": ids}).json() == {"prompt": prompt}
    said = changed(RESPONSES, instructions=prompt, metadata={prompt: prompt})
    answer = post(server, RESPONSES, said).json()
    assert (answer["instructions"], answer["metadata"]) == (prompt, {prompt: prompt})
    last = post(server, RESPONSES, {**said, "stream": True}).events()[-1]["response"]
    assert (last["instructions"], last["metadata"]) == (prompt, {prompt: prompt})
    assert server.chat(messages=[{"role": "user", "content": prompt}], stop=[text], cache_salt=text).status == 200


# -- I07: bodies ------------------------------------------------------------------------------------------------------

DEEP = 200_000
NO_BODIES = [b"", b" ", b"{", b"[", b"null", b"5", b'"a"', b"[]", b"[{}]", b"{}{}", b"{} x"]
NO_BODIES += [b"{'a':1}", b"{a:1}", b"a=1&b=2", b"<a/>", b"\x80\x04\x95", b"\0" * 1000]
NO_BODIES += [b'{"a":' * DEEP, b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP]
NO_BODIES += [b'{"model":"fake",}', b'{"model":"fake"', b'{"model":"fa', b'{"a":01}']


@pytest.mark.parametrize("path", BODIES)
def test_i07_bodies_that_are_none(server: Running, path: str) -> None:
    with nothing_runs(server):
        for content in NO_BODIES:
            check_refusal(post(server, path, content), 400, None, content[:40])
        reply = request(server.port, "POST", path)
        check_refusal(reply, 400, None, "no body at all")


@pytest.mark.parametrize("path", BODIES)
def test_i07_bodies_that_go_deep_in_one_field(server: Running, path: str) -> None:
    content = json.dumps(changed(path, deep="HERE")).encode()
    with nothing_runs(server):
        lists, objects = b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP
        for inside in (lists, objects, b"9" * 5000, b"-" + b"9" * 5000):
            check_refusal(post(server, path, content.replace(b'"HERE"', inside)), 400, None, inside[:20])
        for end in range(1, len(content), 7):  # cut off
            check_refusal(post(server, path, content[:end]), 400, None, content[:end])


def test_i07_many_keys_and_the_same_twice(server: Running) -> None:
    """Unknown fields are ignored, however many; of a field that is there twice the last one counts."""
    began = time.monotonic()
    assert server.chat(**{f"x{i:x}": 1 for i in range(500_000)}).status == 200
    assert time.monotonic() - began < 5 * QUICK_S
    body = json.dumps(changed(CHAT, n=LEFT_OUT))[:-1]
    assert len(post(server, CHAT, body + ', "n": 1000000, "n": 1}').json()["choices"]) == 1
    with nothing_runs(server):
        check_refusal(post(server, CHAT, body + ', "n": 1, "n": 1000000}'), 400, "n")


OTHER_TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/html"]
OTHER_TYPES += ["application/octet-stream", "application/xml", "application/x-ndjson", "json", "", "application/jsonx"]


@pytest.mark.parametrize("path", BODIES)
def test_i07_bodies_that_are_said_to_be_something_else(server: Running, path: str) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nfake\r\n--x--\r\n'
    sent = [(kind, json.dumps(BODIES[path]).encode()) for kind in OTHER_TYPES]
    with nothing_runs(server):
        for kind, content in [*sent, (OTHER_TYPES[1], b"model=fake&prompt=hi"), (OTHER_TYPES[2], form)]:
            reply = post(server, path, content, headers={"Content-Type": kind})
            check_refusal(reply, 415 if reply.status == 415 else 400, None, kind)
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8"):
        assert post(server, path, BODIES[path], headers={"Content-Type": kind}).status == 200


# -- I08: fields and messages -----------------------------------------------------------------------------------------

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "text", "text": "hi"}
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
    for path in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS):
        refuse(server, path, {"model": None}, {"model": LEFT_OUT})


# -- I09: paths -------------------------------------------------------------------------------------------------------

PATHS: list[tuple[str, str, int]] = [
    *((method, path, 405) for path in [*BODIES, CANCEL] for method in ("GET", "PUT", "DELETE", "PATCH")),
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
    ("GET", "/", 404),
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


# -- I10, I12, N12: what is not text ----------------------------------------------------------------------------------


def test_i10_nothing_is_fetched(server: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        urls = [
            f"http://{host}/a.png",
            f"https://{host}/a.png",
            f"http://good\\@{host}/",
            f"//{host}/",
            f"ftp://{host}/",
        ]
        urls += ["file:///etc/passwd", "data:image/png;base64,AAAA", f"http://[::ffff:127.0.0.1]:{host[10:]}/"]
        for url in urls:
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "image_url", "image_url": url},
                {"type": "input_image", "image_url": url},
                {"type": "input_file", "file_url": url},
                {"type": "file", "file": {"file_data": url}},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                {"type": "video_url", "video_url": {"url": url}},
            ]
            refuse(server, CHAT, *({"messages": [{"role": "user", "content": [PART, part]}]} for part in parts))
            refuse(server, RESPONSES, *({"input": [{"role": "user", "content": [part]}]} for part in parts))
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_i12_no_tensors(server: Running) -> None:
    text = base64.b64encode(bytes(64)).decode()
    for path in (CHAT, COMPLETIONS):
        refuse(server, path, *({"prompt_embeds": value} for value in (text, [text], [[0.5] * 8], {"data": text})))
    refuse(server, COMPLETIONS, {"prompt_embeds": text, "prompt": LEFT_OUT})


def test_i12_nothing_else_for_a_prompt(server: Running) -> None:
    packed = pickle.dumps({"a": 1})
    text = base64.b64encode(packed).decode()
    for path, param in PROMPTS:
        values = [{"b64": text}, {"prompt_embeds": text}, [{"data": text}], [[0.5, 0.5]], [0.5, 0.5]]
        refuse(server, path, *({param: value} for value in values))
    with nothing_runs(server):
        for path in BODIES:
            check_refusal(post(server, path, packed), 400, None, "a pickle")


@pytest.mark.parametrize("path", BODIES)
def test_n12_packed_bodies_are_not_unpacked(server: Running, path: str) -> None:
    content = json.dumps(BODIES[path]).encode()
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed_zeros = b"".join(bomb.compress(b"\0" * (1 << 20)) for _ in range(64)) + bomb.flush()
    codings = [
        ("gzip", gzip.compress(content)),
        ("gzip", packed_zeros),
        ("GZIP", gzip.compress(content)),
        ("deflate", zlib.compress(content)),
        ("br", content),
        ("zstd", content),
        ("gzip, gzip", gzip.compress(gzip.compress(content))),
        ("identity, gzip", gzip.compress(content)),
        ("unknown", content),
    ]
    with nothing_runs(server):
        for coding, packed in codings:
            check_refusal(post(server, path, packed, headers={"Content-Encoding": coding}), 415, None, coding)
    assert post(server, path, content, headers={"Content-Encoding": "identity"}).status == 200


# -- I11: what is told of what goes wrong inside -----------------------------------------------------------------------

SECRET = "/srv/weights/model.safetensors 0x7f3a5c0012d0 TOKEN=hunter2"
LIBRARY_WORDS = re.compile(
    r"Input should|Field required|should have|Value error|validation error|Extra inputs|after validation|"
    r"EOF while|expected value|trailing|control character|Not Found|Method Not Allowed|Unprocessable|NoneType|<class"
)


def everything_that_is_raised() -> list[Exception]:
    """Errors of Python and of ours that are no answer to a client."""
    kinds: list[type[Exception]] = [RuntimeError, ValueError, KeyError, MemoryError, RecursionError, TimeoutError]
    kinds += [AssertionError, errors.ModelLoadError, errors.ModelNotFound, errors.IllegalTransition, errors.EngineDead]
    kinds += [errors.RequestFailed, errors.BackendError, errors.InvalidBatch, errors.InvalidOperation, errors.StaleKV]
    kinds += [errors.Unsupported, errors.BackendClosed, errors.ForwardFailed, errors.IntegrityError]
    unicode = UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET)
    return [*(kind(SECRET) for kind in kinds), OSError(2, SECRET, "/etc/shadow"), unicode, errors.OutOfKV(5, 3)]


@pytest.mark.parametrize("error", everything_that_is_raised(), ids=lambda error: type(error).__name__)
def test_i11_what_is_raised_inside_stays_inside(
    server: Running, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(server.llm, "chat_ids", fail)
    monkeypatch.setattr(server.llm, "prompt_ids", fail)
    for path in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS):
        for body in both(path, BODIES[path]):
            caplog.clear()
            reply = post(server, path, body)
            assert reply.status in (500, 503), reply.body
            assert reply.error["type"] == "server_error"
            check_words(reply.error["message"])
            assert not any(word in reply.body.decode() for word in [*SECRET.split(), "shadow", "cells"]), reply.body
            if reply.status == 500:  # who looks for the reason finds it, by the request's name
                assert type(error).__name__ in caplog.text
    monkeypatch.undo()
    assert server.chat().status == 200


@pytest.mark.parametrize("kind", ["FAIL", "FATAL", "LATE_FATAL", "NAN"])
def test_i11_what_a_model_says_when_it_fails_is_for_the_log(server: Running, kind: str) -> None:
    for stream in (True,) if "FATAL" in kind else (False, True):  # an engine is not made anew without end
        server.inject(FaultKind[kind], times=2 if kind.endswith("FAIL") else 1)  # once more when it is tried alone
        reply = server.chat(stream=stream)
        error = reply.error if reply.status != 200 else reply.events()[-1]["error"]
        assert error["type"] == "server_error"
        check_words(error["message"])
        assert "fake backend" not in error["message"]
        assert "ForwardFailed" not in error["message"]
        server.wait_until_idle()
    assert server.chat().status == 200


def test_i11_what_fails_in_a_stream_is_logged(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(SECRET)

    monkeypatch.setattr("tokenmill.server.calls.Deltas.take", fail)
    for path in GENERATING:
        caplog.clear()
        reply = post(server, path, changed(path, stream=True))
        assert not any(word in reply.body.decode() for word in SECRET.split())
        last = reply.events()[-1]
        error = last["response"]["error"] if path == RESPONSES else last["error"]
        assert error["message"] == "internal error"
        assert "RuntimeError" in caplog.text


OWN_WORDS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": LEFT_OUT}),
    (CHAT, {"model": 5}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "hi"}),
    (CHAT, {"messages": [5]}),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}),
    (CHAT, {"messages": [{"content": "a"}]}),
    (CHAT, {"n": "3"}),
    (CHAT, {"n": 1.5}),
    (CHAT, {"temperature": "hot"}),
    (CHAT, {"stream": "yes"}),
    (CHAT, {"stop": 5}),
    (CHAT, {"logit_bias": [5]}),
    (CHAT, {"logit_bias": {"5": "a"}}),
    (CHAT, {"priority": -1}),
    (CHAT, {"priority": 101}),
    (CHAT, {"timeout_s": 0}),
    (CHAT, {"cache_salt": ""}),
    (CHAT, {"cache_salt": "x" * 300}),
    (CHAT, {"stream_options": 5}),
    (COMPLETIONS, {"prompt": LEFT_OUT}),
    (COMPLETIONS, {"prompt": 5}),
    (EMBEDDINGS, {"encoding_format": "hex"}),
    (RESPONSES, {"input": LEFT_OUT}),
    (RESPONSES, {"metadata": {"a": 5}}),
    (RESPONSES, {"tools": 5}),
    (TOKENIZE, {"add_special_tokens": 1}),
    (DETOKENIZE, {"tokens": ["a"]}),
]


def test_i11_the_words_for_fields_are_our_own(server: Running) -> None:
    told = []
    for path, change in OWN_WORDS:
        reply = post(server, path, changed(path, **change))
        told.append(check_refusal(reply, 400, next(iter(change)), change)["message"])
    assert [message for message in told if LIBRARY_WORDS.search(message)] == []


def test_i11_the_words_for_bodies_and_paths_are_our_own(server: Running) -> None:
    replies = [post(server, CHAT, content) for content in NO_BODIES]
    replies += [server.get("/nothing"), server.get(CHAT), post(server, "/v1/models", {})]
    told = {reply.error["message"] for reply in replies}
    assert [message for message in told if LIBRARY_WORDS.search(message)] == []


# -- I13, T04, T05: what goes together -------------------------------------------------------------------------------


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
    forms = [{"type": "json_object"}, form, {}, {"type": None}, {"type": "xml"}, {"schema": 1}, 5, "text"]
    refuse(server, CHAT, *({"response_format": value} for value in forms))
    refuse(server, CHAT, {"tools": [tool], "response_format": form})
    refuse(server, CHAT, {"functions": [tool["function"]]})
    refuse(server, RESPONSES, {"tools": [{"type": "web_search"}]})
    refuse(server, RESPONSES, {"text": {"format": form}})
    refuse(server, RESPONSES, {"background": True})
    refuse(server, RESPONSES, {"previous_response_id": "resp_1"}, status=404)
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
