"""The models that `tokenmill.bench.gpu` measures: sizes of real ones, with random weights made on the card."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.cuda.decoder import CudaDecoder
from tokenmill.backends.torch.cuda.model import CudaModel
from tokenmill.backends.torch.cuda.switches import Switches
from tokenmill.backends.torch.families.names import HF_NAMES
from tokenmill.backends.torch.rope import Rope
from tokenmill.backends.torch.weights import DecoderWeights

CONTEXT = 4096
NUM_LAYERS = 28
SPREAD = 0.02
"""Standard deviation of the weights."""

SHAPES: Mapping[str, DecoderConfig] = {
    "qwen2.5-7b": DecoderConfig(
        family="qwen2", vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_heads=28, num_kv_heads=4,
        head_dim=128, max_context=CONTEXT, rms_eps=1e-6, rope=Rope(dim=128, theta=1e6), windows=(None,) * NUM_LAYERS,
        qkv_bias=True,
    ),
    "qwen3-0.6b": DecoderConfig(
        family="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8,
        head_dim=128, max_context=CONTEXT, rms_eps=1e-6, rope=Rope(dim=128, theta=1e6), windows=(None,) * NUM_LAYERS,
        qk_norm=True, tied=True,
    ),
}  # fmt: skip


@torch.inference_mode()
def random_model(name: str, switches: Switches, kv_dtype: torch.dtype | None = None) -> CudaModel:
    """A model of one of the shapes. The same weights each time."""
    config = SHAPES[name]
    weights = DecoderWeights(config, torch.bfloat16, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    for own, view in weights.views.items():
        if "norm" in own:
            view.fill_(1.0)
        else:
            view.normal_(0.0, SPREAD, generator=generator)
    return CudaModel(name, CudaDecoder(config, weights, switches), HF_NAMES, kv_dtype=kv_dtype)
