"""Keys and values of 8 bits, as far as no card is needed: how they are moved about in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmill.backends.torch.footprint import FP8
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.rotations import rotate, rotations
from tokenmill.contract import IntArray, LayerKV
from tokenmill.errors import InvalidOperation

HEADS, DIM, BLOCK = 2, 16, 4
INV_FREQ = 1.0 / (100.0 ** (torch.arange(0, DIM, 2) / DIM))
WRITTEN = torch.arange(6)


def slots(*numbers: int) -> IntArray:
    return np.array(numbers, dtype=np.int32)


def filled() -> tuple[TorchKV, torch.Tensor, torch.Tensor]:
    """A memory of four blocks, in the first six cells of which these keys and values were stored."""
    layer = LayerKV("full", None, HEADS, DIM, DIM, 1)
    kv = TorchKV([layer], 4, BLOCK, INV_FREQ, FP8, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(len(WRITTEN), HEADS, DIM, generator=generator) for _ in range(2))
    kv.store(0, WRITTEN, keys, values)
    return kv, keys.to(FP8).float(), values.to(FP8).float()


def held(kv: TorchKV, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.keys[0].float()[numbers], kv.values[0].float()[numbers]


def test_they_are_rounded_when_they_are_stored_and_not_again() -> None:
    kv, keys, values = filled()
    assert kv.num_bytes == 2 * 4 * BLOCK * HEADS * DIM
    assert all(map(torch.equal, held(kv, WRITTEN), (keys, values)))
    kv.copy_blocks(slots(0, 1), slots(3, 2))
    copied = torch.tensor([12, 13, 14, 15, 8, 9])
    assert all(map(torch.equal, held(kv, copied), (keys, values)))
    kv.write(slots(10, 2, 11, 0, 1, 5), memoryview(kv.read(slots(0, 1, 2, 3, 4, 5))))
    assert all(map(torch.equal, held(kv, torch.tensor([10, 2, 11, 0, 1, 5])), (keys, values)))


def test_keys_are_turned_in_float32() -> None:
    kv, keys, values = filled()
    kv.shift(slots(0, 1, 2, 3, 4, 5), -3)
    turned = rotate(keys, *rotations(torch.tensor([-3]), INV_FREQ, 1.0)).to(FP8).float()
    assert all(map(torch.equal, held(kv, WRITTEN), (turned, values)))


def test_bytes_that_are_no_numbers_are_refused() -> None:
    kv, keys, values = filled()
    bad = bytearray(kv.read(slots(0, 1)))
    bad[5] = 0x7F  # NaN
    with pytest.raises(InvalidOperation, match="non-finite"):
        kv.write(slots(2, 3), memoryview(bytes(bad)))
    assert all(map(torch.equal, held(kv, WRITTEN), (keys, values)))


def test_a_block_with_a_new_owner_is_empty_after_bad_numbers() -> None:
    kv, _, _ = filled()
    kv.holds_bad_numbers = True
    kv.hand_out(slots(0))
    assert not any(part.any() for part in held(kv, WRITTEN[:BLOCK]))


def test_numbers_that_are_too_large_stop_at_the_largest() -> None:
    kv, keys, values = filled()
    kv.store(0, WRITTEN, 1e6 * keys, torch.full_like(values, -500.0))
    stored, others = held(kv, WRITTEN)
    assert stored.abs().max() == 448.0
    assert torch.equal(others, torch.full_like(values, -448.0))
    kv.keys[0].view(torch.uint8)[:] = 0x7E
    kv.shift(slots(0, 1, 2, 3, 4, 5), 3)
    assert bool(held(kv, WRITTEN)[0].isfinite().all())
