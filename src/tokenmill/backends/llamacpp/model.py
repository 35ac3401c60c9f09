"""`LlamaModel`: a GGUF file loaded by llama.cpp, once for any number of contexts, and its tokenizer, `LlamaVocab`."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from tokenmill.backends.llamacpp.backend import LlamaBackend
from tokenmill.backends.llamacpp.header import Header, LlamaOptions, num_states, parked_cells, read_header, read_options
from tokenmill.backends.llamacpp.mirror import LlamaMemory
from tokenmill.backends.llamacpp.native import (
    MAX_SEQS,
    ContextSettings,
    NativeContext,
    NativeModel,
    has_slow_flash_attention,
)
from tokenmill.backends.llamacpp.streams import AnyContext, StreamedContext, stream_cells
from tokenmill.contract import BackendLimits, Capabilities, ModelInfo, StepSizes
from tokenmill.contract.backend import KV_SHARE, LoadOptions, MemoryPlan, free_host_bytes, num_processors
from tokenmill.errors import ConfigError, ModelLoadError, TokenmillError, Unsupported
from tokenmill.progress import ProgressLine

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
        """The text of a token within a prompt; empty if the model has no such token."""
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


USUAL_KV_BYTES = 1 << 30
"""KV memory that nobody asked for takes no more than this, or than four whole conversations: llama.cpp takes all of
it at once, and its attention reads all cells in use, whoever's they are."""
WHOLE_CONVERSATIONS = 4


def open_vocab(path: Path) -> LlamaVocab:
    """The vocabulary in a GGUF file, without its weights. Freed with the last reference to it."""
    probe(path, vocab_only=True)
    native = NativeModel(path, n_gpu_layers=0, vocab_only=True)
    vocab = LlamaVocab(native)
    weakref.finalize(vocab, native.close)
    return vocab


class LlamaModel:
    """A `ModelHandle`. Weights are freed when it and all its backends are closed."""

    block_size = 1
    weights_version = 0
    step_sizes = StepSizes(target_tick_ms=500.0, max_step_ms=500.0)
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
        num_threads = limits.num_threads or num_processors()
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
        raise Unsupported("llama.cpp cannot replace weights; use the torch backend")

    def close(self) -> None:
        self._native.close()


log = logging.getLogger(__name__)
MIB = 1 << 20
PERCENT = 100


def open_path(path: Path, options: LoadOptions) -> LlamaModel:
    """Load the model in a GGUF file."""
    chosen = _checked(path, options)
    header = read_header(path, chosen)
    _check_memory(path, header, chosen)
    if chosen.probe:
        probe(path)
    with ProgressLine(f"loading {path.name} into llama.cpp", PERCENT) as progress:
        native = NativeModel(
            path,
            use_mmap=chosen.use_mmap,
            use_mlock=chosen.use_mlock,
            n_gpu_layers=chosen.n_gpu_layers,
            repack=chosen.repack,
            progress=lambda share: progress.update(int(PERCENT * share)),
        )
    if not native.generates:
        native.close()
        raise ModelLoadError(f"{path}: {header.architecture} is an encoder and cannot generate text")
    log.info("%s: %s, as it is in its file, by llama.cpp", path.name, native.description)
    return LlamaModel(path, native, header, chosen)


PROBE_S = 60.0
PROBE_BYTES_PER_S = 50e6
"""A probe may take so long, and as long as reading the file at this rate."""
PROBE_CELLS = 32
PROBE_TEXT = b"Hello, world 1"
_PROBE = "import sys; from tokenmill.backends.llamacpp.model import load_once; load_once(*sys.argv[1:])"
_probed: set[tuple[Path, int, int, bool]] = set()
"""Files that a child process has loaded: path, size, time of change, vocabulary only."""


