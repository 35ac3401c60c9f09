"""The decoder's own name of each tensor, and what Hugging Face and GGUF files call it. `{}` is the layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tokenmill.backends.families.config import DecoderConfig, LayerConfig

Shape = tuple[int, ...]

HF_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "attn_norm.{}": "model.layers.{}.input_layernorm.weight",
    "q.{}": "model.layers.{}.self_attn.q_proj.weight",
    "k.{}": "model.layers.{}.self_attn.k_proj.weight",
    "v.{}": "model.layers.{}.self_attn.v_proj.weight",
    "o.{}": "model.layers.{}.self_attn.o_proj.weight",
    "qkv.{}": "model.layers.{}.self_attn.qkv_proj.weight",
    "q_bias.{}": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias.{}": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias.{}": "model.layers.{}.self_attn.v_proj.bias",
    "o_bias.{}": "model.layers.{}.self_attn.o_proj.bias",
    "q_norm.{}": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm.{}": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm.{}": "model.layers.{}.post_attention_layernorm.weight",
    "gate.{}": "model.layers.{}.mlp.gate_proj.weight",
    "up.{}": "model.layers.{}.mlp.up_proj.weight",
    "down.{}": "model.layers.{}.mlp.down_proj.weight",
    "gate_up.{}": "model.layers.{}.mlp.gate_up_proj.weight",
    "gate_bias.{}": "model.layers.{}.mlp.gate_proj.bias",
    "up_bias.{}": "model.layers.{}.mlp.up_proj.bias",
    "down_bias.{}": "model.layers.{}.mlp.down_proj.bias",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}

SANDWICH_NAMES: Mapping[str, str] = {
    **HF_NAMES,
    "attn_post_norm.{}": "model.layers.{}.post_attention_layernorm.weight",
    "mlp_norm.{}": "model.layers.{}.pre_feedforward_layernorm.weight",
    "mlp_post_norm.{}": "model.layers.{}.post_feedforward_layernorm.weight",
}
"""Of families with norms after attention and MLP."""

GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "attn_norm.{}": "blk.{}.attn_norm.weight",
    "q.{}": "blk.{}.attn_q.weight",
    "k.{}": "blk.{}.attn_k.weight",
    "v.{}": "blk.{}.attn_v.weight",
    "o.{}": "blk.{}.attn_output.weight",
    "qkv.{}": "blk.{}.attn_qkv.weight",
    "q_bias.{}": "blk.{}.attn_q.bias",
    "k_bias.{}": "blk.{}.attn_k.bias",
    "v_bias.{}": "blk.{}.attn_v.bias",
    "o_bias.{}": "blk.{}.attn_output.bias",
    "q_norm.{}": "blk.{}.attn_q_norm.weight",
    "k_norm.{}": "blk.{}.attn_k_norm.weight",
    "mlp_norm.{}": "blk.{}.ffn_norm.weight",
    "attn_post_norm.{}": "blk.{}.post_attention_norm.weight",
    "mlp_post_norm.{}": "blk.{}.post_ffw_norm.weight",
    "gate.{}": "blk.{}.ffn_gate.weight",
    "up.{}": "blk.{}.ffn_up.weight",
    "down.{}": "blk.{}.ffn_down.weight",
    "gate_up.{}": "blk.{}.ffn_up.weight",
    "gate_bias.{}": "blk.{}.ffn_gate.bias",
    "up_bias.{}": "blk.{}.ffn_up.bias",
    "down_bias.{}": "blk.{}.ffn_down.bias",
    "norm": "output_norm.weight",
    "head": "output.weight",
}


ROPE_FREQS, ROPE_FACTORS_SHORT = "rope_freqs.weight", "rope_factors_short.weight"
"""In GGUF files, what each frequency of the rotation is divided by, the second with longrope."""
SETTINGS = (ROPE_FREQS, ROPE_FACTORS_SHORT, "rope_factors_long.weight")
"""Of GGUF files: settings in the shape of tensors."""


def shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor that a decoder of this configuration has, by its own name."""
    found = {"embed": (config.vocab_size, config.hidden_size), "norm": (config.hidden_size,)}
    if not config.tied:
        found["head"] = (config.vocab_size, config.hidden_size)
    for number, layer in enumerate(config.layers):
        found.update({f"{name}.{number}": shape for name, shape in _of_a_layer(config, layer)})
    return found


def num_values(config: DecoderConfig) -> int:
    """How many numbers the weights of a decoder are."""
    return sum(math.prod(shape) for shape in shapes(config).values())


def num_norm_values(config: DecoderConfig) -> int:
    """How many of them are weights of norms."""
    return sum(math.prod(shape) for own, shape in shapes(config).items() if is_norm(own))


def in_file(own: str, names: Mapping[str, str]) -> str:
    """What a file calls one of the decoder's tensors."""
    kind, _, layer = own.partition(".")
    return names[f"{kind}.{{}}" if layer else kind].format(layer)


def is_norm(own: str) -> bool:
    """Whether one of the decoder's tensors is the weight of a norm."""
    return own.partition(".")[0].endswith("norm")


def _of_a_layer(config: DecoderConfig, layer: LayerConfig) -> Iterator[tuple[str, Shape]]:
    hidden, query, kv, inner = config.hidden_size, config.query_size, config.kv_size, config.intermediate_size
    if layer.norm_before:
        yield from [("attn_norm", (hidden,)), ("mlp_norm", (hidden,))]
    if layer.norm_after:
        yield from [("attn_post_norm", (hidden,)), ("mlp_post_norm", (hidden,))]
    if layer.fused:
        yield from [("qkv", (query + 2 * kv, hidden)), ("gate_up", (2 * inner, hidden))]
    else:
        yield from [("q", (query, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden))]
        yield from [("gate", (inner, hidden)), ("up", (inner, hidden))]
    yield from [("o", (hidden, query)), ("down", (hidden, inner))]
    if layer.qkv_bias:
        yield from [("q_bias", (query,)), ("k_bias", (kv,)), ("v_bias", (kv,))]
    if layer.output_bias:
        yield "o_bias", (hidden,)
    if layer.qk_norm == "head":
        yield from [("q_norm", (config.head_dim,)), ("k_norm", (config.head_dim,))]
    if layer.qk_norm == "projection":
        yield from [("q_norm", (query,)), ("k_norm", (kv,))]
    if layer.mlp_bias:
        yield from [("gate_bias", (inner,)), ("up_bias", (inner,)), ("down_bias", (hidden,))]
