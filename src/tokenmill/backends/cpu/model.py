"""`CPUModel`: a quantized model on the C library, its weights once for any number of backends; and how it is opened."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.backends.checkpoints import Checkpoint, check_tensors, open_checkpoint
from tokenmill.backends.cpu.backend import CPUKV, KV_DTYPES, CPUBackend, CPUDecoder, layer_kv
from tokenmill.backends.cpu.bindings import INT4, INT8, KINDS, library
from tokenmill.backends.cpu.packing import (
    Native,
    NativeWeights,
    can_hold,
    held_as,
    matrices,
    num_groups,
    packed_bytes,
)
from tokenmill.backends.families.config import DecoderConfig, memory_plan
from tokenmill.backends.families.names import in_file, num_values, shapes
from tokenmill.backends.families.rope import check_rope
from tokenmill.contract import BackendLimits, Capabilities, ModelInfo, StepSizes
from tokenmill.contract.backend import KV_SHARE, LoadOptions, MemoryPlan, free_host_bytes, num_processors
from tokenmill.errors import ConfigError, InvalidOperation, ModelLoadError
from tokenmill.files import has_tokenizer, model_name
from tokenmill.kv.paged import PagedKV
from tokenmill.kv.paged_backend import BLOCK_SIZE, WeightsGate, check_extras
from tokenmill.progress import ProgressLine

log = logging.getLogger(__name__)

FORMS = {"auto": None, "int8": INT8, "int4": INT4}
"""`auto`: as the file has them; 8 bits where it has floats."""
GIB = 1 << 30
STORED_BYTES, ROUNDED_BYTES = 2, 7
"""For each value while a matrix is loaded: of one that is held as its file has it, and of one that is rounded. That one
is there as float32, as rounded numbers in parts and in one piece, and with its scales."""


class CPUModel:
    """A `ModelHandle` over paged KV. `names` are what the model's files call its tensors."""

    step_sizes = StepSizes(max_step_ms=500.0, speculation="auto")

    def __init__(
        self,
        name: str,
        decoder: CPUDecoder,
        names: Mapping[str, str],
        path: Path | None = None,
        *,
        form: Native,
        loading_bytes: int,
        kv_dtype: np.dtype[Any] = KV_DTYPES["auto"],
        deterministic: bool = False,
        block_size: int | None = None,
        depth: int | None = None,
    ) -> None:
        self.path = path
        self.decoder = decoder
        config = decoder.config
        self.info = ModelInfo(
            name,
            config.vocab_size,
            config.hidden_size,
            config.max_context,
            layer_kv(config, kv_dtype),
            form=f"cpu {form} {kv_dtype}",
            deterministic=True,
        )
        self._kv_dtype = kv_dtype
        self.block_size = BLOCK_SIZE if block_size is None else block_size
        self._loading_bytes = loading_bytes
        self._own_names = {in_file(own, names): own for own in decoder.weights.names}
        self._gate = WeightsGate()
        self._deterministic = deterministic  # a row of the kernels' results depends on nothing but itself, always
        self._depth = depth or 0
        self._num_threads = _num_threads()

    @property
    def weights_version(self) -> int:
        return self._gate.version

    @property
    def kv_budget_bytes(self) -> int:
        return int(KV_SHARE * self.free_bytes)

    @property
    def free_bytes(self) -> int:
        return free_host_bytes()

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        weights, kv = self.decoder.weights.num_bytes, self.info.kv_bytes_per_token
        return _plan(self.decoder.config, weights, self._loading_bytes, kv, limits, num_rows)

    def new_backend(self, limits: BackendLimits) -> CPUBackend:
        num_blocks = max(1, -(-limits.num_cells // self.block_size))
        inv_freq = self.decoder.inv_freq
        storage = CPUKV(self.decoder.lib, self.info.layers, num_blocks, self.block_size, inv_freq, self._kv_dtype)
        capabilities = Capabilities(
            state_bytes=True,
            shift=inv_freq.size > 0,
            max_seqs=limits.max_seqs,
            depth=self._depth,
            deterministic=self._deterministic,
        )
        return CPUBackend(
            self.decoder,
            PagedKV(num_blocks * self.block_size, self.info.max_context, self.block_size, capabilities, storage),
            storage,
            self._gate,
            ubatch_size=limits.ubatch_size,
            num_threads=limits.num_threads or self._num_threads,
        )

    def replace_weight(self, name: str, value: Any) -> None:
        """New values for one tensor, under its name in the model's files. Waits for running steps.

        All KV of the old weights is invalid from then on: engines drop it and replay their requests.
        """
        own = self._own_names.get(name)
        if own is None:
            raise InvalidOperation(f"the model has no tensor {name!r}")
        try:
            if hasattr(value, "detach"):  # a tensor of torch, maybe of a type that numpy lacks
                value = value.detach().cpu()
                value = value.float().numpy() if value.is_floating_point() else value.numpy()
            values = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidOperation(f"the new value of {name} is not a tensor: {error}") from None
        with self._gate.replacing():
            self.decoder.weights.replace(own, values)

    def close(self) -> None:
        """Weights go when the last one who uses them does."""


def _num_threads() -> int:
    """What `OMP_NUM_THREADS` says, which other libraries go by, too; else all processors of this process."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else num_processors()


def why_not(checkpoint: Checkpoint) -> str | None:
    """Why a model does not run on the kernels; None: it does."""
    if library() is None:
        return "the CPU kernels are not built"
    return None if can_hold(checkpoint.config) else "the CPU kernels do not support the shapes of this model"


def open_path(path: Path, options: LoadOptions, found: Checkpoint | None = None) -> CPUModel:
    """Load the model in a directory or GGUF file; `found`: its files, if they have been opened before."""
    checkpoint, form, kv_dtype = _open(path, options, found)
    extra = options.extra
    decoder = _load(path, checkpoint, form)
    model = CPUModel(
        model_name(path),
        decoder,
        checkpoint.names,
        path if options.load_format != "dummy" or has_tokenizer(path) else None,
        form=form,
        loading_bytes=_loading_bytes(checkpoint, form),
        kv_dtype=kv_dtype,
        deterministic=options.deterministic,
        block_size=extra.get("block_size"),
        depth=extra.get("depth"),
    )
    log.info("%s: %s", model.info.name, decoder.about)
    return model


class CPUDescription:
    """What is known of a model from its files' headers: what it is, and how it would be held in memory."""

    block_size = BLOCK_SIZE

    def __init__(self, checkpoint: Checkpoint, form: Native, kv_dtype: np.dtype[Any]) -> None:
        self._config, self._form, self._kv_dtype = checkpoint.config, form, kv_dtype
        self._weight_bytes, self._loading_bytes = _weight_bytes(checkpoint, form), _loading_bytes(checkpoint, form)

    @property
    def form(self) -> str:
        return "it is in its file" if self._form.kind is None else f"int{self._form.bits}"

    @property
    def max_context(self) -> int:
        return self._config.max_context

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in layer_kv(self._config, self._kv_dtype))

    @property
    def free_bytes(self) -> int:
        return free_host_bytes()

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        kv = self.kv_bytes_per_token
        return _plan(self._config, self._weight_bytes, self._loading_bytes, kv, limits, num_rows)


def describe(path: Path, options: LoadOptions) -> CPUDescription:
    """Read a model's headers. Nothing is loaded."""
    return CPUDescription(*_open(path, options))


def _open(
    path: Path, options: LoadOptions, found: Checkpoint | None = None
) -> tuple[Checkpoint, Native, np.dtype[Any]]:
    """The model's files, checked, and how its weights and its KV are to be held."""
    check_extras(options.extra)
    if options.dtype not in FORMS:
        raise ConfigError(
            f"dtype {options.dtype!r} requires the torch backend; supported by the cpu backend: {', '.join(FORMS)}"
        )
    if options.device not in ("auto", "cpu"):
        what = f"dtype {options.dtype!r}" if options.dtype != "auto" else "the cpu backend"
        raise ConfigError(f"{what} is supported on the CPU only, not on device {options.device!r}")
    asked = options.extra.get("kv_cache_dtype", "auto")
    if asked not in KV_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype {asked!r} is not supported by the cpu backend; supported: {', '.join(KV_DTYPES)}"
        )
    impl, is_dummy = options.extra.get("model_impl", "auto"), options.load_format == "dummy"
    checkpoint = found or open_checkpoint(path, impl=impl, is_dummy=is_dummy)
    if checkpoint is None:
        raise ConfigError(f"{path}: the cpu backend requires a model of our own families (docs/models.md)")
    refusal = why_not(checkpoint)
    if refusal is not None:
        raise ConfigError(f"dtype {options.dtype!r} on the CPU: {refusal}; use float32, which requires torch")
    check_tensors(checkpoint.source, checkpoint.config, checkpoint.names)
    for rope in checkpoint.config.ropes:
        check_rope(rope)
    return checkpoint, Native(FORMS[options.dtype]), KV_DTYPES[asked]


