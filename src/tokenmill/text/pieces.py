"""What a tokenizer's parts say about its texts: where one may be cut, how much of it a token covers, how tokens join.

Tokenizing in pieces bounds what a single call does, and can stop once a prompt is known to be too long. The ids of the
pieces, one after the other, are the ids of the whole. A cut is made before a space between two letters or digits, where
nothing that the tokenizer does reaches across:

- its pre-tokenizer always begins a new pre-token at that space, or
- it has none, and no token of its BPE vocabulary has a space after another character, so no merge spans the cut.

That is known for the components listed here. Texts for any other tokenizer stay whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RustTokenizer

# -- expressions that split a text ------------------------------------------------------------------------------------

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def _tekken(upper: str, lower: str) -> str:
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _o200k(upper: str, lower: str, ending: str) -> str:
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}?|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_CASES = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
TEKKEN = _tekken(*_CASES)
O200K = _o200k(*_CASES, "(?i:'s|'t|'re|'ve|'m|'ll|'d)")
DIGIT, NUMBER, THREE_DIGITS = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
SYMBOLS, SYMBOLS_AND_BACKTICK = r"[\p{P}\$\+<=>\^~\|]+", r"[\p{P}\$\+<=>\^~\|`]+"

# As llama.cpp has them, also where they differ from those a model was trained with: only ASCII letters have a case.
# (To other libraries, U+017F is an "s" in a contraction.)
_ENDING = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LLAMACPP_LLAMA3 = _ENDING + LLAMA3.removeprefix("(?i:'s|'t|'re|'ve|'m|'ll|'d)")
LLAMACPP_QWEN2 = LLAMACPP_LLAMA3.replace("{1,3}", "")
LLAMACPP_QWEN35 = LLAMACPP_QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_ASCII_CASES = (r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]")
LLAMACPP_TEKKEN = _tekken(*_ASCII_CASES)
LLAMACPP_O200K = _o200k(*_ASCII_CASES, _ENDING)

SPLITS_AT_SPACES = frozenset({GPT2, LLAMA3, QWEN2, TEKKEN, O200K, LLAMACPP_LLAMA3, LLAMACPP_QWEN2, LLAMACPP_QWEN35,
                              LLAMACPP_TEKKEN, LLAMACPP_O200K})  # fmt: skip
"""No match has a space after another character, and `\\s+` matches every space, so a space after a letter begins
a match. What comes before does not depend on it either: lookaheads only ask for a space or the end."""
ONLY_SPLITS = frozenset({DIGIT, NUMBER, r"\p{N}{1,3}", THREE_DIGITS, SYMBOLS, SYMBOLS_AND_BACKTICK})
"""These don't split at spaces, and match nothing that has one."""

# -- cutting ----------------------------------------------------------------------------------------------------------

PIECE_CHARS = 1 << 13
"""Pieces have at least this many characters: some milliseconds of tokenizing."""
SEARCH_CHARS = 1 << 16
"""The search for a cut lets other threads run after this many characters."""
_WORD = r"[^\W_]"
_CUT = re.compile(rf" (?<={_WORD} )(?={_WORD})")
_REACHES_CUT = re.compile(rf"{_WORD}[\s▁]|[\s▁]{_WORD}|\A[\s▁]\Z")
"""Added tokens like this may match across a cut, or the space itself."""


@dataclass(frozen=True)
class Cuts:
    """How the texts of a tokenizer are cut."""

    drops_space: bool = False
    """Its normalizer puts a space before every text, so that of a piece is left out."""

    def pieces(self, text: str) -> Iterator[str]:
        """The text in pieces; a single one if there is no place to cut."""
        start = 0
        while len(text) - start > PIECE_CHARS and (cut := _next_cut(text, start + PIECE_CHARS)) is not None:
            yield text[start:cut]
            start = cut + self.drops_space
        yield text[start:]


def _next_cut(text: str, start: int) -> int | None:
    for begin in range(start, len(text), SEARCH_CHARS):
        # One character more, for the look ahead from the last place.
        found = _CUT.search(text, begin, begin + SEARCH_CHARS + 1)
        if found is not None:
            return found.start()
    return None


