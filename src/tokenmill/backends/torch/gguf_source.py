"""A GGUF file as a `TensorSource`, and its metadata as a `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenmill.backends.gguf_file import GGUFFile, GGUFTensor
from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.families.names import GGUF_NAMES, Shape
from tokenmill.backends.torch.rope import Rope
from tokenmill.errors import ModelLoadError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PERMUTED = ("llama",)
"""Architectures whose queries and keys are stored for rotation of neighbouring dimensions."""


class GGUFSource:
    """The tensors of a GGUF file, dequantised when they are asked for."""

    def __init__(self, file: GGUFFile, config: DecoderConfig) -> None:
        self.where = str(file.path)
        self._file = file
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._permuted = heads if file.get("general.architecture") in PERMUTED else {}

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tensor.shape for name, tensor in self._file.tensors.items()}

    def load(self, name: str) -> Tensor:
        values = dequantise(self._file, self._file.tensors[name])
        kind = name.split(".")[-2]
        return _unpermuted(values, self._permuted[kind]) if kind in self._permuted else values


def dequantise(file: GGUFFile, tensor: GGUFTensor) -> Tensor:
    """A tensor's values as float32 (or as they are, if they are numbers already)."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(tensor.type)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelLoadError(f"{file.path}: {tensor.name} has the unknown type {tensor.type}") from None
    count = int(np.prod(tensor.shape, dtype=np.int64))
    if not tensor.shape or tensor.shape[-1] % per_block:
        raise ModelLoadError(f"{file.path}: {tensor.name} has the shape {tensor.shape}, not in blocks of {per_block}")
    data = file.bytes_of(tensor, count // per_block * block_bytes)
    rows = data.reshape(*tensor.shape[:-1], tensor.shape[-1] // per_block * block_bytes)
    try:
        values = gguf.quants.dequantize(rows, kind)
    except NotImplementedError:
        raise ModelLoadError(f"{file.path}: {tensor.name} is of type {kind.name}, which can't be read") from None
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(tensor.shape))


def _unpermuted(values: Tensor, num_heads: int) -> Tensor:
    """Rows back in the order in which dimension i turns with dimension i + dim / 2."""
    rest = values.shape[1:]
    return values.reshape(num_heads, -1, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def config_of(file: GGUFFile) -> DecoderConfig:
    """The decoder that a GGUF file holds."""
    arch = file.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path} has the architecture {arch!r}, which is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    values = _Values(file, arch)
    num_layers, num_heads = values.number("block_count"), values.number("attention.head_count")
    hidden_size, max_context = values.number("embedding_length"), values.number("context_length")
    head_dim = file.get(f"{arch}.attention.key_length") or hidden_size // num_heads
    embed = file.tensors.get(GGUF_NAMES["embed"])
    if embed is None or len(embed.shape) != 2:
        raise ModelLoadError(f"{file.path} has no embedding: {GGUF_NAMES['embed']} is missing")
    window = file.get(f"{arch}.attention.sliding_window") or None
    return DecoderConfig(
        family=arch,
        vocab_size=embed.shape[0],
        hidden_size=hidden_size,
        intermediate_size=values.number("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=file.get(f"{arch}.attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        max_context=max_context,
        rms_eps=float(values.get("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, arch, head_dim, max_context),
        windows=(window,) * num_layers,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied=GGUF_NAMES["head"] not in file.tensors,
    )


def _rope(file: GGUFFile, arch: str, head_dim: int, max_context: int) -> Rope:
    turned = file.get(f"{arch}.rope.dimension_count", head_dim)
    if turned != head_dim:
        raise ModelLoadError(f"{file.path}: rotating {turned} of {head_dim} dimensions is not supported")
    kind = file.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelLoadError(f"{file.path}: rope scaling of type {kind!r} is not supported")
    divisors = file.tensors.get("rope_freqs.weight")
    return Rope(
        dim=head_dim,
        theta=float(file.get(f"{arch}.rope.freq_base", 10_000.0)),
        kind="default" if kind == "none" else kind,
        factor=float(file.get(f"{arch}.rope.scaling.factor", 1.0)),
        original_context=file.get(f"{arch}.rope.scaling.original_context_length") or max_context,
        divisors=() if divisors is None else tuple(dequantise(file, divisors).tolist()),
    )


class _Values:
    """Metadata under an architecture's prefix that must be there."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._file, self._arch = file, arch

    def get(self, name: str) -> Any:
        value = self._file.get(f"{self._arch}.{name}")
        if value is None:
            raise ModelLoadError(f"{self._file.path} has no {self._arch}.{name}")
        return value

    def number(self, name: str) -> int:
        value = self.get(name)
        if not isinstance(value, int):
            raise ModelLoadError(f"{self._file.path}: {self._arch}.{name} is {value!r}, which is not supported")
        return value
