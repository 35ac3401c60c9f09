"""What is known before a model is loaded: `LlamaOptions`, by the names they have in llama.cpp, and its file's `Header`.

The header says what a model takes in memory, for any architecture. `parked_cells` says how much KV of ended requests
may stay while others run: llama.cpp's attention reads every cell up to the highest one in use, of any sequence, so
parked KV makes each step slower, in proportion. The step of a lone sequence suffers most: it reads all weights once,
and of each parked cell the keys and values. The bytes alone would say by how much; measured, a byte of KV costs less
than a byte of weights (`python -m benchmarks.llamacpp` gives the curve, docs/llamacpp.md has it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.contract import BackendLimits, LayerKV
from tokenmill.contract.backend import MemoryPlan
from tokenmill.errors import ConfigError, ModelLoadError

BITS_PER_VALUE = {"f32": 32.0, "f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
"""Types of keys and values, and what one of them takes."""


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """None leaves it to tokenmill. Checked when it is made."""

    n_ctx: int | None = None
    """Cells of KV memory, for all sequences together; in place of what the engine would choose."""
    n_batch: int | None = None
    """Tokens handed to llama.cpp in one call; None: as many as a step has."""
    n_ubatch: int = 512
    """Tokens that are computed at once."""
    n_threads: int | None = None
    """For steps of one token a sequence; None takes `num_threads`."""
    n_threads_batch: int | None = None
    """For all other steps."""
    flash_attn: bool | None = None
    """None: where llama.cpp thinks it works, but not in streams of builds where it is slow."""
    type_k: str = "f16"
    type_v: str = "f16"
    use_mmap: bool = True
    use_mlock: bool = False
    n_gpu_layers: int = -1
    """Layers on a GPU, in builds that know one; -1 is all of them."""
    repack: bool | None = None
    """Store weights once more in the order that a processor's own kernels read them. None: not in builds with kernels
    for AMX, which end the process on machines that announce AMX and do not keep its state."""
    kv_unified: bool | None = None
    """One memory for all sequences, or one for each that runs; None: the latter where all have room in it."""
    parked_cells: int | None = None
    """Cells that KV of ended requests may keep while others run; None: as many as slow a step down by a tenth."""
    probe: bool = True
    """Load the file in a child process first: llama.cpp aborts the process on some damaged files."""

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch"):
            _check_count(name, getattr(self, name), least=1)
        _check_count("parked_cells", self.parked_cells, least=0)
        _check_count("n_gpu_layers", self.n_gpu_layers, least=-1)
        for name in ("flash_attn", "use_mmap", "use_mlock", "repack", "kv_unified", "probe"):
            value = getattr(self, name)
            if value is not None and type(value) is not bool:
                raise ConfigError(f"{name} must be true or false, not {value!r}")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in BITS_PER_VALUE:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is not supported; supported: {', '.join(BITS_PER_VALUE)}"
                )
        if self.needs_flash_attn and self.flash_attn is False:
            raise ConfigError(f"type_v {self.type_v} requires flash attention; omit flash_attn or set it to true")

    @property
    def needs_flash_attn(self) -> bool:
        """Without it llama.cpp can't read values that are quantised."""
        return self.type_v.startswith("q")


def read_options(given: Mapping[str, Any]) -> LlamaOptions:
    """The options of a model that is opened; `ConfigError` names an unknown one."""
    known = {one.name for one in fields(LlamaOptions)}
    unknown = set(given) - known
    if unknown:
        raise ConfigError(
            f"unknown option {', '.join(sorted(unknown))}; supported by llama.cpp: {', '.join(sorted(known))}"
        )
    return LlamaOptions(**given)


def _check_count(name: str, value: Any, *, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):  # bool is a subclass of int
        raise ConfigError(f"{name} must be an integer of at least {least}, not {value!r}")


SLOWDOWN = 0.1
"""By how much of itself parked KV may slow a step of a lone sequence down."""
KV_BYTE_COST = 0.5
"""Of a byte of weights, measured."""
LEAST = 512
"""Cells that may always stay: llama.cpp reads them in blocks of 256."""


def parked_cells(weight_bytes: int, kv_bytes_per_token: int) -> int | None:
    """None where there is nothing that steps would read."""
    if kv_bytes_per_token == 0:
        return None
    return max(LEAST, int(SLOWDOWN * weight_bytes / (KV_BYTE_COST * kv_bytes_per_token)))


