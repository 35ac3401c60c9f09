"""Sampling on the card draws what it draws on the CPU from the same logits, in kernels and in torch."""

from __future__ import annotations

import numpy as np
import torch

from tests.gpu.card import needs_card
from tokenmill.contract import Mask, pack_mask
from tokenmill.params import SamplingParams
from tokenmill.sampling.sampler import StepSampler
from tokenmill.sampling.state import SamplingState

pytestmark = needs_card()

VOCAB = 5003
PLAIN = [SamplingParams(temperature=t) for t in (0, 0.3, 0.6, 1.0, 1.7)]
OTHERS = [
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.9, temperature=0.7),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=50, top_p=0.8, min_p=0.01),
    SamplingParams(typical_p=0.7),
    SamplingParams(typical_p=0.4, top_p=0.8, temperature=1.3),
    SamplingParams(xtc_probability=0.5, xtc_threshold=0.05),
    SamplingParams(xtc_probability=0.9, xtc_threshold=0.02, top_k=40, typical_p=0.95),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=0, logit_bias={7: 5.0, 9: -3.0}, banned_token_ids=(11, 12)),
    SamplingParams(temperature=0.8, logprobs=3),
]


def sampled(
    params: list[SamplingParams], logits: torch.Tensor, position: int, mask: Mask | None = None
) -> tuple[np.ndarray, dict[str, object]]:
    state = SamplingState(len(params), VOCAB)
    for row, one in enumerate(params):
        state.attach(row, one, [1, 2, 3, 2, 1, 7], 3, seed=row * 1_000_003 + 5)
    rows = np.arange(len(params), dtype=np.int32)
    drawn = StepSampler(state, rows, np.full(len(params), position, dtype=np.int32))(logits, mask)
    return drawn.ids.cpu().numpy(), dict(drawn.extras)


def test_ids_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(1)
    for params in (PLAIN, OTHERS, PLAIN + OTHERS):
        for position in range(20):
            logits = 4 * torch.randn(len(params), VOCAB, generator=generator)
            on_cpu, _ = sampled(params, logits, position)
            on_card, _ = sampled(params, logits.cuda(), position)
            assert on_cpu.tolist() == on_card.tolist()


def masks(num_rows: int, seed: int) -> np.ndarray:
    """Some tokens of each row are allowed; of the second all, of the third one."""
    allowed = np.random.default_rng(seed).random((num_rows, VOCAB)) < 0.01
    allowed[1], allowed[2] = True, False
    allowed[2, 77] = True
    return allowed


def test_masked_ids_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(4)
    for params in (PLAIN, OTHERS, PLAIN + OTHERS):
        for position in range(5):
            logits = 4 * torch.randn(len(params), VOCAB, generator=generator)
            allowed = masks(len(params), position)
            on_cpu, _ = sampled(params, logits, position, pack_mask(allowed))
            on_card, _ = sampled(params, logits.cuda(), position, pack_mask(allowed))
            assert on_cpu.tolist() == on_card.tolist()
            assert allowed[np.arange(len(params)), on_card].all()


def test_half_precision_logits_are_drawn_from_as_they_are() -> None:
    generator = torch.Generator().manual_seed(2)
    for params in (PLAIN, PLAIN + OTHERS):
        logits = (4 * torch.randn(len(params), VOCAB, generator=generator)).to(torch.bfloat16)
        on_cpu, _ = sampled(params, logits.float(), 3)
        on_card, _ = sampled(params, logits.cuda(), 3)
        assert on_cpu.tolist() == on_card.tolist()


def test_a_bad_row_fails_alone() -> None:
    logits = torch.randn(5, VOCAB)
    wanted, _ = sampled(PLAIN, logits, 0)
    logits[2, 100] = torch.nan
    found, _ = sampled(PLAIN, logits.cuda(), 0)
    assert found.tolist() == [*wanted[:2], -1, *wanted[3:]]


WITHOUT_WAITING = [
    *PLAIN,
    *OTHERS,
    SamplingParams(temperature=0.8, top_p=0.9, allowed_token_ids=[5, 6, 7, 8], logit_bias={6: 1.0}),
]


def test_nothing_waits_for_the_card() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(len(WITHOUT_WAITING), VOCAB, generator=generator)).cuda()
    state = SamplingState(len(logits), VOCAB)
    for row, one in enumerate(WITHOUT_WAITING):
        state.attach(row, one, [1, 2, 3, 2, 1, 7], 3, seed=row)
    rows = np.arange(len(logits), dtype=np.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = StepSampler(state, rows, rows)(logits, None)
        held = StepSampler(state, rows[: len(PLAIN)], rows[: len(PLAIN)])(
            logits[: len(PLAIN)], pack_mask(masks(len(PLAIN), 0))
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (drawn.ids >= 0).all()
    assert (held.ids >= 0).all()
