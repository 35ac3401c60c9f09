"""Every decoder of transformers behind the contract: its module runs the flat batch, attention runs on our paged KV.

transformers calls a registered function for attention (`AttentionInterface`) and passes the attention mask through to
it. Our mask is a `StepMask`: a tensor in name only, which carries the step's KV. So one forward pass over `[1, tokens]`
computes the tokens of any number of sequences, and nothing outside attention may mix them.

Opening a model has four stages, each of which may refuse it by name:

1. `read_spec`: the module is built on the meta device and run once, to learn which attention calls it makes, with which
   heads and windows. A window is taken from the mask that the model asks for, since not every model passes it on.
2. Files and module are compared before memory is allocated for the weights.
3. transformers loads the safetensors files: names and layouts of a checkpoint are not always those of the module.
4. `check_against_own_attention`: two sequences in one flat batch must give what each gives alone, computed with the
   model's own attention. State beside the KV (recurrent layers, convolutions) and unknown kinds of attention show here.

Everything here needs the extra `transformers`; `loader.py` imports the module only then.
"""

from __future__ import annotations

import inspect
import logging
import math
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AttentionMaskInterface

from tokenmill.backends.checkpoints import SafetensorsSource, some_names
from tokenmill.backends.families.config import MOST_CONTEXT, MOST_LAYERS, kv_bytes
from tokenmill.backends.torch.attention import GatherAttention, Scoring
from tokenmill.backends.torch.backend import EagerBackend, TorchStep, Ubatch
from tokenmill.backends.torch.footprint import free_bytes, plan_sizes
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.model import BaseTorchModel
from tokenmill.backends.torch.weights import all_finite, overwrite
from tokenmill.contract import Backend, BackendLimits, Batch, IntArray, LayerKV, Output
from tokenmill.contract.backend import MemoryPlan
from tokenmill.errors import ModelLoadError, UnsupportedModel
from tokenmill.files import has_tokenizer, model_name
from tokenmill.kv.paged import PagedKV, Segment
from tokenmill.kv.paged_backend import BLOCK_SIZE, WeightsGate

log = logging.getLogger(__name__)

ATTENTION = "tokenmill"
"""Our attention's name in transformers' registry."""
PROBE = "tokenmill_probe"
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers (`layer_types` in config.json) whose only state is KV."""
MOST_EXPERTS = 1 << 16


# -- attention, as transformers calls it ------------------------------------------------------------------------------


class StepMask(Tensor):
    """An attention mask that carries the step's KV to our attention function; its values are never read.

    transformers passes a mask of four dimensions through as it is, in every model; not every model passes on keyword
    arguments.
    """

    step: AttentionCalls

    @classmethod
    def over(cls, num_tokens: int, step: AttentionCalls, device: torch.device) -> StepMask:
        mask = torch.zeros(1, device=device).expand(1, 1, num_tokens, num_tokens).as_subclass(cls)
        mask.step = step
        return mask


class AttentionCalls(Protocol):
    """The attention calls of one forward pass, in the order in which the model makes them.

    KV belongs to the call, not to the layer: some models attend twice in a layer, or run a layer several times.
    """

    num_calls: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """[1, heads, tokens, dim] each, as the model computed them, to [1, tokens, heads, value dim]."""
        ...


class GatheringCalls:
    """`AttentionCalls` in plain torch."""

    def __init__(self, kv: TorchKV, slots: Tensor, attention: GatherAttention) -> None:
        self._kv = kv
        self._slots = slots
        self._attention = attention
        self.num_calls = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        call, dtype = self.num_calls, query.dtype
        self.num_calls += 1
        self._kv.store(call, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        found = self._attention(call, query[0].transpose(0, 1).to(self._kv.keys[call].dtype), scoring)
        return found.to(dtype)[None]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers. Windows are known by then, causality is the KV's."""
    if not isinstance(attention_mask, StepMask) or not hasattr(attention_mask, "step"):
        raise UnsupportedModel(f"{type(module).__name__} changes the attention mask on its way to attention")
    return attention_mask.step.attend(query, key, value, Scoring(scaling, softcap, s_aux)), None