OTHER_BYTES = 64 << 20
"""Code, tables, tokenizer."""
LOGITS_COPIES = 4
"""Copies of the logits that sampling makes on the way."""
LOADING_BYTES = 16 << 20
MOST_LAYERS = 1 << 12
MOST_SIZE = 1 << 26
"""Of a vocabulary, a context, a dimension. llama.cpp has 32-bit integers for these, and computes with them."""


@dataclass(frozen=True)
class Header:
    """Sizes of a model; where a file says nothing, 0."""

    architecture: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    max_context: int
    weight_bytes: int
    layers: tuple[LayerKV, ...]
    state_bytes: int
    """Of recurrent layers, for each sequence."""

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    def memory(self, limits: BackendLimits, num_rows: int, options: LlamaOptions) -> MemoryPlan:
        """As `ModelHandle.memory`."""
        num_cells = options.n_ctx or limits.num_cells
        num_tokens = min(options.n_ubatch, limits.ubatch_size, num_cells)
        per_token = 4 * (self.vocab_size + 8 * self.hidden_size + 3 * self.inner_size)
        logits = LOGITS_COPIES * num_rows * self.vocab_size * 4
        kv = num_cells * self.kv_bytes_per_token + num_states(limits.max_seqs) * self.state_bytes
        return MemoryPlan(self.weight_bytes, kv, num_tokens * per_token + logits, OTHER_BYTES, LOADING_BYTES)


MOST_STATES = 64
"""Sequences of a model with recurrent layers: each has a state of its own from the beginning."""


def num_states(max_seqs: int) -> int:
    return min(max_seqs, MOST_STATES)


def read_header(path: Path, options: LlamaOptions) -> Header:
    """`ModelLoadError` if it is no GGUF file, or a damaged one."""
    file = GGUFFile(path)
    architecture = file.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelLoadError(f"{path} has no general.architecture")

    def number(name: str, *, least: int = 0, most: int = MOST_SIZE) -> int:
        value = file.get(f"{architecture}.{name}")
        if type(value) is not int:
            return 0  # llama.cpp says whether it needs one
        if not least <= value <= most:
            raise ModelLoadError(f"{path}: {architecture}.{name} must be from {least} to {most}, not {value}")
        return value

    num_layers = number("block_count", least=1, most=MOST_LAYERS)
    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    head_dim = hidden_size // num_heads if num_heads else 0
    key_dim, value_dim = number("attention.key_length") or head_dim, number("attention.value_length") or head_dim
    kv_heads = _by_layer(file.get(f"{architecture}.attention.head_count_kv", num_heads), num_layers)
    tokens = file.get("tokenizer.ggml.tokens")
    return Header(
        architecture=architecture,
        vocab_size=number("vocab_size") or (len(tokens) if isinstance(tokens, list) else 0),
        hidden_size=hidden_size,
        inner_size=max(number("feed_forward_length"), number("ssm.inner_size")),
        max_context=number("context_length", least=1),
        weight_bytes=sum(part.stat().st_size for part in file.paths),
        layers=tuple(_layer(heads, key_dim, value_dim, options) for heads in kv_heads),
        state_bytes=4 * num_layers * _state_size(number),
    )


def _by_layer(heads: Any, num_layers: int) -> list[int]:
    """Key and value heads of each layer: files give one number for all, or a list."""
    listed = heads[:MOST_LAYERS] if isinstance(heads, list) else [heads] * num_layers
    return [one if type(one) is int and 0 < one <= MOST_SIZE else 0 for one in listed]


def _layer(num_heads: int, key_dim: int, value_dim: int, options: LlamaOptions) -> LayerKV:
    """Dimensions in bytes, since a quantised value takes no whole number of them."""
    if num_heads == 0:
        return LayerKV("state")
    key_bytes, value_bytes = (
        int(dim * BITS_PER_VALUE[kind]) // 8 for dim, kind in ((key_dim, options.type_k), (value_dim, options.type_v))
    )
    return LayerKV("full", num_heads=num_heads, key_dim=key_bytes, value_dim=value_bytes, dtype_bytes=1)


def _state_size(number: Any) -> int:
    """Numbers that a recurrent layer keeps for a sequence: of Mamba's kind, or of RWKV's."""
    inner, state, groups = number("ssm.inner_size"), number("ssm.state_size"), number("ssm.group_count")
    convolved = inner + 2 * groups * state
    mamba = inner * state + max(0, number("ssm.conv_kernel") - 1) * convolved
    rwkv = number("embedding_length") * (number("wkv.head_size") + 2) if number("wkv.head_size") else 0
    return int(mamba + rwkv)
