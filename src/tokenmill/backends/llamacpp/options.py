"""`LlamaOptions`: what a user may say about llama.cpp, under the names it has there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenmill.errors import ConfigError

BITS_PER_VALUE = {"f32": 32.0, "f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
"""Types of keys and values, and what one of them takes."""


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """None leaves it to tokenmill. Checked when it is made."""

    n_ctx: int | None = None
    """Cells of KV memory, for all sequences together; in place of what the engine would choose."""
    n_batch: int | None = None
    """Tokens handed to llama.cpp in one call; None: as many as a step has."""
    n_ubatch: int = 512
    """Tokens that are computed at once."""
    n_threads: int | None = None
    """For steps of one token a sequence; None takes `num_threads`."""
    n_threads_batch: int | None = None
    """For all other steps."""
    flash_attn: bool | None = None
    """None: where llama.cpp thinks it works, but not in streams of builds where it is slow."""
    type_k: str = "f16"
    type_v: str = "f16"
    use_mmap: bool = True
    use_mlock: bool = False
    n_gpu_layers: int = -1
    """Layers on a GPU, in builds that know one; -1 is all of them."""
    repack: bool | None = None
    """Store weights once more in the order that a processor's own kernels read them. None: not in builds with kernels
    for AMX, which end the process on machines that announce AMX and do not keep its state."""
    kv_unified: bool | None = None
    """One memory for all sequences, or one for each that runs; None: the latter where all have room in it."""
    parked_cells: int | None = None
    """Cells that KV of ended requests may keep while others run; None: as many as slow a step down by a tenth."""

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch"):
            _check_count(name, getattr(self, name), least=1)
        _check_count("parked_cells", self.parked_cells, least=0)
        _check_count("n_gpu_layers", self.n_gpu_layers, least=-1)
        for name in ("flash_attn", "use_mmap", "use_mlock", "repack", "kv_unified"):
            value = getattr(self, name)
            if value is not None and type(value) is not bool:
                raise ConfigError(f"{name} must be true or false, not {value!r}")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in BITS_PER_VALUE:
                raise ConfigError(f"{name} {getattr(self, name)!r} is not known; known: {', '.join(BITS_PER_VALUE)}")
        if self.needs_flash_attn and self.flash_attn is False:
            raise ConfigError(f"type_v {self.type_v} needs flash attention; leave flash_attn out, or set it to true")

    @property
    def needs_flash_attn(self) -> bool:
        """Without it llama.cpp can't read values that are quantised."""
        return self.type_v.startswith("q")


def read_options(given: Mapping[str, Any]) -> LlamaOptions:
    """The options of a model that is opened; `ConfigError` names an unknown one."""
    known = {one.name for one in fields(LlamaOptions)}
    unknown = set(given) - known
    if unknown:
        raise ConfigError(f"unknown option {', '.join(sorted(unknown))}; llama.cpp's are {', '.join(sorted(known))}")
    return LlamaOptions(**given)


def _check_count(name: str, value: Any, *, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):  # a bool is no number here
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
