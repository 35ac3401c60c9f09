"""Small random GGUF files for llama.cpp: one with attention, one whose layers have states (Mamba)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCAB, HIDDEN, LAYERS, CONTEXT = 257, 64, 2, 512
HEADS, KV_HEADS, INNER = 2, 1, 64
STATE, KERNEL, RANK, SSM_INNER = 8, 4, 2, 128


class File:
    """A GGUF file in the making; all numbers come from one seed."""

    def __init__(self, path: Path, architecture: str, tokenizer: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.writer = gguf.GGUFWriter(path, architecture)
        self._random = np.random.default_rng(5)
        vocab_size = len(tokenizer["tokenizer.ggml.tokens"]) if tokenizer else VOCAB
        self.writer.add_vocab_size(vocab_size)
        for key, value in (tokenizer or {"tokenizer.ggml.model": "no_vocab"}).items():
            kind = gguf.GGUFValueType.UINT32 if isinstance(value, int) else gguf.GGUFValueType.get_type(value)
            self.writer.add_key_value(key, value, kind)
        self.writer.add_block_count(LAYERS)
        self.writer.add_context_length(CONTEXT)
        self.writer.add_embedding_length(HIDDEN)
        self.writer.add_layer_norm_rms_eps(1e-5)
        self.normal("token_embd.weight", vocab_size, HIDDEN)
        self.ones("output_norm.weight", HIDDEN)
        self.normal("output.weight", vocab_size, HIDDEN)

    def normal(self, name: str, *shape: int, scale: float = 0.4) -> None:
        self.put(name, scale * self._random.standard_normal(shape))

    def ones(self, name: str, *shape: int) -> None:
        self.put(name, np.ones(shape))

    def put(self, name: str, values: Any) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    def close(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def write_attention(
    path: Path, architecture: str = "llama", tokenizer: Mapping[str, Any] | None = None, part_tensors: int = 0
) -> Path:
    """Without a tokenizer's metadata it has none. `part_tensors`: of each part of a split file; 0: it is not split."""
    file = File(path, architecture, tokenizer)
    file.writer.split_max_tensors = part_tensors
    file.writer.add_feed_forward_length(INNER)
    file.writer.add_head_count(HEADS)
    file.writer.add_head_count_kv(KV_HEADS)
    kv_size = HIDDEN // HEADS * KV_HEADS
    for layer in (f"blk.{i}" for i in range(LAYERS)):
        file.ones(f"{layer}.attn_norm.weight", HIDDEN)
        file.ones(f"{layer}.ffn_norm.weight", HIDDEN)
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv_size, HIDDEN),
            ("attn_v", kv_size, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):
            file.normal(f"{layer}.{name}.weight", rows, columns)
    return file.close()


def spoil(path: Path, token: int) -> Path:
    """Let a token's embedding be no number."""
    (tensor,) = [one for one in gguf.GGUFReader(path, "r+").tensors if one.name == "token_embd.weight"]
    tensor.data[token] = np.nan
    return path


def write_mamba(path: Path) -> Path:
    file = File(path, "mamba")
    file.writer.add_feed_forward_length(0)
    file.writer.add_head_count(0)
    file.writer.add_ssm_conv_kernel(KERNEL)
    file.writer.add_ssm_inner_size(SSM_INNER)
    file.writer.add_ssm_state_size(STATE)
    file.writer.add_ssm_time_step_rank(RANK)
    for layer in (f"blk.{i}" for i in range(LAYERS)):
        file.ones(f"{layer}.attn_norm.weight", HIDDEN)
        file.normal(f"{layer}.ssm_in.weight", 2 * SSM_INNER, HIDDEN)
        file.normal(f"{layer}.ssm_conv1d.weight", SSM_INNER, KERNEL)
        file.normal(f"{layer}.ssm_conv1d.bias", SSM_INNER)
        file.normal(f"{layer}.ssm_x.weight", RANK + 2 * STATE, SSM_INNER)
        file.normal(f"{layer}.ssm_dt.weight", SSM_INNER, RANK)
        file.normal(f"{layer}.ssm_dt.bias", SSM_INNER)
        file.put(f"{layer}.ssm_a", -np.tile(np.arange(1.0, STATE + 1) / STATE, (SSM_INNER, 1)))
        file.ones(f"{layer}.ssm_d", SSM_INNER)
        file.normal(f"{layer}.ssm_out.weight", HIDDEN, SSM_INNER)
    return file.close()
