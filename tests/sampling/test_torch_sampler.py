"""The sampler of the torch backend draws the ids of the one on the host, to the last bit of each log-probability."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.sampling.steps import Step, assert_same, steps
from tokenmill.contract import pack_mask
from tokenmill.sampling.sampler import HostSampler

torch = pytest.importorskip("torch")

from tokenmill.backends.torch.kernels.device import largest_allowed  # noqa: E402
from tokenmill.backends.torch.tensor_sampler import sample  # noqa: E402


@pytest.mark.req("R29", "G12")
@settings(deadline=None, max_examples=150)
@given(step=steps())
def test_torch_samples_what_the_host_samples(step: Step) -> None:
    sampled = sample(step.draws, torch.from_numpy(step.logits), step.mask)
    assert_same(step, sampled, HostSampler()(step.draws, step.logits, step.mask, None))


def test_the_largest_allowed_logit_of_each_row() -> None:
    """Whether or not the largest of all is allowed; a NaN is the largest wherever it is."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.standard_normal((40, 1003)).astype(np.float32))
    allowed = rng.random((40, 1003)) < np.linspace(0.01, 1, 40)[:, None]
    allowed[7] = False
    logits[9, 4] = torch.nan
    values, ids = largest_allowed(logits, pack_mask(allowed))
    wanted = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
    rows = [row for row in range(40) if row not in (7, 9)]
    assert ids[rows].tolist() == wanted.argmax(dim=-1)[rows].tolist()
    assert values[rows].tolist() == wanted.amax(dim=-1)[rows].tolist()
    assert values[7] == -torch.inf
    assert values[9].isnan()
