"""Requests by endpoint and outcome. They are counted in one place, where they come and go (`context.py`).

At every moment, for every endpoint: received = finished + cancelled + failed + rejected + running.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import Enum

from tokenmill.server.telemetry.tally import LONG_S, Tally

OTHER = "other"
"""All paths that are none of ours."""
CLIENT_GONE = 499
"""Nobody was there any more to be answered."""
OF_SESSIONS = (
    "turns", "explain", "append", "generate", "regenerate", "stream", "cancel", "fork", "rewind", "edit", "save",
)  # fmt: skip
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/load",
    "/v1/models/unload",
    "/v1/models/{name:path}",
    "/v1/requests/{id}/cancel",
    "/v1/requests/{id}/timeline",
    "/v1/scheduler",
    "/v1/scheduler/events",
    "/v1/sessions",
    "/v1/sessions/restore",
    "/v1/sessions/{id}",
    *(f"/v1/sessions/{{id}}/{operation}" for operation in OF_SESSIONS),
    "/tokenize",
    "/detokenize",
    "/metrics",
    "/health",
    "/health/live",
    "/health/ready",
    "/openapi.json",
    "/",
    "/engine",
    "/web/{file:path}",
)
"""Whatever clients send, a label has one of these values, or `OTHER`."""


class Outcome(Enum):
    """How a request ended, as far as its client is concerned."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """Its client left, or somebody ended it by its id."""
    FAILED = "failed"
    """It was taken and did not get done."""
    REJECTED = "rejected"
    """It was not taken: wrong, not allowed, too many at once, or the server was not ready."""


def outcome_of(status: int) -> Outcome:
    """What a status says; a stream's was sent before it ended."""
    if status < 400:
        return Outcome.FINISHED
    if status == CLIENT_GONE:
        return Outcome.CANCELLED
    return Outcome.REJECTED if status < 500 or status == 503 else Outcome.FAILED


class Traffic:
    """Counts requests. For the event loop's thread."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.ended: Counter[tuple[str, Outcome]] = Counter()
        self.seconds: dict[str, Tally] = {}

    def enter(self, path: str) -> str:
        """A request for this path came in; the endpoint that it is for."""
        endpoint = endpoint_of(path)
        self.received[endpoint] += 1
        self.running[endpoint] += 1
        return endpoint

    def leave(self, endpoint: str, outcome: Outcome, seconds: float) -> None:
        self.running[endpoint] -= 1
        self.ended[endpoint, outcome] += 1
        if endpoint not in self.seconds:
            self.seconds[endpoint] = Tally(LONG_S)
        self.seconds[endpoint].add(seconds)


def endpoint_of(path: str) -> str:
    """The endpoint that answers to a path; those under /v1 answer without it, too."""
    found = _PLAIN.get(path)
    if found is not None:
        return found
    return next((label for label, pattern in _PATTERNS if pattern.fullmatch(path)), OTHER)


def _label(pattern: str) -> str:
    return pattern.replace(":path", "")


def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]+\})", pattern)
    made = "".join(
        re.escape(part) if not part.startswith("{") else ".*" if part.endswith(":path}") else "[^/]+" for part in parts
    )
    return re.compile(made.replace("/v1", "(?:/v1)?", 1), re.DOTALL)


_PLAIN = {
    path: _label(pattern)
    for pattern in ENDPOINTS
    if "{" not in pattern
    for path in (pattern, pattern.removeprefix("/v1"))
}
_PATTERNS = [(_label(pattern), _regex(pattern)) for pattern in ENDPOINTS if "{" in pattern]
