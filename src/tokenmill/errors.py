"""Every exception tokenmill raises on purpose, in one tree.

    TokenmillError
    ├── ConfigError             a setting or argument is wrong; nothing was started
    ├── ModelLoadError          a model is there, but can't be loaded: damaged, incomplete or of an unknown kind
    │   └── ModelNotFound       no model of that name or at that path
    ├── InvalidRequest          a request asks for something impossible; nothing was run
    │   ├── TokenizeFailed      a text can't be turned into tokens
    │   ├── TooManyTokens       a text has more tokens than it may have
    │   ├── ContextOverflow     a conversation has outgrown the context
    │   └── SessionFileError    a session's file is damaged, of another model or of a later version
    ├── NotDurable              what was done is in memory, but could not be written to the store
    ├── ModelNotLoaded          the service has no model yet
    ├── Overloaded              no room for another session, or for more of one
    ├── SessionNotFound         no session of that name
    │   └── SessionEnded        there was one, and it has ended
    ├── SessionBusy             too many operations wait for one session
    ├── AnswerLost              the stream of an answer can't be resumed: the process that made it is gone
    ├── RequestFailed           a request ended otherwise than by being complete
    ├── IllegalTransition       a request was moved to a state it can't reach from its own: a bug in tokenmill
    ├── EngineDead              the engine failed for good; a supervisor may build a new one
    └── BackendError            something the contract refuses or reports
        ├── InvalidBatch        the batch breaks a rule; memory is as it was
        ├── InvalidOperation    the KV or backend call breaks a rule; memory is as it was
        │   ├── Unsupported     a rule of this backend's `Capabilities`
        │   └── BackendClosed   the backend was closed
        ├── OutOfKV             not enough free cells; memory is as it was
        ├── StaleKV             the weights were replaced, and memory holds KV of the old ones
        ├── ForwardFailed       the forward pass failed; `fatal` says whether the backend is lost
        └── IntegrityError      the bookkeeping contradicts itself: a bug in tokenmill

An error says what was wrong, what was allowed, and what to do about it.
"""

from __future__ import annotations


class TokenmillError(Exception):
    """Root of everything tokenmill raises on purpose."""


class ConfigError(TokenmillError, ValueError):
    """A setting or argument is wrong; nothing was started."""


class ModelLoadError(TokenmillError):
    """A model is there, but can't be loaded: damaged, incomplete, or of a kind that is not known."""


class ModelNotFound(ModelLoadError):
    """No model of that name or at that path."""


class InvalidRequest(TokenmillError, ValueError):
    """A request asks for something impossible; nothing was run."""

    def __init__(self, reason: str, *, param: str | None = None) -> None:
        super().__init__(reason)
        self.param = param
        """The parameter that is wrong, if it is one."""


class TokenizeFailed(InvalidRequest):
    """A text can't be turned into tokens."""


class TooManyTokens(InvalidRequest):
    """A text has more tokens than it may have; how many is not known, since tokenization stopped there."""

    def __init__(self, at_least: int, limit: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens; {limit} are allowed")
        self.at_least = at_least


class ContextOverflow(InvalidRequest):
    """A conversation has outgrown the context; what was to be added was not."""


class SessionFileError(InvalidRequest):
    """A session's file is damaged, of another model or of a later version; nothing was restored from it."""


class NotDurable(TokenmillError):
    """What was done is in memory, but could not be written to the store."""


class ModelNotLoaded(TokenmillError):
    """The service has no model: load one first."""


class Overloaded(TokenmillError):
    """There is no room for another session, or for more of one. Try again later."""


class SessionNotFound(TokenmillError):
    """No session of that name."""


class SessionEnded(SessionNotFound):
    """The session has ended."""


class SessionBusy(TokenmillError):
    """Too many operations wait for this session. Wait for some of them."""


class AnswerLost(TokenmillError):
    """The stream of an answer can't be resumed: the process that made it is gone."""

    def __init__(self, what: str, *, durable_offset: int = 0) -> None:
        super().__init__(what)
        self.durable_offset = durable_offset
        """Tokens of the answer that are in its session's log."""


class RequestFailed(TokenmillError):
    """A request ended otherwise than by being complete, and the caller asked only for complete ones."""

    def __init__(self, what: str, *, finish_reason: str | None = None) -> None:
        super().__init__(what)
        self.finish_reason = finish_reason


class IllegalTransition(TokenmillError):
    """A request was moved to a state it can't reach from its own. Always a bug in tokenmill; please report it."""


class EngineDead(TokenmillError):
    """The engine failed for good or was closed; its requests have had their terminal events."""


class BackendError(TokenmillError):
    """Something the contract between engine and compute refuses or reports."""


class InvalidBatch(BackendError, ValueError):
    """The batch breaks a rule of the contract; KV memory is as it was."""


class InvalidOperation(BackendError):
    """A KV or backend call breaks a rule of the contract; KV memory is as it was."""


class Unsupported(InvalidOperation):
    """The call is legal, but not with this backend's `Capabilities`, or not of an engine in a process of its own."""


class BackendClosed(InvalidOperation):
    """The backend was closed; nothing can be run on it any more."""


class OutOfKV(BackendError):
    """The batch needs more KV cells than are free; KV memory is as it was."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"out of KV: {needed} cells needed, {free} free; remove a sequence and try again")
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[type[OutOfKV], tuple[int, int]]:
        return type(self), (self.needed, self.free)


class StaleKV(BackendError):
    """The weights were replaced: KV memory holds what the old ones computed and must be emptied first."""


class ForwardFailed(BackendError):
    """The forward pass failed. `fatal` means the backend must be closed and built anew."""

    def __init__(self, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.fatal = fatal


class IntegrityError(BackendError):
    """The bookkeeping contradicts itself. Always a bug in tokenmill; please report it."""
