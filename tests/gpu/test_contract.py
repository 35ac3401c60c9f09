"""The conformance suite on the card: every story, and random operations at both depths."""

from __future__ import annotations

from tests.conformance.__main__ import run
from tests.gpu.card import needs_card

pytestmark = needs_card()


def test_the_contract() -> None:
    from tests.gpu.cuda_subject import CUDA

    assert run(CUDA, num_seeds=20) == 0


def test_the_contract_without_each_optimisation() -> None:
    from tests.gpu.cuda_subject import WITHOUT

    for subject in WITHOUT:
        assert run(subject, num_seeds=2) == 0
