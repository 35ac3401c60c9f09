"""From a model's name and a caller's options to everything an engine is made of. Shared by all entry points."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

from tokenmill.backends.loading import ROUNDED, is_installed, num_gpus, open_model
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, Model, ModelHandle, ModelInfo
from tokenmill.contract.backend import cells_for, num_processors, seqs_for
from tokenmill.engine.core import DraftModel
from tokenmill.entrypoints.fit import check_memory
from tokenmill.errors import ConfigError
from tokenmill.text.model_text import ModelText, open_text
from tokenmill.text.tokenizer import Tokenizer

ENGINES = ("auto", "thread", "process")
UNLIMITED = 1 << 62


class EngineOptions(TypedDict, total=False):
    """The options of `LLM`, `AsyncLLM` and everything else that opens a model by its name. None means the default."""

    engine: str
    """Where the engine runs: `thread`, `process`, or `auto`: in a process of its own if the model runs on a GPU.

    `LLM` runs it in the caller's thread, unless `process` is given.
    """

    tokenizer: Tokenizer | None
    """Overrides the tokenizer of the model."""
    backend: str
    """`auto`, `cpu`, `torch`, `llamacpp` or `fake`."""
    dtype: str
    """Data type of the weights: `auto`, `float32`, `bfloat16`, `float16`; on the CPU also `int8`, `int4`."""
    device: str
    """`auto`, `cpu` or `cuda`."""
    workers: int | None
    """Engine cores on one set of weights, each with an equal share of KV cache, threads and request limits; CPU only.

    Requests go to a core with their prefix in its KV cache, unless it is much busier than another one (default 1).
    """
    deterministic: bool
    """Batch-invariant arithmetic: bit-identical results in any batch."""
    load_format: str
    """`auto`, or `dummy`: random weights from `config.json` alone, for benchmarks of a model's shape."""
    max_model_len: int | None
    """Maximum tokens of prompt and output of a request."""
    max_num_seqs: int | None
    """Maximum number of running requests, of all workers together."""
    max_num_batched_tokens: int | None
    """Token budget of a step of one worker."""
    prefill_chunk: int | None
    """Maximum prompt tokens of one request in a step while other requests are decoding."""
    min_prefill_chunk: int | None
    """Minimum prompt tokens of a step with prompts."""
    target_tick_ms: float | None
    """Target step latency (ms) while requests are decoding."""
    max_step_ms: float | None
    """Target latency (ms) of steps that compute prompts only; not applied by `LLM` unless given."""
    max_queue: int | None
    """Maximum number of queued requests; unlimited for `LLM`."""
    max_queue_tokens: int | None
    """Maximum total prompt tokens of queued requests; unlimited by default."""
    queue_timeout_s: float | None
    """Maximum time in the queue (s), then the request ends with `timeout`."""
    hang_timeout_s: float | None
    """Abandon an engine when a step takes longer than this (s); an engine process is replaced."""
    kv_cache_tokens: int | None
    """Size of the KV cache in tokens, of all workers together; by default a fraction of free memory."""
    forced_tokens: bool | None
    """Append tokens forced by a grammar without sampling them (default true)."""
    speculation: str | None
    """Default of `SamplingParams.speculation`: `auto`, `off`, `lookup` or `draft` (docs/speculation.md).

    By default `auto` on the CPU kernels or with a draft model, otherwise `off`.
    """
    draft_model: str | None
    """Name or path of a smaller model with the same vocabulary that drafts tokens for speculation."""
    num_threads: int | None
    """CPU threads, of all workers together; by default all cores. Use fewer on a busy machine."""
    extra: Mapping[str, Any] | None
    """Backend-specific options: `kv_cache_dtype` (docs/kernels.md), llama.cpp's `n_ubatch` (docs/llamacpp.md)."""
    tool_format: str | None
    """Format of tool calls by name, such as `hermes` (docs/tools.md); derived from the chat template by default."""
    config: EngineConfig | None
    """Scheduling parameters; the options above take precedence."""


__all__ = ["EngineOptions", "OpenedModel", "choose_limits", "open_for_engine", "open_model"]

CONFIG_OPTIONS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "min_prefill_chunk",
    "target_tick_ms", "max_step_ms", "max_queue", "max_queue_tokens", "queue_timeout_s", "forced_tokens",
    "hang_timeout_s", "speculation",
)  # fmt: skip
SHARED_LIMITS = ("max_num_seqs", "max_queue", "max_queue_tokens")
"""Limits of the whole engine, of which each worker gets an equal share."""
SHARED_EXTRAS = {"n_ctx": "kv_cache_tokens", "n_threads": "num_threads", "n_threads_batch": "num_threads"}
"""Sizes of one llama.cpp context, and the options that are divided between several."""
LOAD_OPTIONS = ("backend", "dtype", "device", "deterministic", "load_format", "extra")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its engine's settings, for an engine in this process."""

    model: ModelHandle
    config: EngineConfig
    limits: BackendLimits
    draft: DraftModel | None = None


