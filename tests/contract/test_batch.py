import numpy as np
import pytest

from tokenmill.contract import Batch, BatchBuilder, Output, last_sampled, pack_mask, unpack_mask
from tokenmill.errors import InvalidBatch


def arrays(**changes: object) -> dict[str, object]:
    good = {
        "token": np.array([5, 6], dtype=np.int32),
        "pos": np.array([0, 1], dtype=np.int32),
        "seq_ids": np.array([[0], [0]], dtype=np.int32),
        "output": np.array([0, 1], dtype=np.uint8),
    }
    return {**good, **changes}


@pytest.mark.req("R20")
@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"token": np.array([], dtype=np.int32)}, "at least one token"),
        ({"pos": np.array([0], dtype=np.int32)}, "2 tokens, but 1 positions"),
        ({"pos": np.array([0, -1], dtype=np.int32)}, "position -1 is negative"),
        ({"seq_ids": np.array([0, 0], dtype=np.int32)}, "seq_ids has 1 dimensions of int32, not 2"),
        ({"seq_ids": np.zeros((2, 0), dtype=np.int32)}, "shape"),
        ({"token": np.array([1.0, 2.0])}, "token has 1 dimensions of float64, not 1 of int32"),
        ({"pos": np.array([[0], [1]], dtype=np.int32)}, "pos has 2 dimensions"),
        ({"seq_ids": np.array([[0], [-1]], dtype=np.int32)}, "token 1 belongs to no sequence"),
        ({"seq_ids": np.array([[0, -1, 1], [0, 1, -1]], dtype=np.int32)}, "at the end of a row"),
        ({"seq_ids": np.array([[0, -2], [0, 1]], dtype=np.int32)}, "at the end of a row"),
        ({"seq_ids": np.array([[0, -1], [3, 3]], dtype=np.int32)}, "same sequence twice"),
        ({"output": np.array([0, 4], dtype=np.uint8)}, "output 4"),
    ],
)
def test_a_misshapen_batch_is_refused(changes: dict[str, object], saying: str) -> None:
    with pytest.raises(InvalidBatch, match=saying):
        Batch(**arrays(**changes))  # type: ignore[arg-type]


def test_the_builder_pads_and_flags_the_last_token_of_a_run() -> None:
    batch = BatchBuilder().add_run([7, 8, 9], 4, (2, 5)).add(last_sampled(3), 0, 1, Output.HIDDEN).build()
    assert batch.token.tolist() == [7, 8, 9, -4]
    assert batch.pos.tolist() == [4, 5, 6, 0]
    assert batch.seq_ids.tolist() == [[2, 5], [2, 5], [2, 5], [1, -1]]
    assert batch.rows(Output.LOGITS).tolist() == [2]
    assert batch.rows(Output.HIDDEN).tolist() == [3]
    assert batch.sequences_of(3) == [1]


def test_the_builder_takes_numpy_numbers_and_refuses_what_does_not_fit() -> None:
    batch = BatchBuilder().add(np.int64(3), np.int32(0), np.int32(5)).build()
    assert batch.sequences_of(0) == [5]
    for token, output in ((1 << 31, 0), (1, 300)):
        with pytest.raises(InvalidBatch, match="out of range"):
            BatchBuilder().add(token, 0, 0, output).build()
    with pytest.raises(InvalidBatch, match="must be non-negative"):
        last_sampled(-3)


def test_an_empty_builder_makes_no_batch() -> None:
    with pytest.raises(InvalidBatch, match="at least one token"):
        BatchBuilder().build()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 257])
def test_masks_survive_packing(vocab: int) -> None:
    allowed = np.random.default_rng(vocab).random((5, vocab)) < 0.5
    packed = pack_mask(allowed)
    assert packed.dtype == np.uint32
    assert packed.shape == (5, -(-vocab // 32))
    assert (unpack_mask(packed, vocab) == allowed).all()
    assert bool(packed[0, 0] & 1) == allowed[0, 0]
