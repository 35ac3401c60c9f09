"""Opens Hugging Face directories and GGUF files for the torch backend: our own families, or through transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tokenmill.backends.checkpoints import Checkpoint, check_tensors, open_checkpoint, read_config
from tokenmill.backends.families import choose_family
from tokenmill.backends.families.config import kv_bytes
from tokenmill.backends.families.names import num_values, shapes
from tokenmill.backends.families.rope import check_rope
from tokenmill.backends.torch.decoder import Decoder
from tokenmill.backends.torch.footprint import FP8, cuda_step_bytes, free_bytes, plan, weight_bytes
from tokenmill.backends.torch.model import BaseTorchModel, TorchModel
from tokenmill.backends.torch.weights import DecoderWeights
from tokenmill.contract import BackendLimits
from tokenmill.contract.backend import LoadOptions, MemoryPlan
from tokenmill.errors import ConfigError, ModelLoadError
from tokenmill.files import has_tokenizer, model_name
from tokenmill.kv.paged_backend import check_extras
from tokenmill.progress import ProgressLine

if TYPE_CHECKING:  # an extra
    from tokenmill.backends.torch.cuda.model import CudaModel
    from tokenmill.backends.torch.transformers_adapter import ModelSource, TransformersDescription

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 1 << 30
KV_DTYPES = {"auto": None, "fp8": FP8, "fp8_e4m3": FP8}
"""`auto` is as wide as the weights."""


def open_path(path: Path, options: LoadOptions) -> BaseTorchModel:
    """Load the model in a directory or GGUF file."""
    check_extras(options.extra)
    files = _open(path, options)
    model = _open_own(path, files, options) if isinstance(files, Checkpoint) else _open_adapted(files, options)
    log.info("%s: %s", model.info.name, model.about)
    return model


def _open_own(path: Path, files: Checkpoint, options: LoadOptions) -> BaseTorchModel:
    """Of one of our own families."""
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    kv_dtype = _kv_dtype(options, device, dtype)
    if options.deterministic:
        _check_deterministic(dtype, device)
    check_tensors(files.source, files.config, files.names)
    for rope in files.config.ropes:
        check_rope(rope)
    decoder = _load(path, files, dtype, device)
    make: Callable[..., BaseTorchModel] = _model_kind(device)
    return make(
        model_name(path),
        decoder,
        files.names,
        path if options.load_format != "dummy" or has_tokenizer(path) else None,
        form=dtype,
        deterministic=options.deterministic,
        block_size=options.extra.get("block_size"),
        depth=options.extra.get("depth"),
        kv_dtype=kv_dtype,
    )


def _open_adapted(source: ModelSource, options: LoadOptions) -> BaseTorchModel:
    """Through transformers."""
    from tokenmill.backends.torch.transformers_adapter import load_module, open_plain

    dtype, device = _adapted_form(options)
    open_loaded: Callable[..., BaseTorchModel] = open_plain
    if device.type == "cuda":
        from tokenmill.backends.torch.cuda.adapted import open_on_card  # needs triton

        open_loaded = open_on_card
    loaded = load_module(source, dtype, device)
    return open_loaded(loaded, block_size=options.extra.get("block_size"), depth=options.extra.get("depth"))


def _adapted_form(options: LoadOptions) -> tuple[torch.dtype, torch.device]:
    """Type of weights and KV of a model that runs through transformers, and where it runs."""
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    if options.deterministic:
        raise ConfigError("deterministic requires a model of our own families, not one that runs through transformers")
    if options.extra.get("kv_cache_dtype", "auto") != "auto":
        raise ConfigError("kv_cache_dtype requires a model of our own families, not one that runs through transformers")
    return dtype, device


def _model_kind(device: torch.device) -> type[TorchModel] | type[CudaModel]:
    if device.type != "cuda":
        return TorchModel
    from tokenmill.backends.torch.cuda.model import CudaModel  # needs triton

    return CudaModel


def _decoder_kind(device: torch.device) -> type[Decoder]:
    if device.type != "cuda":
        return Decoder
    from tokenmill.backends.torch.cuda.layers import CudaDecoder

    return CudaDecoder


class TorchDescription:
    """What is known of a model from its files' headers: what it is, and how it would be held in memory."""

    def __init__(self, files: Checkpoint, options: LoadOptions) -> None:
        self._device = _device(options.device)
        self._config = files.config
        check_tensors(files.source, files.config, files.names)
        self._dtype = _dtype(options.dtype, self._device)
        self._kv_dtype = _kv_dtype(options, self._device, self._dtype) or self._dtype
        self._weight_bytes = weight_bytes(self._config, self._dtype)

    @property
    def form(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def block_size(self) -> int:
        return _model_kind(self._device).default_block_size

    @property
    def max_context(self) -> int:
        return self._config.max_context

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes(self._config, self._kv_dtype.itemsize)

    @property
    def free_bytes(self) -> int:
        return free_bytes(self._device)

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        planned = plan(self._config, self._weight_bytes, self._dtype, limits, num_rows)
        if self._device.type != "cuda":
            return planned
        kv = limits.num_cells * self.kv_bytes_per_token
        step = cuda_step_bytes(self._config, limits.ubatch_size, num_rows, self._dtype.itemsize)
        return replace(planned, kv=kv, activations=step)


def describe(path: Path, options: LoadOptions) -> TorchDescription | TransformersDescription:
    """Read a model's headers. Nothing is loaded."""
    files = _open(path, options)
    if isinstance(files, Checkpoint):
        return TorchDescription(files, options)
    from tokenmill.backends.torch.transformers_adapter import TransformersDescription

    return TransformersDescription(files, *_adapted_form(options))


def _load(path: Path, files: Checkpoint, dtype: torch.dtype, device: torch.device) -> Decoder:
    try:
        with (
            ProgressLine(f"loading {model_name(path)}", len(shapes(files.config))) as progress,
            torch.inference_mode(),
        ):
            weights = DecoderWeights(files.config, dtype, device)
            weights.load(files.source, files.names, lambda done, _: progress.update(done))
            return _decoder_kind(device)(files.config, weights)
    except (RuntimeError, MemoryError) as error:  # torch's "out of memory" is a RuntimeError
        needed = num_values(files.config) * dtype.itemsize / GIB
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"{path}: the weights need {needed:.1f} GiB of memory on {device.type} and cannot be loaded: {reason}"
        ) from error


