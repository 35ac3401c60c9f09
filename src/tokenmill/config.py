"""Settings of the engine: frozen dataclasses that check themselves."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
"""What is run if no model is named. Here, since the command line needs no more than its name to show its help."""
SPECULATION = ("auto", "off", "lookup", "draft")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Scheduling parameters of an engine core. Defaults are for CPUs."""

    max_num_seqs: int = 32
    """Maximum number of running requests."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    prefill_chunk: int = 512
    """Maximum prompt tokens of one request in a step while other requests are decoding."""
    min_prefill_chunk: int = 8
    """Minimum prompt tokens of a step with prompts, regardless of the target step latency."""
    max_model_len: int | None = None
    """Maximum tokens of prompt and output of a request; None for the limit of model and KV memory."""
    max_queue: int = 256
    """Maximum number of queued requests; further ones end with `overload`."""
    max_queue_tokens: int | None = None
    """Maximum total prompt tokens of queued requests; None for no limit."""
    queue_timeout_s: float | None = None
    """Maximum time in the queue (s), then the request ends with `timeout`."""
    hang_timeout_s: float | None = 60.0
    """Abandon a core whose step has not returned for this long (s), or for ten times the predicted duration if that is
    longer; None: never."""
    target_tick_ms: float = 100.0
    """Target step latency (ms) while requests are decoding; bounds prefill chunks."""
    max_step_ms: float | None = None
    """Target latency (ms) of steps that compute prompts only, so that cancels and new requests take effect in time;
    None for no bound but the token budget."""
    max_wait_ticks: int = 256
    """Starvation limit: after this many ticks without a start, the first request of a key and priority goes next."""
    background_slowdown: float = 1.5
    """Factor by which background requests (batches) may lengthen steps while others run."""
    admission_margin: int = 1
    """Free KV blocks reserved per running request when another one is admitted."""
    min_shared_prefix: int = 32
    """Minimum tokens saved for a request to wait for another one that is computing its prefix."""
    prefix_caching: bool = True
    """Reuse the KV of common prefixes."""
    forced_tokens: bool = True
    """Append tokens forced by a grammar without sampling them, and compute them in one chunk."""
    speculation: str = "off"
    """Default of `SamplingParams.speculation`: `auto`, `off`, `lookup` or `draft`."""
    depth: int | None = None
    """Steps submitted ahead, 0 or 1; None for the maximum of the backend."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "min_prefill_chunk", "max_wait_ticks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} < max_num_seqs {self.max_num_seqs}: "
                "every running request needs one token per step"
            )
        for name in ("max_queue", "admission_margin", "min_shared_prefix"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be non-negative, not {getattr(self, name)}")
        for name in ("max_model_len", "max_queue_tokens", "queue_timeout_s", "hang_timeout_s", "max_step_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive or None, not {value}")
        if not self.background_slowdown >= 1:
            raise ConfigError(f"background_slowdown must be at least 1, not {self.background_slowdown}")
        if self.target_tick_ms <= 0:
            raise ConfigError(f"target_tick_ms must be positive, not {self.target_tick_ms}")
        if self.speculation not in SPECULATION:
            raise ConfigError(f"speculation must be one of {', '.join(SPECULATION)}, not {self.speculation!r}")
        if self.depth not in (None, 0, 1):
            raise ConfigError(f"depth must be 0, 1 or None, not {self.depth}")
