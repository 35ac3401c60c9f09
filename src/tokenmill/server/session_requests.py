"""Bodies of requests about sessions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, StrictInt, StrictStr, WithJsonSchema

from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError
from tokenmill.server.fields import Flag, Number
from tokenmill.server.requests import Body, ChatFields, Metadata, template_kwargs
from tokenmill.server.responses import as_message
from tokenmill.session.session import MAX_TITLE_CHARS, OVERFLOW_KEEP, Input, Overflow

Given = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "object"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer"}},
            ],
            "description": "A user's message, a list of messages, or token ids: only what is new.",
        }
    ),
]


def as_input(given: Any, config: ServerConfig, param: str = "input") -> Input:
    """What a session is to take in."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"{param} must be a text, a list of messages or a list of token ids", param=param)
    if all(type(one) is int for one in given):
        return given
    if len(given) > config.max_messages:
        raise ApiError(400, f"at most {config.max_messages} messages", param=param)
    return [as_message(item, config.max_content_parts, param) for item in given]


Title = Annotated[StrictStr | None, Field(max_length=MAX_TITLE_CHARS, description="A name for lists of sessions.")]


class UpdateSession(Body):
    """What is left out stays as it is; null removes it."""

    title: Title = None
    metadata: Metadata = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"title": "Capitals", "metadata": {"topic": "travel"}}]})

    def changes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("title", "metadata") if name in self.model_fields_set}


class CreateSession(ChatFields):
    """A new conversation. Sampling parameters hold for all of its answers, unless one asks for others."""

    model: StrictStr | None = None
    system: StrictStr | None = Field(None, description="The system prompt.")
    messages: Given = Field(None, description="What was said before, if anything was.")
    title: Title = None
    metadata: Metadata = None
    overflow: Overflow = Field("error", description="What happens when the conversation outgrows the context.")
    overflow_keep: Annotated[Number, Field(ge=0, le=1)] = Field(
        OVERFLOW_KEEP, description="With `drop_oldest_turns`: the fraction of the context that is kept when turns go."
    )
    chat_template_kwargs: dict[str, Any] | None = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m", "system": "Answer in one sentence."}]}
    )

    def template_options(self, config: ServerConfig) -> dict[str, Any]:
        return template_kwargs(self.chat_template_kwargs, config)


class AppendInput(Body):
    input: Given
    raw: Flag = Field(None, description="A text goes in as it is, outside any message.")
    continue_final_message: Flag = Field(
        None,
        description="The last message, an assistant's, is the beginning of the next answer, which goes on with it.",
    )

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "What is the capital of Japan?"}]})


class AnswerRequest(ChatFields):
    """An answer, to what was appended or to `input`; streamed unless told otherwise."""

    input: Given = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "And of Italy?", "max_tokens": 32}]})

    def check(self, config: ServerConfig) -> None:
        super().check(config)
        for name in ("cache_salt", "prompt_logprobs"):
            if getattr(self, name) is not None:
                raise ApiError(400, f"{name} is not for a session's answer", param=name)

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class ForkSession(Body):
    at_turn: StrictInt | None = Field(None, description="Keep so many turns.")
    at_token: StrictInt | None = Field(None, description="Keep so many tokens.")
    n: Annotated[StrictInt, Field(ge=1, le=64)] | None = None


class RewindSession(Body):
    at_turn: StrictInt | None = Field(None, description="Keep so many turns.")
    at_token: StrictInt | None = Field(None, description="Keep so many tokens.")


class EditTurn(Body):
    turn: StrictInt
    content: StrictStr


class SaveSession(Body):
    kv: Flag = Field(None, description="Put the KV into the file, too, so that it need not be computed again.")