def safe_cuts(tokenizer: RustTokenizer) -> Cuts | None:
    """How this tokenizer's texts may be cut; None if that is not known."""
    if any(_may_reach_cut(token) for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    normalizes = [_on_spaces(part) for part in _parts(tokenizer.normalizer)]
    splits = _parts(tokenizer.pre_tokenizer)
    if None in normalizes:
        return None
    if "replaces" not in normalizes and "prepends" not in normalizes:
        return Cuts() if _splits_at_cuts(splits) else None
    is_one_word = all(part["type"] == "Split" and part["pattern"] == {"String": " "} for part in splits)
    if "replaces" in normalizes and is_one_word and _never_joins_words(tokenizer):
        return Cuts(drops_space="prepends" in normalizes)
    return None


_SEQUENCES = ("normalizers", "pretokenizers", "decoders")


def _parts(component: Any) -> list[dict[str, Any]]:
    """What a normalizer, a pre-tokenizer or a decoder consists of, in order."""
    if component is None:
        return []
    waiting, found = [json.loads(component.__getstate__())], []
    while waiting:
        part = waiting.pop(0)
        if part["type"] == "Sequence":
            waiting = [*(one for kind in _SEQUENCES for one in part.get(kind, [])), *waiting]
        else:
            found.append(part)
    return found


def _on_spaces(normalizer: Mapping[str, Any]) -> str | None:
    """What a normalizer does to spaces; None if that is not known."""
    match normalizer:
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
            return "keeps"
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return "replaces"
        case {"type": "Prepend", "prepend": "▁"}:
            return "prepends"
        case _:
            return None


def _splits_at_cuts(pre_tokenizers: Sequence[Mapping[str, Any]]) -> bool:
    """Does one of them begin a pre-token at every cut, and does none before it depend on what is across?"""
    for part in pre_tokenizers:
        match part:
            case {"type": "ByteLevel", "use_regex": True} | {"type": "Whitespace" | "WhitespaceSplit"}:
                return True
            case {"type": "Metaspace", "split": True}:
                return True
            case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated" | "Removed"}:
                if expression in SPLITS_AT_SPACES:
                    return True
                if expression not in ONLY_SPLITS:
                    return False
            case {"type": "Digits"} | {"type": "Punctuation", "behavior": "Isolated" | "Contiguous"}:
                pass
            case _:
                return False
    return False


def _never_joins_words(tokenizer: RustTokenizer) -> bool:
    """Is the model a BPE with a token for the space, and none that has a space after another character?"""
    model, vocabulary = tokenizer.model, tokenizer.get_vocab()
    if not isinstance(model, models.BPE) or model.dropout or model.ignore_merges or model.end_of_word_suffix:
        return False
    return "▁" in vocabulary and not any("▁" in token.lstrip("▁") for token in vocabulary)


def _may_reach_cut(token: AddedToken) -> bool:
    """May this token match across a cut, or take the space there with it?"""
    takes_left = token.lstrip and re.match(_WORD, token.content)
    takes_right = token.rstrip and re.search(rf"{_WORD}\Z", token.content)
    return bool(_REACHES_CUT.search(token.content) or takes_left or takes_right)


# -- a lower bound ----------------------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
NOT_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})

NFC_SHRINKS = 4
"""NFC makes a text less than this many times shorter in UTF-8; seven bytes (U+1FBE U+0308 U+0301) become two."""


@dataclass(frozen=True)
class LengthBound:
    """Of how many ids a text consists at least."""

    max_token_bytes: int
    """UTF-8 bytes that one id may stand for."""
    unknown: bytes = b""
    """Bytes that the vocabulary lacks: they become no id at all."""

    def min_num_tokens(self, text: bytes) -> int:
        num_bytes = len(text.translate(None, self.unknown) if self.unknown else text)
        return -(-num_bytes // self.max_token_bytes)


def length_bound(tokenizer: RustTokenizer) -> LengthBound | None:
    """None if an id may stand for any number of characters."""
    normalizers, splits = _parts(tokenizer.normalizer), _parts(tokenizer.pre_tokenizer)
    composes = any(part["type"] == "NFC" for part in normalizers)
    keeps = all(part["type"] == "NFC" or _on_spaces(part) in ("replaces", "prepends") for part in normalizers)
    removes = any(part.get("behavior") == "Removed" or part["type"].startswith("Whitespace") for part in splits)
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    if not keeps or removes or strips or not isinstance(tokenizer.model, models.BPE):
        return None
    if any(part["type"] == "ByteLevel" for part in splits):
        longest = max(map(len, vocabulary), default=1)
        unknown = bytes(BYTE_OF[one] for one in BYTE_OF.keys() - vocabulary.keys() if BYTE_OF[one] not in NOT_IN_UTF8)
    elif tokenizer.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        longest, unknown = max(len(token.replace("▁", " ").encode()) for token in vocabulary), b""
    else:
        return None
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    if composes:
        return None if unknown else LengthBound(longest * NFC_SHRINKS)
    return LengthBound(longest, unknown)


# -- decoding ---------------------------------------------------------------------------------------------------------


def joins_texts(tokenizer: RustTokenizer) -> bool:
    """Does a token add the same text wherever it follows other text, unless it holds part of a character?

    So with decoders that look at each token by itself, or at the bytes of a character, and strip no more than the
    beginning of the text.
    """
    parts, is_one_text = _parts(tokenizer.decoder), False
    for part in parts:
        match part:
            case {"type": "Strip", "stop": 0}:
                pass
            case {"type": "Replace" | "ByteFallback" | "Metaspace" | "ByteLevel" | "Fuse"} if not is_one_text:
                is_one_text = part["type"] in ("ByteLevel", "Fuse")
            case _:
                return False
    return bool(parts)
