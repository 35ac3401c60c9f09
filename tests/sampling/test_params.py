from typing import Any

import numpy as np
import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams, id_array


@pytest.mark.req("R29", "R49")
@pytest.mark.parametrize(
    ("wrong", "saying"),
    [
        ({"temperature": -0.1}, r"temperature must be in \[0, 100\], not -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"n": 0}, "n must be an integer from 1 to 64, not 0"),
        ({"n": 10_000}, "n must be"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"min_tokens": 20}, "min_tokens 20 > max_tokens 16"),
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, not 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": 7}, "stop must be a string or a list of strings, not int"),
        ({"stop": ["a", 7]}, "stop must be a string or a list of strings"),
        ({"stop": ["x"] * 10_000}, "at most 64 stop strings are allowed, not 10000"),
        ({"stop": [""]}, "1 to 1024 characters, not 0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: token ids must be from 0 to"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids"),
        ({"banned_token_ids": [1.5]}, "banned_token_ids must be a list"),
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": {1: 10**400}}, "logit_bias of token 1"),
        ({"logit_bias": {1: "a"}}, "logit_bias of token 1"),
        ({"logit_bias": {-1: 1.0}}, "must be from 0 to"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping"),
        ({"stop": ["\ud800"]}, "not valid Unicode"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], saying: str) -> None:
    with pytest.raises(InvalidRequest, match=saying):
        SamplingParams(**wrong)


def test_lists_become_tuples_and_one_stop_string_a_list() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert not params.needs_history
    assert SamplingParams(min_tokens=3).needs_history


@pytest.mark.req("R29")
@pytest.mark.parametrize("ids", [[], [0, 1, 2], (1,), [np.int64(5), 6], np.array([7, 8]), range(3), [2**31 - 1]])
def test_token_ids_become_an_array(ids: Any) -> None:
    found = id_array("prompt", ids)
    assert found.dtype == np.int32
    assert found.tolist() == list(ids)


@pytest.mark.req("R29", "R49")
@pytest.mark.parametrize(
    "ids", [[True], [5, False], [0, 1, True], [1.0], ["1"], "12", b"1234", [[1, 2]], [None], None, 5, [-1], [2**31]]
)
def test_what_is_no_list_of_token_ids_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        id_array("prompt", ids)
