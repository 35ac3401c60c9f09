"""SentencePiece's tokenizer.model and Mistral's tekken.json: the ids of the original libraries; damaged files."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mistral_common
import pytest
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from tests.text.vocabularies import CONTROL, NORMAL, UNKNOWN, processor, train, unicode_texts
from tokenmill.errors import InvalidRequest, ModelLoadError
from tokenmill.text.conversion import OLD_SPECIAL
from tokenmill.text.detok import Detokenizer
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.model_text import ModelText, open_text

DATA = Path(mistral_common.__file__).parent / "data"
TYPED = ("<unk>", "<s>", "</s>", "<0x41>", "[INST]", " the", " ")
TEXTS = [text.replace("\0", "") for text in unicode_texts(400, more=TYPED)] + ["", " ", "  a ", "Hello, world!"]


def directory(folder: Path, model: bytes, **config: Any) -> HuggingFaceTokenizer:
    """The tokenizer of a directory with these files alone."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer.from_directory(folder)


# -- SentencePiece ----------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "as Llama's": {},
    "as Gemma's": {"add_dummy_prefix": False},
    "without bytes": {"byte_fallback": False},
    "spaces removed": {"remove_extra_whitespaces": True},
    "NFKC": {"normalization_rule_name": "nmt_nfkc"},
    "NFKC, cases folded, spaces removed": {"normalization_rule_name": "nmt_nfkc_cf", "remove_extra_whitespaces": True},
    "symbols": {"user_defined_symbols": "<sep>,THE 1,\t\t"},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_are_those_of_sentencepiece(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    model = train(kind, **options)
    ours, theirs = directory(tmp_path, model), processor(model)
    texts = [text.replace("don't", "<sep>") for text in TEXTS] if "user_defined_symbols" in options else TEXTS
    # Over a long text, SentencePiece's 32-bit sums of a unigram's scores lose the difference between two ways to split.
    for text in [*texts, " ".join(texts[: 30 if kind == "unigram" else None])]:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special=False) == ids, ascii(text)
        if options.get("byte_fallback", True):
            assert ours.decode(ids) == theirs.decode(ids), ascii(text)
            detokenizer = Detokenizer(ours)
            assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == ours.decode(ids)
    assert ours.vocab_size == theirs.get_piece_size()
    assert ours.eos_ids == {theirs.eos_id()}
    assert ours.encode("a")[0] == theirs.bos_id()


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_241114.model.v7"])
def test_ids_of_mistrals_own_models(tmp_path: Path, name: str) -> None:
    model = (DATA / name).read_bytes()
    ours, theirs = directory(tmp_path, model), processor(model)
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text), ascii(text)
    if name.endswith("v7"):
        assert ours.special_tokens["[INST]"] == 3
        assert 3 not in ours.encode("[INST]"), "what a user types stays text"
        assert ours.encode_template("[INST]")[-1] == 3


def message(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer; shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


def written(pieces: list[tuple[str, float, int]], kind: int) -> bytes:
    """A tokenizer.model with these pieces: text, score and type."""
    fields = [message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, type_])
              for text, score, type_ in pieces]  # fmt: skip
    return b"".join(message(1, one) for one in fields) + message(2, bytes([3 << 3, kind]))


@pytest.mark.parametrize("kind", [1, 2])
def test_text_that_spells_a_control_piece_stays_text(tmp_path: Path, kind: int) -> None:
    """Also where the vocabulary has all parts of it."""
    special = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<x>", 0.0, CONTROL)]
    parts = ["s>", "<x", "</", "</s", "\u2581<", "\u2581", "<", "/", "s", "x", ">"]
    model = written([*special, *((part, -1.0 - place, NORMAL) for place, part in enumerate(parts))], kind)
    ours, theirs = directory(tmp_path, model), processor(model)
    for text in ("<s>", "a<s>", "</s>x", "<x><x>", "<unk>", "s</s>", "<<s>>"):
        assert ours.encode(text, add_special=False) == theirs.encode(text), text
        assert not {1, 2, 3} & {*ours.encode(text, add_special=False)}


