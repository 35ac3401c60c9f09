"""All exceptions of tokenmill, in one tree.

    TokenmillError
    ├── ConfigError             invalid setting or argument; nothing was started
    ├── ModelLoadError          the model files are corrupt, incomplete or of an unsupported kind
    │   ├── ModelNotFound       no model with this name or path
    │   ├── UnsupportedModel    an architecture or a setting that is not supported
    │   └── InsufficientMemory  the model does not fit in free memory
    ├── InvalidRequest          invalid request; nothing was run
    │   ├── TokenizeFailed      the text cannot be tokenized
    │   ├── TooManyTokens       the text has more tokens than allowed
    │   ├── ContextOverflow     the conversation exceeds the context
    │   └── SessionFileError    the session file is corrupt, of another model or of a newer version
    ├── NotDurable              a change is in memory, but could not be written to the store
    ├── ModelNotLoaded          the service has no model yet
    ├── Overloaded              no memory for another session, or for more input
    ├── SessionNotFound         no session with this id
    │   └── SessionEnded        the session has ended
    ├── SessionBusy             too many operations are queued for one session
    ├── AnswerLost              the stream of an answer cannot be resumed: its process has ended
    ├── RequestFailed           a request did not complete
    ├── IllegalTransition       illegal state transition of a request: a bug in tokenmill
    ├── EngineDead              the engine has failed permanently; a supervisor may create a new one
    └── BackendError            contract violated, or compute failed
        ├── InvalidBatch        the batch violates the contract; memory is unchanged
        ├── InvalidOperation    the KV or backend call violates the contract; memory is unchanged
        │   ├── Unsupported     not supported by the backend's `Capabilities`
        │   └── BackendClosed   the backend was closed
        ├── OutOfKV             not enough free cells; memory is unchanged
        ├── StaleKV             the weights were replaced, and memory holds KV of the old ones
        ├── ForwardFailed       the forward pass failed; `fatal` if the backend is unusable
        └── IntegrityError      inconsistent bookkeeping: a bug in tokenmill

A message says what is wrong, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Callable


class TokenmillError(Exception):
    """Base class of all exceptions of tokenmill."""


class ConfigError(TokenmillError, ValueError):
    """Invalid setting or argument; nothing was started."""


class ModelLoadError(TokenmillError):
    """The model files are corrupt, incomplete or of an unsupported kind."""


class ModelNotFound(ModelLoadError):
    """No model with this name or path."""


class UnsupportedModel(ModelLoadError):
    """An architecture or a setting that is not supported."""


class InsufficientMemory(ModelLoadError):
    """The model does not fit in free memory; nothing was loaded."""


class InvalidRequest(TokenmillError, ValueError):
    """Invalid request; nothing was run."""

    def __init__(self, reason: str, *, param: str | None = None) -> None:
        super().__init__(reason)
        self.param = param
        """The invalid parameter, if the error is about one."""


class TokenizeFailed(InvalidRequest):
    """The text cannot be tokenized."""


class TooManyTokens(InvalidRequest):
    """The text has more tokens than allowed; tokenization stopped there, so the exact count is unknown."""

    def __init__(self, at_least: int, limit: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens; the limit is {limit}")
        self.at_least = at_least


class ContextOverflow(InvalidRequest):
    """The conversation exceeds the context; nothing was appended."""


class SessionFileError(InvalidRequest):
    """The session file is corrupt, of another model or of a newer version; nothing was restored."""


class NotDurable(TokenmillError):
    """A change is in memory, but could not be written to the store."""


class StoreUnavailable(NotDurable):
    """The store's database does not answer. Try again later."""


class SessionMoved(NotDurable):
    """Another server has taken the session over: what was done to this copy of it is lost. Try again."""


class SessionElsewhere(TokenmillError):
    """Another server is answering in the session."""

    def __init__(
        self,
        message: str,
        address: str = "",
        is_there: Callable[[], bool] = bool,
        retry_s: float = 1.0,
        *,
        is_named: bool = False,
    ) -> None:
        super().__init__(message)
        self.address = address
        """That server's base URL; empty if it does not tell."""
        self.is_there = is_there
        """Is that server still alive? Asks the store."""
        self.retry_s = retry_s
        """How often that is worth asking."""
        self.is_named = is_named
        """Does the request itself name that server? Then its response is the response, whatever it is."""


class ModelNotLoaded(TokenmillError):
    """The service has no model: load one first."""


class Overloaded(TokenmillError):
    """There is no memory for another session, or for more input. Try again later."""


class SessionNotFound(TokenmillError):
    """No session with this id."""


class SessionEnded(SessionNotFound):
    """The session has ended."""


class SessionBusy(TokenmillError):
    """Too many operations are queued for this session; wait for them."""


class AnswerLost(TokenmillError):
    """The stream of an answer cannot be resumed: its process has ended."""

    def __init__(self, what: str, *, durable_offset: int = 0) -> None:
        super().__init__(what)
        self.durable_offset = durable_offset
        """Tokens of the answer in the session log."""


class RequestFailed(TokenmillError):
    """A request did not complete, and the caller returns only complete results."""

    def __init__(self, what: str, *, finish_reason: str | None = None) -> None:
        super().__init__(what)
        self.finish_reason = finish_reason


class IllegalTransition(TokenmillError):
    """Illegal state transition of a request. Always a bug in tokenmill; please report it."""


class EngineDead(TokenmillError):
    """The engine has failed permanently or was closed; its requests have had their terminal events."""


class BackendError(TokenmillError):
    """A violation of the contract between engine and compute, or a failure of the latter."""


class InvalidBatch(BackendError, ValueError):
    """The batch violates the contract; KV memory is unchanged."""


class InvalidOperation(BackendError):
    """A KV or backend call violates the contract; KV memory is unchanged."""


class Unsupported(InvalidOperation):
    """The call is not supported by the backend's `Capabilities`, or where the engine runs."""


class BackendClosed(InvalidOperation):
    """The backend was closed."""


class OutOfKV(BackendError):
    """The batch needs more KV cells than are free; KV memory is unchanged."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"out of KV: {needed} cells needed, {free} free; remove a sequence and try again")
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[type[OutOfKV], tuple[int, int]]:
        return type(self), (self.needed, self.free)


class StaleKV(BackendError):
    """The weights were replaced: KV memory holds KV of the old ones and must be emptied first."""


class ForwardFailed(BackendError):
    """The forward pass failed. If `fatal`, the backend must be closed and recreated."""

    def __init__(self, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.fatal = fatal


class IntegrityError(BackendError):
    """Inconsistent bookkeeping. Always a bug in tokenmill; please report it."""
