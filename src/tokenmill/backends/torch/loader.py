"""Opens Hugging Face directories and GGUF files for the torch backend: our own families, or through transformers."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.decoder import Decoder
from tokenmill.backends.torch.families import FamilyChoice, choose_family
from tokenmill.backends.torch.families.names import GGUF_NAMES, num_values, shapes
from tokenmill.backends.torch.footprint import (
    FP8,
    Form,
    cuda_step_bytes,
    free_bytes,
    kv_bytes,
    kv_dtype,
    plan,
    weight_bytes,
)
from tokenmill.backends.torch.kv_storage import BLOCK_SIZE
from tokenmill.backends.torch.model import BaseTorchModel, TorchModel
from tokenmill.backends.torch.native.bindings import INT4, INT8, library
from tokenmill.backends.torch.native.packing import Native, NativeWeights, can_hold
from tokenmill.backends.torch.native_backend import NativeDecoder
from tokenmill.backends.torch.rope import check_rope
from tokenmill.backends.torch.sources import GGUFSource, RandomSource, SafetensorsSource, config_of
from tokenmill.backends.torch.weights import DecoderWeights, TensorSource, check_tensors
from tokenmill.contract import BackendLimits
from tokenmill.contract.backend import LoadOptions, MemoryPlan
from tokenmill.errors import ConfigError, ModelLoadError
from tokenmill.files import has_tokenizer, model_name, read_json
from tokenmill.progress import ProgressLine

if TYPE_CHECKING:  # an extra
    from tokenmill.backends.torch.cuda.model import CudaModel
    from tokenmill.backends.torch.transformers_adapter import ModelSource, TransformersDescription

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"int8": INT8, "int4": INT4}
GIB = 1 << 30
EXTRAS = frozenset({"block_size", "depth", "kv_cache_dtype", "model_impl"})
KV_DTYPES = {"auto": None, "fp8": FP8, "fp8_e4m3": FP8}
"""`auto` is as wide as the weights, or as the CPU's kernels have it."""


@dataclass(frozen=True)
class NativeFiles:
    """A model of one of our own families: what was read of its files before its weights."""

    config: DecoderConfig
    source: TensorSource
    names: Mapping[str, str]


def open_path(path: Path, options: LoadOptions) -> BaseTorchModel:
    """Load the model in a directory or GGUF file."""
    _check_extras(options.extra)
    files = _open_gguf(path) if path.is_file() else _open_directory(path, options)
    model = _open_native(path, files, options) if isinstance(files, NativeFiles) else _open_adapted(files, options)
    log.info("%s: %s", model.info.name, model.about)
    return model


def _open_native(path: Path, files: NativeFiles, options: LoadOptions) -> BaseTorchModel:
    config, source, names = files.config, files.source, files.names
    device = _device(options.device)
    form = _form(options.dtype, device, source.is_quantised, can_hold(config))
    asked_kv = _kv_dtype(options, device, form)
    if isinstance(form, torch.dtype) and options.deterministic:
        _check_deterministic(form, device)
    check_tensors(source, config, names)
    for rope in config.ropes:
        check_rope(rope)
    decoder = _load(path, config, source, names, form, device)
    make: Callable[..., BaseTorchModel] = _model_kind(device)
    return make(
        model_name(path),
        decoder,
        names,
        path if options.load_format != "dummy" or has_tokenizer(path) else None,
        form=form,
        deterministic=options.deterministic,
        block_size=options.extra.get("block_size"),
        depth=options.extra.get("depth"),
        kv_dtype=asked_kv,
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
    form = _form(options.dtype, device, is_quantised=False, fits=False)
    if not isinstance(form, torch.dtype):
        raise ConfigError(f"dtype {options.dtype!r} requires a model of our own families; use {', '.join(DTYPES)}")
    if options.deterministic:
        raise ConfigError("deterministic requires a model of our own families, not one that runs through transformers")
    if options.extra.get("kv_cache_dtype", "auto") != "auto":
        raise ConfigError("kv_cache_dtype requires a model of our own families, not one that runs through transformers")
    return form, device


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

    def __init__(self, files: NativeFiles, options: LoadOptions) -> None:
        self._device = _device(options.device)
        self._config, source, names = files.config, files.source, files.names
        check_tensors(source, self._config, names)
        self._form = _form(options.dtype, self._device, source.is_quantised, can_hold(self._config))
        self._kv_dtype = _kv_dtype(options, self._device, self._form) or kv_dtype(self._form)
        self._weight_bytes = weight_bytes(self._config, source, names, self._form)

    @property
    def form(self) -> str:
        if isinstance(self._form, torch.dtype):
            return str(self._form).removeprefix("torch.")
        return "it is in its file" if self._form.bits is None else f"int{self._form.bits}"

    @property
    def block_size(self) -> int:
        return _model_kind(self._device).default_block_size

    @property
    def max_context(self) -> int:
        return self._config.max_context

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes(self._config, self._kv_dtype)

    @property
    def free_bytes(self) -> int:
        return free_bytes(self._device)

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        planned = plan(self._config, self._weight_bytes, self._form, limits, num_rows)
        if self._device.type != "cuda":
            return planned
        kv = limits.num_cells * self.kv_bytes_per_token
        itemsize = kv_dtype(self._form).itemsize
        return replace(
            planned, kv=kv, activations=cuda_step_bytes(self._config, limits.ubatch_size, num_rows, itemsize)
        )


def describe(path: Path, options: LoadOptions) -> TorchDescription | TransformersDescription:
    """Read a model's headers. Nothing is loaded."""
    files = _open_gguf(path) if path.is_file() else _open_directory(path, options)
    if isinstance(files, NativeFiles):
        return TorchDescription(files, options)
    from tokenmill.backends.torch.transformers_adapter import TransformersDescription

    return TransformersDescription(files, *_adapted_form(options))


def _load(
    path: Path,
    config: DecoderConfig,
    source: TensorSource,
    names: Mapping[str, str],
    form: Form,
    device: torch.device,
) -> Decoder | NativeDecoder:
    num_tensors = len(shapes(config))
    try:
        with ProgressLine(f"loading {model_name(path)}", num_tensors) as progress, torch.inference_mode():
            if isinstance(form, torch.dtype):
                weights = DecoderWeights(config, form, device)
                weights.load(source, names, lambda done, _: progress.update(done))
                return _decoder_kind(device)(config, weights)
            lib = library()
            native = NativeWeights(lib, config, form.bits)
            native.load(source, names, lambda done, _: progress.update(done))
            return NativeDecoder(lib, config, native)
    except (RuntimeError, MemoryError) as error:  # torch's "out of memory" is a RuntimeError
        size = form.itemsize if isinstance(form, torch.dtype) else (form.bits or INT8) / 8
        needed = num_values(config) * size / GIB
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"{path}: the weights need {needed:.1f} GiB of memory on {device.type} and cannot be loaded: {reason}"
        ) from error


