"""`plan_fit`: what a model, its KV and its steps take in memory, by the arithmetic with which engines are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.backends.loading import describe_model
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, ModelHandle
from tokenmill.contract.backend import MemoryPlan, cells_for, seqs_for
from tokenmill.engine.core import DraftModel
from tokenmill.errors import ConfigError

MIB = 1 << 20
MOST_SESSIONS = 1 << 20


@dataclass(frozen=True)
class Fit:
    """A plan, and how far it could be stretched."""

    form: str
    """What the weights are held as."""
    context: int
    plan: MemoryPlan
    kv_bytes_per_token: int
    free_bytes: int
    most_sessions: int
    """Of this context; 0 if not even one fits."""
    longest_context: int
    """Of so many sessions; 0 if not even the shortest fits."""

    @property
    def fits(self) -> bool:
        return self.plan.total <= self.free_bytes

    def shortage(self, name: str) -> str:
        """Why a model of this name does not fit, in numbers."""
        plan = self.plan
        parts = {
            "weights": plan.weights,
            "KV of one session": plan.kv,
            "activations": plan.activations,
            "other": plan.other,
        }
        said = ", ".join(f"{what} {size / MIB:,.0f}" for what, size in parts.items())
        free = f"only {self.free_bytes / MIB:,.0f} MiB are free"
        return f"{name} needs {plan.total / MIB:,.0f} MiB ({said}), but {free}"


def plan_fit(
    model: str,
    sessions: int,
    context: int | None,
    *,
    free_bytes: int | None,
    workers: int = 1,
    draft_model: str | None = None,
    **options: Any,
) -> Fit:
    """Read a model's headers and plan for so many sessions at the same time. Nothing is loaded.

    Sessions are divided between workers, each of which has KV and activations of its own. A draft model has KV for as
    many tokens.
    """
    about = describe_model(model, **options)
    shared = {name: value for name, value in options.items() if name not in ("dtype", "extra")}
    draft = None if draft_model is None else describe_model(draft_model, **shared)
    context = min(context or about.max_context, about.max_context)
    free = about.free_bytes if free_bytes is None else free_bytes

    def planned(num_seqs: int, length: int) -> MemoryPlan:
        share = -(-num_seqs // workers)
        limits = limits_for(share, length, about.block_size)
        plan = about.memory(limits, share)
        if draft is not None:
            plan = plan.with_draft(draft.memory(limits, share))
        return plan.times(workers)

    def fits(num_seqs: int, length: int) -> bool:
        return planned(num_seqs, length).total <= free

    return Fit(
        form=about.form,
        context=context,
        plan=planned(sessions, context),
        kv_bytes_per_token=about.kv_bytes_per_token + (0 if draft is None else draft.kv_bytes_per_token),
        free_bytes=free,
        most_sessions=_most(MOST_SESSIONS, lambda count: fits(count, context)),
        longest_context=_most(about.max_context, lambda length: fits(sessions, length)),
    )


FIT_OPTIONS = ("dtype", "device", "backend", "load_format", "extra")


def plan_one_session(model: str, options: Mapping[str, Any]) -> Fit:
    """The fit of a model with `EngineOptions`, for one session: the least that it is of use with."""
    chosen = {name: options[name] for name in FIT_OPTIONS if options.get(name) is not None}
    workers = options.get("workers") or 1
    draft = options.get("draft_model")
    length = options.get("max_model_len")
    return plan_fit(model, 1, length, free_bytes=None, workers=workers, draft_model=draft, **chosen)


def limits_for(num_seqs: int, context: int, block_size: int) -> BackendLimits:
    """What an engine core for so many requests of this length asks of its backend."""
    defaults, config = BackendLimits(), EngineConfig()
    num_cells = cells_for(num_seqs, context, block_size)
    return BackendLimits(
        num_cells=num_cells,
        max_seqs=seqs_for(num_cells, num_seqs),
        ubatch_size=min(defaults.ubatch_size, max(config.max_num_batched_tokens, num_seqs)),
    )


def check_memory(
    model: ModelHandle, limits: BackendLimits, num_seqs: int, workers: int = 1, draft: DraftModel | None = None
) -> None:
    """Raise `ConfigError` if KV and activations of all workers exceed the free memory; the weights are loaded."""
    plan, free = model.memory(limits, num_seqs), model.free_bytes
    if draft is not None:
        plan = plan.with_draft(draft.model.memory(draft.limits, num_seqs))
    plan = plan.times(workers)
    needed, num_cells = plan.kv + plan.activations, workers * limits.num_cells
    if needed > free:
        raise ConfigError(
            f"{needed / MIB:,.0f} MiB are needed ({plan.kv / MIB:,.0f} for KV of {num_cells:,} tokens, "
            f"{plan.activations / MIB:,.0f} for activations), but only {free / MIB:,.0f} are free: take a shorter "
            "context, fewer requests at a time or a smaller kv_cache_tokens; `tokenmill fit` shows what fits"
        )


def _most(limit: int, is_fine: Callable[[int], bool]) -> int:
    """The largest number up to a limit for which it is fine: all smaller ones are."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if is_fine(middle):
            low = middle
        else:
            high = middle - 1
    return low