# -- what a model is, from its config.json ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function in a forward pass."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True)
class TransformersSpec:
    """Sizes of a model of transformers: what the backend and the memory plan need (`DecoderSizes`)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_context: int
    calls: tuple[AttentionCall, ...]
    num_values: int
    """Of all parameters."""
    largest: int
    """Values of the largest parameter."""

    @property
    def query_size(self) -> int:
        return max(call.num_heads * max(call.key_dim, call.value_dim) for call in self.calls)

    @property
    def kv_size(self) -> int:
        return max(call.num_kv_heads * max(call.key_dim, call.value_dim) for call in self.calls)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(call.window for call in self.calls)

    def layer_kv(self, dtype_bytes: int) -> tuple[LayerKV, ...]:
        return tuple(
            LayerKV(
                "full" if call.window is None else "window",
                call.window,
                num_heads=call.num_kv_heads,
                key_dim=call.key_dim,
                value_dim=call.value_dim,
                dtype_bytes=dtype_bytes,
            )
            for call in self.calls
        )


class ProbeMask(Tensor):
    """A mask that records the attention calls of a probe: of two dimensions as it goes in, of four once a model has
    asked for a mask of a kind.
    """

    calls: list[AttentionCall]
    window: int | None

    @classmethod
    def of(cls, shape: Sequence[int], calls: list[AttentionCall], window: int | None) -> Self:
        mask = torch.ones(shape, dtype=torch.bool, device="meta").as_subclass(cls)
        mask.calls, mask.window = calls, window
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A mask in another shape or of another type is still the probe's."""
        found = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        origin = args[0] if args else None
        if isinstance(found, ProbeMask) and isinstance(origin, ProbeMask) and not hasattr(found, "calls"):
            found.calls, found.window = origin.calls, origin.window
        return found


class ProbePositions(Tensor):
    """Positions without values whose maximum is known: rope types that depend on it look before they compute."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.max, Tensor.max) and len(args) == 1 and not kwargs:
            return torch.tensor(0, device="cpu")
        with torch._C.DisableTorchFunctionSubclass():  # what is computed from them are tensors like any other
            return func(*args, **(kwargs or {}))


def _probe_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, local_size: int | None = None,
    config: Any = None, **_: Any,
) -> Tensor | None:  # fmt: skip
    """A mask function of transformers: called once for each kind of mask that a model has."""
    if not isinstance(attention_mask, ProbeMask):
        raise UnsupportedModel("the model changes the attention mask before it makes masks of it")
    # Chunked attention is causal attention up to the chunk's length, and `_max_context` stops there.
    is_chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    window = None if is_chunked else local_size
    return ProbeMask.of((batch_size, 1, q_length, kv_length), attention_mask.calls, window)


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    *, sliding_window: int | None = None, position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers that attends to nothing and records its shapes."""
    if not isinstance(attention_mask, ProbeMask) or not hasattr(attention_mask, "calls"):
        raise UnsupportedModel(f"{type(module).__name__} changes the attention mask on its way to attention")
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} has position biases in its attention")
    window = attention_mask.window if attention_mask.ndim == 4 else sliding_window
    attention_mask.calls.append(
        AttentionCall(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], window),
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


@dataclass(frozen=True)
class ModelSource:
    """What was read of a model's directory before its weights."""

    folder: Path
    config: Any
    """A `PreTrainedConfig`."""
    kind: Any
    """The class of the model."""
    spec: TransformersSpec
    has_weights: bool
    """False: its weights are to be random."""


def read_source(folder: Path, config: Mapping[str, Any], *, has_weights: bool = True) -> ModelSource:
    """A directory's model as transformers has it, or a `ModelLoadError`. Nothing is allocated for its weights.

    Without `has_weights`, the configuration alone is looked at.
    """
    shapes = SafetensorsSource(folder).shapes() if has_weights else None
    parsed, kind = _parse(folder, config, most_layers=MOST_LAYERS if shapes is None else len(shapes))
    spec = read_spec(model_name(folder), parsed, kind)
    held = spec.num_values if shapes is None else sum(map(math.prod, shapes.values()))
    if spec.num_values > held:
        raise ModelLoadError(
            f"{folder}: config.json describes {spec.num_values:,} parameters, but the files hold {held:,}"
        )
    return ModelSource(folder, parsed, kind, spec, has_weights)


