"""The decoder's own name of each tensor, and what Hugging Face and GGUF files call it. `{}` is the layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tokenmill.backends.torch.config import DecoderConfig

Shape = tuple[int, ...]

HF_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "attn_norm.{}": "model.layers.{}.input_layernorm.weight",
    "q.{}": "model.layers.{}.self_attn.q_proj.weight",
    "k.{}": "model.layers.{}.self_attn.k_proj.weight",
    "v.{}": "model.layers.{}.self_attn.v_proj.weight",
    "o.{}": "model.layers.{}.self_attn.o_proj.weight",
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
    "gate_bias.{}": "model.layers.{}.mlp.gate_proj.bias",
    "up_bias.{}": "model.layers.{}.mlp.up_proj.bias",
    "down_bias.{}": "model.layers.{}.mlp.down_proj.bias",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}

GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "attn_norm.{}": "blk.{}.attn_norm.weight",
    "q.{}": "blk.{}.attn_q.weight",
    "k.{}": "blk.{}.attn_k.weight",
    "v.{}": "blk.{}.attn_v.weight",
    "o.{}": "blk.{}.attn_output.weight",
    "q_bias.{}": "blk.{}.attn_q.bias",
    "k_bias.{}": "blk.{}.attn_k.bias",
    "v_bias.{}": "blk.{}.attn_v.bias",
    "o_bias.{}": "blk.{}.attn_output.bias",
    "q_norm.{}": "blk.{}.attn_q_norm.weight",
    "k_norm.{}": "blk.{}.attn_k_norm.weight",
    "mlp_norm.{}": "blk.{}.ffn_norm.weight",
    "gate.{}": "blk.{}.ffn_gate.weight",
    "up.{}": "blk.{}.ffn_up.weight",
    "down.{}": "blk.{}.ffn_down.weight",
    "gate_bias.{}": "blk.{}.ffn_gate.bias",
    "up_bias.{}": "blk.{}.ffn_up.bias",
    "down_bias.{}": "blk.{}.ffn_down.bias",
    "norm": "output_norm.weight",
    "head": "output.weight",
}


ROPE_FREQS = "rope_freqs.weight"
"""In GGUF files, what each frequency of the rotation is divided by: a setting in the shape of a tensor."""


def shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor that a decoder of this configuration has, by its own name."""
    found = {"embed": (config.vocab_size, config.hidden_size), "norm": (config.hidden_size,)}
    if not config.tied:
        found["head"] = (config.vocab_size, config.hidden_size)
    for name, shape in _of_a_layer(config):
        found.update({f"{name}.{layer}": shape for layer in range(config.num_layers)})
    return found


def num_values(config: DecoderConfig) -> int:
    """How many numbers the weights of a decoder are."""
    return sum(math.prod(shape) for shape in shapes(config).values())


def in_file(own: str, names: Mapping[str, str]) -> str:
    """What a file calls one of the decoder's tensors."""
    kind, _, layer = own.partition(".")
    return names[f"{kind}.{{}}" if layer else kind].format(layer)


def _of_a_layer(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    hidden, query, kv, inner = config.hidden_size, config.query_size, config.kv_size, config.intermediate_size
    yield from [("attn_norm", (hidden,)), ("mlp_norm", (hidden,))]
    yield from [("q", (query, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, query))]
    yield from [("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))]
    if config.qkv_bias:
        yield from [("q_bias", (query,)), ("k_bias", (kv,)), ("v_bias", (kv,))]
    if config.output_bias:
        yield "o_bias", (hidden,)
    if config.qk_norm:
        yield from [("q_norm", (config.head_dim,)), ("k_norm", (config.head_dim,))]
    if config.mlp_bias:
        yield from [("gate_bias", (inner,)), ("up_bias", (inner,)), ("down_bias", (hidden,))]
