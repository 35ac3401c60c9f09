"""The C kernels against plain numpy: packing, products, norms; and that a row depends on nothing but itself."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tokenmill.backends.torch.native.bindings import (
    INT4,
    INT8,
    DecoderStruct,
    Layer,
    Matrix,
    Pool,
    StepStruct,
    address,
    library,
)
from tokenmill.backends.torch.native.packing import (
    Quantised,
    from_gguf,
    pack,
    packed_bytes,
    to_int4,
    to_int8,
)

SHAPES = [(16, 32), (1, 32), (17, 64), (40, 70), (48, 33), (576, 576), (100, 1536), (3, 1), (160, 48)]
Floats = NDArray[np.float32]


def some_floats(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantised(rows: int, cols: int, kind: int) -> Quantised:
    values = some_floats(rows, cols, seed=rows * cols)
    return to_int4(values) if kind == INT4 else to_int8(values)


def packed(lib: Any, matrix: Quantised, bias: Floats | None = None) -> tuple[Matrix, Any]:
    rows, cols = matrix.numbers.shape
    blocks = np.zeros(packed_bytes(rows, cols, matrix.kind), dtype=np.uint8)
    pack(lib, matrix, blocks)
    where = None if bias is None else address(bias)
    return Matrix(address(blocks), where, matrix.kind, rows, cols), (blocks, bias)


def product(lib: Any, matrix: Matrix, x: Floats, pool: Pool | None = None) -> Floats:
    y = np.empty((len(x), matrix.rows), dtype=np.float32)
    scratch = np.empty(lib.tm_product_bytes(matrix, len(x)), dtype=np.uint8)
    lib.tm_product(matrix, address(x), len(x), address(y), address(scratch), None if pool is None else pool.handle)
    return y


def rounded(x: Floats) -> NDArray[np.float64]:
    """Activations as the kernels round them: 8 bits, by groups of 32."""
    missing = -x.shape[1] % 32
    groups = np.pad(x, ((0, 0), (0, missing))).reshape(len(x), -1, 32).astype(np.float64)
    most = np.abs(groups).max(axis=2, keepdims=True)
    numbers = np.rint(groups * np.divide(127, most, out=np.zeros_like(most), where=most > 0))
    return (numbers * most / 127).reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize("kind", [INT4, INT8])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_a_product_is_that_of_the_numbers(lib: Any, pool: Pool, rows: int, cols: int, kind: int) -> None:
    matrix, bias = quantised(rows, cols, kind), some_floats(rows, seed=5)
    blocks, _keep = packed(lib, matrix, bias)
    for n in (1, 2, 7, 8, 9, 21):
        x = some_floats(n, cols, seed=n)
        wanted = rounded(x) @ matrix.values().astype(np.float64).T + bias
        assert np.abs(product(lib, blocks, x, pool) - wanted).max() < 2e-5 * (1 + np.abs(wanted).max())


@pytest.mark.req("B1")
@pytest.mark.parametrize("kind", [INT4, INT8])
def test_a_row_is_the_same_alone_and_in_any_crowd(lib: Any, kind: int) -> None:
    blocks, _keep = packed(lib, quantised(150, 200, kind))
    x = some_floats(40, 200)
    crowd = product(lib, blocks, x)
    for num_threads in (1, 2, 5):
        pool = Pool(lib, num_threads)
        for begin, end in ((0, 40), (3, 4), (7, 15), (10, 31), (39, 40)):
            assert (product(lib, blocks, x[begin:end].copy(), pool) == crowd[begin:end]).all()
        pool.close()


@pytest.mark.parametrize("kind", [INT4, INT8])
def test_rows_come_out_as_they_went_in(lib: Any, kind: int) -> None:
    matrix = quantised(37, 70, kind)
    blocks, _keep = packed(lib, matrix)
    rows = np.array([0, 36, 5, 5, 16, 15], dtype=np.int64)
    out = np.empty((len(rows), 70), dtype=np.float32)
    lib.tm_rows(blocks, address(rows), len(rows), address(out))
    assert np.allclose(out, matrix.values()[rows], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(lib: Any, bad: float) -> None:
    blocks, _keep = packed(lib, quantised(32, 96, INT4))
    x = some_floats(9, 96)
    whole = product(lib, blocks, x)
    x[4, 50] = bad
    got = product(lib, blocks, x)
    assert not np.isfinite(got[4]).any()
    assert (np.delete(got, 4, axis=0) == np.delete(whole, 4, axis=0)).all()


def test_numbers_of_all_sizes(lib: Any) -> None:
    """Zeros, tiny and huge ones: nothing that is finite becomes something else."""
    blocks, _keep = packed(lib, quantised(16, 64, INT8))
    for scale in (0.0, 1e-40, 1e-37, 1e-30, 1e-10, 1e10, 1e30):
        x = some_floats(3, 64) * np.float32(scale)
        got, wanted = product(lib, blocks, x), rounded(x) @ quantised(16, 64, INT8).values().astype(np.float64).T
        assert np.isfinite(got).all()
        assert np.allclose(got, wanted, rtol=1e-4, atol=1e-5 * scale + 1e-30)


def test_norms(lib: Any) -> None:
    for width in (1, 16, 33, 576):
        x, weight, y = some_floats(5, width), some_floats(width, seed=2), np.empty((5, width), dtype=np.float32)
        lib.tm_norm(address(x), address(weight), 1e-5, 5, width, address(y))
        wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
        assert np.allclose(y, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_ggufs_own_types_are_taken_over_number_by_number(kind: str) -> None:
    cols = 512
    if kind == "Q4_K":  # the package can't write it: any bytes are some weights
        raw = np.random.default_rng(3).integers(0, 256, (24, cols // 256 * 144), dtype=np.uint8)
        units = np.random.default_rng(4).random((24, cols // 256, 2)).astype(np.float16)
        raw.reshape(24, -1, 144)[..., :4] = units.view(np.uint8).reshape(24, -1, 4)
    else:
        raw = gguf.quants.quantize(some_floats(24, cols), gguf.GGMLQuantizationType[kind])
    found = from_gguf(kind, raw)
    assert found is not None
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.allclose(found.values(), wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(("make", "steps"), [(to_int8, 254), (to_int4, 15)])
def test_rounding_is_within_half_a_step(make: Any, steps: int) -> None:
    values = some_floats(40, 100)
    values[3, :32] = 0
    values[4, :32] = 7.5
    groups = np.pad(values, ((0, 0), (0, 28))).reshape(40, -1, 32)
    span = 2 * np.abs(groups).max(axis=2) if steps == 254 else groups.max(axis=2) - groups.min(axis=2)
    allowed = np.repeat(span / steps, 32, axis=1)[:, :100] * 0.51 + 2e-3 * np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(make(values).values() - values) <= allowed).all()


def test_pools_do_not_wait_for_each_other() -> None:
    """Several threads, each with its own pool, all the time."""
    lib = library()
    if lib is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    blocks, _keep = packed(lib, quantised(64, 64, INT4))
    x = some_floats(12, 64)
    wanted, wrong = product(lib, blocks, x), []

    def work() -> None:
        pool = Pool(lib, 3)
        wrong.extend(1 for _ in range(200) if not (product(lib, blocks, x, pool) == wanted).all())
        pool.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_the_structures_are_as_large_as_in_c() -> None:
    """ctypes and the compiler lay them out alike."""
    lib = library()
    if lib is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    for name, structure in (("matrix", Matrix), ("layer", Layer), ("decoder", DecoderStruct), ("step", StepStruct)):
        assert lib.tm_size_of(name.encode()) == ctypes.sizeof(structure)


def test_a_child_process_does_without_threads() -> None:
    """They stay with the parent; to wait for them would be to wait for ever."""
    lib = library()
    if lib is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    blocks, _keep = packed(lib, quantised(64, 64, INT4))
    x, pool = some_floats(12, 64), Pool(lib, 2)
    wanted = product(lib, blocks, x, pool)
    child = os.fork()
    if child == 0:
        os._exit(0 if (product(lib, blocks, x, pool) == wanted).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    pool.close()
