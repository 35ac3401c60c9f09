"""`HuggingFaceTokenizer`: the tokenizer of a Hugging Face model directory, through the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from tokenmill.errors import ModelLoadError
from tokenmill.files import read_json
from tokenmill.text.tokenizer import to_utf8


class HuggingFaceTokenizer:
    """Text to ids and back as the model's authors meant it. Everything is loaded at once, so threads can share it."""

    def __init__(self, tokenizer_json: str, eos_ids: frozenset[int] = frozenset()) -> None:
        # Two of them, since how special tokens in a text are read is a setting of the whole tokenizer.
        self._for_users = RustTokenizer.from_str(tokenizer_json)
        self._for_users.encode_special_tokens = True
        self._for_templates = RustTokenizer.from_str(tokenizer_json)
        added = self._for_templates.get_added_tokens_decoder()
        self._special_tokens = {token.content: number for number, token in added.items() if token.special}
        self._eos_ids = eos_ids

    @classmethod
    def from_directory(cls, folder: Path) -> HuggingFaceTokenizer:
        """Read tokenizer.json, and every place where a model names its end-of-sequence tokens."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{folder} has no tokenizer.json")
        text = path.read_text(encoding="utf-8")
        try:
            tokenizer = cls(text)
        except Exception as error:  # the package raises plain Exception
            raise ModelLoadError(f"{path} is no tokenizer: {error}") from None
        tokenizer._eos_ids = frozenset(_eos_ids(folder, tokenizer._for_templates))
        return tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self._for_templates.get_vocab_size())

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text of each special token -> its id."""
        return self._special_tokens

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """A user's text: special tokens in it stay text; `add_special` puts BOS and the like around it."""
        return self._encode(self._for_users, text, add_special)

    def encode_template(self, text: str) -> list[int]:
        """What a chat template wrote: special tokens in it are meant, and nothing is added."""
        return self._encode(self._for_templates, text, add_special=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._for_templates.decode(list(ids), skip_special_tokens=skip_special))

    def _encode(self, tokenizer: Any, text: str, add_special: bool) -> list[int]:
        to_utf8(text)
        return list(tokenizer.encode(text, add_special_tokens=add_special).ids)


def _eos_ids(folder: Path, tokenizer: Any) -> set[int]:
    """The end-of-sequence ids of config.json, generation_config.json and tokenizer_config.json together."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    named = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return found | ({named} if named is not None else set())
