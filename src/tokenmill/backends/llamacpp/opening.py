"""Opens GGUF files for llama.cpp. Needs llama-cpp-python, the extra `llamacpp`."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenmill.backends.llamacpp.header import Header, read_header
from tokenmill.backends.llamacpp.model import LlamaModel
from tokenmill.backends.llamacpp.native import NativeModel
from tokenmill.backends.llamacpp.options import LlamaOptions, read_options
from tokenmill.backends.loading import LoadOptions
from tokenmill.contract import BackendLimits
from tokenmill.contract.backend import MemoryPlan, free_host_bytes
from tokenmill.errors import ConfigError, ModelLoadError
from tokenmill.progress import ProgressLine

log = logging.getLogger(__name__)
MIB = 1 << 20
PERCENT = 100


def open_path(path: Path, options: LoadOptions) -> LlamaModel:
    """Load the model in a GGUF file."""
    chosen = _checked(path, options)
    header = read_header(path, chosen)
    _check_memory(path, header, chosen)
    with ProgressLine(f"loading {path.name} into llama.cpp", PERCENT) as progress:
        native = NativeModel(
            path,
            use_mmap=chosen.use_mmap,
            use_mlock=chosen.use_mlock,
            n_gpu_layers=chosen.n_gpu_layers,
            repack=chosen.repack,
            progress=lambda share: progress.update(int(PERCENT * share)),
        )
    if not native.generates:
        native.close()
        raise ModelLoadError(f"{path}: {header.architecture} is an encoder, which can't go on with a text")
    log.info("%s: %s, as it is in its file, by llama.cpp", path.name, native.description)
    return LlamaModel(path, native, header, chosen)


class Described:
    """What is known of a model from its file's header."""

    block_size = 1
    form = "it is in its file, by llama.cpp"

    def __init__(self, path: Path, options: LoadOptions) -> None:
        self._options = _checked(path, options)
        self._header = read_header(path, self._options)

    @property
    def max_context(self) -> int:
        return self._header.max_context

    @property
    def kv_bytes_per_token(self) -> int:
        return self._header.kv_bytes_per_token

    @property
    def free_bytes(self) -> int:
        return free_host_bytes()

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        return self._header.memory(limits, num_rows, self._options)


def describe(path: Path, options: LoadOptions) -> Described:
    """Read a model's header. Nothing is loaded."""
    return Described(path, options)


def _checked(path: Path, options: LoadOptions) -> LlamaOptions:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; llama.cpp takes a .gguf file")
    if options.dtype != "auto":
        raise ConfigError(f"dtype {options.dtype!r}: llama.cpp takes weights as they are in their file")
    if options.deterministic:
        raise ConfigError("deterministic: llama.cpp's arithmetic depends on the batch; use the torch backend")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {options.device!r} is not known to llama.cpp; use auto, cpu or cuda")
    extra = {"n_gpu_layers": 0, **options.extra} if options.device == "cpu" else options.extra
    return read_options(extra)


def _check_memory(path: Path, header: Header, options: LlamaOptions) -> None:
    """Cells that were asked for must fit; llama.cpp would take them page by page until the system ends the process."""
    if options.n_ctx is None:
        return
    needed, free = options.n_ctx * header.kv_bytes_per_token, free_host_bytes()
    if needed > free:
        fits = free // header.kv_bytes_per_token
        raise ModelLoadError(
            f"{path}: KV memory of n_ctx {options.n_ctx:,} needs {needed / MIB:,.0f} MiB, but only "
            f"{free / MIB:,.0f} are free; n_ctx {fits:,} would fit"
        )