def _parse(folder: Path, config: Mapping[str, Any], most_layers: int) -> tuple[Any, Any]:
    """The configuration, and the class of the model."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        code = f"{folder} requires custom code (auto_map in config.json), which is not supported: "
        raise UnsupportedModel(
            f"{code if 'auto_map' in config else ''}model_type {reprlib.repr(family)} is not supported by our "
            f"families, nor by transformers {transformers.__version__}"
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[family], None)
    if kind is None:
        raise UnsupportedModel(f"model_type {family!r} is not a decoder in transformers {transformers.__version__}")
    if getattr(kind, "_is_stateful", False):
        raise _unsupported_layers(family, "recurrent")
    with quiet(), as_load_error(f"{folder}: config.json is not valid for {family}"):
        parsed = CONFIG_MAPPING[family].from_dict(dict(config))
    text = parsed.get_text_config()
    others = set(map(str, getattr(text, "layer_types", None) or ())) - ATTENTION_LAYERS
    if others:
        raise _unsupported_layers(family, ", ".join(sorted(others)))
    _check_count(text, "num_hidden_layers", most_layers, "the files have that many tensors")
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        _check_count(text, name, MOST_EXPERTS, "no model has more")
    return parsed, kind


def _unsupported_layers(family: str, kinds: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model_type {family!r} has layers of a kind that is not supported ({kinds}); supported: "
        f"{', '.join(sorted(ATTENTION_LAYERS))}. A GGUF file of the model may run on llama.cpp"
    )


def _check_count(config: Any, name: str, most: int, why: str) -> None:
    count = getattr(config, name, None)
    if isinstance(count, int) and count > most:
        raise ModelLoadError(f"config.json: {name} must be at most {most} ({why}), not {count}")


def read_spec(name: str, config: Any, kind: Any) -> TransformersSpec:
    """Run the module once on the meta device, and record its attention calls."""
    family, text, calls = config.model_type, config.get_text_config(), list[AttentionCall]()
    with quiet(), torch.device("meta"), as_load_error(f"{name}: transformers' {kind.__name__} cannot be built"):
        model = kind(config).to(torch.bfloat16).eval()
        tokens = torch.zeros(1, 2, dtype=torch.int64)
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(f"model_type {family!r} does not use transformers' attention interface")
    AttentionInterface.register(PROBE, _probe_attention)
    AttentionMaskInterface.register(PROBE, _probe_mask)
    model.set_attn_implementation(PROBE)
    failed = f"model_type {family!r} cannot be run without its weights, to learn which attention it has"
    with torch.inference_mode(), torch.device("meta"), as_load_error(failed):
        mask, positions = ProbeMask.of((1, 2), calls, None), torch.zeros_like(tokens).as_subclass(ProbePositions)
        logits = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    if not calls:
        raise UnsupportedModel(f"model_type {family!r} does not use transformers' attention interface")
    sizes = [parameter.numel() for parameter in model.parameters()]
    widths = ("intermediate_size", "moe_intermediate_size", "hidden_size")
    return TransformersSpec(
        family=family,
        vocab_size=logits.shape[-1],
        hidden_size=text.hidden_size,
        intermediate_size=max(width for one in widths if isinstance(width := getattr(text, one, 0), int)),
        max_context=_max_context(name, text),
        calls=tuple(calls),
        num_values=sum(sizes),
        largest=max(sizes),
    )


def _max_context(name: str, config: Any) -> int:
    """As many positions as are computed alike in every batch.

    Frequencies of dynamic rope types change once any sequence of a batch is longer than the original context, and
    chunked attention is causal attention up to the first chunk's end.
    """
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or not 2 <= most <= MOST_CONTEXT:
        raise ModelLoadError(f"config.json: max_position_embeddings must be from 2 to {MOST_CONTEXT}, not {most!r}")
    limits = {"the model's context": most}
    for rope in _rope_settings(config):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limits[f"its {rope['rope_type']} frequencies"] = original if isinstance(original, int) else most
    chunk = getattr(config, "attention_chunk_size", None)
    if isinstance(chunk, int):
        limits["its attention chunks"] = chunk
    why, least = min(limits.items(), key=lambda item: item[1])
    if least < most:
        log.warning("%s: the context is limited to %d of %d tokens by %s", name, least, most, why)
    return least


def _rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """One object, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    yield found
    yield from (one for one in found.values() if isinstance(one, dict))


