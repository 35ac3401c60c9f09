"""`Draws`: sampling parameters of each row as arrays; the random numbers of a draw.

Written by the sampling layer, read by the samplers: the C library's for logits on the host, torch's for those on a
device. `philox` is Philox4x32-10, a counter-based generator: the draw of a token depends on its key alone.
It uses integer operators that numpy and torch share, so one function serves both with the same bits.
Values are 32-bit words kept in 64-bit signed integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

KEY = ("seed", "choice", "attempt", "position")
"""The token that a draw is for, as arguments of `uniforms`."""
FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
          "xtc_probability", "xtc_threshold")  # fmt: skip
DRAW = np.dtype(
    [(name, np.int64) for name in (*KEY, "top_k", "num_prompt")]
    + [(name, np.float32) for name in FLOATS]
    + [(name, np.int32) for name in ("num_logprobs", "is_filtered", "has_penalties")],
    align=True,
)
"""One draw, with the layout of the C library's `tm_draw`.

temperature: 0 for greedy; top_k: the vocabulary size if unlimited; num_logprobs: -1 for none.
is_filtered: draw in order of likelihood instead of vocabulary order.
"""


@dataclass(frozen=True)
class TokenLists:
    """Token lists by row, in CSR form: those of row i are from `begin[i]` to `begin[i + 1]`; optional values."""

    begin: NDArray[np.int64]
    token: NDArray[np.int32]
    value: NDArray[np.float32] | None = None

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.diff(self.begin)

    @property
    def places(self) -> NDArray[np.int64]:
        """The row of each token."""
        return np.repeat(np.arange(len(self.begin) - 1), self.counts)


@dataclass(frozen=True)
class Draws:
    """The draws of one step. Lists that no row uses are None; within a row no token is listed twice."""

    table: NDArray[np.void]
    """[rows] of `DRAW`."""
    allowed: TokenLists | None = None
    """Allow-lists: rows with one lose all other tokens."""
    edits: TokenLists | None = None
    """Added to individual logits: bias, or minus infinity for a ban."""
    history: TokenLists | None = None
    """Token logs of rows with penalties: `num_prompt` prompt tokens, then the output. Tokens may recur."""
    taxes: TokenLists | None = None
    """Subtracted from individual logits after the penalties; infinity bans."""

    @property
    def num_logprobs(self) -> int:
        """The largest number of logprobs that any row requests; -1 for none."""
        return int(self.table["num_logprobs"].max(initial=-1))

    def uniforms(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Two random numbers per row."""
        first, second = uniforms(*(self.table[name] for name in KEY))
        return first, second


# -- weights: constants of their arithmetic (`tokenmill.sampling.definition`) ------------------------------------------

LEAST = -24.0
"""Scaled logits below this get weight 0: exp(-24) is less than half of 2^-33."""
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Of exp(r) = 1 + r + r^2 * p(r), the polynomial p for |r| <= ln(2) / 2."""
TO_INTEGER = 1.5 * 2**23
"""Adding and subtracting it rounds a float32 to an integer."""
TO_UNIT = 2**-10
"""The same for multiples of 2^-33, for numbers below it; larger ones are such multiples already."""
MOMENT_TO_UNIT = 1.5 * 2**19
"""The same in float64, for numbers from -1 to 1."""

# -- random numbers ----------------------------------------------------------------------------------------------------

Words = TypeVar("Words", bound=Any)
"""An int64 array, numpy's or torch's."""

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def uniforms(seed: Words, choice: Words, attempt: Words, position: Words) -> tuple[Any, Any]:
    """Two numbers in [0, 1) with 53 bits each: the first draws the token, the second is for rules that need one.

    `seed` has up to 63 bits, the others 32.
    """
    zero = position * 0
    x0, x1, x2, x3 = philox((position, choice, attempt, zero), (seed & WORD, (seed >> 32) & WORD))
    return _to_unit(x0, x1), _to_unit(x2, x3)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words per counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def _multiply(a: int, b: Words) -> tuple[Words, Words]:
    """High and low word of the 64-bit product, within 63 bits."""
    low_part, high_part = b * (a & 0xFFFF), b * (a >> 16)
    high = ((low_part >> 16) + high_part) >> 16
    low = (low_part + ((high_part & 0xFFFF) << 16)) & WORD
    return high, low


def _to_unit(high: Words, low: Words) -> Any:
    bits: Any = (high >> 5) * (1 << 26) + (low >> 6)
    exact = bits.double() if hasattr(bits, "double") else bits  # torch would truncate to 32 bits
    return exact * (1.0 / (1 << 53))
