"""`ModelText`: everything about a model that is text: its tokenizer, its chat template, how it likes to be sampled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.library import default_sampling
from tokenmill.contract import Model
from tokenmill.errors import ConfigError, InvalidRequest, ModelLoadError
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
    return ModelText(tokenizer, template, defaults, variables)


def _from_gguf(path: Path, model: Model) -> ModelText:
    file = GGUFFile(path)
    tokenizer = _gguf_tokenizer(file, model)
    source, variables = chat_source(file), chat_variables(file)
    template = None if source is None else ChatTemplate(source, tokenizer, variables)
    return ModelText(tokenizer, template, dict(default_sampling(path)), variables)


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
