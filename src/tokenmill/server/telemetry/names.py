"""`Names`: whose names a caller may see. One's own are shown as they are, everybody else's as a short hash.

The hash is of this process alone: it tells two requests apart, and nothing else.
"""

from __future__ import annotations

import hashlib
import secrets

DIGITS = 8


class Names:
    """One for each server."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)

    def shown(self, name: str, key: str, viewer: str) -> str:
        """A name that belongs to a key, as the holder of another may see it."""
        return name if key == viewer else hashlib.sha256(self._salt + name.encode()).hexdigest()[:DIGITS]


class NamesFor:
    """The names as one caller may see them."""

    def __init__(self, names: Names, viewer: str) -> None:
        self._names = names
        self._viewer = viewer

    def __call__(self, name: str | None, key: str) -> str | None:
        return None if name is None else self._names.shown(name, key, self._viewer)
