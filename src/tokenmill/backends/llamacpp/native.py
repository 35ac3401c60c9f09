"""The raw `llama_*` functions, typed: return codes become exceptions, pointers become arrays. No rules of ours.

ctypes lets go of the interpreter's lock for the time of each call, so other threads run while llama.cpp computes.
Nothing here is freed by the garbage collector: `close` is explicit, contexts first, and a model whose contexts are
still open is freed with the last of them. `NativeLog` turns llama.cpp's log, one for the whole process, into Python's:
nothing is printed, and what was said of an error is there for the exception about it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import IntArray
from tokenmill.contract.backend import FloatArray
from tokenmill.errors import BackendClosed, ForwardFailed, InvalidBatch, ModelLoadError

log = logging.getLogger(__name__)

DEBUG, INFO, ERROR, CONTINUED = 1, 2, 4, 5
"""ggml's levels."""
LEVELS = {ERROR: logging.INFO}
"""All else is for debugging. What is wrong becomes an exception that quotes it, so no line is more than information
here. ggml's own DEBUG, thousands of lines for each context, is left out."""
KEPT_LINES = 8


class NativeLog:
    """Takes llama.cpp's lines. Any thread."""

    def __init__(self) -> None:
        self._callback = llama.llama_log_callback(self._take)  # C keeps no reference
        self._lock = threading.Lock()
        self._errors: deque[str] = deque(maxlen=KEPT_LINES)
        self._level, self._text = INFO, ""

    def install(self) -> None:
        """Redirect llama.cpp's log to this logger."""
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def forget_errors(self) -> None:
        """What was said until now belongs to earlier calls."""
        with self._lock:
            self._errors.clear()

    def errors(self) -> str:
        """What was said since about something that went wrong, in one line."""
        with self._lock:
            return "; ".join(dict.fromkeys(self._errors))

    def _take(self, level: int, text: bytes, _: object) -> None:
        if level == DEBUG:
            return
        with self._lock:
            if level != CONTINUED:
                self._level, self._text = level, ""
            self._text += text.decode("utf-8", errors="replace")
            if not self._text.endswith("\n"):
                return
            level, line, self._text = self._level, self._text.strip(), ""
            if level == ERROR and line:
                self._errors.append(_without_function(line))
        if line:
            log.log(LEVELS.get(level, logging.DEBUG), "%s", line)


def _without_function(line: str) -> str:
    """Lines begin with the name of the function that writes them."""
    function, colon, rest = line.partition(": ")
    return rest if colon and " " not in function else line


MAX_SEQS: int = llama.llama_max_parallel_sequences()
"""Sequences that a context can tell apart."""
NO_ROWS: FloatArray = np.zeros((0, 0), dtype=np.float32)
NO_ROOM, ABORTED, INVALID = 1, 2, -1
"""Return codes of `llama_decode`; anything below -1 is an error inside."""
KV_TYPES = {
    "f32": llama.GGML_TYPE_F32,
    "f16": llama.GGML_TYPE_F16,
    "q8_0": llama.GGML_TYPE_Q8_0,
    "q4_0": llama.GGML_TYPE_Q4_0,
}
FLASH_ATTENTION = {
    None: llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    False: llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    True: llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}
LOAD_MODES = {
    (False, False): llama.LLAMA_LOAD_MODE_NONE,
    (True, False): llama.LLAMA_LOAD_MODE_MMAP,
    (False, True): llama.LLAMA_LOAD_MODE_MLOCK,
    (True, True): llama.LLAMA_LOAD_MODE_MMAP_MLOCK,
}
"""(mapped, locked) -> how a file is read."""


@cache
def native_log() -> NativeLog:
    """The process's log of llama.cpp; the first call starts the library."""
    log = NativeLog()
    log.install()
    llama.llama_backend_init()
    return log


def has_amx() -> bool:
    """Was this build made with kernels for AMX?"""
    return b"AMX_INT8 = 1" in llama.llama_print_system_info()


def has_slow_flash_attention() -> bool:
    """Builds for AMX take several times as long for it on a processor (docs/llamacpp.md)."""
    return has_amx() and not llama.llama_supports_gpu_offload()


def _progress_callback(progress: Callable[[float], None]) -> Any:
    def go_on(share: float, _: object) -> bool:
        progress(share)
        return True

    return llama.llama_progress_callback(go_on)


