"""The tokenizer inside a GGUF file, built with the `tokenizers` package from the file's metadata.

Two kinds are there: byte-level BPE with its merges ("gpt2"), and SentencePiece ("llama"), whose merges follow from the
tokens' scores. How a text is cut before merging is a name in the file; a name that is not known here is an error, since
guessing would give wrong ids without anybody noticing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.errors import ModelLoadError
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.pieces import DIGIT, GPT2, LLAMA3, QWEN2, TEKKEN

CONTROL, USER_DEFINED = 3, 4
"""Token types of the format."""

CUTS: Mapping[str, Sequence[str]] = {
    "default": [GPT2],
    "gpt-2": [GPT2],
    "smollm": [DIGIT, GPT2],
    "starcoder": [DIGIT, GPT2],
    "refact": [DIGIT, GPT2],
    "llama-bpe": [LLAMA3],
    "llama3": [LLAMA3],
    "qwen2": [QWEN2],
    "tekken": [TEKKEN],
}
"""Name of the cut -> the expressions that cut a text, one after the other."""
WHOLE_TOKENS_FIRST = frozenset({"llama-bpe", "llama3", "tekken"})
"""Cuts whose pieces are looked up whole before they are merged from bytes."""
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
    tokenizer.add_special_tokens(_added(tokens, types, CONTROL))
    tokenizer.add_tokens(_added(tokens, types, USER_DEFINED))
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelLoadError(f"{file.path}: its tokenizer has {tokenizer.get_vocab_size()} tokens, not {len(tokens)}")
    bos = _token_id(file, "bos", tokens)
    if bos is not None and file.get("tokenizer.ggml.add_bos_token", _adds_bos(file)):
        content = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[content, "$A"], pair=[content, "$A", "$B"], special_tokens=[(content, bos)]
        )
    return HuggingFaceTokenizer(tokenizer.to_str(), frozenset(_end_ids(file, tokens, types)))


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    """Tokens that are never cut or merged."""
    chosen = [token for token, its_kind in zip(tokens, types, strict=True) if its_kind == kind]
    return [AddedToken(token, special=kind == CONTROL, normalized=False) for token in chosen]


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


def _token_id(file: GGUFFile, name: str, tokens: Sequence[str]) -> int | None:
    """The number of the token that the file names so."""
    key = f"tokenizer.ggml.{name}_token_id"
    number = file.get(key)
    if number is not None and not (type(number) is int and 0 <= number < len(tokens)):
        raise ModelLoadError(f"{file.path}: {key} must be from 0 to {len(tokens) - 1}, not {number!r:.80}")
    return number


def _byte_level(file: GGUFFile, tokens: list[str]) -> Any:
    cut = file.get("tokenizer.ggml.pre", "default")
    if cut not in CUTS:
        raise ModelLoadError(
            f"{file.path}: pre-tokenizer {cut!r} is not supported; supported: {', '.join(sorted(CUTS))}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = RustTokenizer(models.BPE(vocabulary, merges, ignore_merges=cut in WHOLE_TOKENS_FIRST))
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in CUTS[cut]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Any:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = merges_by_score(vocabulary, file.get("tokenizer.ggml.scores", []))
    unknown = tokens[_token_id(file, "unknown", tokens) or 0]
    tokenizer = RustTokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two pieces whose union has the best score: as merges, every union in that order."""
    if len(scores) != len(vocabulary):
        raise ModelLoadError(f"{len(vocabulary)} tokens, but {len(scores)} scores")
    found = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(found)]


def _adds_bos(file: GGUFFile) -> bool:
    """What the format means when it does not say."""
    return file.get("tokenizer.ggml.model") == "llama" or file.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")


def _end_ids(file: GGUFFile, tokens: list[str], types: list[int]) -> set[int]:
    """Every token that ends a generation: named by the file, or by its own name."""
    named = {_token_id(file, name, tokens) for name in ("eos", "eot", "eom")}
    by_name = {i for i, token in enumerate(tokens) if types[i] == CONTROL and token in END_NAMES}
    return {i for i in named if i is not None} | by_name
