"""Philox4x32-10, a counter-based random generator: the draw of a token depends on its key and nothing else.

Written with integer operators that numpy and torch share, so one function serves both and gives the same bits. Values
are 32-bit words kept in 64-bit signed integers.
"""

from __future__ import annotations

from typing import Any, TypeVar

Words = TypeVar("Words", bound=Any)
"""An int64 array, numpy's or torch's."""

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def _multiply(a: int, b: Words) -> tuple[Words, Words]:
    """High and low word of the 64-bit product, without leaving 63 bits."""
    low_part, high_part = b * (a & 0xFFFF), b * (a >> 16)
    high = ((low_part >> 16) + high_part) >> 16
    low = (low_part + ((high_part & 0xFFFF) << 16)) & WORD
    return high, low


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniforms(seed: Words, choice: Words, attempt: Words, position: Words) -> tuple[Any, Any]:
    """Two numbers in [0, 1) with 53 bits each: the first draws the token, the second is for whoever needs another.

    `seed` may use 63 bits, the others 32.
    """
    zero = position * 0
    x0, x1, x2, x3 = philox((position, choice, attempt, zero), (seed & WORD, (seed >> 32) & WORD))
    return _to_unit(x0, x1), _to_unit(x2, x3)


def _to_unit(high: Words, low: Words) -> Any:
    bits: Any = (high >> 5) * (1 << 26) + (low >> 6)
    exact = bits.double() if hasattr(bits, "double") else bits  # torch would go to 32 bits by itself
    return exact * (1.0 / (1 << 53))
