"""What goes between a process and its engine process: msgpack through msgspec, never pickle. Imported where used."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.config import EngineConfig
from tokenmill.core import BackendLimits
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.outputs import FinishReason, GeneratedToken, TokenLogprobs
from tokenmill.params import Pooling


class Start(msgspec.Struct, tag=True):
    """The first message: which model to open, and how to run it."""

    model: str
    options: dict[str, Any]
    config: EngineConfig
    limits: BackendLimits


class Submit(msgspec.Struct, tag=True):
    request_id: str
    prompt: list[int]
    limits: Limits
    hints: Hints
    draw: Draw
    pooling: Pooling | None = None

    @classmethod
    def of(cls, request: Request) -> Submit:
        return cls(request.request_id, request.tokens, request.limits, request.hints, request.draw, request.pooling)

    def request(self) -> Request:
        return Request(self.request_id, self.prompt, self.limits, self.hints, self.draw, self.pooling)


class Cancel(msgspec.Struct, tag=True):
    request_id: str
    reason: FinishReason


class Finish(msgspec.Struct, tag=True):
    request_id: str
    keep_tokens: int


class AskStats(msgspec.Struct, tag=True):
    number: int


class Close(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    """The model is loaded; what the parent has to know of it."""

    max_model_len: int
    vocab_size: int


class Failed(msgspec.Struct, tag=True):
    """The model could not be loaded."""

    reason: str


class Token(msgspec.Struct, tag=True):
    """A token or the end of a request; with the end, what else is to be known of it."""

    token: GeneratedToken
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprobs] = []
    embedding: list[float] = []


class Stats(msgspec.Struct, tag=True):
    number: int
    stats: Any


ToEngine = Start | Submit | Cancel | Finish | AskStats | Close
FromEngine = Ready | Failed | Token | Stats

encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
