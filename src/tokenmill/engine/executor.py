"""`Executor`: from a `StepPlan` to sampled ids, through one backend. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.contract import Backend, DecodeOutput, Forward, Sampled, Sampler, SampleRows, Sampling
from tokenmill.engine.plan import StepPlan
from tokenmill.errors import ForwardFailed
from tokenmill.sampling.state import SamplingState

NOTHING = Sampled(np.zeros(0, dtype=np.int32))


@dataclass(frozen=True)
class Submitted:
    """A step on its way."""

    plan: StepPlan
    forward: Forward
    sampling: Sampling | None
    """None where no row of the step gets a token."""


class Executor:
    """Runs plans on a backend: two launches, one wait. The sampler reads the state of the plan's rows at launch."""

    def __init__(self, backend: Backend, sampling: SamplingState) -> None:
        self.backend = backend
        self._sampling = sampling

    def submit(self, plan: StepPlan) -> Submitted:
        """Launch the forward pass and the sampling; returns at once. Raises what `Backend.forward` raises."""
        forward = self.backend.forward(plan.batch)
        if not len(plan.sampled_rows):
            return Submitted(plan, forward, None)
        try:
            rows = SampleRows(plan.logits_rows, plan.sampled_rows, self._sampler(plan))
            return Submitted(plan, forward, self.backend.sample(forward, rows))
        except Exception as error:
            # The forward has been launched and can't be undone from here.
            raise ForwardFailed(f"sampling failed: {type(error).__name__}: {error}", fatal=True) from error

    def _sampler(self, plan: StepPlan) -> Sampler | None:
        """None where every row takes its largest logit, which a backend does by itself."""
        if self._sampling.is_plain_greedy[plan.sampled_rows].all():
            return None
        from tokenmill.sampling.sampler import StepSampler  # needs torch, which greedy decoding on numpy does not

        return StepSampler(self._sampling, plan.sampled_rows, plan.positions)

    def collect(self, step: Submitted) -> Sampled:
        """Wait for what the step drew, one id for each of the plan's sampled rows."""
        if step.sampling is None:
            self.backend.collect(step.forward)
            return NOTHING
        return self.backend.collect(step.sampling)

    def outputs(self, step: Submitted) -> DecodeOutput | None:
        """All logits and hidden rows of a collected step, if its plan has prompts to score or to pool."""
        return self.backend.collect(step.forward) if step.plan.scores or step.plan.pools else None

    def close(self) -> None:
        self.backend.close()
