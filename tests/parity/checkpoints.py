"""Small random checkpoints of every family and variant, made with transformers, saved as their authors would."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tokenmill.contract import BackendLimits, BatchBuilder, ModelHandle, Output

SIZES: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LIMITS = BackendLimits(num_cells=1024, max_seqs=16)
TOKENS = random.Random(1).choices(range(160), k=150)
"""All kinds of them: over equal tokens, attention gives the same whatever the positions are."""
TOLERANCE = 1e-3
WIDE = 0.4
"""Standard deviation of the weights: large, so that the likeliest token is so by a margin."""


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 40}
"""The usual scale of scores would be that of 16."""
THETAS = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    }
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.4, "logits_scaling": 1.7,
}  # fmt: skip
PHI: dict[str, Any] = {"hidden_size": 96, **rope("default", partial_rotary_factor=0.75)}
FACTORS = [1.0, 1.1, 1.3, 1.7, 2.2, 3.0]
LONGROPE = rope("longrope", partial_rotary_factor=0.75, short_factor=FACTORS, long_factor=[9.0] * 6)
ROUND: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
"""Whole groups of quantized weights."""
UNSCALED: dict[str, Any] = {**ROUND, "sliding_window": 5, "query_pre_attn_scalar": 16}
AS_IN_GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2 of a GGUF file": ("Gemma2", {**UNSCALED, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}),
    "gemma3 of a GGUF file": ("Gemma3Text", {**UNSCALED, "num_hidden_layers": 7, **THETAS}),
    "smollm3 of a GGUF file": ("SmolLM3", {**ROUND, "num_hidden_layers": 5}),
    "phi3, plain": ("Phi3", {"hidden_size": 64, "num_attention_heads": 4}),
}
"""With those settings fixed that GGUF files do not have: the attention scale, and which layers differ."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, no sharing of KV heads": ("Llama", {"num_key_value_heads": 6}),
    "llama, one KV head": ("Llama", {"num_key_value_heads": 1}),
    "llama, other base": ("Llama", rope("default", rope_theta=500_000.0)),
    "llama, linear rope": ("Llama", rope("linear", factor=4.0)),
    "llama, llama3 rope": ("Llama", LLAMA3),
    "llama, yarn rope": ("Llama", YARN),
    "llama, yarn with mscale": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7,
                                             mscale_all_dim=1.0, beta_fast=16, beta_slow=2)),
    "llama, heads of their own size": ("Llama", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied, yarn": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, **YARN}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}),
    "gemma2, no caps": ("Gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                                   "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                                   "attention_bias": True}),
    "gemma3": ("Gemma3Text", {**GEMMA, "sliding_window_pattern": 3, "final_logit_softcapping": 20.0, **THETAS}),
    "phi3": ("Phi3", PHI),
    "phi3, window": ("Phi3", {**PHI, "sliding_window": 7, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    "phi3, longrope": ("Phi3", {**PHI, "max_position_embeddings": 4096, "original_max_position_embeddings": 2048,
                                **LONGROPE}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "num_hidden_layers": 4}),
    "smollm3, window": ("SmolLM3", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 5}),
    "granite": ("Granite", MULTIPLIERS),
    "granite with biases": ("Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.1,
                                        "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    **AS_IN_GGUF,
}  # fmt: skip


@cache
def reference(variant: str) -> Any:
    """A transformers model with random weights, the same each time."""
    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, WIDE, generator=torch.Generator().manual_seed(len(name) * 7919 + parameter.numel()))
            if "norm" in name:
                parameter.mul_(0.5).add_(1.0)
    return model.float().eval()


def save(variant: str, folder: Path, shard_size: str = "5GB") -> Path:
    """The variant as a directory with safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    reference(variant).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def logits_of(variant: str, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]: what transformers gives."""
    with torch.no_grad():
        return reference(variant)(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


def all_logits(model: ModelHandle, tokens: list[int], chunk: int) -> np.ndarray:
    """The logits of every token, computed in chunks."""
    parts = []
    with model.new_backend(LIMITS) as backend:
        for begin in range(0, len(tokens), chunk):
            batch = BatchBuilder()
            for pos, token in enumerate(tokens[begin : begin + chunk], begin):
                batch.add(token, pos, 0, Output.LOGITS)
            parts.append(backend.decode(batch.build()).logits)
    return np.concatenate(parts)
