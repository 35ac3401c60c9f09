"""`tokenmill serve fake` as a process of its own, for all tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import Child, child


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with child(tmp_path_factory.mktemp("server") / "log", "fake", "--max-num-seqs", "4") as served:
        yield served
        assert "Traceback" not in served.said()
