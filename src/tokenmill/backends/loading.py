"""`open_model`: from a model's name or path to a `ModelHandle`, through a registry of openers.

An opener looks at the name and either gives a handle or None, so a new kind of model joins with one call of
`register_opener` and no change anywhere else.

Which backend opens a file is what the caller said, or a short rule (`choose_backend`, docs/models.md): quantized models
of our own families run on the C library where there is no GPU (cpu), everything else of our families and of
transformers' on torch, and GGUF files of other architectures on llama.cpp.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.backends.gguf_file import OWN_ARCHITECTURES, GGUFFile
from tokenmill.contract.backend import BackendLimits, LoadOptions, MemoryPlan, ModelHandle
from tokenmill.errors import ConfigError, ModelLoadError, ModelNotFound
from tokenmill.files import model_name

if TYPE_CHECKING:
    from tokenmill.backends.checkpoints import Checkpoint

log = logging.getLogger(__name__)

PACKAGES = {"torch": ("torch", "torch"), "llamacpp": ("llama_cpp", "llama-cpp-python")}
"""Backend -> the module that it needs, and the package that has it. The extra is called like the backend."""
ROUNDED = ("int8", "int4")
FLOATS = "its weights are floats"


@dataclass(frozen=True)
class BackendChoice:
    backend: str
    why: str
    checkpoint: Checkpoint | None = None
    """The model's files, if they had to be read to decide."""


def choose_backend(path: Path, options: LoadOptions) -> BackendChoice:
    """`ModelLoadError` if it takes a package that is not there."""
    asked = options.backend
    choice = _by_rule(path, options) if asked == "auto" else BackendChoice(asked, "as asked for")
    module, package = PACKAGES.get(choice.backend, (None, None))
    if module is None or is_installed(module):
        return choice
    reason = "" if choice.backend == asked else f"{path}: {choice.why}; "
    remedy = f"the {choice.backend} backend requires {package}: pip install 'tokenmill[{choice.backend}]'"
    if choice.why == FLOATS:
        remedy += ", or use dtype int8 or int4, which the cpu backend rounds them to"
    raise ModelLoadError(reason + remedy)


def _by_rule(path: Path, options: LoadOptions) -> BackendChoice:
    file = GGUFFile(path) if path.is_file() else None
    if file is not None:
        architecture = file.get("general.architecture")
        if architecture not in OWN_ARCHITECTURES and isinstance(architecture, str):
            return BackendChoice("llamacpp", f"{architecture} is not one of {', '.join(OWN_ARCHITECTURES)}")
    if options.dtype in ROUNDED:
        return BackendChoice("cpu", f"dtype {options.dtype}")
    if runs_on_gpu(options.device):
        return BackendChoice("torch", "on a GPU")
    if options.dtype != "auto":
        return BackendChoice("torch", f"dtype {options.dtype}")
    from tokenmill.backends.checkpoints import gguf_checkpoint, read_config
    from tokenmill.backends.cpu.model import why_not
    from tokenmill.backends.families import choose_family

    if file is None:
        is_ours = choose_family(read_config(path), options.extra.get("model_impl", "auto")).family is not None
        return BackendChoice("torch", FLOATS if is_ours else "it runs through transformers")
    checkpoint = gguf_checkpoint(file)
    refusal = why_not(checkpoint) if checkpoint.source.is_quantised else FLOATS
    return BackendChoice("torch", refusal) if refusal else BackendChoice("cpu", "quantized, on the CPU", checkpoint)


def runs_on_gpu(device: str) -> bool:
    """Does the torch backend take a GPU for this `device` option? `auto`: if there is one, and torch can use it."""
    if device != "auto" or num_gpus() == 0 or not is_installed("torch"):
        return device.startswith("cuda")
    from tokenmill.backends.torch.loader import has_cuda

    return has_cuda()


