"""Errors: the one place where an exception is mapped to a response, in the shape of each API that is served."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from starlette.responses import JSONResponse

from tokenmill.engine.request import ENDINGS
from tokenmill.errors import (
    AnswerLost,
    ContextOverflow,
    EngineDead,
    InsufficientMemory,
    InvalidRequest,
    NotDurable,
    Overloaded,
    RequestFailed,
    SessionBusy,
    SessionElsewhere,
    SessionFileError,
    SessionMoved,
    SessionNotFound,
    StoreUnavailable,
)
from tokenmill.outputs import ENDED_WELL, FinishReason

log = logging.getLogger(__name__)

RETRY_SOON = {"Retry-After": "1"}
RETRY_LATER = {"Retry-After": "5"}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cause: str | None = None
    """For the log only."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further fields of the body, for clients that know the code."""

    def body(self) -> dict[str, Any]:
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**told, **self.details}}


class Dialect(Enum):
    """The API that a client speaks."""

    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"
    OLLAMA = "Ollama"

    def error_body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """An error in the shape that clients of this API parse."""
        if self is Dialect.OLLAMA:
            return {"error": error.message}
        if self is Dialect.ANTHROPIC:
            kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
        return error.body()


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    507: "overloaded_error",
}
"""Anthropic's error type for each status that has one of its own."""


def to_api_error(error: BaseException) -> ApiError:
    """The response for an exception. Messages of unexpected exceptions go to the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflow):
        return ApiError(400, str(error), code="context_length_exceeded", param=error.param)
    if isinstance(error, SessionFileError):
        return ApiError(400, f"invalid session file: {error}", code="bad_session_file")
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, SessionNotFound):
        return ApiError(404, "session not found", code="session_not_found", param="session_id")
    if isinstance(error, SessionBusy):
        return ApiError(409, str(error), code="session_busy", headers=RETRY_SOON)
    if isinstance(error, AnswerLost):
        return ApiError(409, str(error), code="answer_lost", details={"durable_offset": error.durable_offset})
    if isinstance(error, Overloaded):
        return _overloaded(str(error), RETRY_SOON)
    if isinstance(error, InsufficientMemory):
        return ApiError(507, str(error), "server_error", "out_of_memory")
    if isinstance(error, SessionElsewhere):
        return unavailable("the session is on another server", "session_elsewhere", RETRY_SOON)
    if isinstance(error, SessionMoved):
        return ApiError(409, str(error), code="session_moved", headers=RETRY_SOON)
    if isinstance(error, StoreUnavailable):
        return unavailable("the session store does not answer; try again", "store_unavailable", RETRY_SOON)
    if isinstance(error, NotDurable):
        return ApiError(507, f"could not be stored: {error}", "server_error", "not_durable")
    if isinstance(error, EngineDead):
        return unavailable("the engine is not available; try again", "engine_dead")
    if isinstance(error, RequestFailed) and error.finish_reason is not None:
        return ended_badly(error.finish_reason, None, num_tokens=0) or internal_error()
    return internal_error()


def ended_badly(reason: str, detail: str | None, num_tokens: int) -> ApiError | None:
    """The error of a request that did not complete; None if it did."""
    ended = FinishReason(reason)
    if ended in ENDED_WELL:
        return None
    if ended is FinishReason.OVERLOAD:
        return _overloaded(detail or "too many requests")  # the middleware adds when to come again
    if ended is FinishReason.ERROR:
        return ApiError(500, "the request failed", "server_error", reason, cause=detail)
    message = f"the request ended: {detail or reason}"
    if ended is FinishReason.TIMEOUT and num_tokens == 0:  # timed out in the queue: worth a retry
        return unavailable(message, reason, RETRY_SOON)
    status = ENDINGS[ended].http_status
    headers = RETRY_SOON if status == 503 else {}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(status, message, kind, reason, headers=headers)


def error_response(error: Exception, shape: Callable[[ApiError], dict[str, Any]]) -> JSONResponse:
    """The response for an exception, in the caller's dialect; the log has what it does not say."""
    answer = to_api_error(error)
    log_failure(answer, error)
    return JSONResponse(shape(answer), answer.status, headers=answer.headers)


def log_failure(told: ApiError, error: BaseException) -> None:
    """Log what the response does not say, with the request's id."""
    if told.cause is not None:
        log.error("%s: %s", told.message, told.cause)
    elif told.status == 500:
        log.error("the request failed", exc_info=None if isinstance(error, ApiError) else error)


def cancelled() -> ApiError:
    return ApiError(499, "the request ended: cancelled", code="cancelled")


def timed_out(timeout_s: float) -> ApiError:
    """Before the engine had the request."""
    message = f"the request ended: not done after {timeout_s:g} s"
    return unavailable(message, FinishReason.TIMEOUT.value, RETRY_SOON)


def stopping() -> ApiError:
    return unavailable("the server is shutting down", "stopping")


def unavailable(message: str, code: str, headers: dict[str, str] = RETRY_LATER) -> ApiError:
    """503: worth a retry."""
    return ApiError(503, message, "server_error", code, headers=headers)


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"the model {model!r:.200} does not exist", code="model_not_found", param="model")


def _overloaded(message: str, headers: dict[str, str] = {}) -> ApiError:  # noqa: B006
    return ApiError(429, message, "rate_limit_error", "rate_limit_exceeded", headers=headers)


def internal_error() -> ApiError:
    return ApiError(500, "internal error", "server_error", "internal_error")