def probe(path: Path, *, vocab_only: bool = False) -> None:
    """Have a child process load a file and compute a token; `ModelLoadError` if llama.cpp ends that process.

    llama.cpp asserts much of what a file says, and a failed assertion is the end of its process, with all that a server
    has running in it. A file that the child has loaded is not probed again. Errors that llama.cpp returns are left to
    the caller's own attempt.
    """
    stat = path.stat()
    key = (path.resolve(), stat.st_size, stat.st_mtime_ns, vocab_only)
    if key in _probed:
        return
    command = [sys.executable, "-P", "-c", _PROBE, str(path), *(["vocabulary"] if vocab_only else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),  # the same code as here
        "CUDA_VISIBLE_DEVICES": "",
        "GGML_NO_BACKTRACE": "1",
    }
    limit_s = PROBE_S + stat.st_size / PROBE_BYTES_PER_S
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelLoadError(f"{path}: llama.cpp did not load it within {limit_s:.0f} s in a child process") from None
    except OSError as error:
        log.warning("%s is loaded without a probe: no child process could be started: %s", path, error)
        return
    if done.returncode < 0:
        said = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
        reason = said[-1] if said else f"signal {-done.returncode}"
        raise ModelLoadError(f"{path}: llama.cpp aborts on it: {reason}")
    _probed.add(key)


def load_once(path: str, *only: str) -> None:
    """What the child process of a probe does. Errors are the parent's to find."""
    try:
        native = NativeModel(Path(path), n_gpu_layers=0, repack=False, vocab_only=bool(only))
        if llama.llama_vocab_type(native.vocab) != llama.LLAMA_VOCAB_TYPE_NONE:
            LlamaVocab(native).tokenize(PROBE_TEXT, add_special=True, parse_special=False)
        if only or not native.generates:
            return
        settings = ContextSettings(
            n_ctx=PROBE_CELLS,
            n_batch=PROBE_CELLS,
            n_ubatch=PROBE_CELLS,
            n_seq_max=1,
            kv_unified=True,
            n_threads=num_processors(),
            n_threads_batch=num_processors(),
            flash_attn=None,
            type_k="f16",
            type_v="f16",
        )
        zero = np.zeros(1, dtype=np.int32)
        NativeContext(native, settings).decode(zero, zero, zero[:, None], np.ones(1, dtype=np.uint8))
    except TokenmillError as error:
        print(error, file=sys.stderr)


class LlamaDescription:
    """What is known of a model from its file's header."""

    block_size = 1
    form = "it is in its file, by llama.cpp"

    def __init__(self, path: Path, options: LoadOptions) -> None:
        self._options = _checked(path, options)
        self._header = read_header(path, self._options)

    @property
    def max_context(self) -> int:
        return self._header.max_context

    @property
    def kv_bytes_per_token(self) -> int:
        return self._header.kv_bytes_per_token

    @property
    def free_bytes(self) -> int:
        return free_host_bytes()

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        return self._header.memory(limits, num_rows, self._options)


def describe(path: Path, options: LoadOptions) -> LlamaDescription:
    """Read a model's header. Nothing is loaded."""
    return LlamaDescription(path, options)


def _checked(path: Path, options: LoadOptions) -> LlamaOptions:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; llama.cpp needs a .gguf file")
    if options.dtype != "auto":
        raise ConfigError(f"dtype {options.dtype!r}: llama.cpp does not convert weights; use auto")
    if options.deterministic:
        raise ConfigError("deterministic: llama.cpp's arithmetic depends on the batch; use the torch backend")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {options.device!r} is not supported by llama.cpp; use auto, cpu or cuda")
    extra = {"n_gpu_layers": 0, **options.extra} if options.device == "cpu" else options.extra
    return read_options(extra)


def _check_memory(path: Path, header: Header, options: LlamaOptions) -> None:
    """Cells that were asked for must fit; llama.cpp would take them page by page until the system ends the process."""
    if options.n_ctx is None:
        return
    needed, free = options.n_ctx * header.kv_bytes_per_token, free_host_bytes()
    if needed > free:
        fits = free // header.kv_bytes_per_token
        raise ModelLoadError(
            f"{path}: KV memory of n_ctx {options.n_ctx:,} needs {needed / MIB:,.0f} MiB, but only "
            f"{free / MIB:,.0f} are free; n_ctx {fits:,} would fit"
        )
