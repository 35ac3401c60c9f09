"""What the machine can do at best: bytes read a second, and operations a second. Measured, with our own threads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

MIB = 1 << 20


@dataclass(frozen=True)
class Machine:
    """Best of a few tries, on so many threads."""

    num_threads: int
    read_bytes_per_s: float
    float_ops_per_s: float
    """Of float32 matrix products: a multiplication and an addition are two."""


def measure_machine(num_threads: int) -> Machine:
    return Machine(num_threads, _read_speed(num_threads), _product_speed(num_threads))


def _read_speed(num_threads: int, size: int = 256 * MIB) -> float:
    """Sum up memory that no cache can hold."""
    parts = np.array_split(np.ones(size // 8), num_threads)

    def read() -> float:
        threads = [threading.Thread(target=part.sum) for part in parts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    return size / min(read() for _ in range(7))


def _product_speed(num_threads: int, size: int = 1536) -> float:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        a, b = torch.rand(size, size), torch.rand(size, size)

        def multiply() -> float:
            began = time.perf_counter()
            a @ b
            return time.perf_counter() - began

        return 2 * size**3 / min(multiply() for _ in range(7))
    finally:
        torch.set_num_threads(before)
