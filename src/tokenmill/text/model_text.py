"""`ModelText`: everything about a model that is text: its tokenizer, its chat template, how it likes to be sampled.

`Infill` is how it fills in the middle: a prompt of what comes before and after a hole. Models that were trained on such
have tokens for it, which are found by their names, or by the ids that a GGUF file gives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.library import default_sampling
from tokenmill.contract import Model
from tokenmill.errors import ConfigError, InvalidRequest, ModelLoadError, TooManyTokens
from tokenmill.files import read_json
from tokenmill.params import SamplingParams
from tokenmill.text.conversion import tekken_template
from tokenmill.text.gguf import chat_source, chat_variables, gguf_tokenizer
from tokenmill.text.grammar import GrammarCompiler
from tokenmill.text.hf import HuggingFaceTokenizer, read_text
from tokenmill.text.llamacpp import LlamaTokenizer, Vocab
from tokenmill.text.template import PLAIN_TEMPLATE, ChatTemplate
from tokenmill.text.tokenizer import ByteTokenizer, Tokenizer
from tokenmill.text.tool_format import NAMED

SAMPLING_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty"})
"""What a generation_config may say about sampling, under the names of `SamplingParams`."""
KEPT_TEMPLATES = 8
"""Callers' own templates that stay compiled."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelText:
    """A model's text side. Safe to share between threads."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    """None: the model is not made for chat."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the model's authors recommend."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What templates may ask for by name: bos_token and the like."""
    infill: Infill | None = None
    """None: the model was not trained to fill in the middle."""
    _own_template: Callable[[str], ChatTemplate] = field(init=False, repr=False, compare=False)
    _grammars: Callable[[int], GrammarCompiler] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def own_template(source: str) -> ChatTemplate:
            return ChatTemplate(source, self.tokenizer, self.variables)

        object.__setattr__(self, "_own_template", lru_cache(KEPT_TEMPLATES)(own_template))
        object.__setattr__(self, "_grammars", lru_cache(1)(partial(GrammarCompiler, self.tokenizer)))

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling parameters, with changes."""
        return SamplingParams(**{**self.defaults, **changes})

    def with_tool_format(self, name: str) -> ModelText:
        """The same, with tool calls in a format of this name."""
        if name not in NAMED:
            raise ConfigError(f"tool_format must be one of {', '.join(sorted(NAMED))}, not {name!r:.40}")
        if self.template is None:
            return self
        template = ChatTemplate(self.template.source, self.tokenizer, self.variables, name)
        return replace(self, template=template)

    def grammars(self, vocab_size: int) -> GrammarCompiler:
        """The compiler of structured outputs for a model with so many tokens: one for all who ask."""
        return self._grammars(vocab_size)

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """A caller's own template, or without one the model's; `InvalidRequest` if it has none either."""
        if source is None:
            if self.template is None:
                raise InvalidRequest("this model has no chat template; use generate, or pass chat_template")
            return self.template
        if not isinstance(source, str):
            raise InvalidRequest(f"a chat template must be a string, not {type(source).__name__}")
        return self._own_template(source)


def open_text(model: Model) -> ModelText:
    """The text side of a loaded model."""
    path = model.path
    if path is None:
        tokenizer = ByteTokenizer(model.info.vocab_size)
        return ModelText(tokenizer, ChatTemplate(PLAIN_TEMPLATE, tokenizer))
    return _from_directory(path) if path.is_dir() else _from_gguf(path, model)


def _from_directory(folder: Path) -> ModelText:
    tokenizer = HuggingFaceTokenizer.from_directory(folder)
    config = read_json(folder / "tokenizer_config.json")
    variables = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    source = _template_source(folder, config)
    template = None if source is None else ChatTemplate(source, tokenizer, variables)
    defaults = sampling_defaults(read_json(folder / "generation_config.json"))
    return ModelText(tokenizer, template, defaults, variables, find_infill(tokenizer))


def _from_gguf(path: Path, model: Model) -> ModelText:
    file = GGUFFile(path)
    tokenizer = _gguf_tokenizer(file, model)
    source, variables = chat_source(file), chat_variables(file)
    template = None if source is None else ChatTemplate(source, tokenizer, variables)
    infill = find_infill(tokenizer, file.metadata)
    return ModelText(tokenizer, template, dict(default_sampling(path)), variables, infill)


