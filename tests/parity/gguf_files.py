"""The small random checkpoints as GGUF files, written as llama.cpp's converter would."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.parity.checkpoints import reference
from tokenmill.backends.families import family_of
from tokenmill.backends.families.names import GGUF_NAMES, HF_NAMES

TOKENS = [f"t{i}" for i in range(160)]


def put(writer: Any, arch: str, **values: Any) -> None:
    """Metadata in place of what there is; a double underscore stands for a dot. None takes a key away."""
    for name, value in values.items():
        key = f"{arch}.{name.replace('__', '.')}"
        writer.kv_data[0].pop(key, None)
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind if kind != gguf.GGUFValueType.INT32 else gguf.GGUFValueType.INT64)


def gguf_name(hf_name: str, names: Mapping[str, str] = HF_NAMES) -> str:
    for own, pattern in names.items():
        head, _, tail = pattern.partition("{}")
        if hf_name == pattern:
            return GGUF_NAMES[own]
        if tail and hf_name.startswith(head) and hf_name.endswith(tail):
            layer = hf_name[len(head) : len(hf_name) - len(tail)]
            if layer.isdigit():
                return GGUF_NAMES[own].format(layer)
    raise KeyError(hf_name)


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter stores queries and keys of the llama architecture."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


PERMUTED = ("llama", "granite", "smollm3")


def add_family(writer: Any, arch: str, config: Any) -> None:
    """What only some architectures have."""
    window = getattr(config, "sliding_window", None)
    if arch in ("gemma2", "gemma3", "phi3") and window is not None:
        writer.add_sliding_window(window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        put(writer, arch, rope__freq_base_swa=float(config.rope_parameters["sliding_attention"]["rope_theta"]))
        if config.rope_parameters["full_attention"]["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(config.rope_parameters["full_attention"]["factor"])
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "phi3" and config.rope_parameters["rope_type"] == "longrope":
        original = config.rope_parameters["original_max_position_embeddings"]
        stretched = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretched) / math.log(original)))
        for length in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def write(
    variant: str,
    path: Path,
    arch: str,
    kind: Any = gguf.GGMLQuantizationType.F32,
    change: Callable[[Any], object] = lambda _: None,
    part_tensors: int = 0,
) -> Path:
    """Matrices whose width allows it are stored as `kind`, everything else as float32.

    `change` may change what the writer is about to write. With `part_tensors`, the file is split into parts of so many
    tensors; the first one is returned.
    """
    model = reference(variant)
    config = model.config
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    add_family(writer, arch, config)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(config.rope_parameters.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(config.rope_parameters.get("beta_slow") or 1.0)
        usual = 1.0 + 0.1 * math.log(config.rope_parameters["factor"])
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling / usual)
    if rope["rope_type"] == "llama3":
        plain = 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    names = family_of({"model_type": config.model_type}).names
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if arch.startswith("gemma") and "norm" in name:
            array = array + 1
        if arch in PERMUTED and ".q_proj." in name:
            array = permuted(array, config.num_attention_heads)
        if arch in PERMUTED and ".k_proj." in name:
            array = permuted(array, config.num_key_value_heads)
        if array.ndim == 2 and array.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            data = gguf.quants.quantize(array, kind)
            writer.add_tensor(gguf_name(name, names), data, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name, names), np.ascontiguousarray(array))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-00001-of-*"))[0] if part_tensors else path