@cache
def num_gpus() -> int:
    """GPUs that CUDA shows this process; its library is asked directly, and no context is created."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class Opener(Protocol):
    """Opens the models of one kind; None means "not mine". Extras it does not know are a `ConfigError`."""

    def __call__(self, model: str, options: LoadOptions) -> ModelHandle | None: ...


_openers: dict[str, Opener] = {}


def register_opener(kind: str, opener: Opener) -> None:
    """Add a kind of model. Later ones are asked first, so that a specific opener can go before a general one."""
    if kind in _openers:
        raise ConfigError(f"an opener for {kind!r} models is already registered")
    _openers[kind] = opener


def unregister_opener(kind: str) -> None:
    """Remove a kind of model."""
    del _openers[kind]


def open_model(model: str, **options: Any) -> ModelHandle:
    """Load a model once; the handle makes a backend for each engine core. Options: see `LoadOptions`."""
    load_options = _load_options(options)
    for opener in reversed(_openers.values()):
        handle = opener(model, load_options)
        if handle is not None:
            return handle
    raise _not_found(model)


def _not_found(model: str) -> ModelNotFound:
    what = "not a directory, a .gguf file, ORGANIZATION/MODEL on the Hugging Face Hub or a short name"
    return ModelNotFound(f"no model {model!r}: {what} ({', '.join(_names())})")


def _load_options(options: dict[str, Any]) -> LoadOptions:
    """What only one kind of model knows may be given in `extra`, or beside the others."""
    known = {one.name for one in fields(LoadOptions)} - {"extra"}
    chosen = {name: value for name, value in options.items() if name in known}
    others = {name: value for name, value in options.items() if name not in known | {"extra"}}
    return LoadOptions(**chosen, extra={**(options.get("extra") or {}), **others})


class ModelDescription(Protocol):
    """What is known of a model from its files' headers, before it is loaded."""

    @property
    def form(self) -> str:
        """What its weights would be held as."""
        ...

    @property
    def max_context(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        """As the handle's own `memory`."""
        ...


def describe_model(model: str, **options: Any) -> ModelDescription:
    """Read a model's headers; nothing is loaded. Options: see `LoadOptions`."""
    load_options = _load_options(options)
    path = _find(model, load_options)
    if path is None:
        raise _not_found(model)
    backend = choose_backend(path, load_options).backend
    if backend == "cpu":
        from tokenmill.backends.cpu.model import describe as describe_for_cpu

        return describe_for_cpu(path, load_options)
    if backend == "llamacpp":
        from tokenmill.backends.llamacpp.model import describe as describe_for_llamacpp

        return describe_for_llamacpp(path, load_options)
    from tokenmill.backends.torch.loader import describe

    return describe(path, load_options)


def pull_model(model: str) -> Path:
    """Download a model and verify it; the path to open. A model that cannot be run is rejected before its weights."""
    from tokenmill.backends.library import pull

    return pull(model, check_directory)


def _names() -> list[str]:
    from tokenmill.backends.library import names

    return [*names(), "fake"]


def _open_fake(model: str, options: LoadOptions) -> ModelHandle | None:
    if model != "fake":
        return None
    asked = LoadOptions(extra=options.extra, deterministic=options.deterministic)
    if options != asked and options != replace(asked, backend="fake"):
        raise ConfigError("the fake model does not support backend, dtype or device")
    try:
        return FakeModel(FakeConfig(**options.extra))
    except TypeError as error:
        raise ConfigError(f"fake model: {error}") from None


def _open_path(model: str, options: LoadOptions) -> ModelHandle | None:
    """A Hugging Face directory or a GGUF file, here or in the library of downloaded models."""
    path = _find(model, options)
    if path is None:
        return None
    if options.backend == "fake":
        raise ConfigError(f"backend 'fake' cannot open {model}; use auto, cpu, torch or llamacpp")

    choice = choose_backend(path, options)
    log.info("%s: backend %s (%s)", model_name(path), choice.backend, choice.why)
    return _open_with(choice, path, options)


def _find(model: str, options: LoadOptions) -> Path | None:
    """The files to open; None if the name is not that of a model."""
    from tokenmill.backends.library import find_model

    def check(folder: Path) -> None:
        choose_backend(folder, options)  # a missing package is reported before the download
        check_directory(folder)

    has_weights = options.load_format != "dummy"
    path = find_model(model, weights=has_weights, check=check)
    if path is not None and not has_weights and (not path.is_dir() or options.backend == "llamacpp"):
        raise ConfigError(
            f"load_format 'dummy' requires the torch or cpu backend and a directory with a config.json: {path}"
        )
    return path


def check_directory(folder: Path) -> None:
    """Reject a model that cannot be run from its configuration alone, before gigabytes are downloaded."""
    from tokenmill.backends.checkpoints import read_config
    from tokenmill.backends.families import choose_family

    if choose_family(read_config(folder)).family is None:
        from tokenmill.backends.torch.loader import check_adapted

        check_adapted(folder)


def _open_with(choice: BackendChoice, path: Path, options: LoadOptions) -> ModelHandle:
    """Each backend is imported when it is used: torch takes seconds."""
    if choice.backend == "cpu":
        from tokenmill.backends.cpu.model import open_path as open_for_cpu

        return open_for_cpu(path, options, choice.checkpoint)
    if choice.backend == "llamacpp":
        from tokenmill.backends.llamacpp.model import open_path as open_for_llamacpp

        return open_for_llamacpp(path, options)
    from tokenmill.backends.torch.loader import open_path

    return open_path(path, options)


register_opener("path", _open_path)
register_opener("fake", _open_fake)
