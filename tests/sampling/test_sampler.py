"""Each kind of sampling against a plain reference, alone and in mixed batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.sampling import reference
from tests.sampling.test_properties import as_tensor
from tokenmill.contract import BAD_ROW, Sampled, pack_mask
from tokenmill.params import MAX_BIAS, SamplingParams
from tokenmill.sampling import definition
from tokenmill.sampling.sampler import HostSampler, StepSampler
from tokenmill.sampling.state import SamplingState

VOCAB = 40
STOPS = frozenset({3, 4})


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


def sample(
    logits: np.ndarray,
    params: list[SamplingParams],
    *,
    logs: list[list[int]] | None = None,
    seeds: list[int] | None = None,
    position: int = 9,
    mask: np.ndarray | None = None,
    as_torch: bool = False,
) -> Sampled:
    state = SamplingState(len(params), logits.shape[1])
    for row, one in enumerate(params):
        log = logs[row] if logs else [1, 2]
        state.attach(row, one, log, 2, seed=seeds[row] if seeds else row, stop_ids=STOPS)
    rows = np.arange(len(params), dtype=np.int32)
    sampler = StepSampler(state, rows, np.full(len(params), position, dtype=np.int32))
    packed = None if mask is None else pack_mask(mask)
    return sampler(as_tensor(logits) if as_torch else logits, packed)


def draws(logits: np.ndarray, params: SamplingParams, count: int, **options: Any) -> np.ndarray:
    """`count` draws from one row of logits: a batch of equal rows with different seeds."""
    many = np.repeat(logits[None], count, axis=0)
    return np.asarray(sample(many, [params] * count, seeds=list(range(count)), **options).ids)


FILTERS = [
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=0.01),
    SamplingParams(min_p=0.2),
    SamplingParams(typical_p=0.6),
    SamplingParams(top_k=10, top_p=0.7, min_p=0.05, temperature=1.3),
    SamplingParams(typical_p=0.9, top_k=7, temperature=0.5),
    SamplingParams(top_k=VOCAB + 5, top_p=0.5),
]


@pytest.mark.req("R29")
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_only_what_the_filters_keep_is_drawn_and_as_often_as_it_should(params: SamplingParams) -> None:
    """100,000 draws against the reference's distribution: no token outside it, frequencies within five sigmas."""
    logits = random_logits(1, seed=3)[0]
    expected = reference.distribution(logits.astype(np.float64), params)
    count = 100_000
    found = np.bincount(np.concatenate([draws(logits, params, 10_000, position=p) for p in range(10)]), minlength=VOCAB)
    assert (found[expected == 0] == 0).all()
    sigma = np.sqrt(count * expected * (1 - expected)) + 1e-9
    assert (np.abs(found - count * expected) <= 5 * sigma + 1).all()


@pytest.mark.parametrize("seed", range(20))
def test_the_kept_tokens_are_the_references(seed: int) -> None:
    logits = random_logits(1, seed=seed)[0]
    for params in FILTERS:
        wanted = set(reference.kept(logits.astype(np.float64), params))
        assert set(draws(logits, params, 400).tolist()) <= wanted


@pytest.mark.req("R29")
def test_penalties_bias_bans_and_dry_are_the_references() -> None:
    """Greedy over edited logits: the choice shows the edit. 300 random logs and parameters in one batch."""
    rng = np.random.default_rng(5)
    logits = random_logits(300, seed=6)
    params, logs = [], []
    for _ in range(300):
        some = rng.integers(0, VOCAB, 6).tolist()
        params.append(
            SamplingParams(
                temperature=0,
                repetition_penalty=float(rng.choice([1.0, 1.5, 0.7])),
                presence_penalty=float(rng.choice([0.0, 1.0, -1.0])),
                frequency_penalty=float(rng.choice([0.0, 0.6])),
                dry_multiplier=float(rng.choice([0.0, 2.0])),
                dry_range=int(rng.choice([0, 8])),
                min_tokens=int(rng.choice([0, 12])),
                max_tokens=50,
                logit_bias={some[0]: 3.0, some[1]: -4.0},
                banned_token_ids=tuple(some[2:4]),
                allowed_token_ids=tuple(range(30)) if rng.random() < 0.3 else None,
            )
        )
        period = int(rng.integers(2, 6))
        logs.append([int(x) for x in np.resize(rng.integers(0, VOCAB, period), int(rng.integers(3, 20)))])
    ids = sample(logits, params, logs=logs).ids
    for i, one in enumerate(params):
        expected = reference.edited(logits[i], one, logs[i], 2, STOPS)
        assert expected[ids[i]] >= np.nanmax(expected) - 1e-4, f"row {i}: {one}"


