"""Bodies of OpenAI's requests, checked by pydantic; from their fields to `SamplingParams`.

Unknown fields are ignored, as OpenAI does. What is wrong in type is refused here, what is wrong in value by
`SamplingParams` itself.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from tokenmill.params import SamplingParams
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError

Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]


class StreamOptions(BaseModel):
    include_usage: StrictBool = False


class SamplingFields(BaseModel):
    """What all generating endpoints understand."""

    model_config = ConfigDict(extra="ignore")

    model: str
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    # Extensions that other servers have under these names.
    top_k: StrictInt | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    return_token_ids: StrictBool = False

    def check(self, config: ServerConfig) -> None:
        """Limits of this server, beyond those of `SamplingParams`."""
        if self.n is not None and not 1 <= self.n <= config.max_n:
            raise ApiError(400, f"n must be 1 to {config.max_n}, not {self.n}", param="n")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > config.max_stops:
            raise ApiError(400, f"at most {config.max_stops} stop strings, not {len(stops)}", param="stop")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")

    def sampling(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The parameters of the request; where it says nothing, the model's own."""
        names = ("n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p",
                 "typical_p", "repetition_penalty", "min_tokens", "ignore_eos", "skip_special_tokens",
                 "include_stop_str_in_output", "stop", "stop_token_ids", "logit_bias")  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        own = {name: getattr(defaults, name) for name in SamplingParams.__dataclass_fields__}
        return SamplingParams(**{**own, **given, **more})


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class ChatRequest(SamplingFields):
    messages: list[ChatMessage]
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell for each one; None for no log-probabilities at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields):
    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    max_tokens: StrictInt | None = None
    echo: StrictBool = False
    logprobs: StrictInt | None = None


class EmbeddingRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str
    input: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["last", "mean"] = "last"


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    prompt: str
    add_special_tokens: StrictBool = True


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    tokens: list[StrictInt]
