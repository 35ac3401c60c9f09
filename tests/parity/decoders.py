"""Tiny random checkpoints of the decoders of transformers, made from a table of what differs between them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

SIZES: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "sliding_window": 5,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    # other spellings
    "ffn_hidden_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
}
"""Each family takes those that its configuration has."""

SLIDING: Mapping[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT: Mapping[str, Any] = {"num_key_value_heads": 4, "head_dim": 4}
SHARED: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""The last layers attend to keys and values of earlier ones."""
NAMED: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NONE: Mapping[str, Any] = {}
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": NONE,
    "apertus": NONE,
    "arcee": NONE,
    "aria_text": NONE,
    "axk1": LATENT,
    "beam": NONE,
    "biogpt": NONE,
    "bitnet": NONE,
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, **SLIDING},
    "cohere2_moe": {"logit_scale": 1.0},
    "cwm": {**NAMED, **SLIDING},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "diffllama": NONE,
    "dots1": NONE,
    "ernie4_5": NONE,
    "ernie4_5_moe": NONE,
    "exaone4": NONE,
    "exaone_moe": NONE,
    "flex_olmo": NONE,
    "flint": SLIDING,
    "gemma": NONE,
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "gemma3n_text": SHARED,
    "gemma4_text": {**SHARED, "global_head_dim": 16},
    "glm": NONE,
    "glm4": NONE,
    "glm4_moe": NONE,
    "glm4_moe_lite": LATENT,
    "gpt2": NONE,
    "gpt_bigcode": NONE,
    "gpt_neox": NONE,
    "gpt_oss": SLIDING,
    "granite": NONE,
    "granite_swa": SLIDING,
    "granitemoe": NONE,
    "granitemoe_swa": SLIDING,
    "granitemoeshared": NONE,
    "helium": NONE,
    "hunyuan_v1_dense": NONE,
    "hunyuan_v1_moe": NONE,
    "hy_v3": NONE,
    "hyperclovax": NONE,
    "jais2": NONE,
    "kolibri1": NONE,
    "laguna": NONE,
    "llama": NONE,
    "llama4_text": {"attention_chunk_size": 256},
    "mellum": NONE,
    "mimo_v2_flash": SLIDING,
    "minicpm3": {**LATENT, "dim_model_base": 32},
    "minimax_m2": NONE,
    "ministral": NONE,
    "ministral3": NONE,
    "mistral": NONE,
    "mixtral": NONE,
    "modernbert-decoder": {**NAMED, **SLIDING},
    "nanochat": NONE,
    "nemotron": NONE,
    "olmo": NONE,
    "olmo2": NONE,
    "olmo3": SLIDING,
    "olmoe": NONE,
    "opt": NONE,
    "persimmon": NONE,
    "phi": NONE,
    "phi3": NONE,
    "phimoe": NONE,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": NONE,
    "qwen3": NONE,
    "qwen3_moe": NONE,
    "seed_oss": NONE,
    "smollm3": NONE,
    "solar_open": NONE,
    "stablelm": NONE,
    "starcoder2": NONE,
    "vaultgemma": SLIDING,
    "youtu": LATENT,
}
"""`model_type` -> what it needs beside `SIZES`. Windows are five tokens wide, so that prompts exceed them."""
STATEFUL = ("bamba", "falcon_h1", "jamba", "mamba2", "minimax", "qwen3_next", "recurrent_gemma", "rwkv", "zamba2")
"""Decoders with state beside the KV."""
WIDE = 0.4
"""Standard deviation of the weights: large, so that the likeliest token is so by a margin."""


def tiny_config(family: str, **changes: Any) -> Any:
    kind = CONFIG_MAPPING[family]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {})}
    known |= set(getattr(kind, "attribute_map", None) or ())
    usual = {name: value for name, value in SIZES.items() if name in known}
    return kind(**{**usual, **DECODERS.get(family, NONE), **changes})


@cache
def tiny(family: str, vocab_size: int = 160) -> Any:
    """A model with random weights, the same each time."""
    config = tiny_config(family, vocab_size=vocab_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, WIDE, generator=generator)
            if "norm" in name:
                parameter.mul_(0.5).add_(1.0)
    model.set_attn_implementation("eager")
    return model


def save_tiny(family: str, folder: Path, vocab_size: int = 160) -> Path:
    """The model as its authors would publish it."""
    shows = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        tiny(family, vocab_size).save_pretrained(folder)
    finally:
        if shows:
            transformers.utils.logging.enable_progress_bar()
    return folder


@torch.no_grad()
def own_logits(family: str, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]: what transformers gives, with its own attention."""
    return tiny(family)(torch.tensor([tokens]), use_cache=False).logits[0]  # type: ignore[no-any-return]
