"""`open_model`: from a model's name or path to a `ModelHandle`, through a registry of openers.

An opener looks at the name and either gives a handle or None, so a new kind of model joins with one call of
`register_opener` and no change anywhere else.

Which backend opens a file is what the caller said, or a short rule (docs/llamacpp.md): a Hugging Face directory, and a
GGUF file of an architecture that the torch backend has, go to torch, the faster of the two wherever both can do a model
(docs/benchmarks.md). Every other GGUF file goes to llama.cpp.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.backends.gguf_file import TORCH_ARCHITECTURES, GGUFFile
from tokenmill.contract.backend import BackendLimits, LoadOptions, MemoryPlan, ModelHandle
from tokenmill.errors import ConfigError, ModelLoadError, ModelNotFound
from tokenmill.files import model_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackendChoice:
    backend: str
    why: str


def choose_backend(path: Path, asked: str) -> BackendChoice:
    """`ModelLoadError` if it takes a package that is not there."""
    choice = _by_rule(path) if asked == "auto" else BackendChoice(asked, "as asked for")
    if choice.backend == "llamacpp" and importlib.util.find_spec("llama_cpp") is None:
        reason = "" if asked == "llamacpp" else f"{path}: {choice.why}; "
        raise ModelLoadError(
            f"{reason}the llamacpp backend requires llama-cpp-python: pip install 'tokenmill[llamacpp]'"
        )
    return choice


def _by_rule(path: Path) -> BackendChoice:
    if path.is_dir():
        return BackendChoice("torch", "a directory")
    file = GGUFFile(path)
    architecture = file.get("general.architecture")
    if architecture not in TORCH_ARCHITECTURES and isinstance(architecture, str):
        return BackendChoice("llamacpp", f"{architecture} is not one of torch's {', '.join(TORCH_ARCHITECTURES)}")
    return BackendChoice("torch", f"{architecture} is one of torch's architectures")


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
    if choose_backend(path, load_options.backend).backend == "llamacpp":
        from tokenmill.backends.llamacpp.model import describe as describe_for_llamacpp

        return describe_for_llamacpp(path, load_options)
    from tokenmill.backends.torch.loader import describe

    return describe(path, load_options)


def pull_model(model: str) -> Path:
    """Download a model and verify it; the path to open. A model that cannot be run is rejected before its weights."""
    from tokenmill.backends.library import pull

    return pull(model, _check_directory)


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
        raise ConfigError(f"backend 'fake' cannot open {model}; use auto, torch or llamacpp")

    choice = choose_backend(path, options.backend)
    log.info("%s: backend %s (%s)", model_name(path), choice.backend, choice.why)
    return _open_with(choice.backend, path, options)


def _find(model: str, options: LoadOptions) -> Path | None:
    """The files to open; None if the name is not that of a model."""
    from tokenmill.backends.library import find_model

    has_weights = options.load_format != "dummy"
    path = find_model(model, weights=has_weights, check=_check_directory)
    if path is not None and not has_weights and (not path.is_dir() or options.backend == "llamacpp"):
        raise ConfigError(f"load_format 'dummy' requires the torch backend and a directory with a config.json: {path}")
    return path


def _check_directory(folder: Path) -> None:
    """Reject a model that cannot be run from its configuration alone, before gigabytes are downloaded."""
    from tokenmill.backends.torch.loader import check_directory

    check_directory(folder)


def _open_with(backend: str, path: Path, options: LoadOptions) -> ModelHandle:
    if backend == "llamacpp":
        from tokenmill.backends.llamacpp.model import open_path as open_for_llamacpp

        return open_for_llamacpp(path, options)
    from tokenmill.backends.torch.loader import open_path  # torch takes seconds to import

    return open_path(path, options)


register_opener("path", _open_path)
register_opener("fake", _open_fake)