@dataclass(frozen=True)
class OpenedModel:
    """A model with its engine's settings, and its text side."""

    model: Model
    text: ModelText
    config: EngineConfig
    limits: BackendLimits
    is_ours: bool
    """Was it opened here? Then it is closed with the engine."""
    draft: DraftModel | None = None
    """The model that drafts for it, which is always opened here."""

    def close(self) -> None:
        if self.draft is not None:
            self.draft.model.close()
        if self.is_ours:
            self.model.close()


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what is wrong whatever the model is, before it is loaded."""
    unknown = set(options) - set(EngineOptions.__annotations__)
    if unknown:
        known = ", ".join(sorted(EngineOptions.__annotations__))
        raise ConfigError(f"unknown option {', '.join(sorted(unknown))}; known: {known}")
    if options.get("engine", "auto") not in ENGINES:
        raise ConfigError(f"engine {options['engine']!r} is not supported; supported: {', '.join(ENGINES)}")
    base = options.get("config") or EngineConfig(max_num_seqs=1, max_num_batched_tokens=sys.maxsize)
    replace(base, **_given(options, CONFIG_OPTIONS))
    if num_workers(options) > 1:
        for name in SHARED_EXTRAS.keys() & (options.get("extra") or {}).keys():
            raise ConfigError(f"{name} is a size of one context; with several workers use {SHARED_EXTRAS[name]}")


def num_workers(options: Mapping[str, Any]) -> int:
    """Engine cores that the options ask for."""
    asked = options.get("workers")
    found = 1 if asked is None else int(asked)
    if found < 1:
        raise ConfigError(f"workers must be at least 1, not {found}")
    return found


def load_for_engine(model: str | ModelHandle, options: Mapping[str, Any], *, offline: bool = False) -> LoadedModel:
    """Load the model, if only its name is given, and work out the size of each core of its engine."""
    check_options(options)
    workers = num_workers(options)
    if workers > 1 and isinstance(model, str) and _runs_on_gpu(model, options):
        raise ConfigError(f"workers {workers}: one engine core uses a whole GPU; several are for device='cpu'")
    load_options = _given(options, LOAD_OPTIONS)
    with contextlib.ExitStack() as undo:
        if isinstance(model, str):
            handle = open_model(model, **load_options)
            undo.callback(handle.close)
        elif load_options:
            raise ConfigError(f"{', '.join(load_options)}: the model is already loaded")
        else:
            handle = model
        drafting = _load_draft(handle, options)
        if drafting is not None:
            undo.callback(drafting.close)
        config = _divided(_config(handle, options, offline=offline), workers)
        draft_bytes = 0 if drafting is None else drafting.info.kv_bytes_per_token
        limits = choose_limits(handle, config, options.get("kv_cache_tokens"), workers, draft_bytes)
        limits = replace(limits, num_threads=_threads(options.get("num_threads"), workers))
        draft = None
        if drafting is not None:
            context = min(longest_context(handle.info, config), drafting.info.max_context)
            draft = DraftModel(drafting, replace(limits, max_context=context))
        check_memory(handle, limits, config.max_num_seqs, workers, draft)
        undo.pop_all()
    return LoadedModel(handle, config, limits, draft)


def _load_draft(model: ModelHandle, options: Mapping[str, Any]) -> ModelHandle | None:
    """The model that drafts, on the same device; `ConfigError` if its tokens are not those of the other one."""
    name = options.get("draft_model")
    if name is None:
        return None
    shared = {key: value for key, value in _given(options, LOAD_OPTIONS).items() if key not in ("dtype", "extra")}
    draft = open_model(name, **shared)
    try:
        check_vocabularies(model, draft)
    except BaseException:
        draft.close()
        raise
    return draft


PADDING = 1024
"""Vocabularies of models that share a tokenizer are padded to different sizes."""
PROBE = 'The mill 製粉所 turns: \u00bd of 3.14 = f(x) {"a": [1, 2]}\n\tdone.'


def check_vocabularies(model: Model, draft: Model) -> None:
    """Raise `ConfigError` unless both models have the same tokens."""
    sizes = model.info.vocab_size, draft.info.vocab_size
    if abs(sizes[0] - sizes[1]) > PADDING:
        raise ConfigError(f"draft_model has {sizes[1]} tokens, the model {sizes[0]}: they must share a vocabulary")
    if model.path is not None and draft.path is not None:
        ids = [open_text(one).tokenizer.encode(PROBE, add_special=False) for one in (model, draft)]
        if ids[0] != ids[1]:
            raise ConfigError("draft_model has another tokenizer than the model: they must share a vocabulary")


def open_for_engine(
    model: str | ModelHandle, options: Mapping[str, Any], *, offline: bool = False
) -> tuple[OpenedModel, ModelHandle]:
    """A model with its text side, for an engine in this process; and the handle to make one of."""
    loaded = load_for_engine(model, options, offline=offline)
    is_ours = isinstance(model, str)
    try:
        text = text_of(loaded.model, options)
    except BaseException:
        if loaded.draft is not None:
            loaded.draft.model.close()
        if is_ours:
            loaded.model.close()
        raise
    return OpenedModel(loaded.model, text, loaded.config, loaded.limits, is_ours, loaded.draft), loaded.model


def text_of(model: Model, options: Mapping[str, Any]) -> ModelText:
    """A model's text side, or a tokenizer that was given instead."""
    tokenizer, tool_format = options.get("tokenizer"), options.get("tool_format")
    text = open_text(model) if tokenizer is None else ModelText(tokenizer)
    return text if tool_format is None else text.with_tool_format(tool_format)


