"""`Executor`: from a `StepPlan` to sampled ids, through one backend. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.core import Backend, Forward, IntArray, SampleRows, Sampling
from tokenmill.engine.plan import StepPlan
from tokenmill.errors import ForwardFailed

NO_IDS: IntArray = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Submitted:
    """A step on its way."""

    plan: StepPlan
    forward: Forward
    sampling: Sampling | None
    """None where no row of the step gets a token."""


class Executor:
    """Runs plans on a backend: two launches, one wait."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def submit(self, plan: StepPlan) -> Submitted:
        """Launch the forward pass and the sampling; returns at once. Raises what `Backend.forward` raises."""
        forward = self.backend.forward(plan.batch)
        if not len(plan.sampled_rows):
            return Submitted(plan, forward, None)
        rows = SampleRows(np.arange(len(plan.sampled_rows), dtype=np.int32), plan.sampled_rows)
        try:
            return Submitted(plan, forward, self.backend.sample(forward, rows))
        except Exception as error:
            # The forward has been launched and can't be undone from here.
            raise ForwardFailed(f"sampling failed: {type(error).__name__}: {error}", fatal=True) from error

    def collect(self, step: Submitted) -> IntArray:
        """Wait for the step's ids, one for each of the plan's sampled rows."""
        if step.sampling is None:
            self.backend.collect(step.forward)
            return NO_IDS
        ids: IntArray = self.backend.collect(step.sampling).ids
        return ids

    def close(self) -> None:
        self.backend.close()
