"""Everything in this folder needs llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.llamacpp.files import write_attention, write_mamba
from tests.llamacpp import needs_llamacpp
from tokenmill import open_model
from tokenmill.backends.library import fetch_alias
from tokenmill.config import DEFAULT_MODEL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_llamacpp)


@pytest.fixture(scope="session")
def default_model() -> Path:
    return fetch_alias(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with attention."""
    return write_attention(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="session")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mamba(tmp_path_factory.mktemp("gguf") / "mamba.gguf")


@pytest.fixture
def model(small: Path) -> Iterator[Any]:
    opened = open_model(str(small), backend="llamacpp", n_threads=1)
    yield opened
    opened.close()


@pytest.fixture
def recurrent(mamba: Path) -> Iterator[Any]:
    opened = open_model(str(mamba), backend="llamacpp", n_threads=1)
    yield opened
    opened.close()
