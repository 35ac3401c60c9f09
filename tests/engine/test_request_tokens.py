"""`RequestTokens`: a request's log behaves as the list that it replaces, and arrays handed out do not change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.request import RequestTokens

IDS = st.lists(st.integers(0, 99), max_size=6)
STEPS = st.lists(st.one_of(st.tuples(st.just("add"), IDS), st.tuples(st.just("keep"), st.integers(0, 6))), max_size=12)


@given(prompt=IDS.filter(bool), steps=STEPS, begin=st.integers(-12, 12), end=st.integers(-12, 12))
def test_it_is_a_list_whose_arrays_stay_as_they_were(
    prompt: list[int], steps: list[tuple[str, list[int] | int]], begin: int, end: int
) -> None:
    tokens, model = RequestTokens(np.array(prompt, dtype=np.int32)), list(prompt)
    handed_out = []
    for _, value in steps:
        if isinstance(value, list):
            tokens += value[:-1]
            for token in value[-1:]:
                tokens.append(token)
            model += value
        else:
            count = min(value, len(tokens.generated))
            tokens.keep_generated(count)
            del model[len(prompt) + count :]
        handed_out.append((tokens.array, list(model)))
    assert tokens == model
    assert len(tokens) == len(model)
    assert list(tokens) == model
    assert tokens[begin:end] == model[begin:end]
    assert [tokens[i] for i in range(-len(model), len(model))] == model + model
    assert np.array(tokens, dtype=np.int64).tolist() == model
    assert tokens.prompt.tolist() == prompt
    for array, expected in handed_out:
        assert array.tolist() == expected
