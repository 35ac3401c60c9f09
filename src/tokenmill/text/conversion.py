"""Tokenizers in other formats, as those of the `tokenizers` package: SentencePiece's `tokenizer.model`, `tekken.json`.

Ids are those of the original libraries, which are not needed: the tests compare them on random Unicode text. A setting
that cannot be converted is an error that names it.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from tokenmill.errors import ModelLoadError
from tokenmill.files import read_json
from tokenmill.text.pieces import BYTE_OF

UNKNOWN, NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 1, 3, 4, 5, 6
"""Types of a token, in SentencePiece's models and in GGUF files."""


@dataclass(frozen=True)
class ConvertedTokenizer:
    """A tokenizer.json, and what it cannot express."""

    tokenizer_json: str
    prefix: str = ""
    """Put before every text that does not begin with a special token."""
    eos_id: int | None = None
    normalize: Callable[[str], str] | None = None
    """Applied to text between special tokens."""


def convert_directory(folder: Path) -> ConvertedTokenizer | None:
    """The tokenizer of a directory without tokenizer.json; None if there is none in another format, either."""
    readers: dict[str, Callable[[Path], ConvertedTokenizer]] = {
        "tokenizer.model": convert_sentencepiece,
        "tekken.json": convert_tekken,
    }
    for name, convert in readers.items():
        if (path := folder / name).is_file():
            try:
                return convert(path)
            except ModelLoadError:
                raise
            except Exception as error:  # the package raises plain Exception, and a file may hold anything
                raise ModelLoadError(f"{path} is not a valid tokenizer: {error}") from None
    return None


def add_around(tokenizer: RustTokenizer, before: int | None, after: int | None) -> None:
    """Have the tokenizer put these ids before and after a text."""
    names = {number: tokenizer.id_to_token(number) for number in (before, after) if number is not None}
    if not names:
        return
    first = [] if before is None else [names[before]]
    last = [] if after is None else [names[after]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", "$B", *last],
        special_tokens=[(name, number) for number, name in names.items()],
    )


# -- SentencePiece ----------------------------------------------------------------------------------------------------

UNIGRAM, BPE = 1, 2


