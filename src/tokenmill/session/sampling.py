"""Sampling parameters of sessions: those of one answer, and those of a fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.params import MAX_SEED, SamplingParams

FORK_STEP = 0x1E3779B97F4A7C15
"""Between the seeds of a session's forks: large and odd, so that they never meet."""


def changed(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """A session's parameters with some others; `InvalidRequest` for what an answer of a session can't have."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    unknown = set(changes) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        raise InvalidRequest(f"SamplingParams has no {', '.join(sorted(unknown))}")
    if changes.get("n", params.n) != 1:
        raise InvalidRequest("an answer of a session is one; fork it for more", param="n")
    return replace(params, **changes)


def of_fork(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of a session's fork: a seed that follows from its parent's, so that it draws otherwise."""
    return replace(params, seed=((params.seed or 0) + number * FORK_STEP) % MAX_SEED)


def differences(params: SamplingParams, usual: SamplingParams) -> dict[str, Any] | None:
    """What is not as usual in the parameters of an answer; None if all is, but for how long it may be."""
    names = [name for name in SamplingParams.__dataclass_fields__ if name != "max_tokens"]
    found = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(usual, name)}
    return found or None