# -- a loaded model ---------------------------------------------------------------------------------------------------


class TransformersDecoder:
    """A module of transformers with its weights. Shared by all backends of a model."""

    inv_freq = torch.empty(0)
    """Keys arrive rotated, in one of many ways: they can't be shifted."""

    def __init__(self, module: Any, spec: TransformersSpec, dtype: torch.dtype) -> None:
        self.config = spec
        self.kv_dtype = dtype
        self._module = module
        self._parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self._slices_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        # A forward pass of transformers may change its module's configuration for as long as it runs.
        self._lock = threading.Lock()
        AttentionInterface.register(ATTENTION, paged_attention)
        module.set_attn_implementation(ATTENTION)

    @property
    def device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    @property
    def about(self) -> str:
        """How the weights are held, for people."""
        kind, dtype = type(self._module).__name__, str(self.kv_dtype).removeprefix("torch.")
        return f"transformers' {kind}, weights in {dtype} on {self.device}"

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self._parameters.values())

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def replace(self, own: str, value: Tensor) -> None:
        """New values for one tensor, in place."""
        overwrite(self._parameters[own].data, value)

    def logits(self, token: Tensor, pos: Tensor, step: AttentionCalls, rows: Tensor) -> Tensor:
        """[rows, vocab] in float32: run all tokens, and the head on some of them."""
        keep: dict[str, Any] = {"logits_to_keep": rows} if self._slices_logits else {}
        logits: Tensor = self._run(self._module, token, pos, step, **keep).logits[0]
        return (logits if self._slices_logits else logits[rows]).float()

    def hidden(self, token: Tensor, pos: Tensor, step: AttentionCalls) -> Tensor:
        """[tokens, hidden]: run all tokens up to the head."""
        hidden: Tensor = self._run(self._module.base_model, token, pos, step).last_hidden_state[0]
        return hidden

    def _run(self, module: Any, token: Tensor, pos: Tensor, step: AttentionCalls, **more: Any) -> Any:
        mask = StepMask.over(len(token), step, token.device)
        with self._lock:
            found = module(input_ids=token[None], position_ids=pos[None], attention_mask=mask, use_cache=False, **more)
        if step.num_calls != len(self.config.calls):
            raise RuntimeError(f"{step.num_calls} attention calls, not {len(self.config.calls)}")
        return found


class TransformersBackend(EagerBackend[TransformersDecoder]):
    """One KV memory over a module of transformers, on the CPU or on a card."""

    def __init__(
        self,
        decoder: TransformersDecoder,
        kv: PagedKV,
        storage: TorchKV,
        gate: WeightsGate,
        *,
        ubatch_size: int,
        num_threads: int,
    ) -> None:
        super().__init__(decoder, kv, storage, gate, ubatch_size=ubatch_size, num_threads=num_threads)
        # What a token does not see is masked, which only helps if it is a number; a module hides what it computes.
        storage.holds_bad_numbers = True

    def _compute(self, step: TorchStep, batch: Batch, segment: Segment, slots: IntArray, ubatch: Ubatch) -> None:
        token, pos = batch.token[ubatch.tokens], batch.pos[ubatch.tokens]
        lead, slot = segment.token_lead[ubatch.inside], slots[ubatch.inside]
        output = batch.output[ubatch.tokens]
        attention = GatherAttention(self._storage, self._kv.tables, lead, pos, self._decoder.config.windows)
        tokens, positions, new = self._tokens(token), self._to_device(pos), self._to_device(slot)
        rows, hidden_rows = (np.flatnonzero(output & np.uint8(flag)) for flag in (Output.LOGITS, Output.HIDDEN))
        # Hidden states are for embeddings: a batch that wants logits as well is run twice.
        if len(hidden_rows):
            hidden = self._decoder.hidden(tokens, positions, GatheringCalls(self._storage, new, attention))
            step.hidden_parts.append(hidden[self._to_device(hidden_rows)].float())
        if len(rows) or not len(hidden_rows):
            attending = GatheringCalls(self._storage, new, attention)
            logits = self._decoder.logits(tokens, positions, attending, self._to_device(rows))
            if len(rows):
                step.logits_parts.append(logits)

    def _is_lost(self, error: Exception) -> bool:
        """After a failed kernel a CUDA context is lost; running out of memory leaves it as it was."""
        return self._device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError)


