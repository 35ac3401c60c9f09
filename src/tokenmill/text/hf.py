"""`HuggingFaceTokenizer`: the tokenizer of a Hugging Face model directory, through the `tokenizers` package."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RustTokenizer

from tokenmill.errors import ModelLoadError, TokenizeFailed, TooManyTokens
from tokenmill.files import read_json
from tokenmill.text.conversion import ConvertedTokenizer, convert_directory
from tokenmill.text.pieces import BYTE_OF, joins_texts, length_bound, safe_cuts
from tokenmill.text.tokenizer import InnerTexts, Places, to_utf8

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece vocabularies spell a single byte."""


MANY_IDS = 1024
"""To decode them, a batch is worth it: `decode` holds the interpreter lock."""


class HuggingFaceTokenizer:
    """Text to ids and back as the model's authors meant it. Everything is loaded at once, so threads can share it.

    The interpreter lock is released while a text is tokenized, and long texts are tokenized in pieces.
    """

    def __init__(
        self,
        source: str | RustTokenizer,
        eos_ids: frozenset[int] = frozenset(),
        prefix: str = "",
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        """`source` is a tokenizer of the package or its tokenizer.json; `prefix` is put before every text that does not
        begin with a special token; `normalize` applies to text.
        """
        # Two of them, since how special tokens in a text are read is a setting of the whole tokenizer.
        self._for_templates = RustTokenizer.from_str(source) if isinstance(source, str) else source
        added = self._for_templates.get_added_tokens_decoder()
        self._special_tokens = {token.content: number for number, token in added.items() if token.special}
        self._stand_ins = _stand_ins(self._special_tokens)
        """Text of each special token -> a text that is the same token to `_for_users`."""
        self._for_users = _tokenizer_for_users(self._for_templates, added, self._stand_ins)
        for one in (self._for_users, self._for_templates):  # settings of whoever saved the file, not of the model
            one.no_truncation()
            one.no_padding()
        self._eos_ids = eos_ids
        self._prefix = prefix
        self._normalize = normalize or str
        self._meant = {
            self._for_users.token_to_id(new): self._special_tokens[old] for old, new in self._stand_ins.items()
        }
        self._cuts = safe_cuts(self._for_users)
        self._bound = length_bound(self._for_templates) if normalize is None else None
        self._around = _added_around(self._for_users)
        """The ids that `add_special` puts before a text and after it."""
        example = self._for_templates.encode("a", add_special_tokens=False).ids[-1:]
        after = example[0] if example and joins_texts(self._for_templates) else None
        self._inner_texts = [InnerTexts(partial(self.decode, skip_special=skips), after) for skips in (False, True)]

    @classmethod
    def from_directory(cls, folder: Path) -> HuggingFaceTokenizer:
        """Read tokenizer.json or another format, and every place where a model names its end-of-sequence tokens."""
        path = folder / "tokenizer.json"
        if path.is_file():
            found = ConvertedTokenizer(read_text(path))
        elif (converted := convert_directory(folder)) is not None:
            found = converted
        else:
            raise ModelLoadError(f"{folder} has no tokenizer.json, tokenizer.model or tekken.json")
        try:
            tokenizer = cls(found.tokenizer_json, prefix=found.prefix, normalize=found.normalize)
        except Exception as error:  # the package raises plain Exception
            raise ModelLoadError(f"{path} is not a valid tokenizer: {error}") from None
        own = set() if found.eos_id is None else {found.eos_id}
        tokenizer._eos_ids = frozenset(_eos_ids(folder, tokenizer._for_templates) or own)
        return tokenizer

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return str(self._for_templates.to_str())

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

    def min_num_tokens(self, text: str) -> int:
        return 0 if self._bound is None else self._bound.min_num_tokens(to_utf8(text))

    def encode(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:
        """A user's text: special tokens in it stay text; `add_special` puts BOS and the like around it."""
        before, after = self._around if add_special else ([], [])
        text = self._prefix + self._normalize(text) if text else text
        return [*before, *self._encode(self._for_users, text, limit), *after]

    def encode_template(self, text: str, special: Places | None = None, *, limit: int | None = None) -> list[int]:
        """What a chat template wrote: special tokens in it are meant (with `special`, only those at these places)."""
        if special is None and self._normalize is str:
            begins_special = not text or text.startswith(tuple(self._special_tokens))
            return self._encode(self._for_templates, text if begins_special else self._prefix + text, limit)
        if special is None:
            longest_first = sorted(self._special_tokens, key=len, reverse=True)
            special = [found.span() for found in re.finditer("|".join(map(re.escape, longest_first)), text)]
        pieces, at = [self._prefix] if text and (not special or special[0][0] > 0) else [], 0
        for start, end in special:
            pieces += [self._normalize(text[at:start]), self._stand_ins[text[start:end]]]
            at = end
        ids = self._encode(self._for_users, "".join([*pieces, self._normalize(text[at:])]), limit)
        return [self._meant.get(number, number) for number in ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        if len(ids) < MANY_IDS:
            return str(self._for_templates.decode(list(ids), skip_special_tokens=skip_special))
        (text,) = self._for_templates.decode_batch([list(ids)], skip_special_tokens=skip_special)
        return str(text)

    def inner_texts(self, *, skip_special: bool = True) -> Mapping[int, str]:
        return self._inner_texts[skip_special]

    def token_bytes(self, token: int) -> bytes:
        piece = self._for_templates.id_to_token(token)
        if piece is None:
            return b""
        # Twice, since decoders strip a first space.
        text = self.decode([token, token], skip_special=False).removeprefix(self.decode([token], skip_special=False))
        if "\ufffd" not in text:
            return text.encode()
        if found := BYTE_TOKEN.fullmatch(piece):
            return bytes([int(found[1], 16)])
        known = [BYTE_OF.get(character) for character in piece]
        return text.encode() if None in known else bytes(byte for byte in known if byte is not None)

    def _encode(self, tokenizer: Any, text: str, limit: int | None) -> list[int]:
        if limit is not None and (least := self.min_num_tokens(text)) > limit:
            raise TooManyTokens(least, limit)
        to_utf8(text)
        ids: list[int] = []
        for piece in [text] if self._cuts is None else self._cuts.pieces(text):
            ids += _ids_of(tokenizer, piece)
            if limit is not None and len(ids) > limit:
                raise TooManyTokens(len(ids), limit)
        return ids


def _ids_of(tokenizer: Any, text: str) -> list[int]:
    """As a batch, since `encode` holds the interpreter lock; of one text, so that it runs on one thread."""
    try:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except BaseException as error:  # a panic of the package is no Exception: its regex engine gives up on long runs
        if type(error).__name__ == "PanicException":
            raise TokenizeFailed(f"the tokenizer failed on this text: {error}") from None
        raise
    ids: list[int] = encoding.ids
    return ids


def _added_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the post-processor puts before a text and after it."""
    encoding = tokenizer.encode("a")
    of_text = [at for at, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
    return (encoding.ids[: of_text[0]], encoding.ids[of_text[-1] + 1 :]) if of_text else (encoding.ids, [])


def _eos_ids(folder: Path, tokenizer: Any) -> set[int]:
    """The end-of-sequence ids of config.json, generation_config.json and tokenizer_config.json together."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(number) is int and number >= 0 for number in listed):
            raise ModelLoadError(
                f"{folder / name}: eos_token_id must be a token id or a list of token ids, not {ids!r}"
            )
        found.update(listed)
    token = read_json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    named = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return found | ({named} if named is not None else set())


def _stand_ins(special: Iterable[str]) -> dict[str, str]:
    """Another text for each special token. These begin with eight random characters, so nobody can type them."""
    nonce = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(8))
    return {content: f"{nonce}{chr(0xF0000 + place)}" for place, content in enumerate(special)}


def _tokenizer_for_users(original: Any, added: Mapping[int, AddedToken], stand_ins: Mapping[str, str]) -> Any:
    """A tokenizer that takes special tokens as text, and the texts that stand in for them as those tokens."""
    tokenizer = _without_special_words(original, stand_ins) if isinstance(original.model, models.Unigram) else None
    if tokenizer is None:
        tokenizer = _sharing_model(original, added)
    tokenizer.encode_special_tokens = True
    tokenizer.add_tokens([
        AddedToken(stand_ins[token.content], single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                   normalized=False, special=False)
        for token in added.values() if token.special
    ])  # fmt: skip
    return tokenizer


def _without_special_words(original: Any, stand_ins: Mapping[str, str]) -> Any:
    """A copy of a Unigram tokenizer, to which special tokens in its vocabulary are words, too."""
    content = json.loads(original.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    model = content["model"]
    model["vocab"] = [[stand_ins.get(piece, piece), score] for piece, score in model["vocab"]]
    return RustTokenizer.from_str(json.dumps(content))


def _sharing_model(original: Any, added: Mapping[int, AddedToken]) -> Any:
    """A copy on the same vocabulary and merges, which take most of a tokenizer's memory, and of the time to make it."""
    tokenizer = RustTokenizer(original.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(original, part) is not None:
            setattr(tokenizer, part, getattr(original, part))
    tokenizer.add_tokens([added[number] for number in sorted(added)])
    # A file may leave numbers out between added tokens; adding them one after the other does not.
    if any(tokenizer.token_to_id(token.content) != number for number, token in added.items()):
        return RustTokenizer.from_str(original.to_str())
    return tokenizer


def read_text(path: Path) -> str:
    """A model's text file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from None
