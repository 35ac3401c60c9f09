"""Models that run through transformers on a card: the module between our token table, paged KV and graphs.

`AdaptedDecoder` is to `CudaBackend` what `CudaDecoder` is: it runs all layers over a step's inputs. What it
launches depends on the step's shapes alone, unless the module's own code waits for numbers from the card: steps are
captured as graphs where that works, which `AdaptedCudaModel` finds out by trying.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from tokenmill.backends.torch.attention import Attention, Scoring
from tokenmill.backends.torch.cuda.inputs import StepInputs
from tokenmill.backends.torch.cuda.layers import Switches
from tokenmill.backends.torch.cuda.model import BaseCudaModel
from tokenmill.backends.torch.footprint import plan_sizes
from tokenmill.backends.torch.kernels.islands import store
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.model import BaseTorchModel
from tokenmill.backends.torch.transformers_adapter import (
    LoadedModule,
    TransformersDecoder,
    TransformersSpec,
    as_load_error,
    check_against_own_attention,
    open_plain,
)
from tokenmill.contract import BackendLimits
from tokenmill.contract.backend import MemoryPlan
from tokenmill.errors import ModelLoadError, UnsupportedModel

log = logging.getLogger(__name__)


class AdaptedDecoder(TransformersDecoder):
    """A module of transformers with its weights, run by `CudaBackend`."""

    is_capped = True
    """A module may cap its scores: that is known in its attention calls only."""

    def __init__(self, module: Any, spec: TransformersSpec, dtype: torch.dtype) -> None:
        super().__init__(module, spec, dtype)
        self.switches = Switches()
        fuse_norms(module)
        self._head = _head_of(module)

    def run(
        self,
        inputs: StepInputs,
        sampled: Tensor,
        x: Tensor,
        kv: TorchKV,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """All layers and the last norm over the step's tokens; `x` becomes their hidden states."""
        token = inputs.token.long()
        # A bad row's request is over, but its next token may be in flight already, and must be some valid id.
        known = torch.where(token < 0, sampled[(-1 - token).clamp(min=0)].clamp(min=0), token)
        x.copy_(self.hidden(known, inputs.pos.long(), CudaAttentionCalls(kv, inputs.slot, attention)))
        return x if wanted is None else x[wanted]

    def normed(self, hidden: Tensor) -> Tensor:
        """The module's last hidden states are normed."""
        return hidden

    def logits_of(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, vocab] in the weights' own type."""
        logits: Tensor = self._head(inputs_embeds=hidden[None]).logits[0].to(self.kv_dtype)
        return logits if out is None else out.copy_(logits)


class CudaAttentionCalls:
    """The attention calls of one forward pass, with our kernels (`transformers_adapter.AttentionCalls`)."""

    def __init__(self, kv: TorchKV, slots: Tensor, attention: Attention) -> None:
        self._kv = kv
        self._slots = slots
        self._attention = attention
        self.num_calls = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if scoring.sinks is not None:
            raise UnsupportedModel("attention sinks")
        call, dtype = self.num_calls, query.dtype
        self.num_calls += 1
        cells = self._kv.keys[call]
        store(key[0].transpose(0, 1), value[0].transpose(0, 1), self._slots, cells, self._kv.values[call])
        found = self._attention(call, query[0].transpose(0, 1).to(cells.dtype).contiguous(), scoring)
        return found.to(dtype)[None]


NORM_TOLERANCE = 2e-2
"""Of a norm in bfloat16 that rounds once, to one that rounds twice."""


@torch.inference_mode()
def fuse_norms(module: nn.Module) -> None:
    """Let plain RMS norms run as one kernel instead of six: those that give the same for a sample."""
    for norm in module.modules():
        weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not type(norm).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or eps is None:
            continue
        fused = partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)
        sample = torch.linspace(-2, 3, weight.numel(), dtype=weight.dtype, device=weight.device).view(1, -1)
        try:
            wanted = norm(sample)
        except (RuntimeError, TypeError):  # it takes more than one argument, or other shapes
            continue
        if wanted.dtype == sample.dtype and torch.allclose(fused(sample), wanted, NORM_TOLERANCE, NORM_TOLERANCE):
            norm.forward = fused


class _States(BaseModelOutputWithPast):  # type: ignore[misc]
    """Hidden states, and nothing else that a module might look for in its layers' output."""

    def __getattr__(self, name: str) -> None:
        return None


class _Passed(nn.Module):
    """In place of a module's layers: the hidden states that it is given."""

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> BaseModelOutputWithPast:
        return _States(last_hidden_state=inputs_embeds)


def _head_of(module: Any) -> Any:
    """The module without its layers: head, and whatever it does to logits. Weights are shared."""
    head = copy.copy(module)
    head._modules = {**module._modules, module.base_model_prefix: _Passed()}
    return head


class AdaptedCudaModel(BaseCudaModel):
    """A `ModelHandle` that runs through transformers on a card. Tensors are named as in its module."""

    decoder: AdaptedDecoder

    def __init__(
        self, name: str, decoder: AdaptedDecoder, path: Path | None, *, block_size: int | None, depth: int | None
    ) -> None:
        self.decoder = decoder
        names = {one: one for one in decoder.names}
        super().__init__(name, decoder, names, path, form=decoder.kv_dtype, block_size=block_size, depth=depth)
        # Saved KV is in the order of the attention calls, which need not be that of another version.
        self.info = replace(self.info, form=f"transformers {transformers.__version__} {self.info.form}")
        if not self._can_be_captured():
            log.warning("%s: steps are launched kernel by kernel, since its module cannot be captured", name)
            decoder.switches = replace(decoder.switches, graphs=False)

    def _can_be_captured(self) -> bool:
        """Capture some steps: a module whose code waits for the card cannot be a graph."""
        with self.cold_backend(BackendLimits(num_cells=self.block_size, max_seqs=1, num_running=1)) as backend:
            try:
                backend.warm_up(seconds=0.0)
            except RuntimeError as error:
                log.debug("capture failed: %s", error)
                return False
        return True

    def _plan(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        spec = self.decoder.config
        return plan_sizes(spec, self.decoder.num_bytes, self._form, limits, num_rows, 4 * spec.largest)


def open_on_card(loaded: LoadedModule, *, block_size: int | None, depth: int | None) -> BaseTorchModel:
    """A model on our attention kernels, checked against its own attention; in plain torch where they cannot run it."""
    spec = loaded.source.spec
    try:
        if any(call.key_dim != call.value_dim for call in spec.calls):
            raise UnsupportedModel("keys and values of different sizes")
        with as_load_error("its module cannot be run in parts"):
            decoder = AdaptedDecoder(loaded.module, spec, loaded.dtype)
            model = AdaptedCudaModel(loaded.name, decoder, loaded.path, block_size=block_size, depth=depth)
        check_against_own_attention(decoder, model.block_size, model.cold_backend, loaded.apart)
        return model
    except ModelLoadError as error:
        log.warning("%s: attention runs in plain torch, which is slow: %s", loaded.name, error)
        return open_plain(loaded, block_size=block_size, depth=depth)