class TransformersModel(BaseTorchModel):
    """A `ModelHandle` that runs through transformers. Tensors are named as in its module."""

    def __init__(
        self, name: str, decoder: TransformersDecoder, path: Path | None, *, block_size: int | None, depth: int | None
    ) -> None:
        self.decoder = decoder
        names = {one: one for one in decoder.names}
        super().__init__(name, decoder, names, path, form=decoder.kv_dtype, block_size=block_size, depth=depth)
        # Saved KV is in the order of the attention calls, which need not be that of another version.
        self.info = replace(self.info, form=f"transformers {transformers.__version__} {self.info.form}")

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        spec = self.decoder.config
        return plan_sizes(spec, self.decoder.num_bytes, self._form, limits, num_rows, 4 * spec.largest)

    def new_backend(self, limits: BackendLimits) -> TransformersBackend:
        kv, storage = self._new_memory(limits)
        return TransformersBackend(
            self.decoder,
            kv,
            storage,
            self._gate,
            ubatch_size=limits.ubatch_size,
            num_threads=limits.num_threads or self._num_threads,
        )


class TransformersDescription:
    """What is known of a model before it is loaded (a `ModelDescription`)."""

    block_size = BLOCK_SIZE

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = source.spec, dtype, device

    @property
    def form(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def max_context(self) -> int:
        return self._spec.max_context

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes(self._spec, self._dtype.itemsize)

    @property
    def free_bytes(self) -> int:
        return free_bytes(self._device)

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        weights = self._spec.num_values * self._dtype.itemsize
        return plan_sizes(self._spec, weights, self._dtype, limits, num_rows, 4 * self._spec.largest)


@dataclass(frozen=True)
class LoadedModule:
    """A module with its weights, not changed in any way yet."""

    source: ModelSource
    module: Any
    dtype: torch.dtype
    apart: Sequence[Tensor]
    """[tokens, vocab] of each of `PROMPTS`, computed alone and with the model's own attention."""

    @property
    def name(self) -> str:
        return model_name(self.source.folder)

    @property
    def path(self) -> Path | None:
        folder = self.source.folder
        return folder if self.source.has_weights or has_tokenizer(folder) else None


def load_module(source: ModelSource, dtype: torch.dtype, device: torch.device) -> LoadedModule:
    module = (_with_weights if source.has_weights else _with_random_weights)(source, dtype).to(device)
    return LoadedModule(source, module, dtype, _own_logits(module, PROMPTS))


def open_plain(loaded: LoadedModule, *, block_size: int | None, depth: int | None) -> TransformersModel:
    """A model whose attention is plain torch, checked against its own attention."""
    decoder = TransformersDecoder(loaded.module, loaded.source.spec, loaded.dtype)
    model = TransformersModel(loaded.name, decoder, loaded.path, block_size=block_size, depth=depth)
    check_against_own_attention(decoder, model.block_size, model.new_backend, loaded.apart)
    return model


def _with_weights(source: ModelSource, dtype: torch.dtype) -> Any:
    folder = source.folder
    with quiet(), as_load_error(f"{folder}: transformers cannot load it"):
        module, report = source.kind.from_pretrained(
            folder,
            config=source.config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    for keys, wrong in (("missing_keys", "missing"), ("unexpected_keys", "not expected")):
        if report[keys]:
            raise ModelLoadError(f"{folder}: {some_names(list(report[keys]))} {wrong}")
    for name, parameter in module.named_parameters():
        if not all_finite(parameter):
            raise ModelLoadError(f"{folder}: {name} has non-finite values as {parameter.dtype}")
    return module.eval().requires_grad_(False)


def _with_random_weights(source: ModelSource, dtype: torch.dtype) -> Any:
    with quiet(), as_load_error(f"{source.folder}: transformers cannot build it"):
        module = source.kind._from_config(source.config, dtype=dtype, attn_implementation="eager")
    return module.eval().requires_grad_(False)


# -- the check at opening ---------------------------------------------------------------------------------------------

PROMPTS = ((1, 5, 2, 7, 3, 8, 4), (6, 2, 9, 1, 5, 3, 3, 8, 7, 4, 2))
"""Token ids that every vocabulary has; of different lengths, so that positions differ in a flat batch."""
LARGEST_ERROR = 1e-3
"""Of a token's logits computed together, to those computed apart: root mean square over their standard deviation."""
LARGEST_ERROR_16_BITS = 0.1
"""The same for the median of a sequence's tokens: rounded otherwise, some may be routed to other experts."""


@torch.inference_mode()
def _own_logits(module: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocab] of each prompt, computed alone and with the model's own attention."""
    tokens = [torch.tensor([prompt], device=module.device) for prompt in prompts]
    return [module(input_ids=one, use_cache=False).logits[0].float().cpu() for one in tokens]


def check_against_own_attention(
    decoder: TransformersDecoder,
    block_size: int,
    new_backend: Callable[[BackendLimits], Backend],
    apart: Sequence[Tensor],
) -> None:
    """Raise `UnsupportedModel` unless two sequences in one flat batch give what each gives alone."""
    num_tokens = sum(map(len, PROMPTS))
    limits = BackendLimits(num_cells=len(PROMPTS) * (num_tokens + block_size), max_seqs=len(PROMPTS))
    seq = np.repeat(np.arange(len(PROMPTS)), [len(prompt) for prompt in PROMPTS]).astype(np.int32)
    batch = Batch(
        token=np.concatenate([np.array(prompt, dtype=np.int32) for prompt in PROMPTS]),
        pos=np.concatenate([np.arange(len(prompt), dtype=np.int32) for prompt in PROMPTS]),
        seq_ids=seq[:, None],
        output=np.full(num_tokens, Output.LOGITS, dtype=np.uint8),
    )
    family = decoder.config.family
    failed = f"model_type {family!r} cannot compute a flat batch of two sequences"
    with as_load_error(failed), new_backend(limits) as backend:
        together = torch.from_numpy(backend.decode(batch).logits)
    found = torch.split(together, [len(prompt) for prompt in PROMPTS])
    errors = [_token_errors(ours, wanted) for ours, wanted in zip(found, apart, strict=True)]
    is_exact = decoder.kv_dtype is torch.float32
    error = max(float(one.max() if is_exact else one.median()) for one in errors)
    allowed = LARGEST_ERROR if is_exact else LARGEST_ERROR_16_BITS
    if not error <= allowed:  # NaN is not, either
        raise UnsupportedModel(
            f"model_type {family!r} gives other logits in a flat batch of two sequences than for each alone "
            f"(relative error {error:.2g}, at most {allowed:g}): it keeps state beside the KV, or its attention is of "
            "a kind that is not supported"
        )


def _token_errors(ours: Tensor, wanted: Tensor) -> Tensor:
    """Of each token, relative; NaN where a logit is none, which is larger than any number to `max` and `median`."""
    return (ours - wanted).square().mean(dim=1).sqrt() / wanted.std()


# -- transformers' manners --------------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """No reports and progress bars of transformers: what matters of them is in our errors."""
    logging_of = transformers.utils.logging
    verbosity, shows_progress = logging_of.get_verbosity(), logging_of.is_progress_bar_enabled()
    logging_of.set_verbosity(logging_of.CRITICAL)
    logging_of.disable_progress_bar()
    try:
        yield
    finally:
        logging_of.set_verbosity(verbosity)
        if shows_progress:
            logging_of.enable_progress_bar()


@contextmanager
def as_load_error(what: str) -> Iterator[None]:
    """Whatever transformers raises over a bad checkpoint, as one line."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"{what}: {reason}") from error