@pytest.mark.req("R29")
def test_xtc_excludes_all_but_the_least_of_the_top_choices() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], dtype=np.float32))
    always = SamplingParams(xtc_probability=1.0, xtc_threshold=0.15)
    assert set(draws(logits, always, 2000).tolist()) == {2, 3, 4}
    assert set(draws(logits, SamplingParams(xtc_probability=0.0), 2000).tolist()) == {0, 1, 2, 3, 4}
    half = draws(logits, SamplingParams(xtc_probability=0.5, xtc_threshold=0.15), 4000)
    assert abs(np.isin(half, [0, 1]).mean() - 0.35) < 0.04
    nothing_above = SamplingParams(xtc_probability=1.0, xtc_threshold=0.5)
    assert set(draws(logits, nothing_above, 2000).tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.req("R29")
@pytest.mark.parametrize("allowed", [VOCAB, VOCAB - 5])
def test_xtc_with_a_threshold_of_zero_leaves_the_least_likely_token(allowed: int) -> None:
    """However unlikely it is, and whatever is banned: banned tokens have a probability of 0, which is no less."""
    logits = 3 * random_logits(50, seed=11)
    banned = tuple(range(allowed, VOCAB))
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=0.0, banned_token_ids=banned)
    assert (sample(logits, [params] * 50).ids == logits[:, :allowed].argmin(axis=1)).all()


@pytest.mark.req("G12", "R6")
def test_a_row_draws_the_same_alone_and_in_any_crowd() -> None:
    logits = random_logits(64, seed=9)
    rng = np.random.default_rng(1)
    crowd = [FILTERS[i] for i in rng.integers(0, len(FILTERS), 60)]
    crowd += [SamplingParams(temperature=0), SamplingParams(repetition_penalty=1.4), SamplingParams(logprobs=3),
              SamplingParams(xtc_probability=0.5)]  # fmt: skip
    seeds = rng.integers(0, 1 << 40, 64).tolist()
    together = sample(logits, crowd, seeds=seeds).ids
    for i, params in enumerate(crowd):
        assert sample(logits[i : i + 1], [params], seeds=seeds[i : i + 1]).ids[0] == together[i]
    order = rng.permutation(64)
    shuffled = sample(logits[order], [crowd[i] for i in order], seeds=[seeds[i] for i in order]).ids
    assert (shuffled == together[order]).all()


def test_a_large_vocabulary_is_sorted_only_when_it_must_be() -> None:
    """More tokens than the first look takes: flat logits need them all, and the result is the reference's."""
    vocab = 3000
    flat = np.random.default_rng(2).normal(0, 0.01, vocab).astype(np.float32)
    params = SamplingParams(top_p=0.9)
    expected = set(reference.kept(flat.astype(np.float64), params))
    drawn = draws(flat, params, 3000)
    assert set(drawn.tolist()) <= expected
    assert len(set(drawn.tolist())) > 1024


