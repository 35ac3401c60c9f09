"""Whatever parameters rows have, alone or side by side: each draws the token that the slow reference draws."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sampling import reference
from tokenmill.contract import BAD_ROW, Sampled, pack_mask
from tokenmill.contract.draws import uniforms
from tokenmill.params import SamplingParams
from tokenmill.sampling.sampler import StepSampler
from tokenmill.sampling.state import SamplingState

STOPS = frozenset({1, 2})


@dataclass(frozen=True)
class Case:
    """One row: what it is drawn from, how, and under which key."""

    logits: np.ndarray
    params: SamplingParams
    log: list[int]
    num_prompt: int
    seed: int
    choice: int
    position: int
    mask: np.ndarray | None

    def may_be_drawn(self) -> set[int]:
        masked = self.logits if self.mask is None else np.where(self.mask, self.logits, -np.inf)
        if not np.isfinite(masked.max()) or not np.isfinite(self.logits.max()):
            return set()
        key = (np.array([value], dtype=np.int64) for value in (self.seed, self.choice, self.attempt, self.position))
        first, second = uniforms(*key)
        edited = reference.edited(masked, self.params, self.log, self.num_prompt, STOPS)
        return reference.may_be_drawn(edited, self.params, float(first[0]), float(second[0]))

    @property
    def attempt(self) -> int:
        return self.params.attempt


def some_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Each parameter is at its default in most rows, so that every kind of row is met, and every pair of parameters."""
    values: dict[str, tuple[float, Any]] = {  # name -> (how often it is set, to one of these)
        "temperature": (0.6, [0.0, 0.4, 1.7, 1e-6]),
        "top_k": (0.35, [1, 2, 7, vocab - 1, vocab, vocab + 3, -1, 70, 1100]),
        "top_p": (0.35, [0.05, 0.5, 0.83, 0.99]),
        "min_p": (0.25, [0.02, 0.3, 1.0]),
        "typical_p": (0.2, [0.1, 0.6, 0.95]),
        "xtc_probability": (0.25, [0.5, 1.0]),
        "xtc_threshold": (0.5, [0.0, 0.03, 0.3]),
        "repetition_penalty": (0.2, [0.6, 1.8]),
        "presence_penalty": (0.2, [-1.5, 1.5]),
        "frequency_penalty": (0.2, [-0.7, 0.9]),
        "dry_multiplier": (0.2, [1.3]),
        "dry_allowed_length": (0.3, [1, 3]),
        "dry_range": (0.3, [3, 9]),
        "min_tokens": (0.2, [1, 2, 3, 5]),
        "logprobs": (0.25, [0, 1, 4]),
        "attempt": (0.3, [1, 2, 1 << 31]),
    }
    chosen = {
        name: choices[rng.integers(len(choices))] for name, (often, choices) in values.items() if rng.random() < often
    }
    some = rng.permutation(vocab)
    if rng.random() < 0.15:
        chosen["logit_bias"] = {int(token): float(rng.choice([2.5, -3.5])) for token in some[:3]}
    if rng.random() < 0.15:
        chosen["banned_token_ids"] = tuple(some[2 : rng.integers(3, vocab + 1)].tolist())
    if rng.random() < 0.15:
        chosen["allowed_token_ids"] = tuple(some[: rng.integers(1, vocab + 1)].tolist())
    return SamplingParams(**chosen)


def some_case(rng: np.random.Generator, vocab: int, mask: np.ndarray | None) -> Case:
    logits = rng.normal(0, rng.choice([0.1, 2.0, 6.0] if vocab < 1000 else [0.5, 2.0]), vocab).astype(np.float32)
    logits[-int(rng.integers(1, 4)) :] += 3  # the last tokens are easily forgotten
    if vocab <= 64 and rng.random() < 0.4:
        logits = np.round(logits)  # many are equal
    if rng.random() < 0.03:
        logits[rng.integers(vocab)] = np.nan
    period, num_prompt = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    log = np.resize(rng.integers(0, vocab, period), num_prompt + int(rng.integers(0, 12))).tolist()
    return Case(
        logits,
        some_params(rng, vocab),
        log,
        num_prompt,
        seed=int(rng.integers(0, 1 << 62)),
        choice=int(rng.integers(0, 3)),
        position=int(rng.integers(0, 5000)),
        mask=mask,
    )


