"""The C library, in each of its variants that this machine can run."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest

from tokenmill.backends.cpu.bindings import Pool, library

VARIANTS = ("plain", "neon") if platform.machine() == "aarch64" else ("plain", "avx2", "avx512vnni")


@pytest.fixture(params=VARIANTS)
def lib(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The library, told to use one variant; the machine's own again afterwards."""
    found = library()
    if found is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    own = found.tm_variant()
    if not found.tm_use(request.param.encode()):
        pytest.skip(f"this machine can't run {request.param}")
    yield found
    assert found.tm_use(own)


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    found = library()
    if found is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    pool = Pool(found, request.param)
    yield pool
    pool.close()
