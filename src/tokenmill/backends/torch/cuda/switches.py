"""`Switches`: what is done for speed on CUDA, each to be turned off, so that its worth can be measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Everything is on by default; off means plain torch."""

    graphs: bool = True
    """Decode steps are replayed as CUDA graphs. Needs `attention` and `islands`."""
    attention: bool = True
    """Attention reads paged KV where it is; off gathers it first."""
    islands: bool = True
    """Norms, rope with the KV store, and gates are one kernel each."""
    one_row: bool = True
    """A step of a single token multiplies with kernels of its own. Needs `islands`."""
