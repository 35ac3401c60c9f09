"""`/tokenize` under the names of vLLM and of llama-server: texts and conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.server.refusals import TOKENIZE, check_refusal
from tests.server.serving import HI, Running, running
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.server.config import ServerConfig
from tokenmill.text.hf import HuggingFaceTokenizer

BOS, MARK = 256, 257
SPECIAL = {"<s>": BOS, "<|im_start|>": MARK}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """The fake model with a tokenizer that adds a token and has another one: bytes otherwise."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    own = HuggingFaceTokenizer(tokenizer.to_str())
    assert dict(own.special_tokens) == SPECIAL
    llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258, max_context=4096)), tokenizer=own, kv_cache_tokens=8192)
    with running(llm, ServerConfig()) as one:
        yield one


@pytest.fixture(scope="module")
def chatting() -> Iterator[Running]:
    """The fake model with its own template, a token a byte."""
    llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258, max_context=4096)), kv_cache_tokens=8192)
    with running(llm, ServerConfig()) as one:
        yield one


def tokens(server: Running, **body: Any) -> Any:
    reply = server.post(TOKENIZE, body)
    assert reply.status == 200, reply.body
    return reply.json()


def ids(server: Running, **body: Any) -> list[int]:
    found = tokens(server, **body)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 4096
    return list(found["tokens"])


def test_21_7_a_prompt_is_tokenized_as_vllm_does(server: Running) -> None:
    plain = ids(server, prompt="hi there", add_special_tokens=False)
    assert len(plain) == 8
    assert ids(server, prompt="hi there") == [BOS, *plain]
    assert ids(server, prompt="hi there", add_special_tokens=True) == [BOS, *plain]
    assert ids(server, prompt="hi there", add_special=False) == plain
    assert ids(server, prompt="") == [BOS]
    strings = tokens(server, prompt="hi é", return_token_strs=True)
    assert strings["token_strs"] == ["<s>", "h", "i", " ", "bytes:\\xc3", "bytes:\\xa9"]
    assert "token_strs" not in tokens(server, prompt="hi")


def test_21_7_a_content_is_tokenized_as_llama_server_does(server: Running) -> None:
    plain = ids(server, prompt="hi there", add_special_tokens=False)
    assert ids(server, content="hi there") == plain
    assert ids(server, content="hi there", add_special=True) == [BOS, *plain]
    assert ids(server, content="") == []
    pieces = tokens(server, content="hé", with_pieces=True)["tokens"]
    assert [one["piece"] for one in pieces] == ["h", [0xC3], [0xA9]]
    assert [one["id"] for one in pieces] == ids(server, content="hé")


def test_21_7_special_tokens_in_a_text_are_parsed_if_they_are_meant(server: Running) -> None:
    text, plain = "<|im_start|>hi", ids(server, content="hi")
    assert ids(server, content=text) == [MARK, *plain]
    assert ids(server, content=text, add_special=True) == [BOS, MARK, *plain]
    assert ids(server, prompt=text, parse_special=True) == [BOS, MARK, *plain]
    as_text = ids(server, content=text, parse_special=False)
    assert MARK not in as_text
    assert len(as_text) == len(text)
    assert ids(server, prompt=text) == [BOS, *as_text], "as in a prompt of /v1/completions"
    assert ids(server, prompt=text, content=text) == [BOS, *as_text], "from a client of both servers"


def test_21_7_messages_are_tokenized_as_a_chat_does(chatting: Running) -> None:
    prompt = chatting.chat(messages=HI, return_token_ids=True).json()["prompt_token_ids"]
    assert ids(chatting, messages=HI) == ids(chatting, messages=HI, prompt=None, content=None) == prompt
    assert ids(chatting, prompt="hi", messages=None) == list(b"hi")
    assert ids(chatting, messages=HI, add_special_tokens=False, chat_template_kwargs={}) == prompt
    closed = ids(chatting, messages=HI, add_generation_prompt=False)
    assert closed == list(b"user: hi\n")
    said = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    assert ids(chatting, messages=said, continue_final_message=True) == list(b"user: hi\nassistant: so")
    pieces = tokens(chatting, messages=HI, with_pieces=True, return_token_strs=True)
    assert [one["piece"] for one in pieces["tokens"]] == pieces["token_strs"] == list("user: hi\nassistant: ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "content": "b"}, "content"),
        ({"prompt": "a", "messages": HI}, "messages"),
        ({"content": ["a", 5]}, "content"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HI, "parse_special": True}, "parse_special"),
        ({"messages": HI, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"prompt": "a", "add_special": True, "add_special_tokens": False}, "add_special"),
        ({"prompt": "a", "with_pieces": "yes"}, "with_pieces"),
        ({"prompt": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ],
)
def test_21_7_what_can_not_be_tokenized_is_rejected_by_name(
    chatting: Running, body: dict[str, Any], param: str
) -> None:
    check_refusal(chatting.post(TOKENIZE, body), 400, param)