@pytest.mark.req("R29")
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [1000, 1500, 4999, 5000])
def test_a_top_k_beyond_the_first_look_still_bounds_the_mass(top_k: int, top_p: float) -> None:
    """The first look is at 1024 tokens: whose mass top-p is a part of must not depend on that."""
    logits = np.random.default_rng(7).normal(0, 1, 5000).astype(np.float32)
    params = SamplingParams(top_k=top_k, top_p=top_p)
    wanted = reference.kept(logits.astype(np.float64), params)
    drawn = draws(logits, params, 600)
    assert set(drawn.tolist()) <= set(wanted)
    least_likely_half = sorted(wanted, key=lambda token: logits[token])[: len(wanted) // 2]
    assert np.isin(drawn, least_likely_half).any()


@pytest.mark.req("R29")
@pytest.mark.parametrize("vocab", [2, 8, 32, 128])
def test_top_p_stops_where_its_sum_is_reached_and_equal_logits_go_by_id(vocab: int) -> None:
    """Of 8 equally likely tokens, a top-p of 3/8 keeps 3: binary fractions, so that no rounding is in the way."""
    equal = np.full(vocab, 1.7, dtype=np.float32)
    for kept in {1, vocab // 4 or 1, vocab // 2, vocab // 2 + 1, vocab - 1}:
        for top_k in (0, vocab, vocab + 1):
            params = SamplingParams(top_p=kept / vocab, top_k=top_k, temperature=0.7)
            assert set(draws(equal, params, 10 * vocab).tolist()) == set(range(kept)), params


@pytest.mark.req("G20")
def test_choices_attempts_and_positions_differ() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)
    state = SamplingState(4, 1000)
    for row in range(4):
        attempt = 1 if row == 3 else 0
        state.attach(row, SamplingParams(attempt=attempt), [1], 1, seed=5, choice=row % 3)
    rows = np.arange(4, dtype=np.int32)
    ids = [
        StepSampler(state, rows, np.full(4, position, dtype=np.int32))(np.repeat(logits, 4, axis=0), None).ids
        for position in (7, 8)
    ]
    assert len({*ids[0].tolist(), *ids[1].tolist()}) == 8


@pytest.mark.req("R29")
def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3, seed=4)
    params = [
        SamplingParams(temperature=0.1, top_k=1, logprobs=2),
        SamplingParams(temperature=0),
        SamplingParams(logprobs=0),
    ]
    sampled = sample(logits, params)
    expected = np.log(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
    assert np.isnan(sampled.extras["logprob"][1]), "only rows that ask pay for it"
    for i in (0, 2):
        assert sampled.extras["logprob"][i] == pytest.approx(expected[i, sampled.ids[i]], abs=1e-5)
        best = np.argsort(-expected[i])[: params[i].logprobs]
        assert sampled.extras["top_ids"][i, : len(best)].tolist() == best.tolist()
        assert sampled.extras["top_logprobs"][i, : len(best)] == pytest.approx(expected[i, best], abs=1e-5)
    assert sample(logits, [SamplingParams(temperature=0)] * 3).extras == {}


def test_masks_bind_every_kind_of_row() -> None:
    logits = random_logits(4, seed=8)
    mask = np.zeros((4, VOCAB), dtype=bool)
    mask[:, [5, 11]] = True
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(typical_p=0.5)]
    for position in range(50):
        assert set(sample(logits, params, mask=mask, position=position).ids.tolist()) <= {5, 11}


@pytest.mark.fault("E10")
def test_rows_without_a_finite_logit_are_bad_and_alone_in_it() -> None:
    logits = random_logits(5, seed=8)
    logits[0, 3] = np.nan
    logits[1] = -np.inf
    logits[2, 7] = np.inf
    params = [SamplingParams(temperature=t) for t in (0, 1, 1, 1, 0)]
    ids = sample(logits, params).ids
    assert ids[:3].tolist() == [BAD_ROW] * 3
    assert ids[3] >= 0
    assert ids[4] == logits[4].argmax()
    nothing_left = SamplingParams(temperature=1, banned_token_ids=tuple(range(VOCAB)))
    assert sample(logits[4:], [nothing_left]).ids.tolist() == [BAD_ROW]
    greedy = [SamplingParams(temperature=0)] * 5
    assert sample(logits, greedy).ids[:3].tolist() == [BAD_ROW] * 3


def test_greedy_rows_cost_nothing_but_the_largest_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("greedy rows need none of this")

    for name in ("weights", "drawn", "log_softmax"):
        monkeypatch.setattr(definition, name, never)
    monkeypatch.setattr(HostSampler, "_lib", None)
    logits = random_logits(8)
    assert (sample(logits, [SamplingParams(temperature=0)] * 8).ids == logits.argmax(axis=1)).all()


