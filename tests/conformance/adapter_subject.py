"""The transformers adapter as a subject: the decoder of `torch_subject.py`, as a module of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conformance.subjects import Subject
from tests.conformance.torch_subject import (
    DIM,
    EPS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TOLERANCE,
    Faults,
    hidden_oracle,
    make_backend,
    make_decoder,
    oracle,
)  # fmt: skip
from tokenmill.backends.fake import FakeConfig
from tokenmill.backends.families.names import HF_NAMES, in_file
from tokenmill.backends.torch.transformers_adapter import (
    AttentionCall,
    TransformersBackend,
    TransformersDecoder,
    TransformersSpec,
)


@cache
def adapted(vocab_size: int, max_context: int, windows: tuple[int | None, ...]) -> TransformersDecoder:
    """Llama has no windows in transformers: they are given to the adapter as a probe would have found them."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=12, num_hidden_layers=len(windows),
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, max_position_embeddings=max_context,
        rms_norm_eps=EPS, rope_parameters={"rope_type": "default", "rope_theta": 100.0}, pad_token_id=None,
    )  # fmt: skip
    module = LlamaForCausalLM(config).float().eval()
    views = make_decoder(vocab_size, max_context, windows).weights.views
    module.load_state_dict({in_file(own, HF_NAMES): view for own, view in views.items()})
    spec = TransformersSpec(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=12,
        max_context=max_context,
        calls=tuple(AttentionCall(HEADS, KV_HEADS, DIM, DIM, window) for window in windows),
        num_values=0,
        largest=0,
    )
    return TransformersDecoder(module.requires_grad_(False), spec, torch.float32)


class FaultyTransformersBackend(Faults, TransformersBackend):  # type: ignore[misc]
    """A backend of the adapter that can be told to fail."""


def make_adapted(config: FakeConfig) -> Faults:
    decoder = adapted(config.vocab_size, config.max_context, config.windows)
    return make_backend(FaultyTransformersBackend, decoder, unshifted(config))  # type: ignore[arg-type]


def unshifted(config: FakeConfig) -> FakeConfig:
    """Keys arrive rotated in the model's own way."""
    return replace(config, shift=False)


TRANSFORMERS = Subject(
    "transformers",
    make_adapted,
    oracle,
    hidden_oracle,
    TOLERANCE,
    can_fail=True,
    can_shift=False,
    adapt=unshifted,
    num_seeds=8,
)
