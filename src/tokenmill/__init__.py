"""tokenmill: a session-first LLM inference engine. Public names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.backends.loading import open_model
    from tokenmill.entrypoints.async_llm import AsyncLLM
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.params import SamplingParams, StructuredOutputs
    from tokenmill.session.service import SessionService

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "SessionService", "StructuredOutputs", "__version__", "open_model"]

_HOME = {
    "LLM": "tokenmill.entrypoints.llm",
    "AsyncLLM": "tokenmill.entrypoints.async_llm",
    "SamplingParams": "tokenmill.params",
    "SessionService": "tokenmill.session.service",
    "StructuredOutputs": "tokenmill.params",
    "open_model": "tokenmill.backends.loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