@pytest.mark.req("R29")
def test_no_temperature_is_too_small_or_too_large() -> None:
    logits = random_logits(1, seed=1)[0] * 50
    for temperature in (5e-324, 1e-40, 9e-6):
        for options in ({}, {"top_k": 5}, {"logprobs": 1}, {"logit_bias": {1: 0.0}}):
            params = SamplingParams(temperature=temperature, **options)  # type: ignore[arg-type]
            assert (draws(logits, params, 50) == logits.argmax()).all()
    huge = logits * np.float32(1e36)
    assert (draws(huge, SamplingParams(temperature=1e-4), 50) == huge.argmax()).all()
    assert len(set(draws(logits, SamplingParams(temperature=100), 200).tolist())) > VOCAB / 2


@pytest.mark.req("R29")
def test_edits_out_of_range_stop_at_its_end() -> None:
    """Only a request that bans every token leaves a row without a choice."""
    logits = random_logits(1, seed=2)[0]
    once = [1, 2, 3, 4, 5]
    unlikely = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -MAX_BIAS), repetition_penalty=10)
    for params, allowed in [
        (SamplingParams(logit_bias={7: MAX_BIAS}), {7}),
        (SamplingParams(logit_bias={7: MAX_BIAS}, repetition_penalty=1e-40), set(once)),
        (SamplingParams(logit_bias={7: MAX_BIAS}, banned_token_ids=(7,), allowed_token_ids=(7, 8)), {8}),
        (SamplingParams(logit_bias=dict.fromkeys(once, MAX_BIAS), repetition_penalty=1e-300), set(once)),
        (SamplingParams(repetition_penalty=1e-300, allowed_token_ids=(9, 10)), {9, 10}),
        (SamplingParams(repetition_penalty=1e-30, temperature=0.01), set(once)),
        (unlikely, set(range(VOCAB))),
    ]:
        count = 100
        found = set(draws(logits, params, count, logs=[once] * count).tolist())
        assert found <= allowed, params
    dry = SamplingParams(dry_multiplier=100, dry_base=10, allowed_token_ids=(1,), dry_allowed_length=1)
    assert sample(logits[None], [dry], logs=[[1] * 90]).ids.tolist() == [1]
    all_banned = SamplingParams(logit_bias={7: MAX_BIAS}, banned_token_ids=tuple(range(VOCAB)), repetition_penalty=0.1)
    assert sample(logits[None], [all_banned]).ids.tolist() == [BAD_ROW]


@pytest.mark.req("R29")
def test_dry_comes_after_the_other_penalties() -> None:
    """8 / 2 - 3 = 1 lies over 0.9 and under 1.5; in the other order it would be (8 - 3) / 2 = 2.5."""
    logits = np.full((1, VOCAB), -9.0, dtype=np.float32)
    logits[0, 6], logits[0, 20] = 8.0, 0.9
    log = [5, 6, 5]
    params = SamplingParams(
        temperature=0, repetition_penalty=2, dry_multiplier=3, dry_base=1, dry_allowed_length=1, max_tokens=9
    )
    assert reference.edited(logits[0], params, log, 2, STOPS)[6] == 1
    assert sample(logits, [params], logs=[log]).ids.tolist() == [6]
    lower = logits.copy()
    lower[0, 20] = 1.5
    assert sample(lower, [params], logs=[log]).ids.tolist() == [20]


@pytest.mark.parametrize("as_torch", [False, True])
def test_a_draft_model_s_narrower_vocabulary_is_padded_with_tokens_that_are_never_drawn(as_torch: bool) -> None:
    state = SamplingState(1, 8)
    state.attach(0, SamplingParams(temperature=1.0), [1], 1, seed=0)
    logits = np.full((64, 5), -30.0, dtype=np.float32)
    rows, positions = np.zeros(64, dtype=np.int32), np.arange(64, dtype=np.int32)
    sampled = StepSampler(state, rows, positions)(as_tensor(logits) if as_torch else logits, None)
    ids = np.asarray(sampled.ids)
    assert set(ids.tolist()) == set(range(5))
