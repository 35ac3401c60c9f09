"""Random texts of all kinds of characters, and models of SentencePiece that are trained on them."""

from __future__ import annotations

import io
import random
import unicodedata
from functools import lru_cache
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

UNKNOWN, NORMAL, CONTROL, USER, UNUSED, BYTE = 2, 1, 3, 4, 5, 6


FRAGMENTS = [
    *"abZ127.,!-_/($+<^~|`' \t\n\0\xad", "the", "The", "THE", "aZ", "Za", "don't", "'s", "'S", "'ll", "'LL", "'Re",
    "1984", "\u017f", "'\u017f", *"\xe9\xc9\xdf\u65e5\u672c\u306e\u30ab\ud55c\u0627\u0e01\u01c5\u02b0\u093f", "e\u0301",
    "\u0663", "\u2167", *"\xbd\xb2\u2019\u20ac\u2026\u3002\xab", "\U0001f600", "\u200d", "\u200b", "\ufeff",
    "  ", "\n\n", "\r\n", "\xa0", "\u3000", "\x85", "\u2028", "\U0001d7d8", "\U00010400", "\ue000",
]  # fmt: skip
"""Of every class of characters that tokenizers tell apart."""


def any_character(rng: random.Random) -> str:
    """An assigned one: others may be letters in a later version of Unicode."""
    ends = (0x80, 0x3000, 0x10000, 0x20000)
    while True:
        character = chr(rng.randrange(rng.choice(ends)))
        if unicodedata.category(character) not in ("Cn", "Cs"):
            return character


def unicode_texts(count: int, seed: int = 7, more: tuple[str, ...] = (), share: float = 0.2) -> list[str]:
    """Texts of fragments and, to this share, of any characters."""
    rng = random.Random(seed)

    def fragment() -> str:
        return any_character(rng) if rng.random() < share else rng.choice([*FRAGMENTS, *more, *more])

    return ["".join(fragment() for _ in range(rng.randint(1, 14))) for _ in range(count)]


class Piece(NamedTuple):
    piece: str
    score: float
    type: int


@lru_cache
def train(kind: str, **options: Any) -> bytes:
    """A tokenizer.model, with the settings of Llama's unless told."""
    usual = {
        "model_type": kind,
        "vocab_size": 700,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "minloglevel": 3,
    }
    # Texts that spell tokens which no text becomes.
    spelled = ("<s>", "</s>", "<0x41>")
    sentences = (text.replace("\0", "") for text in unicode_texts(2000, seed=1, more=spelled, share=0.0))
    model = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **{**usual, **options})
    return model.getvalue()


def processor(model: bytes) -> SentencePieceProcessor:
    """SentencePiece itself."""
    found = SentencePieceProcessor()
    found.LoadFromSerializedProto(model)
    return found


def pieces_of(model: bytes) -> list[Piece]:
    one = processor(model)

    def kind(i: int) -> int:
        tests = {UNKNOWN: one.is_unknown, CONTROL: one.is_control, UNUSED: one.is_unused, BYTE: one.is_byte}
        return next((name for name, test in tests.items() if test(i)), NORMAL)

    return [Piece(one.id_to_piece(i), one.get_score(i), kind(i)) for i in range(one.get_piece_size())]
