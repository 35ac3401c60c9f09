"""The C library through ctypes: its structures, and whether it is there."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np

from tokenmill.backends.cpu.build import LIBRARY, fingerprint

log = logging.getLogger(__name__)

BUILD_MODULE = "tokenmill.backends.cpu.build"
SWITCH = "TOKENMILL_KERNELS"
"""Set to 0, the library is not used; set to the name of a variant, that one is, whatever else the machine can run."""
GROUP, ROWS = 32, 16
KINDS = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "IQ4_NL": 20, "IQ4_XS": 23,
}  # fmt: skip
"""Types of weights that there are kernels for, by the numbers that GGUF files have for them."""
INT4, INT8 = KINDS["Q4_1"], KINDS["Q8_0"]
"""What values of other types are rounded to."""


class Matrix(Structure):
    _fields_ = (
        ("blocks", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
    )


NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "q_norm", "k_norm")
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Layer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in NORMS),
        *((name, c_int32) for name in ("window", "rope", "whole_norms", "activation")),
        *((name, c_float) for name in ("scale", "softcap", "residual_scale")),
    )


class DecoderStruct(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_int32) for name in ("num_layers", "hidden", "inner", "num_heads", "num_kv_heads", "head_dim")),
        ("rope_dim", c_int32),
        ("eps", c_float),
    )


class StepStruct(Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("num_runs", c_int32),
        *(
            (name, c_void_p)
            for name in ("order", "begin", "seq", "pos", "slot", "cos", "sin", "table", "base", "start")
        ),
        ("table_width", c_int32),
        ("block_size", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_dtype", c_int32),
    )


class TokensStruct(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("begin", "token", "value"))


class SamplingStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "draws", "mask")),
        *((name, TokensStruct) for name in ("allowed", "edits", "history", "taxes")),
        *((name, c_void_p) for name in ("ids", "logprob", "top_logprobs", "top_ids")),
        *((name, c_int32) for name in ("num_rows", "vocab", "mask_words", "num_logprobs")),
    )


SHORT = ("copy_blocks", "rows")
"""Also declared as `lib.rows_held` etc., which keep the GIL: getting it back can take longer than a short call."""


@lru_cache(1)
def library() -> Any | None:
    """The library, or None where it could not be built or is switched off."""
    switch = os.environ.get(SWITCH, "1")
    if switch == "0":
        return None
    if not LIBRARY.exists():
        log.warning(
            "the CPU kernels are not there, so quantised models run as float32 and sampling runs on numpy, both "
            "several times slower: install a C compiler and run python -m %s",
            BUILD_MODULE,
        )
        return None
    try:
        lib = declare(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError) as error:
        log.warning("the CPU kernels can't be used: %s", error)
        return None
    if lib.tm_sources().decode() != fingerprint():
        log.warning("the CPU kernels were built from other sources and are not used: run python -m %s", BUILD_MODULE)
        return None
    if switch != "1" and not lib.tm_use(switch.encode()):
        used = lib.tm_variant().decode()
        log.warning("%s=%s is not a kernel variant of this build and machine; using %s", SWITCH, switch, used)
    return lib


def declare(lib: Any) -> Any:
    """Tell ctypes what the functions take and give."""
    pointer, number = c_void_p, c_int32
    for name, result, arguments in (
        ("tm_variant", c_char_p, []),
        ("tm_sources", c_char_p, []),
        ("tm_size_of", number, [c_char_p]),
        ("tm_use", number, [c_char_p]),
        ("tm_pool_new", pointer, [number]),
        ("tm_pool_free", None, [pointer]),
        ("tm_scratch_bytes", c_size_t, [POINTER(DecoderStruct), number]),
        ("tm_product_bytes", c_size_t, [POINTER(Matrix), number]),
        ("tm_run", None, [POINTER(DecoderStruct), POINTER(StepStruct), pointer, pointer, pointer]),
        ("tm_product", None, [POINTER(Matrix), pointer, number, pointer, pointer, pointer]),
        ("tm_copy_blocks", None, [pointer, pointer, number, pointer, pointer, number]),
        ("tm_norm", None, [pointer, pointer, c_float, number, number, pointer]),
        ("tm_sample_bytes", c_size_t, [number, pointer]),
        ("tm_sample", None, [POINTER(SamplingStruct), pointer, pointer]),
        ("tm_peak", c_int64, [number]),
        ("tm_rows", None, [POINTER(Matrix), pointer, number, pointer]),
        ("tm_matrix_bytes", c_size_t, [number, number, number]),
        ("tm_pack", number, [number, pointer, pointer, number, number, pointer, pointer]),
        ("tm_pack_int4", None, [pointer, pointer, pointer, number, number, pointer]),
        ("tm_pack_int8", None, [pointer, pointer, number, number, pointer]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    held = ctypes.PyDLL(lib._name, handle=lib._handle)
    for name in SHORT:
        function = getattr(held, f"tm_{name}")
        function.restype, function.argtypes = None, getattr(lib, f"tm_{name}").argtypes
        setattr(lib, f"{name}_held", function)
    return lib


def address(array: np.ndarray[Any, Any]) -> int:
    """Where an array's numbers are."""
    if not array.flags.c_contiguous:
        raise ValueError("the kernels require contiguous arrays")
    return int(array.ctypes.data)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_threads() -> None:
    """In a child process: the threads have stayed with the parent. Without a pool the caller's own does all."""
    for pool in _pools:
        pool.handle = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


class Pool:
    """Threads of the library, for one backend."""

    def __init__(self, lib: Any, num_threads: int) -> None:
        self._lib = lib
        self.handle: int | None = None
        self.handle = lib.tm_pool_new(num_threads)
        _pools.add(self)

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            self._lib.tm_pool_free(handle)

    def __del__(self) -> None:
        self.close()