def _load(path: Path, checkpoint: Checkpoint, form: Native) -> CPUDecoder:
    config, lib = checkpoint.config, library()
    others = {checkpoint.source.dtype_of(in_file(own, checkpoint.names)) for own, shape in shapes(config).items()
              if len(shape) == 2} - KINDS.keys()  # fmt: skip
    if others and checkpoint.source.is_quantised and form.kind is None:
        log.warning("%s: matrices in %s are held in 8 bits", model_name(path), ", ".join(sorted(others)))
    try:
        with ProgressLine(f"loading {model_name(path)}", len(shapes(config))) as progress:
            weights = NativeWeights(lib, config, form.kind)
            weights.load(checkpoint.source, checkpoint.names, lambda done, _: progress.update(done))
            return CPUDecoder(lib, config, weights)
    except MemoryError as error:
        needed = num_values(config) * (form.bits or 8) / 8 / GIB
        raise ModelLoadError(
            f"{path}: the weights need {needed:.1f} GiB of memory on cpu and cannot be loaded: {error}"
        ) from error


# -- memory -----------------------------------------------------------------------------------------------------------


def _kinds(checkpoint: Checkpoint, form: Native) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Of every matrix: its type in the file, the type in which it is held, and its shape."""
    config = checkpoint.config
    asked = dict.fromkeys(["embed"] if config.tied else ["embed", "head"], None if form.kind is None else INT8)
    for i, layer in enumerate(config.layers):
        asked |= dict.fromkeys((f"{tensor}.{i}" for tensor in matrices(layer).values()), form.kind)
    sizes = shapes(config)
    for own, kind in asked.items():
        dtype = checkpoint.source.dtype_of(in_file(own, checkpoint.names))
        rows, cols = sizes[own]
        yield dtype, held_as(dtype, kind), (rows, cols)


def _weight_bytes(checkpoint: Checkpoint, form: Native) -> int:
    """Of all tensors, as they are held."""
    vectors = sum(4 * shape[0] for shape in shapes(checkpoint.config).values() if len(shape) == 1)
    return vectors + sum(packed_bytes(rows, cols, kind) for _, kind, (rows, cols) in _kinds(checkpoint, form))


def _loading_bytes(checkpoint: Checkpoint, form: Native) -> int:
    """What the largest tensor takes on its way, beside the weights."""
    return max(
        math.prod(shape) * (STORED_BYTES if KINDS.get(dtype) == kind else ROUNDED_BYTES)
        for dtype, kind, shape in _kinds(checkpoint, form)
    )


def _plan(
    config: DecoderConfig, weights: int, loading: int, kv: int, limits: BackendLimits, num_rows: int
) -> MemoryPlan:
    """Everything, for one backend; so many rows of logits are wanted in a step."""
    step = _step_bytes(config, min(limits.ubatch_size, limits.num_cells))
    return memory_plan(config, limits, num_rows, weights=weights, kv_token_bytes=kv, step=step, loading=loading)


def _step_bytes(config: DecoderConfig, n: int) -> int:
    """As `tm_scratch_bytes` has it, and the rows that go in and come out."""
    query, kv = config.query_size, config.kv_size
    widest = max(config.hidden_size, config.intermediate_size, query)
    rounded = (n + 8) * num_groups(widest) * (44 + 39)  # in both forms
    return rounded + n * 4 * (query + 2 * kv + query + 2 * config.intermediate_size + 4 * config.hidden_size)