@dataclass(frozen=True)
class PieceModel:
    """What a `ModelProto` of SentencePiece says, with its defaults."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: int = UNIGRAM
    has_byte_fallback: bool = False
    has_space_suffix: bool = False
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    adds_prefix: bool = True
    removes_spaces: bool = True
    escapes_spaces: bool = True


def read_piece_model(content: bytes) -> PieceModel:
    """Parse the protocol buffer of a tokenizer.model."""
    pieces, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append(piece[1].decode())
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            types.append(piece.get(3, NORMAL))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not trainer or not pieces:
        raise ValueError("pieces or trainer_spec are missing")
    return PieceModel(
        pieces,
        scores,
        types,
        kind=trainer.get(3, UNIGRAM),
        has_byte_fallback=bool(trainer.get(35, False)),
        has_space_suffix=bool(trainer.get(24, False)),
        bos_id=_signed(trainer.get(41, 1)),
        eos_id=_signed(trainer.get(42, 2)),
        charsmap=normalizer.get(2, b""),
        adds_prefix=bool(normalizer.get(3, True)),
        removes_spaces=bool(normalizer.get(4, True)),
        escapes_spaces=bool(normalizer.get(5, True)),
    )


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer, in order: integers, or the bytes of anything else."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(content):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
                continue
            case 1:
                size = 8
            case 2:
                size = varint()
            case 5:
                size = 4
            case kind:
                raise ValueError(f"unknown wire type {kind} at byte {at}")
        if at + size > len(content):
            raise ValueError(f"{at + size - len(content)} bytes missing at its end")
        yield key >> 3, content[at : at + size]
        at += size


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def convert_sentencepiece(path: Path) -> ConvertedTokenizer:
    """A tokenizer.model, with the settings and added tokens of the files beside it."""
    model, config = read_piece_model(path.read_bytes()), read_json(path.parent / "tokenizer_config.json")
    _check_convertible(path, model)
    listed = _listed_tokens(path.parent, config)
    pieces, scores, types = list(model.pieces), list(model.scores), list(model.types)
    for number, token in sorted(listed.items()):
        if number > len(pieces):
            raise ModelLoadError(f"{path.parent}: added token {token.content!r} has id {number}, not {len(pieces)}")
        kind, place = (CONTROL if token.special else USER_DEFINED), slice(number, number + 1)
        pieces[place], scores[place], types[place] = [token.content], [0.0], [kind]
    has_prefix = model.adds_prefix and config.get("add_prefix_space") is not False
    # Before each part of a text between special tokens, as older versions of transformers did; else at its beginning.
    is_legacy = bool(config.get("legacy", False)) or model.removes_spaces
    tokenizer = RustTokenizer(_model_of(model, pieces, scores, types))
    tokenizer.normalizer = _normalizer(model, has_prefix=has_prefix and is_legacy)
    tokenizer.decoder = metaspace_decoder(has_prefix=has_prefix)
    if model.kind == UNIGRAM:
        tokenizer.pre_tokenizer = _never_whole(pieces, types)
    added = {
        number: AddedToken(pieces[number], special=kind != USER_DEFINED, normalized=False)
        for number, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    } | listed
    tokenizer.add_special_tokens([token for token in added.values() if token.special])
    tokenizer.add_tokens([token for token in added.values() if not token.special])
    if tokenizer.get_vocab_size() != len(pieces):
        raise ModelLoadError(f"{path.parent}: two of the {len(pieces)} tokens have the same text")
    ids = {name: _named_id(tokenizer, config.get(f"{name}_token"), own)
           for name, own in (("bos", model.bos_id), ("eos", model.eos_id))}  # fmt: skip
    add_around(
        tokenizer,
        ids["bos"] if config.get("add_bos_token", True) else None,
        ids["eos"] if config.get("add_eos_token", False) else None,
    )
    return ConvertedTokenizer(
        tokenizer.to_str(),
        prefix=" " if has_prefix and not is_legacy else "",
        eos_id=ids["eos"],
        normalize=CharacterRules(model.charsmap) if model.charsmap else None,
    )


def _check_convertible(path: Path, model: PieceModel) -> None:
    if model.kind not in (UNIGRAM, BPE):
        raise ModelLoadError(f"{path} has model type {model.kind}; supported: 1 (unigram), 2 (BPE)")
    unsupported = {
        "treat_whitespace_as_suffix": model.has_space_suffix,
        "escape_whitespaces = false": not model.escapes_spaces,
    }
    for what in (what for what, is_used in unsupported.items() if is_used):
        raise ModelLoadError(
            f"{path} uses {what}, which is not supported; save the tokenizer with transformers as a tokenizer.json"
        )


def _listed_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Added tokens by id: tokenizer_config.json's, and those of older versions in added_tokens.json."""
    found = {number: AddedToken(content, normalized=False)
             for content, number in read_json(folder / "added_tokens.json").items()}  # fmt: skip
    for number, token in config.get("added_tokens_decoder", {}).items():
        settings = {name: bool(token.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word")}
        found[int(number)] = AddedToken(token["content"], normalized=False, **settings)
    return found


def _named_id(tokenizer: RustTokenizer, token: Any, own: int) -> int | None:
    """The id of the token that the configuration names so; otherwise the model's own."""
    content = token.get("content") if isinstance(token, dict) else token
    named = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return named if named is not None else own if 0 <= own < tokenizer.get_vocab_size() else None


def _model_of(model: PieceModel, pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> Any:
    unknown = next((number for number, kind in enumerate(types) if kind == UNKNOWN), None)
    if model.kind == UNIGRAM:
        return models.Unigram(list(zip(pieces, scores, strict=True)), unknown, model.has_byte_fallback)
    normal = [number for number, kind in enumerate(types) if kind == NORMAL]
    return models.BPE(
        {piece: number for number, piece in enumerate(pieces)},
        merges_by_score([pieces[number] for number in normal], [scores[number] for number in normal]),
        unk_token=None if unknown is None else pieces[unknown],
        fuse_unk=True,
        byte_fallback=model.has_byte_fallback,
    )


def merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two pieces whose union has the best score: as merges, every union in that order."""
    places = {token: place for place, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = places.get(token[:cut]), places.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


class CharacterRules:
    """SentencePiece's normalization (NFKC and the like): of the rules that match at a character, the longest applies.

    The package's `Precompiled` looks at graphemes instead, which differs for line breaks and combining marks.
    """

    LONGEST = 32
    """Characters of a rule."""

    def __init__(self, charsmap: bytes) -> None:
        """`charsmap`: a double-array trie (darts-clone) of texts in UTF-8, each with the offset of its replacement."""
        (size,) = struct.unpack_from("<I", charsmap)
        self._units = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
        self._replacements = charsmap[4 + size :]

    def __call__(self, text: str) -> str:
        firsts = "".join(character for character in sorted({*text}) if any(self._longest(character.encode())))
        if not firsts:
            return text
        first, done, at = re.compile(f"[{re.escape(firsts)}]"), [], 0
        while (found := first.search(text, at)) is not None:
            start = found.start()
            rest = text[start : start + self.LONGEST].encode()
            size, offset, _ = self._longest(rest)
            replacement = self._replacements[offset : self._replacements.index(b"\0", offset)].decode()
            done += [text[at:start], replacement if size else text[start]]
            at = start + (len(rest[:size].decode()) or 1)
        return "".join([*done, text[at:]])

    def _longest(self, text: bytes) -> tuple[int, int, bool]:
        """Size of the longest rule that a text begins with (0: none), offset of its replacement, and whether longer
        rules begin with the whole text.
        """
        units, size, offset = self._units, 0, 0
        node = _children(units[0])
        for count, byte in enumerate(text, 1):
            node ^= byte
            if node >= len(units) or units[node] & 0x800000FF != byte:
                return size, offset, False
            has_value = units[node] & 0x100
            node ^= _children(units[node])
            if has_value:
                size, offset = count, units[node] & 0x7FFFFFFF
        return size, offset, True


def _children(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _normalizer(model: PieceModel, *, has_prefix: bool) -> Any:
    parts: list[Any] = []
    if model.removes_spaces:
        parts += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    parts += [normalizers.Prepend("▁")] if has_prefix else []
    return normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])


def metaspace_decoder(*, has_prefix: bool) -> Any:
    """For vocabularies with "▁" for spaces and tokens for bytes."""
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def _never_whole(pieces: Sequence[str], types: Sequence[int]) -> Any:
    """Splits texts that spell the token of a byte: to the package's Unigram, such tokens are words as well."""
    spelled = [piece for piece, kind in zip(pieces, types, strict=True) if kind in (UNUSED, BYTE) and len(piece) > 1]
    first = "|".join(f"{re.escape(piece[0])}(?={re.escape(piece[1:])})" for piece in spelled)
    return pre_tokenizers.Split(Regex(first), "merged_with_previous") if spelled else None


# -- Mistral's tekken.json --------------------------------------------------------------------------------------------


OLD_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of files that do not list theirs."""


_TURNS = """
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + (prefix if loop.last and prefix else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + '</s>' }}
    {%- else %}
        {{- raise_exception('roles must be user and assistant, after an optional system message') }}
    {%- endif %}
{%- endfor %}"""
_SYSTEM = """<s>
{%- set has_system = messages[0].role == 'system' %}
{%- set turns = messages[1:] if has_system else messages %}
{%- set system = messages[0].content if has_system else '' %}"""
TEKKEN_TEMPLATES = {
    "v3": _SYSTEM + "{%- set prefix = system + '\\n\\n' if system else '' %}" + _TURNS,
    **dict.fromkeys(
        ("v7", "v11", "v13"),
        _SYSTEM + "{%- if system %}{{ '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}{% endif %}" + _TURNS,
    ),
}
"""As mistral-common renders text, by the version in the file. In `v3`, the last user says what the system does."""


def tekken_template(folder: Path) -> str | None:
    """The chat template of a directory whose tokenizer is a tekken.json; None if its version is not known."""
    config = read_json(folder / "tekken.json").get("config")
    return TEKKEN_TEMPLATES.get(config.get("version", "")) if isinstance(config, dict) else None


def convert_tekken(path: Path) -> ConvertedTokenizer:
    """Byte-level BPE by rank. Special tokens come first; BOS is put before every text."""
    content = read_json(path)
    config, vocabulary = content["config"], content["vocab"]
    num_special = config["default_num_special_tokens"]
    ranked = _ranked(vocabulary[: config["default_vocab_size"] - num_special])
    special = _special_tokens(content, num_special)
    tokens = {text: number for number, text in enumerate([*special, *ranked])}
    if len(tokens) != num_special + len(ranked):
        raise ModelLoadError(f"{path}: two tokens have the same text")
    tokenizer = RustTokenizer(models.BPE(tokens, merges_by_rank(ranked), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    add_around(tokenizer, tokenizer.token_to_id("<s>"), None)
    return ConvertedTokenizer(tokenizer.to_str(), eos_id=tokenizer.token_to_id("</s>"))


def _ranked(vocabulary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens in the alphabet of byte-level vocabularies, by rank."""
    character_of = {byte: character for character, byte in BYTE_OF.items()}
    found = []
    for rank, token in enumerate(vocabulary):
        if token["rank"] != rank:
            raise ValueError(f"token {rank} has rank {token['rank']}")
        found.append("".join(character_of[byte] for byte in base64.b64decode(token["token_bytes"], validate=True)))
    return found


def _special_tokens(content: Mapping[str, Any], count: int) -> list[str]:
    """Their texts by id."""
    listed = content.get("special_tokens") or [{"rank": i, "token_str": text} for i, text in enumerate(OLD_SPECIAL)]
    texts = {token["rank"]: token["token_str"] for token in listed}
    return [texts.get(number, f"<SPECIAL_{number}>") for number in range(count)]


def merges_by_rank(ranked: Sequence[str]) -> list[tuple[str, str]]:
    """Byte pairs are merged to the token of lowest rank: as merges, every way to make each token, in that order."""
    places = {token: rank for rank, token in enumerate(ranked)}
    found = []
    for token in ranked:
        ways = []
        for cut in range(1, len(token)):
            left, right = places.get(token[:cut]), places.get(token[cut:])
            if left is not None and right is not None:
                ways.append((left, right))
        found += [(ranked[left], ranked[right]) for left, right in sorted(ways)]
    return found
