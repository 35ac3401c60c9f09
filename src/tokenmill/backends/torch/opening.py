"""Opens Hugging Face directories and GGUF files for the torch backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.loading import LoadOptions
from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.decoder import Decoder
from tokenmill.backends.torch.families import family_of
from tokenmill.backends.torch.families.names import GGUF_NAMES
from tokenmill.backends.torch.gguf_source import GGUFSource, config_of
from tokenmill.backends.torch.invariant import rows_are_independent
from tokenmill.backends.torch.model import TorchModel
from tokenmill.backends.torch.safetensors_source import SafetensorsSource
from tokenmill.backends.torch.weights import DecoderWeights, TensorSource
from tokenmill.errors import ConfigError, ModelLoadError
from tokenmill.files import read_json
from tokenmill.progress import ProgressLine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXTRAS = frozenset({"block_size", "depth"})


def open_path(path: Path, options: LoadOptions) -> TorchModel:
    """Load the model in a directory or GGUF file."""
    unknown = set(options.extra) - EXTRAS
    if unknown:
        raise ConfigError(f"unknown option {', '.join(sorted(unknown))}")
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    if options.deterministic:
        _check_deterministic(dtype, device)
    config, source, names = _open_gguf(path) if path.is_file() else _open_directory(path)
    weights = DecoderWeights(config, dtype, device)
    with ProgressLine(f"loading {path.name}", len(weights.views)) as progress, torch.inference_mode():
        weights.load(source, names, lambda done, _: progress.update(done))
    return TorchModel(
        path.name, Decoder(config, weights), names, path, deterministic=options.deterministic, **options.extra
    )


def _open_directory(folder: Path) -> tuple[DecoderConfig, TensorSource, Mapping[str, str]]:
    config: Mapping[str, Any] = read_json(folder / "config.json")
    if not config:
        raise ModelLoadError(f"{folder} has no config.json")
    if "auto_map" in config:
        raise ModelLoadError(f"{folder} brings code of its own (auto_map in config.json), which is never run")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ModelLoadError(f"{folder} is quantised with {method!r}, which is not supported; use a GGUF file")
    family = family_of(config)
    return family.read(config), SafetensorsSource(folder), family.names


def _open_gguf(path: Path) -> tuple[DecoderConfig, TensorSource, Mapping[str, str]]:
    file = GGUFFile(path)
    config = config_of(file)
    return config, GGUFSource(file, config), GGUF_NAMES


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known; use cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch finds no CUDA device here")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use cpu or cuda")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not known; known: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_deterministic(dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu" or dtype is not torch.float32:
        raise ConfigError(f"deterministic needs float32 on the CPU, not {dtype} on {device.type}")
    if not rows_are_independent(device):
        raise ConfigError("deterministic: this machine's matrix products depend on the rows around; it can't be had")