def check_directory(folder: Path) -> None:
    """Raise `ModelLoadError` for a Hugging Face directory that cannot be opened, by its configuration alone."""
    config, choice = _read_config(folder), choose_for(folder)
    if choice.family is None:
        from tokenmill.backends.torch.transformers_adapter import read_source

        read_source(folder, config, has_weights=False)


def choose_for(folder: Path, asked: str = "auto") -> FamilyChoice:
    """How the model in a directory is run, and why; `asked` is a `model_impl`."""
    return choose_family(_read_config(folder), asked)


def _open_directory(folder: Path, options: LoadOptions) -> NativeFiles | ModelSource:
    config, choice = _read_config(folder), choose_for(folder, options.extra.get("model_impl", "auto"))
    is_dummy = options.load_format == "dummy"
    if choice.family is not None:
        family, read = choice.family, choice.family.read(config)
        if is_dummy:
            return NativeFiles(read, RandomSource(folder, read, family.names), family.names)
        return NativeFiles(read, SafetensorsSource(folder, family.ignored), family.names)
    log.info("%s: through transformers (%s)", model_name(folder), choice.why)
    from tokenmill.backends.torch.transformers_adapter import read_source  # an extra, and slow to import

    return read_source(folder, config, has_weights=not is_dummy)


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json")
    config = read_json(folder / "config.json")
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else reprlib.repr(quantised)
        raise ModelLoadError(f"{folder} is quantized with {method!r}, which is not supported; use a GGUF file")
    return config


def _open_gguf(path: Path) -> NativeFiles:
    file = GGUFFile(path)
    config = config_of(file)
    return NativeFiles(config, GGUFSource(file, config), GGUF_NAMES)


def _check_extras(extra: Mapping[str, Any]) -> None:
    unknown = set(extra) - EXTRAS
    if unknown:
        raise ConfigError(f"unknown option {', '.join(sorted(unknown))}")
    block_size, depth = extra.get("block_size", BLOCK_SIZE), extra.get("depth")
    if type(block_size) is not int or block_size < 1:  # bool is a subclass of int
        raise ConfigError(f"block_size must be an integer of at least 1, not {block_size!r}")
    if depth is not None and (type(depth) is not int or depth not in (0, 1)):
        raise ConfigError(f"depth must be 0 or 1, not {depth!r}")


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


def _form(name: str, device: torch.device, is_quantised: bool, fits: bool) -> Form:
    """How the weights are to be held. `auto` takes a quantised file as it is, where there are kernels for that."""
    if name in DTYPES:
        return DTYPES[name]
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16
        return Native(None) if is_quantised and fits and library() is not None else torch.float32
    if name not in BITS:
        raise ConfigError(f"dtype {name!r} is not supported; supported: auto, {', '.join([*DTYPES, *BITS])}")
    if device.type != "cpu":
        raise ConfigError(f"dtype {name!r} is supported on the CPU only")
    if not fits:
        raise ConfigError(f"dtype {name!r}: the kernels do not support the shapes of this model; use float32")
    if library() is None:
        raise ConfigError(f"dtype {name!r} requires the CPU kernels, which are not built")
    return Native(BITS[name])


def _kv_dtype(options: LoadOptions, device: torch.device, form: Form) -> torch.dtype | None:
    """What was asked for keys and values; None: what goes with the weights."""
    name = options.extra.get("kv_cache_dtype", "auto")
    if name not in KV_DTYPES:
        raise ConfigError(f"kv_cache_dtype {name!r} is not supported; supported: {', '.join(KV_DTYPES)}")
    dtype = KV_DTYPES[name]
    if dtype is not None and (device.type != "cuda" or kv_dtype(form).itemsize != 2):
        raise ConfigError(f"kv_cache_dtype {name!r} requires CUDA and 16-bit weights, not {form} on {device.type}")
    return dtype


def _check_deterministic(dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu" or dtype is not torch.float32:
        raise ConfigError(f"deterministic requires float32 on the CPU, not {dtype} on {device.type}")
