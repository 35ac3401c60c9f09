from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.database import Database, database


@pytest.fixture(scope="session")
def postgres() -> Iterator[Database]:
    with database() as made:
        yield made


@pytest.fixture
def db(postgres: Database) -> Database:
    """Without tables."""
    postgres.empty()
    return postgres
