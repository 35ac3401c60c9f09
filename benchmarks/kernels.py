"""`python -m benchmarks.kernels`: what part of the processor's peak the products of each type reach, on one core.

The peak is that of products of bytes alone (VNNI's, with AVX-512), measured in the same run. In the cache, a matrix of
2,048 columns is used again and again; from memory, matrices that no cache holds take turns. Shortest times count, so
that other work on the machine matters little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.backends.cpu.bindings import KINDS, Matrix, address, library
from tokenmill.backends.cpu.packing import packed_bytes, zeros
from tokenmill.bench import bench_parser

COLS, CACHED_ROWS, ROWS, FROM_MEMORY = 2048, 2048, 5632, 128 << 20
PEAK_ROUNDS = 100_000


def shortest(work: Callable[[], Any], seconds: float) -> float:
    """The shortest of as many tries as fit into so many seconds."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def random_matrix(kind: int, rows: int) -> tuple[Matrix, NDArray[np.uint8]]:
    blocks = zeros((packed_bytes(rows, COLS, kind),), np.uint8)
    blocks[:] = np.resize(np.random.default_rng(0).integers(0, 60, 4096, dtype=np.uint8), blocks.shape)
    return Matrix(address(blocks), None, kind, rows, COLS), blocks


def product_seconds(lib: Any, matrices: Sequence[Matrix], num_inputs: int, seconds: float) -> float:
    """Of one product, of matrices that take turns."""
    x = np.random.default_rng(1).standard_normal((num_inputs, COLS), dtype=np.float32)
    y = np.empty((num_inputs, matrices[0].rows), dtype=np.float32)
    scratch = np.empty(lib.tm_product_bytes(matrices[0], num_inputs), dtype=np.uint8)
    at = 0

    def work() -> None:
        nonlocal at
        at = (at + 1) % len(matrices)
        lib.tm_product(matrices[at], address(x), num_inputs, address(y), address(scratch), None)

    return shortest(work, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.kernels", __doc__)
    parser.add_argument("--types", nargs="+", default=["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"], help="types of weights")
    parser.add_argument("--inputs", type=int, nargs="+", default=[1, 4, 16, 128], help="inputs of a product")
    parser.add_argument("--variant", help="variant of the kernels (default: the machine's)")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds for each figure")
    options = parser.parse_args(arguments)
    lib = library()
    if lib is None:
        parser.error("the kernels are not built")
    if options.variant and not lib.tm_use(options.variant.encode()):
        parser.error(f"this machine can't run {options.variant}")
    peak = lib.tm_peak(PEAK_ROUNDS) / shortest(lambda: lib.tm_peak(PEAK_ROUNDS), options.seconds)
    print(f"{lib.tm_variant().decode()}: peak {peak / 1e9:.0f} GOP/s on one core\n")
    print("| type | inputs | in the cache, of the peak | from memory, of the peak | GB/s of weights |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in options.types:
        kind = KINDS[name]
        cached, _keep = random_matrix(kind, CACHED_ROWS)
        large = [random_matrix(kind, ROWS) for _ in range(-(-FROM_MEMORY // packed_bytes(ROWS, COLS, kind)))]
        for n in options.inputs:
            fast = 2 * n * COLS * CACHED_ROWS / product_seconds(lib, [cached], n, options.seconds) / peak
            seconds = product_seconds(lib, [matrix for matrix, _ in large], n, options.seconds)
            slow, read = 2 * n * COLS * ROWS / seconds / peak, packed_bytes(ROWS, COLS, kind) / seconds / 1e9
            print(f"| {name} | {n} | {fast:.2f} | {slow:.2f} | {read:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
