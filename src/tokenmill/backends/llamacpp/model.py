"""`LlamaModel`: a GGUF file loaded by llama.cpp, once for any number of contexts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmill.backends.llamacpp.backend import LlamaBackend
from tokenmill.backends.llamacpp.header import Header, num_states
from tokenmill.backends.llamacpp.memory import LlamaMemory
from tokenmill.backends.llamacpp.native import (
    MAX_SEQS,
    ContextSettings,
    NativeContext,
    NativeModel,
    has_slow_flash_attention,
)
from tokenmill.backends.llamacpp.options import LlamaOptions
from tokenmill.backends.llamacpp.parking import parked_cells
from tokenmill.backends.llamacpp.streams import AnyContext, StreamedContext, stream_cells
from tokenmill.backends.llamacpp.vocab import LlamaVocab
from tokenmill.contract import BackendLimits, Capabilities, ModelInfo, StepSizes
from tokenmill.contract.backend import KV_SHARE, MemoryPlan, free_host_bytes
from tokenmill.errors import Unsupported

USUAL_KV_BYTES = 1 << 30
"""KV memory that nobody asked for takes no more than this, or than four whole conversations: llama.cpp takes all of
it at once, and its attention reads all cells in use, whoever's they are."""
WHOLE_CONVERSATIONS = 4


class LlamaModel:
    """A `ModelHandle`. Weights are freed when it and all its backends are closed."""

    block_size = 1
    weights_version = 0
    step_sizes = StepSizes(target_tick_ms=500.0)
    """llama.cpp computes a prompt in chunks of a hundred tokens and more up to twice as fast as in smaller ones."""

    def __init__(self, path: Path, native: NativeModel, header: Header, options: LlamaOptions) -> None:
        self.path: Path | None = path
        self.options = options
        self.vocab = LlamaVocab(native)
        self.num_values = native.num_values
        self._native = native
        self._header = header
        self._parked_cells = options.parked_cells
        if options.parked_cells is None:
            self._parked_cells = parked_cells(header.weight_bytes, header.kv_bytes_per_token)
        held_as = f"llama.cpp {options.type_k} {options.type_v}"
        sizes = (native.vocab_size, native.hidden_size, native.trained_context)
        self.info = ModelInfo(path.name, *sizes, header.layers, form=held_as)

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        return free_host_bytes()

    @property
    def kv_budget_bytes(self) -> int:
        usual = max(USUAL_KV_BYTES, WHOLE_CONVERSATIONS * self.info.max_context * self.info.kv_bytes_per_token)
        return min(usual, int(KV_SHARE * self.free_bytes))

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        return self._header.memory(limits, num_rows, self.options)

    # -- backends -----------------------------------------------------------------------------------------------------

    def new_backend(self, limits: BackendLimits) -> LlamaBackend:
        context, memory = self.new_memory(limits)
        return LlamaBackend(context, memory, self.info.vocab_size)

    def new_memory(self, limits: BackendLimits) -> tuple[AnyContext, LlamaMemory]:
        """A context, and its memory behind the contract's rules."""
        num_cells = self.options.n_ctx or limits.num_cells
        max_seqs = min(limits.max_seqs, MAX_SEQS - 1)  # one is the memory's own
        if self._native.keeps_states:
            max_seqs = num_states(max_seqs)
        num_streams = self._num_streams(limits, num_cells)
        context: AnyContext
        if num_streams:
            context = StreamedContext(NativeContext(self._native, self._streamed(limits, num_streams)), num_streams)
        else:
            context = NativeContext(self._native, self._unified(limits, num_cells, max_seqs))
        capabilities = Capabilities(
            partial_rm=not self._native.keeps_states,
            partial_cp=not self._native.keeps_states,
            shift=not self._native.keeps_states and context.can_shift,
            state_bytes=True,
            max_seqs=max_seqs,
            parked_cells=None if num_streams else self._parked_cells,
        )
        return context, LlamaMemory(context, num_cells, self._longest(limits), capabilities)

    def _longest(self, limits: BackendLimits) -> int:
        """Positions that a sequence may have."""
        return min(limits.max_context or self.info.max_context, self.info.max_context)

    def _num_streams(self, limits: BackendLimits, num_cells: int) -> int:
        """How many sequences have a memory of their own; 0: they share one."""
        if self._native.keeps_states or self.options.kv_unified:
            return 0
        num_streams = min(num_cells // stream_cells(self._longest(limits)), MAX_SEQS)
        is_enough = limits.num_running is not None and num_streams >= limits.num_running
        return max(1, num_streams) if is_enough or self.options.kv_unified is False else 0

    def _streamed(self, limits: BackendLimits, num_streams: int) -> ContextSettings:
        num_cells = num_streams * stream_cells(self._longest(limits))
        settings = self._settings(limits, num_cells, num_streams, kv_unified=False)
        return replace(settings, flash_attn=self._streams_flash_attn)

    def _unified(self, limits: BackendLimits, num_cells: int, max_seqs: int) -> ContextSettings:
        one_more = num_cells + 1  # for the memory's own sequence
        return self._settings(limits, one_more, max_seqs + 1, kv_unified=True)

    def _settings(self, limits: BackendLimits, n_ctx: int, n_seq_max: int, *, kv_unified: bool) -> ContextSettings:
        options = self.options
        num_threads = limits.num_threads or _num_processors()
        return ContextSettings(
            n_ctx=n_ctx,
            n_batch=min(options.n_batch or n_ctx, n_ctx),
            n_ubatch=min(options.n_ubatch, limits.ubatch_size),
            n_seq_max=n_seq_max,
            kv_unified=kv_unified,
            n_threads=options.n_threads or num_threads,
            n_threads_batch=options.n_threads_batch or options.n_threads or num_threads,
            flash_attn=options.flash_attn,
            type_k=options.type_k,
            type_v=options.type_v,
        )

    @property
    def _streams_flash_attn(self) -> bool | None:
        """None leaves it to llama.cpp. In unified memory it is wanted however slow: without it NaN would spread."""
        if self.options.flash_attn is None and has_slow_flash_attention() and not self.options.needs_flash_attn:
            return False
        return self.options.flash_attn

    def replace_weight(self, name: str, value: Any) -> None:  # noqa: ARG002
        raise Unsupported("llama.cpp can't replace the weights of a model that is loaded; use the torch backend")

    def close(self) -> None:
        self._native.close()


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
