"""`Subject`: a backend that takes the conformance suite. `all_subjects.py` lists them.

A subject says how to make a backend of given limits and what logits it owes a token, from what that token can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.backends.fake import FakeBackend, FakeConfig
from tokenmill.contract import Backend

Cells = list[tuple[int, int]]
"""What a token can see: (token, position) pairs, its own included."""

Oracle = Callable[[FakeConfig, list[Cells]], "NDArray[np.float32] | None"]
"""The row owed to a token that sees these cells, one list a layer; None where a fresh prefill says nothing."""


@dataclass(frozen=True)
class Subject:
    name: str
    make: Callable[[FakeConfig], Backend]
    """Limits and capabilities are given as a `FakeConfig`; a backend takes what applies to it."""
    oracle: Oracle
    hidden_oracle: Oracle
    tolerance: float = 0.0
    peek: Callable[[Any, int], Cells] | None = None
    """Read a sequence's cells out of the backend's own storage, where that can be done."""
    can_fail: bool = False
    """Takes `Fault`s, as the fake backend does."""
    can_shift: bool = True
    """`seq_add` works."""
    adapt: Callable[[FakeConfig], FakeConfig] = lambda config: config
    """What becomes of a configuration that it can't have: the specification beside it must be told."""
    depths: tuple[int, ...] = (0, 1)
    """How many steps it may have in flight beyond one."""
    num_seeds: int = 15
    """Random walks it is sent on in tests."""


MASK64 = (1 << 64) - 1


def naive_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def naive_fake_rows(config: FakeConfig, layers: list[Cells], width: int, salt: int) -> NDArray[np.float32]:
    """The fake model's rows, written once more without numpy."""
    context = 0
    for layer, cells in enumerate(layers):
        seen = sum(naive_mix((token << 32) + pos + 1) for token, pos in cells)
        context += naive_mix((seen + layer) & MASK64)
    bits = [naive_mix((context + naive_mix(column + (salt << 32))) & MASK64) >> 40 for column in range(width)]
    return np.array([b / (1 << 20) - 8 for b in bits], dtype=np.float32)


def fake_oracle(config: FakeConfig, layers: list[Cells]) -> NDArray[np.float32]:
    return naive_fake_rows(config, layers, config.vocab_size, salt=1)


def fake_hidden_oracle(config: FakeConfig, layers: list[Cells]) -> NDArray[np.float32]:
    return naive_fake_rows(config, layers, config.hidden_size, salt=2)


def peek_into_fake(backend: FakeBackend, seq: int) -> Cells:
    """What the fake backend has stored for a sequence, as it will be once pending shifts are done."""
    storage, slots = backend._storage, backend.kv.tables.slots_of(seq)
    pos = storage.pos.copy()
    for shifted, delta in backend.kv._shifts:
        pos[shifted] += delta
    return list(zip(storage.token[slots].tolist(), pos[slots].tolist(), strict=True))


FAKE = Subject("fake", FakeBackend, fake_oracle, fake_hidden_oracle, peek=peek_into_fake, can_fail=True, num_seeds=60)
