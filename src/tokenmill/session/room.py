"""`LogRoom`: what the logs of all sessions take together, and how much they may."""

from __future__ import annotations

from tokenmill.errors import Overloaded


class LogRoom:
    """Bytes by session. Owned by the service's event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.total = 0
        self._bytes_of: dict[str, int] = {}

    def take(self, session_id: str, num_bytes: int) -> None:
        """A session's log has this size now."""
        self.total += num_bytes - self._bytes_of.get(session_id, 0)
        self._bytes_of[session_id] = num_bytes

    def give_up(self, session_id: str) -> None:
        self.total -= self._bytes_of.pop(session_id, 0)

    def check(self) -> None:
        """Raise `Overloaded` if there is no room for more."""
        if self.total >= self._most:
            raise Overloaded(f"the logs of all sessions have {self.total} bytes; end some sessions first")