ADDED = {"700": {"content": "<|im_start|>", "special": True}, "701": {"content": "<think>", "special": False}}


def test_settings_of_tokenizer_config(tmp_path: Path) -> None:
    model = train("bpe")
    size = processor(model).get_piece_size()
    added = {str(size + i): token for i, token in enumerate(ADDED.values())}
    ours = directory(tmp_path, model, add_bos_token=False, add_eos_token=True, added_tokens_decoder=added)
    assert ours.encode("a") == [*processor(model).encode("a"), 2]
    assert ours.vocab_size == size + 2
    assert ours.encode_template("<|im_start|>")[0] == size
    assert ours.encode("<think>", add_special=False)[-1] == size + 1
    assert size not in ours.encode("<|im_start|>")
    named = directory(
        tmp_path, model, eos_token="<|im_start|>", bos_token={"content": "</s>"}, added_tokens_decoder=added
    )
    assert named.eos_ids == {size}
    assert named.encode("a")[0] == 2
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<old>": size}))
    assert directory(tmp_path, model).encode("<old>", add_special=False)[-1] == size


@pytest.mark.parametrize("legacy", [True, False])
def test_the_space_before_a_text_and_after_special_tokens(tmp_path: Path, legacy: bool) -> None:
    """`legacy`: before each part of a text; otherwise only before a text that does not begin with a special token."""
    model = train("bpe")
    ours, theirs, inside = directory(tmp_path, model, legacy=legacy), processor(model), processor(model)
    inside.override_normalizer_spec(add_dummy_prefix=legacy)
    assert inside.encode("the") != theirs.encode("the") or legacy
    for text, ids in [
        ("the", theirs.encode("the")),
        ("<s>the", [1, *inside.encode("the")]),
        ("the</s> the<s>a b", [*theirs.encode("the"), 2, *inside.encode(" the"), 1, *inside.encode("a b")]),
        ("<s></s>", [1, 2]),
    ]:
        assert ours.encode_template(text) == ids, text
        places = [found.span() for found in re.finditer("</?s>", text)]
        assert ours.encode_template(text, places) == ids, text
        typed = ours.encode_template(text, [])
        assert typed == ours.encode(text, add_special=False)
        assert typed == theirs.encode(text)


def test_special_tokens_are_not_normalized(tmp_path: Path) -> None:
    model = train("bpe", normalization_rule_name="nmt_nfkc")
    size = processor(model).get_piece_size()
    token = {str(size): {"content": "<\uff5cend\uff5c>", "special": True}}
    ours = directory(tmp_path, model, added_tokens_decoder=token)
    text = "\u2167<\uff5cend\uff5c>"
    assert ours.encode_template(text) == [*processor(model).encode("\u2167"), size]
    assert ours.encode_template(text, [(1, len(text))]) == ours.encode_template(text)
    assert ours.encode(text, add_special=False) == processor(model).encode(text)


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    for options, saying in [
        ({"kind": "char"}, "model type 4; supported"),
        ({"kind": "bpe", "treat_whitespace_as_suffix": True}, "uses treat_whitespace_as_suffix"),
    ]:
        with pytest.raises(ModelLoadError, match=saying):
            directory(tmp_path, train(**options))
    gap = {"added_tokens_decoder": {"5000": {"content": "<far>"}}}
    with pytest.raises(ModelLoadError, match="'<far>' has id 5000, not"):
        directory(tmp_path, train("bpe"), **gap)
    with pytest.raises(ModelLoadError, match=r"two of the \d+ tokens have the same text"):
        directory(tmp_path, train("bpe"), added_tokens_decoder={"5": {"content": "<s>"}})
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json, tokenizer\.model or tekken\.json"):
        HuggingFaceTokenizer.from_directory(tmp_path)


