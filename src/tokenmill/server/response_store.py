"""`ResponseStore`: answers of /v1/responses that can be gone on from, each a session cut after that answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import TokenmillError
from tokenmill.server.errors import ApiError
from tokenmill.session.service import SessionService


@dataclass(frozen=True)
class StoredResponse:
    sessions: SessionService
    """Those of its model; not the model itself, which is free to go."""
    model_name: str
    session_id: str
    key: str
    namespace: Hashable
    instructions: str | None

    def conversation(self) -> list[dict[str, Any]]:
        """What was said up to its end, without the instructions."""
        turns = self.sessions.get(self.session_id).turns
        said = [dict(message) for turn in turns for message in turn.messages]
        return said if self.instructions is None else said[1:]


class ResponseStore:
    """The most recent ones; older ones are forgotten, with their sessions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()

    def add(self, response_id: str, stored: StoredResponse) -> None:
        self._stored[response_id] = stored
        while len(self._stored) > self._most:
            _, oldest = self._stored.popitem(last=False)
            self.forget(oldest)

    def find(self, response_id: str, key: str) -> StoredResponse:
        """One of this key's, whose session is still there."""
        stored = self._stored.get(response_id)
        if stored is not None and stored.key == key:
            try:
                stored.sessions.get(stored.session_id)
            except TokenmillError:  # it has ended, or its model is gone
                del self._stored[response_id]
            else:
                self._stored.move_to_end(response_id)
                return stored
        what = f"the response {response_id!r:.80} is not stored here"
        raise ApiError(400, what, code="previous_response_not_found", param="previous_response_id")

    def forget(self, stored: StoredResponse) -> None:
        """End its session, in a while."""
        ending = asyncio.ensure_future(_end(stored))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def __len__(self) -> int:
        return len(self._stored)


async def _end(stored: StoredResponse) -> None:
    with suppress(TokenmillError):  # it has ended by itself, or its model is gone
        await stored.sessions.end_session(stored.session_id)
