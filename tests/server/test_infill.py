"""Fill in the middle: `suffix` of completions and `/infill`; and others of llama-server's own endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from tests.server.rules import fake_server
from tests.server.serving import HI, Running
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.model_text import Infill, find_infill
from tokenmill.text.tokenizer import ByteTokenizer

PREFIX, SUFFIX, MIDDLE, FILE = 1, 2, 3, 4


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """A model that was not trained to fill in."""
    with fake_server() as one:
        yield one


@pytest.fixture(scope="module")
def filling() -> Iterator[Running]:
    with fake_server() as one:
        infill = Infill(one.llm.get_tokenizer(), PREFIX, SUFFIX, MIDDLE, file=FILE)
        object.__setattr__(one.llm.opened.text, "infill", infill)
        yield one


def ids(*parts: int | str) -> list[int]:
    return [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]


def test_a_completion_with_a_suffix_fills_in_the_middle(filling: Running) -> None:
    body = {"max_tokens": 8, "temperature": 0, "stop_token_ids": [PREFIX, SUFFIX, FILE]}
    made = filling.post(
        "/v1/completions", {"prompt": ["ab", "c"], "suffix": "yz", **body, "return_token_ids": True}
    ).json()
    for choice, before in zip(made["choices"], ("ab", "c"), strict=True):
        expected = ids(PREFIX, before, SUFFIX, "yz", MIDDLE)
        assert choice["prompt_token_ids"] == expected
        same = filling.post("/v1/completions", {"prompt": expected, **body}).json()
        assert choice["text"] == same["choices"][0]["text"]
    plainly = filling.post("/v1/completions", {"prompt": "ab", "suffix": "", **body, "return_token_ids": True}).json()
    assert plainly["choices"][0]["prompt_token_ids"] == ids("ab"), "an empty suffix is none"


def test_ollamas_suffix_fills_in_the_middle(filling: Running, plain: Running) -> None:
    options = {"num_predict": 8, "temperature": 0}
    asked = {"model": "fake", "prompt": "ab", "suffix": "yz", "options": options, "stream": False}
    told = filling.post("/api/generate", asked).json()
    same = {"prompt": "ab", "suffix": "yz", "max_tokens": 8, "temperature": 0}
    assert told["response"] == filling.post("/v1/completions", same).json()["choices"][0]["text"]
    assert "insert" in filling.post("/api/show", {"model": "fake"}).json()["capabilities"]
    refused = plain.post("/api/generate", asked)
    assert (refused.status, "fill-in-the-middle" in refused.json()["error"]) == (400, True)


def test_a_model_without_the_tokens_is_a_clear_400(plain: Running) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_prefix"),
    ):
        reply = plain.post(path, body)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "infill_not_supported", param)
        assert "fill-in-the-middle" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1, 2], "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
        ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra"),
        ("/infill", {"input_extra": ["a"]}, "input_extra"),
        ("/infill", {"n_predict": -2}, "n_predict"),
    ],
)
def test_what_can_not_be_filled_in_is_refused(filling: Running, path: str, body: dict[str, Any], param: str) -> None:
    reply = filling.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_infill_answers_as_llama_server_does(filling: Running) -> None:
    body = {
        "input_prefix": "ab",
        "input_suffix": "yz",
        "input_extra": [{"filename": "f", "text": "x"}],
        "prompt": "m",
        "n_predict": 8,
        "temperature": 0,
        # What editors send besides.
        "samplers": ["top_k", "top_p", "infill"],
        "t_max_prompt_ms": 500,
        "cache_prompt": True,
        "n_indent": 0,
    }
    whole = filling.post("/infill", body).json()
    prompt = ids(FILE, "f\nx\n", FILE, PREFIX, "ab", SUFFIX, "yz", MIDDLE, "m")
    same = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stop_token_ids": [PREFIX, SUFFIX, FILE]}
    expected = filling.post("/v1/completions", same).json()
    assert whole["content"] == expected["choices"][0]["text"]
    assert (whole["tokens_evaluated"], whole["stop"]) == (len(prompt), True)
    assert whole["stop_type"] == {"length": "limit", "stop": "eos"}[expected["choices"][0]["finish_reason"]]
    assert whole["timings"]["predicted_n"] == expected["usage"]["completion_tokens"]
    reply = filling.post("/infill", {**body, "stream": True})
    events = [json.loads(one.removeprefix("data: ")) for one in reply.body.decode().split("\n\n") if one]
    assert [one["stop"] for one in events] == [*[False] * (len(events) - 1), True]
    assert "".join(one["content"] for one in events) == whole["content"]
    assert events[-1]["tokens_predicted"] == whole["tokens_predicted"]
    warmed = filling.post("/infill", {**body, "n_predict": 0}).json()
    assert (warmed["content"], warmed["tokens_predicted"]) == ("", 0)


def test_props_slots_and_templates(plain: Running) -> None:
    props = plain.get("/props").json()
    assert (props["total_slots"], props["model_path"], props["infill"]) == (4, "fake", False)
    assert props["default_generation_settings"]["n_ctx"] == plain.llm.max_model_len
    slots = plain.get("/slots").json()
    assert [(one["id"], one["is_processing"]) for one in slots] == [(row, False) for row in range(4)]
    rendered = plain.post("/apply-template", {"messages": HI}).json()["prompt"]
    tokens = plain.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert list(rendered.encode()) == tokens
    assert plain.get("/props?model=none").status == 404


def test_the_tokens_of_well_known_families_are_found_by_name() -> None:
    assert find_infill(ByteTokenizer()) is None
    for names, is_special in (
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"), False),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"), True),
    ):
        raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
        added = [tokenizers.AddedToken(name, special=is_special) for name in names]
        raw.add_special_tokens(added) if is_special else raw.add_tokens(added)
        found = find_infill(HuggingFaceTokenizer(raw.to_str()))
        assert found is not None
        assert (found.prefix, found.suffix, found.middle) == (2, 3, 4)
        assert found.ids("a", "b") == [2, 0, 3, 1, 4]
        assert found.stop_ids == (2, 3, 5)
    given = {
        "tokenizer.ggml.fim_pre_token_id": 5,
        "tokenizer.ggml.fim_suf_token_id": 6,
        "tokenizer.ggml.fim_mid_token_id": 7,
    }
    found = find_infill(ByteTokenizer(), given)
    assert found is not None
    assert found.ids("a", "") == [5, 97, 6, 7]
