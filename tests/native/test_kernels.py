"""The C kernels against plain numpy: packing, products, norms; and that a row depends on nothing but itself."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import threading
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tokenmill.backends.checkpoints import StoredTensor
from tokenmill.backends.cpu.bindings import (
    INT4,
    INT8,
    KINDS,
    DecoderStruct,
    Layer,
    Matrix,
    Pool,
    StepStruct,
    address,
    library,
)
from tokenmill.backends.cpu.build import FOLDER
from tokenmill.backends.cpu.packing import (
    BLOCKS,
    Quantised,
    pack,
    pack_stored,
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


UNITS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}
"""Where a block has its numbers in half precision: at its beginning, in other types."""


def stored(name: str, rows: int, cols: int) -> StoredTensor:
    """A matrix as a file may have it: any bytes are weights of some size."""
    random = np.random.default_rng(rows * cols + KINDS[name])
    width, size = BLOCKS[KINDS[name]]
    raw = random.integers(0, 256, (rows, cols // width, size), dtype=np.uint8)
    for at in UNITS.get(name, (0,)):
        units = random.uniform(-0.02, 0.02, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = units[..., None].view(np.uint8)
    return StoredTensor(name, (rows, cols), raw.reshape(rows, -1))


def stored_values(matrix: StoredTensor) -> Floats:
    """What the format's authors make of the bytes."""
    values: Floats = gguf.quants.dequantize(matrix.raw, gguf.GGMLQuantizationType[matrix.dtype])
    return values if matrix.order is None else values[matrix.order]


def packed(lib: Any, matrix: Quantised | StoredTensor, bias: Floats | None = None) -> tuple[Matrix, Any]:
    rows, cols = matrix.shape
    kind = matrix.kind if isinstance(matrix, Quantised) else KINDS[matrix.dtype]
    blocks = np.zeros(packed_bytes(rows, cols, kind), dtype=np.uint8)
    assert len(blocks) == lib.tm_matrix_bytes(kind, rows, cols)
    if isinstance(matrix, Quantised):
        pack(lib, matrix, blocks)
    else:
        assert pack_stored(lib, matrix, blocks)
    where = None if bias is None else address(bias)
    return Matrix(address(blocks), where, kind, rows, cols), (blocks, bias)


def product(lib: Any, matrix: Matrix, x: Floats, pool: Pool | None = None) -> Floats:
    y = np.empty((len(x), matrix.rows), dtype=np.float32)
    scratch = np.empty(lib.tm_product_bytes(matrix, len(x)), dtype=np.uint8)
    lib.tm_product(matrix, address(x), len(x), address(y), address(scratch), None if pool is None else pool.handle)
    return y


def rounded(x: Floats, width: int = 32) -> NDArray[np.float64]:
    """Activations as the kernels round them: 8 bits, by groups of 32; of 256, for types with superblocks."""
    missing = -x.shape[1] % width
    groups = np.pad(x, ((0, 0), (0, missing))).reshape(len(x), -1, width).astype(np.float64)
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


@pytest.mark.parametrize("name", KINDS)
def test_a_product_is_that_of_the_values_in_the_file(lib: Any, pool: Pool, name: str) -> None:
    for rows, cols in ((40, 512), (17, 1280)):
        matrix = stored(name, rows, cols)
        blocks, _keep = packed(lib, matrix)
        values = stored_values(matrix).astype(np.float64)
        for n in range(1, 10):
            x = some_floats(n, cols, seed=n)
            wanted = rounded(x, BLOCKS[KINDS[name]][0]) @ values.T
            assert np.abs(product(lib, blocks, x, pool) - wanted).max() < 2e-5 * (1 + np.abs(wanted).max())