def test_damaged_models_are_told(tmp_path: Path) -> None:
    model, rng = train("bpe"), random.Random(0)
    for _ in range(30):
        with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
            directory(tmp_path, model[: rng.randrange(len(model) - 200)])
    for _ in range(60):  # any byte may be wrong: an error or a tokenizer, never anything else
        at = rng.randrange(len(model))
        with contextlib.suppress(ModelLoadError):
            directory(tmp_path, model[:at] + rng.randbytes(4) + model[at + 4 :])


# -- tekken -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nemo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with Mistral's own tekken.json."""
    folder = tmp_path_factory.mktemp("nemo")
    shutil.copy(DATA / "tekken_240718.json", folder / "tekken.json")
    return folder


SPECIAL = (*OLD_SPECIAL, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


def small_tekken(folder: Path, version: str) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"er", b"xyz"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    config = {
        "pattern": r" ?\p{L}+|[^\p{L}]",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + 30,
        "default_num_special_tokens": 30,
        "version": version,
    }
    content = {"config": config, "vocab": vocabulary, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def text_of(folder: Path) -> ModelText:
    return open_text(SimpleNamespace(path=folder))  # type: ignore[arg-type]


def test_ids_of_tekken_are_those_of_mistral_common(nemo: Path) -> None:
    ours, theirs = HuggingFaceTokenizer.from_directory(nemo), Tekkenizer.from_file(nemo / "tekken.json")
    for text in TEXTS:
        ids = theirs.encode(text, bos=True, eos=False)
        assert ours.encode(text) == ids, ascii(text)
        assert ours.decode(ids) == text
    assert (ours.vocab_size, ours.eos_ids) == (theirs.n_words, {theirs.eos_id})
    assert ours.special_tokens["[INST]"] == 3
    assert ours.special_tokens["<SPECIAL_999>"] == 999


def test_a_tekken_token_that_no_merges_make(tmp_path: Path) -> None:
    path = small_tekken(tmp_path, "v7") / "tekken.json"
    ours, theirs = HuggingFaceTokenizer.from_directory(tmp_path), Tekkenizer.from_file(path)
    for text in ("xyz", " xyz", "the xyz other", "thexyz"):
        assert ours.encode(text) == theirs.encode(text, bos=True, eos=False)


CONVERSATIONS = [
    ["user"],
    ["user", "assistant", "user"],
    ["system", "user"],
    ["system", "user", "assistant", "user", "assistant", "user"],
]


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_conversations_of_tekken_are_those_of_mistral_common(tmp_path: Path, version: str) -> None:
    folder = small_tekken(tmp_path, version)
    text, theirs = text_of(folder), MistralTokenizer.from_file(str(folder / "tekken.json"))
    kinds: dict[str, Any] = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    for roles in CONVERSATIONS:
        messages = [{"role": role, "content": f"the {role} says [INST] {i}"} for i, role in enumerate(roles)]
        theirs_too = [kinds[message["role"]](content=message["content"]) for message in messages]
        wanted = theirs.encode_chat_completion(ChatCompletionRequest(messages=theirs_too)).tokens
        assert text.chat_template().encode(messages) == wanted, roles


def test_tekken_of_another_version_has_no_chat_template(tmp_path: Path) -> None:
    text = text_of(small_tekken(tmp_path, "v99"))
    with pytest.raises(InvalidRequest, match="no chat template; use generate, or pass chat_template"):
        text.chat_template()
    with pytest.raises(InvalidRequest, match="roles must be user and assistant"):
        text_of(small_tekken(tmp_path, "v7")).chat_template().encode([{"role": "critic", "content": "a"}])


def test_a_damaged_tekken_is_told(tmp_path: Path) -> None:
    path = small_tekken(tmp_path, "v7") / "tekken.json"
    content = json.loads(path.read_text())
    for change in ({"vocab": content["vocab"][1:]}, {"config": {}}, {"vocab": [{"rank": 0, "token_bytes": "?"}]}):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(ModelLoadError, match="is not a valid tokenizer"):
            HuggingFaceTokenizer.from_directory(tmp_path)
