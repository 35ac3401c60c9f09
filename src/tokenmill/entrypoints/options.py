"""From a model's name and a caller's options to everything an engine is made of. Shared by all entry points."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

from tokenmill.backends.loading import open_model
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, ModelHandle, ModelInfo
from tokenmill.contract.backend import cells_for, seqs_for
from tokenmill.entrypoints.fit import check_memory
from tokenmill.errors import ConfigError
from tokenmill.text.model_text import ModelText, open_text
from tokenmill.text.tokenizer import Tokenizer


class EngineOptions(TypedDict, total=False):
    """The options of `LLM`, `AsyncLLM` and everything else that opens a model by its name. None means the default."""

    tokenizer: Tokenizer | None
    """Instead of the model's own."""
    backend: str
    """`auto`, `torch`, `llamacpp` or `fake`."""
    dtype: str
    device: str
    deterministic: bool
    """The same arithmetic for a token whatever else is in its batch."""
    max_model_len: int | None
    """Prompt and output of one request together."""
    max_num_seqs: int | None
    """Requests that run at the same time."""
    max_num_batched_tokens: int | None
    """Tokens in one step."""
    prefill_chunk: int | None
    """Prompt tokens one request gets in a step while others decode."""
    min_prefill_chunk: int | None
    """Prompt tokens that a step with prompts computes at least."""
    target_tick_ms: float | None
    """How long a step may take while somebody decodes."""
    max_queue: int | None
    """Requests that may wait; `LLM` takes all that it is given."""
    queue_timeout_s: float | None
    """A request that has not started by then ends with `timeout`."""
    kv_cache_tokens: int | None
    """Size of the KV memory; the default takes a share of the memory that is free."""
    num_threads: int | None
    """Processor threads one step may use; the default takes all. Fewer are faster where other work is going on."""
    extra: Mapping[str, Any] | None
    """What only one backend knows, such as llama.cpp's `n_ubatch` (docs/llamacpp.md)."""
    config: EngineConfig | None
    """Everything about scheduling, instead of what suits the model; the options above go before it."""


__all__ = ["EngineOptions", "OpenedModel", "choose_limits", "open_for_engine", "open_model"]

CONFIG_OPTIONS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "min_prefill_chunk",
    "target_tick_ms", "max_queue", "queue_timeout_s",
)  # fmt: skip
LOAD_OPTIONS = ("backend", "dtype", "device", "deterministic", "extra")


@dataclass(frozen=True)
class OpenedModel:
    """A model ready for an engine."""

    model: ModelHandle
    text: ModelText
    config: EngineConfig
    limits: BackendLimits
    is_ours: bool
    """Was it opened here? Then it is closed with the engine."""

    def close(self) -> None:
        if self.is_ours:
            self.model.close()


def open_for_engine(model: str | ModelHandle, options: EngineOptions) -> OpenedModel:
    """Open the model, if only its name is given, and work out the rest. `ConfigError` names an unknown option."""
    unknown = set(options) - set(EngineOptions.__annotations__)
    if unknown:
        known = ", ".join(sorted(EngineOptions.__annotations__))
        raise ConfigError(f"unknown option {', '.join(sorted(unknown))}; known: {known}")
    _check(options)
    load_options = _given(options, LOAD_OPTIONS)
    if isinstance(model, str):
        handle = open_model(model, **load_options)
    elif load_options:
        raise ConfigError(f"{', '.join(load_options)}: the model is loaded already")
    else:
        handle = model
    try:
        config = _config(handle, options)
        tokenizer = options.get("tokenizer")
        text = open_text(handle) if tokenizer is None else ModelText(tokenizer)
        limits = choose_limits(handle, config, options.get("kv_cache_tokens"))
        limits = replace(limits, num_threads=_threads(options.get("num_threads")))
        check_memory(handle, limits, config.max_num_seqs)
    except BaseException:
        if isinstance(model, str):
            handle.close()
        raise
    return OpenedModel(handle, text, config, limits, is_ours=isinstance(model, str))


def choose_limits(model: ModelHandle, config: EngineConfig, kv_cache_tokens: int | None) -> BackendLimits:
    """Memory for one engine core: what was asked for, or what its requests can fill, within the model's budget."""
    if kv_cache_tokens is None:
        kv_cache_tokens = _default_kv_tokens(model, config)
    if kv_cache_tokens < 1:
        raise ConfigError(f"kv_cache_tokens must be at least 1, not {kv_cache_tokens}")
    return BackendLimits(
        num_cells=kv_cache_tokens,
        max_seqs=seqs_for(kv_cache_tokens, config.max_num_seqs),
        max_context=longest_context(model.info, config),
        num_running=config.max_num_seqs,
    )


def _threads(asked: int | None) -> int | None:
    if asked is not None and asked < 1:
        raise ConfigError(f"num_threads must be at least 1, not {asked}")
    return asked


def longest_context(info: ModelInfo, config: EngineConfig) -> int:
    """Tokens that a request may have in all."""
    return min(info.max_context, config.max_model_len or info.max_context)


def _default_kv_tokens(model: ModelHandle, config: EngineConfig) -> int:
    wanted = cells_for(config.max_num_seqs, longest_context(model.info, config), model.block_size)
    affordable = model.kv_budget_bytes // max(1, model.info.kv_bytes_per_token)
    return max(1, min(wanted, affordable))


def _check(options: EngineOptions) -> None:
    """Say what is wrong with the options before a model is loaded, as far as it does not depend on the model."""
    base = options.get("config") or EngineConfig(max_num_seqs=1, max_num_batched_tokens=sys.maxsize)
    replace(base, **_given(options, CONFIG_OPTIONS))


def _config(model: ModelHandle, options: EngineOptions) -> EngineConfig:
    given, config = _given(options, CONFIG_OPTIONS), options.get("config")
    if config is not None:
        return replace(config, **given)
    base = replace(EngineConfig(), **_given(asdict(model.step_sizes), CONFIG_OPTIONS))
    # What nobody has given goes along with what somebody has.
    given.setdefault("max_num_seqs", min(base.max_num_seqs, given.get("max_num_batched_tokens", base.max_num_seqs)))
    tokens = max(base.max_num_batched_tokens, given["max_num_seqs"])
    return replace(base, **{"max_num_batched_tokens": tokens, **given})


def _given(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}
