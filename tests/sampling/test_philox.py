import numpy as np
import pytest

from tokenmill.contract.draws import philox, uniforms


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.int64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The known answers that the authors of Philox publish for philox4x32-10.
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: str) -> None:
    result = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert " ".join(f"{int(word[0]):08x}" for word in result) == expected


@pytest.mark.req("G12")
def test_numpy_and_torch_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    keys = [rng.integers(0, high, 1000) for high in ((1 << 63) - 1, 8, 1 << 32, 1 << 31)]
    torch = pytest.importorskip("torch")
    from_numpy = uniforms(*keys)
    from_torch = uniforms(*(torch.from_numpy(key) for key in keys))
    for ours, theirs in zip(from_numpy, from_torch, strict=True):
        assert (ours == theirs.numpy()).all()
        assert ours.min() >= 0
        assert ours.max() < 1


def test_every_part_of_the_key_matters() -> None:
    base = {"seed": 7, "choice": 0, "attempt": 0, "position": 5}
    draws = {tuple(base.values()): 0.0}
    for changed in ({}, {"seed": 8}, {"seed": 7 + (1 << 40)}, {"choice": 1}, {"attempt": 1}, {"position": 6}):
        key = {name: np.array([value]) for name, value in (base | changed).items()}
        draws[tuple((base | changed).values())] = float(uniforms(**key)[0][0])
    assert len(set(draws.values())) == 6
