"""Which backend opens a model: what the caller said, or the rule of docs/llamacpp.md, which is meant to be short.

A Hugging Face directory, and a GGUF file of an architecture that the torch backend has, go to torch: it is the faster
of the two wherever both can do a model (docs/benchmarks.md). Every other GGUF file goes to llama.cpp.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.errors import ModelLoadError

TORCH_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF architectures of the torch backend."""


@dataclass(frozen=True)
class Choice:
    backend: str
    why: str


def choose_backend(path: Path, asked: str) -> Choice:
    """`ModelLoadError` if it takes a package that is not there."""
    choice = _by_rule(path) if asked == "auto" else Choice(asked, "as asked for")
    if choice.backend == "llamacpp" and importlib.util.find_spec("llama_cpp") is None:
        reason = "" if asked == "llamacpp" else f"{path}: {choice.why}; "
        raise ModelLoadError(f"{reason}the llamacpp backend needs llama-cpp-python: pip install 'tokenmill[llamacpp]'")
    return choice


def _by_rule(path: Path) -> Choice:
    if path.is_dir():
        return Choice("torch", "a directory")
    file = GGUFFile(path)
    architecture = file.get("general.architecture")
    if architecture not in TORCH_ARCHITECTURES and isinstance(architecture, str):
        return Choice("llamacpp", f"{architecture} is not one of torch's {', '.join(TORCH_ARCHITECTURES)}")
    return Choice("torch", f"{architecture} is one of torch's architectures")
