"""`LlamaTokenizer`: llama.cpp's own tokenizer behind our protocol, for GGUF files whose kind is not known here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenmill.text.tokenizer import Places, to_utf8


class Vocab(Protocol):
    """What a model opened by llama.cpp knows of its tokens."""

    @property
    def size(self) -> int: ...

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def special(self) -> Mapping[str, int]: ...

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]: ...
    def detokenize(self, ids: list[int], *, skip_special: bool) -> bytes: ...
    def piece(self, token: int) -> bytes: ...


class LlamaTokenizer:
    """Safe to use from several threads, as long as the model is open."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    @property
    def vocab_size(self) -> int:
        return self._vocab.size

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._vocab.end_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self._vocab.special

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return self._vocab.tokenize(to_utf8(text), add_special=add_special, parse_special=False)

    def encode_template(self, text: str, special: Places | None = None) -> list[int]:
        if special is None:
            return self._vocab.tokenize(to_utf8(text), add_special=False, parse_special=True)
        ids, at = [], 0
        for start, end in special:
            ids += [*self._plain(text[at:start]), self._vocab.special[text[start:end]]]
            at = end
        return [*ids, *self._plain(text[at:])]

    def _plain(self, text: str) -> list[int]:
        return self._vocab.tokenize(to_utf8(text), add_special=False, parse_special=False) if text else []

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        known = [token for token in ids if 0 <= token < self._vocab.size]
        return self._vocab.detokenize(known, skip_special=skip_special).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._vocab.piece(token)