class NativeModel:
    """A model's weights and vocabulary. Any thread may use it."""

    def __init__(
        self,
        path: Path,
        *,
        use_mmap: bool = True,
        use_mlock: bool = False,
        n_gpu_layers: int = -1,
        repack: bool | None = None,
        vocab_only: bool = False,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        params = llama.llama_model_default_params()
        params.vocab_only = vocab_only
        params.load_mode = LOAD_MODES[use_mmap, use_mlock]
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = not has_amx() if repack is None else repack
        params.progress_callback = told = _progress_callback(progress)
        log = native_log()
        log.install()  # its log is the process's: others may have redirected it since
        log.forget_errors()
        self.pointer = llama.llama_model_load_from_file(str(path).encode(), params)
        del told  # it had to live until here
        if not self.pointer:
            raise ModelLoadError(f"{path}: llama.cpp cannot load it: {log.errors() or 'no reason given'}")
        self.vocab = llama.llama_model_get_vocab(self.pointer)
        self._users = 1
        self._lock = threading.Lock()
        self._closed = False

    @property
    def vocab_size(self) -> int:
        return int(llama.llama_vocab_n_tokens(self.vocab))

    @property
    def hidden_size(self) -> int:
        return int(llama.llama_model_n_embd(self.pointer))

    @property
    def trained_context(self) -> int:
        return int(llama.llama_model_n_ctx_train(self.pointer))

    @property
    def num_values(self) -> int:
        """How many numbers the weights are."""
        return int(llama.llama_model_n_params(self.pointer))

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(128)
        llama.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace")

    @property
    def keeps_states(self) -> bool:
        """Does a sequence have a state that can't go back: all of it, or some layers'?"""
        return bool(llama.llama_model_is_recurrent(self.pointer) or llama.llama_model_is_hybrid(self.pointer))

    @property
    def generates(self) -> bool:
        """Can it go on with a text? (An encoder can't.)"""
        return bool(llama.llama_model_has_decoder(self.pointer) and not llama.llama_model_has_encoder(self.pointer))

    def hold(self) -> None:
        """One more uses it."""
        with self._lock:
            if self._users == 0:
                raise ModelLoadError("the model was closed")
            self._users += 1

    def let_go(self) -> None:
        """One less uses it; the last one frees it."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            llama.llama_model_free(self.pointer)

    def close(self) -> None:
        """It is freed now, or with the last context that uses it."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self.let_go()


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """Of one context; names as in llama.h."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    kv_unified: bool
    n_threads: int
    n_threads_batch: int
    flash_attn: bool | None
    type_k: str
    type_v: str


class NativeBatch:
    """llama.cpp's batch over arrays of ours, which are filled by slices."""

    def __init__(self) -> None:
        self.struct = llama.llama_batch()
        self._width = 0
        self._make_room(1, 1)

    def fill(self, token: IntArray, pos: IntArray, seq_ids: IntArray, wanted: NDArray[np.uint8]) -> None:
        """The tokens of the next call; those that give rows are marked in `wanted`, with anything but 0."""
        count, width = seq_ids.shape
        if count > len(self._token) or width != self._width:
            self._make_room(max(count, len(self._token)), width)
        self._token[:count] = token
        self._pos[:count] = pos
        self._seq_ids[:count] = seq_ids
        self._num_seqs[:count] = 1 if width == 1 else (seq_ids >= 0).sum(axis=1)
        self._wanted[:count] = wanted
        self.struct.n_tokens = count

    def _make_room(self, count: int, width: int) -> None:
        capacity = 1 << (count - 1).bit_length()
        self._token = np.zeros(capacity, dtype=np.int32)
        self._pos = np.zeros(capacity, dtype=np.int32)
        self._num_seqs = np.zeros(capacity, dtype=np.int32)
        self._wanted = np.zeros(capacity, dtype=np.int8)
        self._seq_ids = np.zeros((capacity, width), dtype=np.int32)
        first, row_bytes = self._seq_ids.ctypes.data, self._seq_ids.strides[0]
        self._rows = first + row_bytes * np.arange(capacity, dtype=np.uintp)
        self._width = width
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._num_seqs),
            ("seq_id", self._rows),
            ("logits", self._wanted),
        ):
            kind = type(getattr(self.struct, name))
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, kind))


