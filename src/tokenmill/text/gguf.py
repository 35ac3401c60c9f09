"""The tokenizer inside a GGUF file, built with the `tokenizers` package from the file's metadata.

Two kinds are there: byte-level BPE with its merges ("gpt2"), and SentencePiece ("llama"), whose merges follow from the
tokens' scores. How a text is cut before merging is a name in the file; a name that is not known here is an error, since
guessing would give wrong ids without anybody noticing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.errors import ModelLoadError
from tokenmill.text.conversion import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    add_around,
    merges_by_score,
    metaspace_decoder,
)
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.pieces import (
    DIGIT,
    GPT2,
    LLAMACPP_LLAMA3,
    LLAMACPP_O200K,
    LLAMACPP_QWEN2,
    LLAMACPP_QWEN35,
    LLAMACPP_TEKKEN,
    NUMBER,
    SYMBOLS,
    SYMBOLS_AND_BACKTICK,
    THREE_DIGITS,
)

SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Where a file does not say."""


@dataclass(frozen=True)
class PreTokenizer:
    """How texts are split into the parts that merges stay within."""

    expressions: tuple[str, ...]
    """Applied one after the other, each to the parts that the one before left."""
    whole_tokens_first: bool = False
    """Is a part that is a token not merged from bytes?"""
    adds_bos: bool = False
    """Unless the file says otherwise."""


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((SYMBOLS, GPT2, NUMBER, THREE_DIGITS)),
    "falcon": PreTokenizer((SYMBOLS_AND_BACKTICK, GPT2, THREE_DIGITS)),
    "tekken": PreTokenizer((LLAMACPP_TEKKEN,), whole_tokens_first=True, adds_bos=True),
    "glm4": PreTokenizer((LLAMACPP_LLAMA3,), whole_tokens_first=True),
    "qwen35": PreTokenizer((LLAMACPP_QWEN35,)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((LLAMACPP_LLAMA3,), whole_tokens_first=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((LLAMACPP_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((LLAMACPP_O200K,))),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
        ),
        PreTokenizer((GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((DIGIT, GPT2)),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        PreTokenizer((LLAMACPP_QWEN2,)),
    ),
}
"""`tokenizer.ggml.pre`, as llama.cpp reads it (tests/text/test_gguf.py compares the ids)."""
END_NAMES = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>",
})  # fmt: skip
"""Control tokens that end a generation by their name, whatever else the file says."""


def gguf_tokenizer(file: GGUFFile) -> HuggingFaceTokenizer:
    """The file's own tokenizer."""
    try:
        return _tokenizer(file)
    except ModelLoadError:
        raise
    except Exception as error:  # the package raises plain Exception, and values in the file may have any type
        raise ModelLoadError(f"{file.path} has an invalid tokenizer: {error}") from None


def _tokenizer(file: GGUFFile) -> HuggingFaceTokenizer:
    tokens, types = _tokens(file)
    kind = file.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise ModelLoadError(f"{file.path} has a tokenizer of type {kind!r}; supported: 'gpt2', 'llama'")
    added = _added(file, tokens, types)
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelLoadError(f"{file.path}: its tokenizer has {tokenizer.get_vocab_size()} tokens, not {len(tokens)}")
    eos = _token_id(file, "eos", tokens) if file.get("tokenizer.ggml.add_eos_token", False) else None
    add_around(tokenizer, _bos_id(file, tokens), eos)
    return HuggingFaceTokenizer(tokenizer, frozenset(_end_ids(file, tokens, types)))


def _added(file: GGUFFile, tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Tokens that are never cut or merged."""
    name = file.get("general.name", "")
    # The format has no such attribute: llama.cpp goes by the model's name.
    takes_spaces = isinstance(name, str) and any(phi in name.lower() for phi in ("phi-3", "phi3"))
    return [
        AddedToken(
            token,
            special=kind != USER_DEFINED,
            rstrip=takes_spaces and token not in ("<unk>", "<s>", "<|endoftext|>"),
            normalized=False,
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def chat_variables(file: GGUFFile) -> dict[str, Any]:
    """What a chat template may ask for by name."""
    tokens, _ = _tokens(file)
    numbers = {name: _token_id(file, name, tokens) for name in ("bos", "eos")}
    return {f"{name}_token": "" if number is None else tokens[number] for name, number in numbers.items()}


def chat_source(file: GGUFFile) -> str | None:
    """The chat template, if the file has one."""
    source = file.get("tokenizer.chat_template")
    if source is not None and not isinstance(source, str):
        raise ModelLoadError(f"{file.path}: tokenizer.chat_template must be a string, not {source!r:.80}")
    return source


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    tokens = file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(f"{file.path} has no tokenizer")
    types = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        count = len(types) if isinstance(types, list) else "no list of"
        raise ModelLoadError(f"{file.path}: {len(tokens)} tokens, but {count} token types")
    return tokens, types


def _bos_id(file: GGUFFile, tokens: Sequence[str]) -> int | None:
    """The token that every text begins with."""
    adds = file.get("tokenizer.ggml.model") == "llama" or _pre_tokenizer(file).adds_bos
    return _token_id(file, "bos", tokens) if file.get("tokenizer.ggml.add_bos_token", adds) else None


def _token_id(file: GGUFFile, name: str, tokens: Sequence[str]) -> int | None:
    """The number of the token that the file names so; for SentencePiece, llama.cpp's default."""
    key = f"tokenizer.ggml.{name}_token_id"
    number = file.get(key)
    if number is None and file.get("tokenizer.ggml.model") == "llama" and len(tokens) > max(SENTENCEPIECE_IDS.values()):
        number = SENTENCEPIECE_IDS.get(name)
    if number is not None and not (type(number) is int and 0 <= number < len(tokens)):
        raise ModelLoadError(f"{file.path}: {key} must be from 0 to {len(tokens) - 1}, not {number!r:.80}")
    return number


def _byte_level(file: GGUFFile, tokens: list[str]) -> Any:
    pre = _pre_tokenizer(file)
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = RustTokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.whole_tokens_first))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Any:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = file.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path}: {len(tokens)} tokens, but {len(scores)} scores")
    merges = merges_by_score(tokens, scores)
    unknown = tokens[_token_id(file, "unknown", tokens) or 0]
    tokenizer = RustTokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = metaspace_decoder(has_prefix=has_prefix)
    return tokenizer


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    name = file.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelLoadError(f"{file.path}: pre-tokenizer {name!r} is not supported; supported: {known}")
    return PRE_TOKENIZERS[name]


def _end_ids(file: GGUFFile, tokens: list[str], types: list[int]) -> set[int]:
    """Every token that ends a generation: named by the file, or by its own name."""
    named = {_token_id(file, name, tokens) for name in ("eos", "eot", "eom")}
    by_name = {i for i, token in enumerate(tokens) if types[i] == CONTROL and token in END_NAMES}
    return {i for i in named if i is not None} | by_name