def runs_in_process(model: str | ModelHandle, options: Mapping[str, Any]) -> bool:
    """Is the model's engine to have a process of its own? `auto`: if the model will run on a GPU."""
    engine = options.get("engine") or "auto"
    has_packages = all(importlib.util.find_spec(name) is not None for name in ("msgspec", "zmq"))
    if engine == "process":
        if not isinstance(model, str):
            raise ConfigError("engine 'process' requires the name or path of a model, not one that is loaded here")
        if not has_packages:
            raise ConfigError("engine 'process' requires the extra `server`: pip install 'tokenmill[server]'")
        return True
    return engine == "auto" and has_packages and isinstance(model, str) and _runs_on_gpu(model, options)


def _runs_on_gpu(model: str, options: Mapping[str, Any]) -> bool:
    """Will it, once it is opened? Told without loading torch, or using the GPU."""
    if model == "fake" or options.get("backend") in ("cpu", "llamacpp", "fake"):
        return False
    device = options.get("device") or "auto"
    may_use = device == "auto" and options.get("dtype") not in ROUNDED and is_installed("torch")
    return device.startswith("cuda") or (may_use and num_gpus() > 0)


def choose_limits(
    model: ModelHandle,
    config: EngineConfig,
    kv_cache_tokens: int | None,
    workers: int = 1,
    draft_bytes_per_token: int = 0,
) -> BackendLimits:
    """KV memory of one of so many cores: its share of what was asked for, or what its requests can fill, if it fits.

    A share is whole blocks, so that all of them together are never more than what was asked for. A draft model has KV
    for as many tokens.
    """
    if kv_cache_tokens is None:
        total = _default_kv_tokens(model, config, workers, draft_bytes_per_token)
    else:
        total = kv_cache_tokens
    num_cells = total if workers == 1 else total // workers // model.block_size * model.block_size
    if num_cells < 1:
        least = 1 if workers == 1 else workers * model.block_size
        raise ConfigError(f"kv_cache_tokens must be at least {least}, not {total}")
    return BackendLimits(
        num_cells=num_cells,
        max_seqs=seqs_for(num_cells, config.max_num_seqs),
        max_context=longest_context(model.info, config),
        num_running=config.max_num_seqs,
    )


def _threads(asked: int | None, workers: int) -> int | None:
    """CPU threads of one worker; None leaves them to the backend."""
    if asked is not None and asked < 1:
        raise ConfigError(f"num_threads must be at least 1, not {asked}")
    return asked if workers == 1 else max(1, (asked or num_processors()) // workers)


def _divided(config: EngineConfig, workers: int) -> EngineConfig:
    """The settings of one worker: its share of the limits on requests, rounded up."""
    if workers == 1:
        return config
    limits = {name: getattr(config, name) for name in SHARED_LIMITS}
    return replace(config, **{name: -(-limit // workers) for name, limit in limits.items() if limit is not None})


def longest_context(info: ModelInfo, config: EngineConfig) -> int:
    """Tokens that a request may have in all."""
    return min(info.max_context, config.max_model_len or info.max_context)


def _default_kv_tokens(model: ModelHandle, config: EngineConfig, workers: int, draft_bytes_per_token: int) -> int:
    """What the requests of so many cores can fill, within the model's budget."""
    wanted = workers * cells_for(config.max_num_seqs, longest_context(model.info, config), model.block_size)
    affordable = model.kv_budget_bytes // max(1, model.info.kv_bytes_per_token + draft_bytes_per_token)
    return max(1, min(wanted, affordable))


def _config(model: ModelHandle, options: Mapping[str, Any], *, offline: bool) -> EngineConfig:
    """The engine's settings. `offline`: the queue is unbounded, and inter-token latency does not matter."""
    given = _given(options, CONFIG_OPTIONS)
    if offline:
        given |= {"max_queue": UNLIMITED, "max_queue_tokens": None}
    config: EngineConfig | None = options.get("config")
    if config is not None:
        return replace(config, **given)
    sizes = model.step_sizes
    if offline:
        sizes = replace(sizes, target_tick_ms=sizes.offline_tick_ms or sizes.target_tick_ms, max_step_ms=None)
    base = replace(EngineConfig(), **_given(asdict(sizes), CONFIG_OPTIONS))
    if options.get("draft_model") is not None:
        base = replace(base, speculation="auto")
    # Defaults follow the options that were given.
    given.setdefault("max_num_seqs", min(base.max_num_seqs, given.get("max_num_batched_tokens", base.max_num_seqs)))
    tokens = max(base.max_num_batched_tokens, given["max_num_seqs"])
    return replace(base, **{"max_num_batched_tokens": tokens, **given})


def _given(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}