@pytest.mark.parametrize("name", KINDS)
def test_the_largest_codes_do_not_overflow(lib: Any, name: str) -> None:
    """All bits of a block are ones, or zeros, and all activations are as large as they can be."""
    for fill in (0, 255):
        matrix = stored(name, 16, 512)
        units = matrix.raw.reshape(16, -1, BLOCKS[KINDS[name]][1])
        filled = np.full_like(units, fill)
        for at in UNITS.get(name, (0,)):
            filled[..., at : at + 2] = units[..., at : at + 2]
        matrix = StoredTensor(name, (16, 512), filled.reshape(16, -1))
        blocks, _keep = packed(lib, matrix)
        for x in (np.ones((3, 512), np.float32), -np.ones((3, 512), np.float32)):
            wanted = rounded(x) @ stored_values(matrix).astype(np.float64).T
            assert np.allclose(product(lib, blocks, x), wanted, rtol=2e-5, atol=1e-3)


@pytest.mark.req("B1")
@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_the_same_alone_and_in_any_crowd(lib: Any, name: str) -> None:
    blocks, _keep = packed(lib, stored(name, 150, 512))
    x = some_floats(40, 512)
    crowd = product(lib, blocks, x)
    for num_threads in (1, 2, 5):
        pool = Pool(lib, num_threads)
        for begin, end in ((0, 40), (3, 4), (7, 15), (10, 31), (33, 36), (34, 40), (39, 40)):
            assert (product(lib, blocks, x[begin:end].copy(), pool) == crowd[begin:end]).all()
        pool.close()


def rows_of(lib: Any, matrix: Matrix, rows: NDArray[np.int64]) -> Floats:
    out = np.empty((len(rows), matrix.cols), dtype=np.float32)
    lib.tm_rows(matrix, address(rows), len(rows), address(out))
    return out


@pytest.mark.parametrize("kind", [INT4, INT8])
def test_rows_come_out_as_they_went_in(lib: Any, kind: int) -> None:
    matrix = quantised(37, 70, kind)
    blocks, _keep = packed(lib, matrix)
    rows = np.array([0, 36, 5, 5, 16, 15], dtype=np.int64)
    assert np.allclose(rows_of(lib, blocks, rows), matrix.values()[rows], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_taken_over_value_for_value(name: str) -> None:
    """Whatever the order of its rows, in as many bytes as there."""
    lib = library()
    if lib is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    matrix = stored(name, 48, 512)
    order = np.random.default_rng(9).permutation(48)
    for one in (matrix, replace(matrix, order=order)):
        blocks, keep = packed(lib, one)
        assert keep[0].nbytes == matrix.raw.nbytes
        found, wanted = rows_of(lib, blocks, np.arange(48)), stored_values(one)
        assert np.allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def test_scales_that_are_no_numbers_are_noticed(lib: Any) -> None:
    for name in KINDS:
        matrix = stored(name, 20, 512)
        at = UNITS.get(name, (0,))[-1]
        matrix.raw.reshape(20, -1, BLOCKS[KINDS[name]][1])[19, -1, at : at + 2] = np.array([np.inf], "<f2").view(
            np.uint8
        )
        assert not pack_stored(lib, matrix, np.zeros(packed_bytes(20, 512, KINDS[name]), dtype=np.uint8))


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


MACHINES = {
    "avx512vnni": ["__AVX512VNNI__", "__AVX512BW__"],
    "avx2": ["__AVX2__", "__FMA__", "__F16C__"],
    "neon": ["__ARM_NEON", "__ARM_FEATURE_DOTPROD"],
}


def products_of(macros: list[str]) -> set[str]:
    """The functions that product.h defines for a machine: preprocessed, so any machine can tell."""
    options = [f"-D{macro}=1" for macro in macros]
    command = ["cc", "-E", "-P", "-undef", *options, "-x", "c", str(FOLDER / "product.h")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"^(?:static|CONSTANT)\b[^;{]*?\b(\w+)\((?!\()", text, re.MULTILINE))


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_has_all_kernels(machine: str) -> None:
    """Variants for other machines are not compiled here: what one of them lacks is missing when it is loaded there."""
    used = set(re.findall(r"\w+", (FOLDER / "decoder.h").read_text())) | {"product_groups", "product_slabs"}
    needed = products_of([]) & used
    assert {"peak_products", "product_groups", "quantise_slab"} <= needed
    assert needed <= products_of(MACHINES[machine])
