"""A model's text side: templates with the model's variables, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.test_gguf import byte_level, byte_level_metadata, write  # noqa: F401 (a fixture)
from tests.text.test_hf import JSON
from tokenmill.errors import ConfigError, InvalidRequest, ModelLoadError
from tokenmill.text import model_text
from tokenmill.text.model_text import ModelText, sampling_defaults
from tokenmill.text.template import PLAIN_TEMPLATE, ChatTemplate
from tokenmill.text.tokenizer import ByteTokenizer

HI = [{"role": "user", "content": "hi"}]


def folder_with(path: Path, **files: Any) -> Path:
    (path / "tokenizer.json").write_text(JSON)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_callers_template_gets_the_models_variables(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, tokenizer_config={"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}})
    text = model_text._from_directory(folder)
    assert text.variables["eos_token"] == "<|end|>"
    own = text.chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    ids = own.encode(HI)
    assert (ids[0], ids[-1]) == (0, 1)
    assert text.chat_template(own.source) is own
    for number in range(20):
        text.chat_template(str(number))
    assert text.chat_template(own.source) is not own
    for missing in (text.chat_template, lambda: text.chat_template(None)):
        with pytest.raises(InvalidRequest, match="no chat template"):
            missing()
    with pytest.raises(InvalidRequest, match="a chat template must be a string, not int"):
        text.chat_template(5)  # type: ignore[arg-type]


def test_the_models_own_template(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, tokenizer_config={"bos_token": "<|bos|>", "chat_template": "{{ bos_token }}x"})
    text = model_text._from_directory(folder)
    assert text.chat_template(None) is text.chat_template() is text.template
    assert text.chat_template(None).encode(HI)[0] == 0


def test_a_template_that_does_not_compile_only_keeps_from_chatting(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, tokenizer_config={"chat_template": "{% martian %}"})
    text = model_text._from_directory(folder)
    assert text.tokenizer.encode("the cat")
    with pytest.raises(InvalidRequest, match="unknown tag 'martian'"):
        text.chat_template().encode(HI)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json", "tokenizer_config.json"])
def test_files_that_are_no_utf8(tmp_path: Path, name: str) -> None:
    (folder_with(tmp_path) / name).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelLoadError, match=name) as found:
        model_text._from_directory(tmp_path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("eos", ["ab", 2.0, -1, True, [1, "a"], {"a": 1}, [[1]]])
def test_end_of_sequence_ids_that_are_none(tmp_path: Path, eos: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: eos_token_id must be a token id"):
        model_text._from_directory(folder_with(tmp_path, config={"eos_token_id": eos}))


def test_sampling_values_that_are_not_valid_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults({"do_sample": False, "top_p": 0.0, "top_k": "x", "min_p": 0.1}) == {
        "temperature": 0.0,
        "min_p": 0.1,
    }
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "top_p must be in (0, 1], not 0.0" in caplog.text
    assert "top_k must be an integer" in caplog.text
    assert (
        ModelText(ByteTokenizer(), defaults=sampling_defaults({"temperature": -1})).sampling_params().temperature == 1
    )


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        ({"tokenizer.ggml.eos_token_id": 9999}, r"eos_token_id must be from 0 to \d+, not 9999"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id must be from 0 to .*, not 'x'"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id must be from 0 to .*, not -1"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id must be from 0 to .*, not 9999"),
        ({"tokenizer.ggml.eot_token_id": True}, "eot_token_id must be from 0 to .*, not True"),
        ({"tokenizer.chat_template": 5}, r"tokenizer\.chat_template must be a string, not 5"),
        ({"tokenizer.ggml.token_type": 5}, "no list of token types"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "has no tokenizer"),
    ],
)
def test_gguf_values_that_are_wrong(tmp_path: Path, byte_level: Any, change: dict[str, Any], saying: str) -> None:  # noqa: F811
    path = write(tmp_path / "t.gguf", {**byte_level_metadata(byte_level), **change})
    with pytest.raises(ModelLoadError, match=saying) as found:
        model_text._from_gguf(path, None)
    assert "\n" not in str(found.value)


def test_a_gguf_files_variables_and_template(tmp_path: Path, byte_level: Any) -> None:  # noqa: F811
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    metadata = {**byte_level_metadata(byte_level), "tokenizer.chat_template": source}
    text = model_text._from_gguf(write(tmp_path / "t.gguf", metadata), None)
    assert text.variables == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert text.chat_template(None).encode(HI) == text.chat_template(source).encode(HI)


def test_a_tool_format_by_name_replaces_the_derived_one() -> None:
    tokenizer = ByteTokenizer()
    text = ModelText(tokenizer, ChatTemplate(PLAIN_TEMPLATE, tokenizer))
    assert text.chat_template().turn_format.name == "generic"
    assert text.with_tool_format("hermes").chat_template().turn_format.name == "hermes"
    with pytest.raises(ConfigError, match=r"tool_format must be one of .*harmony.*, not 'xml'"):
        text.with_tool_format("xml")
