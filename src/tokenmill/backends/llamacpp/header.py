"""`Header`: what a GGUF file says about a model's memory, for any architecture, before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.llamacpp.options import BITS_PER_VALUE, LlamaOptions
from tokenmill.contract import BackendLimits, LayerKV
from tokenmill.contract.backend import MemoryPlan
from tokenmill.errors import ModelLoadError

OTHER_BYTES = 64 << 20
"""Code, tables, tokenizer."""
LOGITS_COPIES = 4
"""Copies of the logits that sampling makes on the way."""
LOADING_BYTES = 16 << 20


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
        raise ModelLoadError(f"{path} does not say what architecture it has")

    def number(name: str) -> int:
        value = file.get(f"{architecture}.{name}")
        return value if type(value) is int and value > 0 else 0

    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    head_dim = hidden_size // num_heads if num_heads else 0
    key_dim, value_dim = number("attention.key_length") or head_dim, number("attention.value_length") or head_dim
    kv_heads = _by_layer(file.get(f"{architecture}.attention.head_count_kv", num_heads), number("block_count"))
    return Header(
        architecture=architecture,
        vocab_size=number("vocab_size") or len(file.get("tokenizer.ggml.tokens") or ()),
        hidden_size=hidden_size,
        inner_size=max(number("feed_forward_length"), number("ssm.inner_size")),
        max_context=number("context_length"),
        weight_bytes=path.stat().st_size,
        layers=tuple(_layer(heads, key_dim, value_dim, options) for heads in kv_heads),
        state_bytes=4 * number("block_count") * _state_size(number),
    )


def _by_layer(heads: Any, num_layers: int) -> list[int]:
    """Key and value heads of each layer: files give one number for all, or a list."""
    listed = heads if isinstance(heads, list) else [heads] * num_layers
    return [one if type(one) is int else 0 for one in listed]


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
