"""kill -9 at any moment: what was acknowledged is there, once, and goes on as it would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.killing import BUGS, kill_fake, kill_real_decoder

pytestmark = pytest.mark.slow


@pytest.mark.fault("P02", "L09")
@pytest.mark.req("B3")
def test_killed_fifty_times(tmp_path: Path) -> None:
    witness = kill_fake(tmp_path, seed=12, count=50)
    assert witness.num_acks > 500


@pytest.mark.req("B3", "B5")
def test_killed_with_a_real_decoder(tmp_path: Path) -> None:
    """Deterministic, so that what follows a log is the same in every process. `make walks` does it more often."""
    witness = kill_real_decoder(tmp_path, seed=5, count=4)
    assert witness.num_acks > 20


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tmp_path: Path, bug: str) -> None:
    with pytest.raises(AssertionError, match=r"lost|acknowledged|, not |nobody has made"):
        kill_fake(tmp_path, seed=3, count=20, bug=bug)
