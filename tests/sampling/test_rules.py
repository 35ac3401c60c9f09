"""DRY against its reference: forwards, backwards, in forks, and on logs that repeat without end."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import reference
from tokenmill.params import SamplingParams
from tokenmill.sampling.state import Dry

logs = st.one_of(
    st.lists(st.integers(0, 3), max_size=40),
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 12)).map(
        lambda pair: pair[0] * pair[1]
    ),
)
params_lists = st.builds(
    SamplingParams,
    dry_multiplier=st.just(2.0),
    dry_base=st.sampled_from([1.0, 1.5]),
    dry_allowed_length=st.integers(1, 5),
    dry_range=st.sampled_from([0, 1, 7, 1000]),
)


@pytest.mark.req("R29")
@given(begin=logs, more=logs, params=params_lists, back=st.integers(0, 5))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_dry_follows_the_log_forwards_backwards_and_into_forks(
    begin: list[int], more: list[int], params: SamplingParams, back: int
) -> None:
    rule, log = Dry(params, begin), list(begin)
    for token in more:
        assert rule.penalties() == pytest.approx(reference.dry(log, params))
        rule.advance(token)
        log.append(token)
    fork, fork_log = rule.fork(), list(log)
    back = min(back, len(log))
    rule.rollback(back)
    del log[len(log) - back :]
    assert rule.penalties() == pytest.approx(reference.dry(log, params))
    for token in (1, 2, 1, 2):
        fork.advance(token)
        fork_log.append(token)
    assert fork.penalties() == pytest.approx(reference.dry(fork_log, params))
    assert rule.penalties() == pytest.approx(reference.dry(log, params)), "a fork goes its own way"


@pytest.mark.parametrize("allowed_length", [2, 2000])
def test_a_log_of_one_token_costs_little(allowed_length: int) -> None:
    params = SamplingParams(dry_multiplier=1, dry_allowed_length=allowed_length)
    rule = Dry(params, [7] * 4000)
    begin = time.process_time()
    for _ in range(50):
        rule.advance(7)
        assert set(rule.penalties()) == {7}
    assert (time.process_time() - begin) / 50 < 0.02  # about 1 ms; comparing every place took 2.4 s