class NativeContext:
    """One KV memory and what computing needs, over a model. One thread uses it at a time."""

    def __init__(self, model: NativeModel, settings: ContextSettings) -> None:
        params = llama.llama_context_default_params()
        params.n_seq_max = settings.n_seq_max
        # With fewer than one token for each sequence llama.cpp would end the process.
        params.n_ctx = max(settings.n_ctx, settings.n_seq_max)
        params.n_batch = max(settings.n_batch, settings.n_seq_max)
        params.n_ubatch = settings.n_ubatch
        params.n_outputs_max = params.n_outputs_max_per_seq = 0  # as many as there are tokens
        params.n_threads, params.n_threads_batch = settings.n_threads, settings.n_threads_batch
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attn]
        params.type_k, params.type_v = KV_TYPES[settings.type_k], KV_TYPES[settings.type_v]
        params.pooling_type = llama.LLAMA_POOLING_TYPE_NONE
        params.kv_unified = settings.kv_unified
        params.swa_full = True  # a window is a mask: what is outside of it is kept, so that one can go back
        params.no_perf = True
        self._model = model
        self._log = native_log()
        self._log.forget_errors()
        model.hold()
        self._pointer: Any = llama.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            model.let_go()
            said = self._log.errors() or "it does not say why"
            raise ModelLoadError(f"llama.cpp cannot create a context of n_ctx {settings.n_ctx}: {said}")
        self._memory = llama.llama_get_memory(self._pointer)
        self._batch = NativeBatch()
        self._vocab_size, self._hidden_size = model.vocab_size, model.hidden_size
        self._gives_hidden = False
        self._logits_at, self._logits = (0, 0), np.zeros((0, self._vocab_size), dtype=np.float32)
        self.n_batch = settings.n_batch
        self.num_calls = 0
        """Calls of `decode` so far: each writes over the rows of the one before."""

    # -- computing ----------------------------------------------------------------------------------------------------

    def decode(self, token: IntArray, pos: IntArray, seq_ids: IntArray, wanted: NDArray[np.uint8]) -> None:
        """Compute up to `n_batch` tokens. After `ForwardFailed` some of them may be in memory."""
        self._batch.fill(token, pos, seq_ids, wanted)
        self._log.forget_errors()
        self.num_calls += 1
        code = self._decode()
        if code == 0:
            return
        said = self._log.errors() or "it does not say why"
        if code == INVALID:
            raise InvalidBatch(f"llama.cpp rejected the batch: {said}")
        what = {NO_ROOM: "has no room for the batch", ABORTED: "was aborted"}.get(code, "failed")
        raise ForwardFailed(f"llama.cpp {what} (code {code}): {said}")

    def _decode(self) -> int:
        return int(llama.llama_decode(self._pointer, self._batch.struct))

    def give_hidden(self, gives: bool) -> None:
        """Should the next call give hidden rows as well? It then gives both kinds of row for every token."""
        if gives != self._gives_hidden:
            llama.llama_set_embeddings(self._pointer, gives)
            self._gives_hidden = gives

    def logits(self, num_rows: int) -> FloatArray:
        """Rows of the last call, in batch order. llama.cpp's own memory, until the next call."""
        pointer = llama.llama_get_logits(self._pointer)
        where = ctypes.addressof(pointer.contents) if num_rows else 0, num_rows
        if where != self._logits_at:  # its memory is mostly the same as in the step before
            self._logits_at, self._logits = where, self._view(pointer, num_rows, self._vocab_size)
        return self._logits

    def hidden(self, num_rows: int) -> FloatArray:
        """As `logits`."""
        return self._view(llama.llama_get_embeddings(self._pointer), num_rows, self._hidden_size)

    def _view(self, pointer: Any, num_rows: int, width: int) -> FloatArray:
        if num_rows == 0:
            return np.zeros((0, width), dtype=np.float32)
        return np.ctypeslib.as_array(pointer, shape=(num_rows, width))

    # -- sequences ----------------------------------------------------------------------------------------------------

    @property
    def can_shift(self) -> bool:
        return bool(llama.llama_memory_can_shift(self._memory))

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        return bool(llama.llama_memory_seq_rm(self._memory, seq, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        llama.llama_memory_seq_cp(self._memory, src, dst, p0, p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        llama.llama_memory_seq_add(self._memory, seq, p0, p1, delta)

    def seq_keep(self, seq: int) -> None:
        llama.llama_memory_seq_keep(self._memory, seq)

    def seq_pos_min(self, seq: int) -> int:
        return int(llama.llama_memory_seq_pos_min(self._memory, seq))

    def seq_pos_max(self, seq: int) -> int:
        return int(llama.llama_memory_seq_pos_max(self._memory, seq))

    def clear(self, *, data: bool = False) -> None:
        """Forget all sequences; with `data`, what their cells hold as well."""
        llama.llama_memory_clear(self._memory, data)

    def read_state(self, seq: int) -> bytes:
        """A sequence's cells or state."""
        self._check_open()
        size = llama.llama_state_seq_get_size(self._pointer, seq)
        buffer = (ctypes.c_uint8 * size)()
        written = llama.llama_state_seq_get_data(self._pointer, buffer, size, seq)
        return bytes(memoryview(buffer)[:written])

    def write_state(self, seq: int, state: memoryview) -> str:
        """Fill an empty sequence with what `read_state` gave. Empty, or why llama.cpp did not take it."""
        self._check_open()
        self._log.forget_errors()
        data = np.frombuffer(state, dtype=np.uint8)
        pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        if llama.llama_state_seq_set_data(self._pointer, pointer, len(data), seq):
            return ""
        return self._log.errors() or "it does not say why"

    def _check_open(self) -> None:
        if self._pointer is None:
            raise BackendClosed("the context was closed")

    def close(self) -> None:
        if self._pointer is not None:
            llama.llama_free(self._pointer)
            self._pointer = self._memory = None  # to llama.cpp, operations on no memory do nothing
            self._model.let_go()