def _gguf_tokenizer(file: GGUFFile, model: Model) -> Tokenizer:
    """Ours where it knows the file's kind, so that ids are the same whoever computes; else llama.cpp's, if it does."""
    try:
        return gguf_tokenizer(file)
    except ModelLoadError as error:
        vocab: Vocab | None = getattr(model, "vocab", None)
        if vocab is None:
            raise
        logger.info("%s; llama.cpp's own tokenizer is used", error)
        return LlamaTokenizer(vocab)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters in a generation_config.json. Values that are not valid are left out, with a warning."""
    found = {name: generation_config[name] for name in SAMPLING_FIELDS if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    wrong = {name: error for name, value in found.items() if (error := _error_of(name, value))}
    if wrong:
        logger.warning("generation_config.json: left out, since %s", "; ".join(wrong.values()))
    return {name: value for name, value in found.items() if name not in wrong}


def _error_of(name: str, value: Any) -> str | None:
    """What is wrong with a sampling parameter."""
    try:
        SamplingParams(**{name: value})
    except InvalidRequest as error:
        return str(error)
    return None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own, else in tokenizer_config.json: one template, or several of which `default` is meant; else that
    of Mistral's tekken.json.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else tekken_template(folder)


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


# -- fill in the middle ------------------------------------------------------------------------------------------------

ROLES = ("prefix", "suffix", "middle")
NAMES: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
REPO_NAMES = ("<|repo_name|>", "<reponame>", "<repo_name>")
FILE_NAMES = ("<|file_sep|>", "<file_sep>", "<filename>")
PAD_NAMES = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<EOT>", "▁<EOT>")
GGUF_KEYS = {
    "prefix": ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"),
    "suffix": ("tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"),
    "middle": ("tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"),
}


@dataclass(frozen=True)
class Infill:
    """The tokens that a model fills in the middle with. Safe on any thread."""

    tokenizer: Tokenizer
    prefix: int
    suffix: int
    middle: int
    repo: int | None = None
    file: int | None = None
    """Before the name and text of another file; None: the model knows of no other files."""
    pad: int | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end the middle, besides those that end any answer: another file or part would begin."""
        return tuple(one for one in (self.prefix, self.suffix, self.repo, self.file, self.pad) if one is not None)

    def ids(
        self,
        before: str,
        after: str,
        limit: int | None = None,
        *,
        files: Sequence[tuple[str, str]] = (),
        begun: str = "",
    ) -> list[int]:
        """The prompt for a hole; `files` are names and texts of others, `begun` is how the middle begins."""
        ids = self._leading()
        for name, text in files if self.file is not None else ():
            ids += [self.file or 0, *self._text(f"{name}\n{text}\n", limit)]
        if files and self.file is not None:
            ids.append(self.file)
        ids += [self.prefix, *self._text(before, limit), self.suffix, *self._text(after, limit), self.middle]
        ids += self._text(begun, limit)
        if limit is not None and len(ids) > limit:
            raise TooManyTokens(len(ids), limit)
        return ids

    def _text(self, text: str, limit: int | None) -> list[int]:
        return self.tokenizer.encode(text, add_special=False, limit=limit) if text else []

    def _leading(self) -> list[int]:
        """What is added before any text, like BOS."""
        plain, full = self.tokenizer.encode("a", add_special=False), self.tokenizer.encode("a")
        at = next((place for place in range(len(full)) if full[place : place + len(plain)] == plain), 0)
        return full[:at]


def find_infill(tokenizer: Tokenizer, metadata: Mapping[str, object] | None = None) -> Infill | None:
    """The tokens of a model, by a GGUF file's metadata or by their names; None if it was not trained to fill in."""
    given = {role: _given_id(metadata or {}, keys, tokenizer.vocab_size) for role, keys in GGUF_KEYS.items()}
    named = [{role: _id_of(tokenizer, name) for role, name in zip(ROLES, names, strict=True)} for names in NAMES]
    for ids in (given, *named):
        prefix, suffix, middle = (ids[role] for role in ROLES)
        if prefix is not None and suffix is not None and middle is not None:
            others = [_first(tokenizer, names) for names in (REPO_NAMES, FILE_NAMES, PAD_NAMES)]
            return Infill(tokenizer, prefix, suffix, middle, *others)
    return None


def _given_id(metadata: Mapping[str, object], keys: Sequence[str], vocab_size: int) -> int | None:
    found = next((metadata[key] for key in keys if key in metadata), None)
    return found if isinstance(found, int) and 0 <= found < vocab_size else None


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    return next((found for name in names if (found := _id_of(tokenizer, name)) is not None), None)


def _id_of(tokenizer: Tokenizer, name: str) -> int | None:
    """The one token that a name stands for, if it does."""
    if name in tokenizer.special_tokens:
        return tokenizer.special_tokens[name]
    ids = tokenizer.encode_template(name)
    return ids[0] if len(ids) == 1 and tokenizer.decode(ids, skip_special=False) == name else None