def check_adapted(folder: Path) -> None:
    """Raise `ModelLoadError` for a directory that transformers cannot run, by its configuration alone."""
    from tokenmill.backends.torch.transformers_adapter import read_source

    read_source(folder, read_config(folder), has_weights=False)


def _open(path: Path, options: LoadOptions) -> Checkpoint | ModelSource:
    impl, is_dummy = options.extra.get("model_impl", "auto"), options.load_format == "dummy"
    found = open_checkpoint(path, impl=impl, is_dummy=is_dummy)
    if found is not None:
        return found
    config = read_config(path)
    log.info("%s: through transformers (%s)", model_name(path), choose_family(config, impl).why)
    from tokenmill.backends.torch.transformers_adapter import read_source  # an extra, and slow to import

    return read_source(path, config, has_weights=not is_dummy)


def has_cuda() -> bool:
    """Can this build of torch use a GPU of this machine?"""
    return torch.cuda.is_available()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch found no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use cpu or cuda")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Of the weights."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported by the torch backend; supported: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _kv_dtype(options: LoadOptions, device: torch.device, weights: torch.dtype) -> torch.dtype | None:
    """What was asked for keys and values; None: what goes with the weights."""
    name = options.extra.get("kv_cache_dtype", "auto")
    if name not in KV_DTYPES:
        raise ConfigError(f"kv_cache_dtype {name!r} is not supported; supported: {', '.join(KV_DTYPES)}")
    dtype = KV_DTYPES[name]
    if dtype is not None and (device.type != "cuda" or weights.itemsize != 2):
        raise ConfigError(f"kv_cache_dtype {name!r} requires CUDA and 16-bit weights, not {weights} on {device.type}")
    return dtype


def _check_deterministic(dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu" or dtype is not torch.float32:
        raise ConfigError(f"deterministic requires float32 on the CPU, not {dtype} on {device.type}")
