"""Errors as OpenAI's clients expect them: the one place where an exception becomes an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.lifecycle import ENDINGS
from tokenmill.errors import ContextOverflow, EngineDead, InvalidRequest, ModelNotFound, TokenmillError
from tokenmill.outputs import ENDED_WELL, FinishReason

RETRY_AFTER_S = "1"


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is no success."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def to_api_error(error: Exception) -> ApiError:
    """What a client is told. The words are ours; an exception that is not is only a number."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflow):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error))
    if isinstance(error, ModelNotFound):
        return ApiError(404, str(error), code="model_not_found")
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine is not available; try again", "server_error", headers={"Retry-After": "5"})
    if isinstance(error, TokenmillError):
        return ApiError(500, str(error), "server_error")
    return ApiError(500, "internal error", "server_error")


def ended_badly(reason: str, detail: str | None) -> ApiError | None:
    """The error of a request that ended otherwise than by being complete; None for one that did not."""
    ended = FinishReason(reason)
    if ended in ENDED_WELL:
        return None
    status = ENDINGS[ended].http_status
    if ended is FinishReason.OVERLOAD:
        headers = {"Retry-After": RETRY_AFTER_S}
        return ApiError(429, detail or "too many requests", "rate_limit_error", "rate_limit_exceeded", headers=headers)
    headers = {"Retry-After": RETRY_AFTER_S} if status == 503 else {}
    return ApiError(status, detail or f"the request ended with {reason}", "server_error", reason, headers=headers)


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"the model {model!r} does not exist", code="model_not_found", param="model")
