"""`CudaDecoder`: the generic decoder as CUDA runs it, over a state that all layers add to in place."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.backends.torch.attention import Attention
from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.cuda.fused import FusedOps, OneRowOps
from tokenmill.backends.torch.cuda.inputs import StepInputs
from tokenmill.backends.torch.cuda.kernels.islands import norm
from tokenmill.backends.torch.cuda.kernels.one_row import one_row_product
from tokenmill.backends.torch.cuda.layers import LayerOps, PlainOps
from tokenmill.backends.torch.cuda.switches import Switches
from tokenmill.backends.torch.decoder import Decoder
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.rope import rotations
from tokenmill.backends.torch.weights import DecoderWeights


class CudaDecoder(Decoder):
    """Weights and what is done with them. Shared by all backends of a model; keeps no state of its own."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, switches: Switches = Switches()) -> None:
        super().__init__(config, weights)
        self.switches = switches
        pos = torch.arange(config.max_context, device=self.device)
        cos, sin = rotations(pos, self.inv_freq, self._rope_scale)
        self._turns = cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def run(
        self,
        inputs: StepInputs,
        sampled: Tensor,
        x: Tensor,
        kv: TorchKV,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """All layers over `x`, [tokens, hidden], which becomes the state after each; keys and values go to their slots.

        Returns the last state, still to be normed: of all tokens, or of those `wanted`, for which alone the last layer
        is finished.
        """
        ops = self._ops(inputs, kv)
        ops.embed(sampled, x)
        for number, layer in enumerate(self.weights.layers):
            q = ops.store(number, layer, ops.qkv(layer, x))
            if wanted is not None and number == self.config.num_layers - 1:
                if not len(wanted):
                    return x[:0]
                attended, x = attention(number, q).flatten(1)[wanted], x[wanted]
            else:
                attended = attention(number, q).flatten(1)
            ops.add_product(layer.o, attended, x)
            ops.add_product(layer.down, ops.gated(layer, x), x)
        return x

    def _ops(self, inputs: StepInputs, kv: TorchKV) -> LayerOps:
        if not self.switches.islands:
            return PlainOps(self.config, self.weights, self._turns, kv, inputs)
        kind = OneRowOps if self._is_one_row(inputs.token) else FusedOps
        return kind(self.config, self.weights, self._turns, kv, inputs)

    def normed(self, hidden: Tensor) -> Tensor:
        if not self.switches.islands:
            return super().normed(hidden)
        return norm(hidden.contiguous(), self.weights.norm, self.config.rms_eps)

    def logits_of(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, vocab] in the weights' own type, of states that are still to be normed."""
        head, gain = self.weights.head.weight, self.weights.norm
        if self._is_one_row(hidden):
            return one_row_product(hidden, head, gain=gain, eps=self.config.rms_eps, out=out)
        return torch.mm(self.normed(hidden), head.t(), out=out)

    def _is_one_row(self, rows: Tensor) -> bool:
        return len(rows) == 1 and self.switches.islands and self.switches.one_row