def some_cases(rng: np.random.Generator, vocab: int) -> list[Case]:
    """Of one step: all of them have a mask, or none."""
    is_masked = rng.random() < 0.3
    cases = []
    for _ in range(int(rng.integers(1, 13))):
        mask = rng.random(vocab) < rng.choice([0.2, 0.9, 1.0]) if is_masked else None
        cases.append(some_case(rng, vocab, mask))
    return cases


def sample(rng: np.random.Generator, cases: list[Case], vocab: int, *, as_torch: bool = False) -> Sampled:
    """All cases in one step, in rows in any order that had other tenants before."""
    state = SamplingState(len(cases) + 3, vocab)
    for row in range(len(cases) + 3):
        state.attach(row, some_params(rng, vocab), [0, 1], 1, seed=row, choice=row, stop_ids=STOPS)
        state.detach(row)
    rows = rng.permutation(len(cases) + 3)[: len(cases)].astype(np.int32)
    for row, case in zip(rows.tolist(), cases, strict=True):
        state.attach(
            row, case.params, case.log, case.num_prompt, seed=case.seed, choice=case.choice, stop_ids=STOPS
        )  # fmt: skip
    sampler = StepSampler(state, rows, np.array([case.position for case in cases], dtype=np.int32))
    masks = [case.mask for case in cases if case.mask is not None]
    logits = np.stack([case.logits for case in cases])
    return sampler(as_tensor(logits) if as_torch else logits, pack_mask(np.stack(masks)) if masks else None)


def as_tensor(logits: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(logits)


def check_logprobs(case: Case, row: int, sampled: Sampled) -> None:
    """Those of the model: before any parameter, and of the likeliest tokens first."""
    wanted = np.log(reference.softmax(case.logits.astype(np.float64)))
    drawn, count = int(sampled.ids[row]), case.params.logprobs or 0
    assert float(sampled.extras["logprob"][row]) == pytest.approx(wanted[drawn], abs=1e-4)
    top_ids, top = (np.asarray(sampled.extras[name][row])[:count] for name in ("top_ids", "top_logprobs"))
    assert top == pytest.approx(np.sort(wanted)[::-1][:count], abs=1e-4)
    assert top == pytest.approx(wanted[top_ids], abs=1e-4)


@pytest.mark.req("R29", "G12")
@pytest.mark.parametrize("as_torch", [False, True], ids=["host", "torch"])
@pytest.mark.parametrize(("vocab", "num_batches"), [(6, 60), (40, 60), (300, 25), (1100, 16), (8300, 3)])
def test_rows_draw_what_the_reference_draws(vocab: int, num_batches: int, as_torch: bool) -> None:
    num_ambiguous = num_rows = 0
    for seed in range(as_torch, num_batches, 2):
        rng = np.random.default_rng([vocab, seed])
        cases = some_cases(rng, vocab)
        sampled = sample(rng, cases, vocab, as_torch=as_torch)
        for row, case in enumerate(cases):
            expected, drawn = case.may_be_drawn(), int(sampled.ids[row])
            assert drawn in (expected or {BAD_ROW}), f"batch {seed}, row {row}: {drawn}, not {expected}: {case.params}"
            num_ambiguous += len(expected) > 1
            num_rows += 1
            if case.params.logprobs is not None and drawn != BAD_ROW:
                check_logprobs(case, row, sampled)
    assert num_ambiguous < 0.2 * num_rows, "rounding decides too often: nothing is compared"


RECORDED = json.loads((Path(__file__).parent / "recorded_ids.json").read_text())


@pytest.mark.req("R29", "G12")
@pytest.mark.parametrize("vocab", RECORDED, ids=lambda vocab: f"{vocab} tokens")
def test_seeded_rows_draw_what_they_always_drew(vocab: str) -> None:
    """Ids recorded before there was a sampler in C: an update must not change what a seed draws."""
    for seed, ids in enumerate(RECORDED[vocab]):
        rng = np.random.default_rng([int(vocab), seed])
        assert sample(rng, some_cases(rng, int(vocab)), int(vocab)).ids.tolist() == ids
