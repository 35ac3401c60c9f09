"""Steps to sample, for property tests: rows with any combination of parameters, logits, logs and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tokenmill.contract import Mask, Sampled, pack_mask
from tokenmill.contract.draws import Draws
from tokenmill.params import SamplingParams
from tokenmill.sampling.state import SamplingState

STOPS = frozenset({0, 2})


@dataclass(frozen=True)
class Step:
    """What a sampler is given."""

    draws: Draws
    logits: np.ndarray
    mask: Mask | None


def _params(vocab: int) -> st.SearchStrategy[SamplingParams]:
    unit = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9, 0.95, 0.999])
    tokens = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=8).map(tuple)
    each = {
        "temperature": st.sampled_from([0.0, 1e-6, 0.01, 0.3, 0.7, 1.7, 30.0]),
        "top_k": st.sampled_from([1, 2, 3, 40, vocab - 1 or 1, vocab, vocab + 1]),
        "top_p": unit,
        "min_p": st.one_of(unit, st.just(1.0)),
        "typical_p": unit,
        "xtc_probability": st.sampled_from([0.5, 1.0]),
        "xtc_threshold": st.sampled_from([0.0, 1e-6, 0.05, 0.5]),
        "repetition_penalty": st.sampled_from([1e-300, 0.5, 1.3, 10.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.4, 10.0]),
        "frequency_penalty": st.sampled_from([-0.7, 0.2, 10.0]),
        "dry_multiplier": st.sampled_from([0.8, 100.0]),
        "dry_base": st.sampled_from([1.0, 10.0]),
        "dry_allowed_length": st.integers(1, 3),
        "dry_range": st.integers(0, 9),
        "min_tokens": st.integers(1, 6),
        "logprobs": st.integers(0, 6),
        "attempt": st.integers(0, (1 << 32) - 1),
        "logit_bias": st.dictionaries(st.integers(0, vocab - 1), st.floats(-100, 100, width=32), max_size=5),
        "banned_token_ids": tokens,
        "allowed_token_ids": tokens,
    }
    return st.fixed_dictionaries({}, optional=each).map(lambda values: SamplingParams(**values))


@st.composite
def steps(draw: Any) -> Step:
    """Logits are of any spread, with ties or without, some of them minus infinity, a few of them no numbers."""
    vocab = draw(st.sampled_from([1, 2, 7, 40, 63, 64, 65, 130, 700]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_rows = draw(st.integers(1, 5))
    logits = (rng.normal(0, draw(st.sampled_from([0.0, 0.1, 2.0, 9.0, 300.0])), (num_rows, vocab))).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)
    if draw(st.integers(0, 4)) == 0:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
    if draw(st.integers(0, 9)) == 0:
        logits[rng.random(logits.shape) < 0.02] = draw(st.sampled_from([np.nan, np.inf]))
    state = SamplingState(num_rows, vocab)
    for row in range(num_rows):
        log = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=12))
        seed, choice = draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 9))
        num_prompt = draw(st.integers(1, len(log)))
        state.attach(row, draw(_params(vocab)), log, num_prompt, seed=seed, choice=choice, stop_ids=stops_of(vocab))
    positions = rng.integers(0, 1 << 20, num_rows).astype(np.int32)
    draws = state.draws(np.arange(num_rows, dtype=np.int32), positions, {})
    mask = pack_mask(rng.random(logits.shape) < 0.7) if draw(st.integers(0, 3)) == 0 else None
    return Step(draws, logits, mask)


def stops_of(vocab: int) -> frozenset[int]:
    return frozenset(token for token in STOPS if token < vocab)


def assert_same(step: Step, ours: Sampled, theirs: Sampled) -> None:
    """The same ids, and the same bits of all log-probabilities that rows have asked for."""
    ids = np.asarray(ours.ids)
    assert ids.tolist() == np.asarray(theirs.ids).tolist(), step.draws.table
    assert ours.extras.keys() == theirs.extras.keys()
    counts = step.draws.table["num_logprobs"]
    for name in ours.extras:
        for row in np.flatnonzero((counts >= 0) & (ids >= 0)):
            found, wanted = (np.asarray(one.extras[name][row]).ravel() for one in (ours, theirs))
            length = 1 if name == "logprob" else counts[row]
            assert found[:length].tolist() == wanted[:length].tolist(), (name, step.draws.table[row])
