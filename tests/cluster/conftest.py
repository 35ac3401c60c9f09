from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.database import Database, database
from tests.cluster.raycluster import RayCluster, ray_cluster


@pytest.fixture(scope="session")
def postgres() -> Iterator[Database]:
    with database() as made:
        yield made


@pytest.fixture
def db(postgres: Database) -> Database:
    """Without tables."""
    postgres.empty()
    return postgres


@pytest.fixture(scope="module")
def store(postgres: Database) -> Database:
    """That of a module's `cluster`."""
    postgres.empty()
    return postgres


@pytest.fixture(scope="module")
def cluster(store: Database) -> Iterator[RayCluster]:
    """Two nodes with a replica each, shared by a module's tests."""
    pytest.importorskip("ray")
    with ray_cluster(store.url) as made:
        made.deploy(2)
        yield made
