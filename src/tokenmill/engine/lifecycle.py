"""The life of a request: its states, the allowed ways between them, and what each end means outside."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tokenmill.errors import IllegalTransition
from tokenmill.outputs import FinishReason


class RequestState(Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    """Reserved for KV that comes from another machine; nothing enters it yet."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_IGNORED = "finished_ignored"

    @property
    def is_finished(self) -> bool:
        return self in FINISHED


FINISHED = frozenset(
    {
        RequestState.FINISHED_STOPPED,
        RequestState.FINISHED_LENGTH_CAPPED,
        RequestState.FINISHED_ABORTED,
        RequestState.FINISHED_IGNORED,
    }
)

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset(
        {
            RequestState.RUNNING,
            RequestState.WAITING_FOR_REMOTE_KVS,
            RequestState.FINISHED_ABORTED,
            RequestState.FINISHED_IGNORED,
        }
    ),
    RequestState.WAITING_FOR_REMOTE_KVS: frozenset({RequestState.WAITING, RequestState.FINISHED_ABORTED}),
    RequestState.RUNNING: frozenset(
        {
            RequestState.PREEMPTED,
            RequestState.FINISHED_STOPPED,
            RequestState.FINISHED_LENGTH_CAPPED,
            RequestState.FINISHED_ABORTED,
        }
    ),
    # A stop string may be found in the text of a request that has just been preempted.
    RequestState.PREEMPTED: frozenset(
        {RequestState.RUNNING, RequestState.FINISHED_STOPPED, RequestState.FINISHED_ABORTED}
    ),
    **{state: frozenset() for state in FINISHED},
}


def check_transition(old: RequestState, new: RequestState) -> None:
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"a request can't go from {old.value} to {new.value}")


@dataclass(frozen=True)
class Ending:
    """What a finish reason means: the state it leaves, OpenAI's word for it, the status of an HTTP answer."""

    state: RequestState
    openai: str | None
    """OpenAI's `finish_reason`; None where the answer is an error."""
    http_status: int


ENDINGS: dict[FinishReason, Ending] = {
    FinishReason.STOP: Ending(RequestState.FINISHED_STOPPED, "stop", 200),
    FinishReason.LENGTH: Ending(RequestState.FINISHED_LENGTH_CAPPED, "length", 200),
    FinishReason.TOOL_CALLS: Ending(RequestState.FINISHED_STOPPED, "tool_calls", 200),
    FinishReason.CANCELLED: Ending(RequestState.FINISHED_ABORTED, None, 499),
    FinishReason.TIMEOUT: Ending(RequestState.FINISHED_ABORTED, None, 504),
    FinishReason.OVERLOAD: Ending(RequestState.FINISHED_IGNORED, None, 429),
    FinishReason.ERROR: Ending(RequestState.FINISHED_ABORTED, None, 500),
    FinishReason.SHUTDOWN: Ending(RequestState.FINISHED_ABORTED, None, 503),
}
