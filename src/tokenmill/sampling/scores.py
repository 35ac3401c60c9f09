"""Log-probabilities of tokens that are already there: what a prompt's tokens were worth to the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenmill.outputs import TokenLogprobs

SLICE = 16
"""Rows of logits reduced at once: a vocabulary is wide."""


def score(logits: NDArray[np.float32], tokens: NDArray[np.int32], count: int) -> list[TokenLogprobs]:
    """For each row: the log-probability of its token, and the `count` likeliest ones."""
    scores: list[TokenLogprobs] = []
    for begin in range(0, len(tokens), SLICE):
        rows = logits[begin : begin + SLICE].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        for row, token in zip(rows, tokens[begin : begin + SLICE].tolist(), strict=True):
            likeliest = np.argsort(-row, kind="stable")[:count]
            top = tuple((int(i), float(row[i])) for i in likeliest)
            scores.append(TokenLogprobs(float(row[token]), top))
    return scores
