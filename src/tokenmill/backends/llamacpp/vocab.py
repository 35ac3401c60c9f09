"""`LlamaVocab`: llama.cpp's own tokenizer, for files whose tokenizer is not known to tokenmill."""

from __future__ import annotations

import ctypes
from functools import cached_property

import llama_cpp as llama

from tokenmill.backends.llamacpp.native import NativeModel

CHUNK = 1 << 16
"""Ids that become Python's at a time."""


class LlamaVocab:
    """Bytes to ids and back. Any thread; of use as long as the model is open."""

    def __init__(self, model: NativeModel) -> None:
        self._vocab = model.vocab

    @cached_property
    def size(self) -> int:
        return int(llama.llama_vocab_n_tokens(self._vocab))

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return frozenset(i for i in range(self.size) if llama.llama_vocab_is_eog(self._vocab, i))

    @cached_property
    def special(self) -> dict[str, int]:
        """Text of each control token -> its id."""
        control = (i for i in range(self.size) if llama.llama_vocab_is_control(self._vocab, i))
        return {llama.llama_vocab_get_text(self._vocab, i).decode("utf-8", errors="replace"): i for i in control}

    @cached_property
    def uses_expressions(self) -> bool:
        """Does it cut texts by regular expressions first?"""
        return bool(llama.llama_vocab_type(self._vocab) == llama.LLAMA_VOCAB_TYPE_BPE)

    @cached_property
    def keeps_text(self) -> bool:
        """Is every byte of a text in one of its tokens, unless the vocabulary lacks the byte?"""
        kinds = (llama.LLAMA_VOCAB_TYPE_BPE, llama.LLAMA_VOCAB_TYPE_SPM, llama.LLAMA_VOCAB_TYPE_RWKV)
        takes_spaces = llama.LLAMA_TOKEN_ATTR_LSTRIP | llama.LLAMA_TOKEN_ATTR_RSTRIP
        return llama.llama_vocab_type(self._vocab) in kinds and not any(
            llama.llama_vocab_get_attr(self._vocab, i) & takes_spaces for i in range(self.size)
        )

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text; with `parse_special`, the texts of special tokens in it become those."""
        room = len(text) + 8
        ids = (ctypes.c_int32 * room)()
        count = llama.llama_tokenize(self._vocab, text, len(text), ids, room, add_special, parse_special)
        if count < 0:  # more ids than bytes: this is how many
            ids = (ctypes.c_int32 * -count)()
            count = llama.llama_tokenize(self._vocab, text, len(text), ids, -count, add_special, parse_special)
        found: list[int] = []
        for start in range(0, count, CHUNK):  # other threads run in between
            found += ids[start : min(start + CHUNK, count)]
        return found

    def detokenize(self, ids: list[int], *, skip_special: bool) -> bytes:
        """The bytes that ids stand for."""
        given = (ctypes.c_int32 * len(ids))(*ids)
        room = 16 * len(ids) + 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            count = llama.llama_detokenize(self._vocab, given, len(ids), buffer, room, skip_special, not skip_special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count
        raise AssertionError("llama.cpp has changed its mind about the length of a text")

    def piece(self, token: int) -> bytes:
        """What one token stands for inside a text; empty if there is no such token."""
        if not 0 <= token < self.size:
            return b""
        room = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            count = llama.llama_token_to_piece(self._vocab, token, buffer, room, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            room = -count
        raise AssertionError("llama.cpp has changed its mind about the length of a token")
