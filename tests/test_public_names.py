"""Public names may be added, not removed: users and clients rely on them."""

from __future__ import annotations

from tests.public_names import SNAPSHOT, public_names


def test_no_public_name_is_gone() -> None:
    """Exports, commands and options, HTTP routes, statuses and fields."""
    gone = set(SNAPSHOT.read_text().splitlines()) - set(public_names())
    assert not gone, f"removed: {sorted(gone)}"
