"""Settings of the engine: frozen dataclasses that check themselves."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine core schedules. The defaults are those for a CPU."""

    max_num_seqs: int = 32
    """Requests that run at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens in one step, never exceeded."""
    prefill_chunk: int = 512
    """Prompt tokens one request gets in a step while others decode."""
    min_prefill_chunk: int = 8
    """Prompt tokens that a step with prompts computes at least, however long that takes."""
    max_model_len: int | None = None
    """Prompt and output of one request; None takes what model and KV memory allow."""
    max_queue: int = 256
    """Requests that may wait; one more ends with `overload`."""
    max_queue_tokens: int | None = None
    """Prompt tokens that may wait in all; None for no limit."""
    queue_timeout_s: float | None = None
    """A request that has not started by then ends with `timeout`."""
    target_tick_ms: float = 100.0
    """How long a step may take while somebody decodes; prefill chunks are cut to it."""
    max_wait_ticks: int = 256
    """When no request of one key and priority has started for longer, the first of them goes before all others."""
    admission_margin: int = 1
    """Blocks kept free for each running request when another one is admitted."""
    min_shared_prefix: int = 32
    """A request waits for a neighbour that is computing its prefix if that saves at least so many tokens."""
    prefix_caching: bool = True
    """Reuse KV between requests that begin alike."""
    depth: int | None = None
    """Steps submitted ahead, 0 or 1; None takes what the backend can."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "min_prefill_chunk", "max_wait_ticks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} < max_num_seqs {self.max_num_seqs}: "
                "every running request must be able to decode in each step"
            )
        for name in ("max_queue", "admission_margin", "min_shared_prefix"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, but is {getattr(self, name)}")
        for name in ("max_model_len", "max_queue_tokens", "queue_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive or None, not {value}")
        if self.target_tick_ms <= 0:
            raise ConfigError(f"target_tick_ms must be positive, not {self.target_tick_ms}")
        if self.depth not in (None, 0, 1):
            raise ConfigError(f"depth must be 0, 1 or None, not {self.depth}")
