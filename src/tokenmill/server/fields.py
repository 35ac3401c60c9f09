"""Fields of request bodies: their types, and every field of other APIs with what becomes of it.

Each type complains once, whatever a value holds: a million wrong items are one mistake. `FIELDS` is the only list of
the request fields of OpenAI, vLLM, SGLang, llama-server, Anthropic and Ollama. A body declares those it supports; of
the others, one without influence on the answer is accepted without effect, and any other is rejected, because ignoring
it would give an answer that the client did not ask for. The table in docs/request-fields.md is generated from the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import pydantic_core
from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, WithJsonSchema

from tokenmill.params import shown
from tokenmill.server.errors import ApiError

# -- JSON that somebody sends -----------------------------------------------------------------------------------------

BEYOND_LIMITS = {
    "number out of range": "an integer in {} has more than 4300 digits",
    "recursion limit exceeded": "{} is nested more than 200 levels deep",
}
"""What the parser says of JSON that is valid, but more than it reads."""
MAX_JSON_WORK = 1 << 20
"""Of a body: a parser holds the interpreter lock to the end, which is some 40 ms by then."""
OBJECT_WORK, KEY_WORK = 12, 6
"""An object or an array, and a key, in terms of a plain value in a list."""
WORK_PIECE = 1 << 16
"""Bytes that are looked at in one go, while no other thread runs."""


class MuchWork(ValueError):
    """Parsing it would hold up the event loop."""


def json_work(text: bytes, enough: int) -> int:
    """How long JSON takes to be parsed: what its commas, keys and brackets come to; counting stops beyond `enough`.

    Where that seems too much, those within strings do not count.
    """
    if (most := _work(text)) <= enough:
        return most
    at, work, in_string = 0, 0, False
    while at < len(text) and work <= enough:
        piece = text[at : at + WORK_PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:  # it ends within an escape
            piece = piece[:-1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        work += _work(b"".join(parts[in_string::2]))
        in_string ^= len(parts) % 2 == 0
    return work


def _work(text: bytes) -> int:
    return text.count(b",") + KEY_WORK * text.count(b":") + OBJECT_WORK * (text.count(b"{") + text.count(b"["))


def read_json(text: bytes, what: str = "the body", most_work: int = MAX_JSON_WORK) -> Any:
    """JSON, parsed strictly: no NaN, no lone surrogates, no nesting without end. `ValueError` says what is wrong."""
    # Of most bodies, the length alone says that it is little.
    if OBJECT_WORK * len(text) > most_work and json_work(text, most_work) > most_work:
        rule = f"commas + {KEY_WORK} x keys + {OBJECT_WORK} x objects and arrays"
        raise MuchWork(f"too many values in {what}: {rule} may be {most_work} at most")
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        said = str(error)
        where = re.search(r"line \d+ column \d+", said)
        at = f": see {where.group()}" if where else ""
        problem = next((words for limit, words in BEYOND_LIMITS.items() if limit in said), "{} is not valid JSON")
        raise ValueError(f"{problem.format(what)}{at}") from None


# -- types ------------------------------------------------------------------------------------------------------------

Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Flag = StrictBool | None


MOST_ITEMS = 1 << 18
"""Of lists that have no other limit: more tokens than a vocabulary has."""
MOST_IDS = 1 << 20
"""In all prompts of a request."""


def at_most(count: int) -> BeforeValidator:
    """Looked at before the items are: a million wrong ones are one mistake."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > count:
            raise ValueError(f"must have at most {count} items")
        return value

    return BeforeValidator(check)


def list_of(kind: type, words: str) -> AfterValidator:
    """A list of one kind of things, with one complaint for all that are not."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > MOST_ITEMS:
            raise ValueError(f"must have at most {MOST_ITEMS} items")
        if value is None or (isinstance(value, list) and all(type(one) is kind for one in value)):
            return value
        raise ValueError(f"must be a list of {words}")

    return AfterValidator(check)


def _array(items: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": items}}, {"type": "null"}]})


def _json_object(value: Any) -> Any:
    if value is None or isinstance(value, dict):
        return value
    raise ValueError("must be a JSON object")


def _json_schema(value: Any) -> Any:
    if value is None or isinstance(value, dict | str):
        return value
    raise ValueError("must be a JSON object, or its text")


JsonObject = Annotated[
    Any, AfterValidator(_json_object), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
]
JsonSchema = Annotated[
    Any,
    AfterValidator(_json_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
]

Ids = Annotated[Any, list_of(int, "token ids"), _array("integer")]
Texts = Annotated[Any, list_of(str, "texts"), _array("string")]


def _stop(value: Any) -> Any:
    texts = value if isinstance(value, list) else [] if value is None else [value]
    if all(isinstance(one, str) for one in texts):
        return value
    raise ValueError("must be a string or a list of strings")


Stop = Annotated[
    Any,
    AfterValidator(_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]

TEXTS_OR_IDS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}


def _texts_or_ids(value: Any) -> Any:
    """One prompt or several, as texts or as ids."""
    several = value if isinstance(value, list) else [value]
    if len(several) + sum(len(one) for one in several if isinstance(one, list)) > MOST_IDS:
        raise ValueError(f"must have at most {MOST_IDS} token ids")
    kinds = {type(one) for one in several}
    if kinds == {list}:
        kinds = {type(number) for one in several for number in one}
        if kinds == {int}:
            return value
    elif kinds == {str} or (kinds == {int} and isinstance(value, list)):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of token id lists")


TextsOrIds = Annotated[Any, AfterValidator(_texts_or_ids), WithJsonSchema(TEXTS_OR_IDS)]


CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of text parts")
    other = next((part for part in value if part.get("type") != "text" or not isinstance(part.get("text"), str)), None)
    if other is not None:
        raise ValueError(f"content parts of type {shown(other.get('type'))} are not supported; supported: text")
    return value


Content = Annotated[Any, AfterValidator(_content), WithJsonSchema(CONTENT)]


# -- fields of other APIs ---------------------------------------------------------------------------------------------


class Endpoint(Enum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    SESSIONS = "sessions"
    TOKENIZE = "tokenize"
    MESSAGES = "messages"
    OLLAMA = "Ollama"


class Origin(Enum):
    """Whose API has the field; where several do, the first of these."""

    OPENAI = "OpenAI"
    VLLM = "vLLM"
    LLAMA = "llama-server"
    SGLANG = "SGLang"
    ANTHROPIC = "Anthropic"
    OLLAMA = "Ollama"
    OWN = "tokenmill"


class Treatment(Enum):
    """What becomes of a field that a body does not declare."""

    IGNORED = "no effect"
    REJECTED = "rejected"


OPENAI_GENERATING = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.SESSIONS})
MESSAGES = frozenset({Endpoint.MESSAGES})
OLLAMA = frozenset({Endpoint.OLLAMA})
GENERATING = OPENAI_GENERATING | MESSAGES | OLLAMA
PROMPTED = GENERATING | {Endpoint.TOKENIZE}
EVERYWHERE = frozenset(Endpoint)
EMBEDDING = frozenset({Endpoint.EMBEDDINGS})
Condition = Callable[[Any, Mapping[str, Any]], bool]
"""Of a field's value and the body that it is in."""


@dataclass(frozen=True, kw_only=True)
class RequestField:
    """One field. Its note is shown in the docs and, where the field is rejected, in the error."""

    name: str
    origin: Origin
    treatment: Treatment
    note: str = ""
    """Why it can be ignored, or what to do instead."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, as null does: accepted although the field is rejected."""
    condition: tuple[str, Condition] | None = None
    """Other values that are accepted: in words, and as a test."""
    where: frozenset[Endpoint] = GENERATING
    """Endpoints that know the field; at others it is an unknown one."""

    def accepts(self, value: Any, body: Mapping[str, Any]) -> bool:
        """May the field have this value in a body that does not declare it?"""
        if self.treatment is Treatment.IGNORED or value is None or any(_same(value, one) for one in self.neutral):
            return True
        return self.condition is not None and self.condition[1](value, body)

    @property
    def accepted(self) -> list[str]:
        """What else than null is accepted although the field is rejected, in Markdown."""
        words = [] if self.condition is None else [self.condition[0]]
        return [*(f"`{json.dumps(value)}`" for value in self.neutral), *words]

    def rejection(self) -> ApiError:
        because = f": {self.note}" if self.note else ""
        words = f"{self.name} is not supported{because} (accepted: {', '.join(['null', *self.accepted])})"
        return ApiError(400, words.replace("`", ""), code="unsupported_parameter", param=self.name)


def _same(value: Any, other: Any) -> bool:
    """Equality as JSON has it: 1 is 1.0, but true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


# -- the list ---------------------------------------------------------------------------------------------------------


def _fields(origin: Origin, treatment: Treatment, names: str, note: str = "", **more: Any) -> Iterator[RequestField]:
    for name in names.split():
        yield RequestField(name=name, origin=origin, treatment=treatment, note=note, **more)


def _ignored(origin: Origin, names: str, note: str, **more: Any) -> Iterator[RequestField]:
    return _fields(origin, Treatment.IGNORED, names, note, **more)


def _rejected(origin: Origin, names: str, note: str = "", **more: Any) -> Iterator[RequestField]:
    """By every body that does not declare them."""
    return _fields(origin, Treatment.REJECTED, names, note, **more)


def _is_text_format(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "text"


def _has_text_format(value: Any) -> bool:
    return isinstance(value, Mapping) and (value.get("format") is None or _is_text_format(value["format"]))


def _is_n(value: Any, body: Mapping[str, Any]) -> bool:
    return type(value) is int and value == (body.get("n") or 1)


def _is_negative(value: Any, _: Mapping[str, Any]) -> bool:
    return isinstance(value, int | float) and value < 0


def _is(*names: str) -> Condition:
    """Does one of these fields say the same?"""
    return lambda value, body: any(name in body and _same(value, body[name]) for name in names)


NO_TOOLS = ('anything with `tool_choice: "none"`', lambda _, body: body.get("tool_choice") == "none")
NO_FUNCTIONS = ('anything with `function_call: "none"`', lambda _, body: body.get("function_call") == "none")
ONLY_TEXT = ('`{"type": "text"}`', lambda value, _: _is_text_format(value))
ONLY_TEXT_FORMAT = ('`{"format": {"type": "text"}}`', lambda value, _: _has_text_format(value))
SAME_AS_N = ("the value of `n`", _is_n)
NEGATIVE = ("negative numbers", _is_negative)
SPECIAL_TOKENS = ("`false` in chats, `true` elsewhere", lambda value, body: value is ("messages" not in body))
CONSTRAINT = "[structured_output.md](structured_output.md)"
HAVE_TOOLS = "chats, responses and sessions have tools"
NO_MEDIA = "there is no media input"
PERFORMANCE = "the answer is the same"
REASONING = "reasoning is told apart from the answer: `reasoning_content`"

FIELDS: tuple[RequestField, ...] = (
    # OpenAI: what a request is about.
    *_rejected(Origin.OPENAI, "model", "may be left out where the server has one model", where=frozenset()),
    *_rejected(Origin.OPENAI, "messages", where=frozenset()),
    *_rejected(Origin.OPENAI, "input", where=frozenset()),
    *_rejected(Origin.OPENAI, "prompt", "stored prompts are not offered", where=frozenset({Endpoint.RESPONSES})),
    *_rejected(Origin.OPENAI, "instructions", "use a system message"),
    *_rejected(Origin.OPENAI, "previous_response_id", "/v1/responses has it; chats have `session_id`"),
    *_rejected(Origin.OPENAI, "encoding_format dimensions", where=frozenset()),
    # How long it is, and what is told about it.
    *_rejected(
        Origin.OPENAI,
        "max_tokens",
        "use `max_output_tokens` in /v1/responses",
        condition=("the value of `max_output_tokens`", _is("max_output_tokens")),
    ),
    *_rejected(
        Origin.OPENAI,
        "max_completion_tokens",
        "use `max_tokens`, or `max_output_tokens` in /v1/responses",
        condition=("the value of `max_tokens`", _is("max_tokens")),
    ),
    *_rejected(
        Origin.OPENAI,
        "max_output_tokens",
        "use `max_tokens` outside of /v1/responses",
        condition=("the value of `max_tokens`", _is("max_tokens", "max_completion_tokens")),
    ),
    *_rejected(Origin.OPENAI, "stop"),
    *_rejected(Origin.OPENAI, "n", "chats and completions have it", neutral=(1,)),
    *_rejected(Origin.OPENAI, "stream"),
    *_ignored(
        Origin.OPENAI,
        "stream_options",
        "`include_usage` and vLLM's `continuous_usage_stats`, of chats and completions; responses always have usage. "
        "`include_obfuscation` has no effect: chunks are not padded",
    ),
    *_rejected(Origin.OPENAI, "logprobs", "use `include` or `top_logprobs` in /v1/responses", neutral=(False,)),
    *_rejected(Origin.OPENAI, "top_logprobs", "use `logprobs` in /v1/completions", neutral=(0,)),
    *_rejected(
        Origin.OPENAI,
        "include",
        "`message.output_text.logprobs` and `reasoning.encrypted_content`; there is nothing else to include",
        neutral=([],),
    ),
    *_rejected(Origin.OPENAI, "echo", "/v1/completions has it", neutral=(False,)),
    # Sampling.
    *_rejected(Origin.OPENAI, "temperature top_p seed"),
    *_rejected(Origin.OPENAI, "frequency_penalty presence_penalty logit_bias"),
    *_rejected(Origin.OPENAI, "best_of", "answers are not ranked", condition=SAME_AS_N),
    *_rejected(Origin.OPENAI, "suffix", "for models with fill-in-the-middle tokens; see also /infill", neutral=("",)),
    # Formats, tools, media.
    *_rejected(
        Origin.OPENAI, "response_format", f"{CONSTRAINT}; use `text.format` in /v1/responses", condition=ONLY_TEXT
    ),
    *_rejected(
        Origin.OPENAI,
        "text",
        f"`format`, {CONSTRAINT}; use `response_format` outside of /v1/responses",
        condition=ONLY_TEXT_FORMAT,
    ),
    *_rejected(Origin.OPENAI, "tools", HAVE_TOOLS, neutral=([],), condition=NO_TOOLS, where=PROMPTED),
    *_rejected(Origin.OPENAI, "tool_choice", HAVE_TOOLS, neutral=("none", "auto")),
    *_rejected(Origin.OPENAI, "functions", "use `tools`", neutral=([],), condition=NO_FUNCTIONS),
    *_rejected(Origin.OPENAI, "function_call", "use `tool_choice`", neutral=("none", "auto")),
    *_ignored(Origin.OPENAI, "parallel_tool_calls", HAVE_TOOLS),
    *_ignored(Origin.OPENAI, "max_tool_calls", "tools are called by the client, which decides how often"),
    *_rejected(Origin.OPENAI, "web_search_options", "the web is not searched", neutral=({},)),
    *_rejected(Origin.OPENAI, "modalities", "only text is generated", neutral=(["text"], [])),
    *_rejected(Origin.OPENAI, "audio", "only text is generated"),
    *_ignored(Origin.OPENAI, "image", NO_MEDIA),
    # What OpenAI does beside answering.
    *_rejected(Origin.OPENAI, "background", "/v1/responses has it", neutral=(False,)),
    *_rejected(Origin.OPENAI, "conversation", "/v1/responses has it; chats have `session_id`"),
    *_rejected(
        Origin.OPENAI,
        "context_management",
        "conversations are not compacted",
        neutral=([],),
        where=OPENAI_GENERATING,
    ),
    *_rejected(Origin.OPENAI, "moderation", "nothing is moderated"),
    *_ignored(
        Origin.OPENAI, "truncation", "`auto` drops old turns in /v1/responses; elsewhere, what does not fit is a 400"
    ),
    *_ignored(Origin.OPENAI, "store", "chat completions if true, responses unless false", where=EVERYWHERE),
    *_ignored(Origin.OPENAI, "metadata", "of what is stored: responses, chat completions, sessions", where=EVERYWHERE),
    *_ignored(Origin.OPENAI, "prediction", f"{PERFORMANCE}; proposed by speculation, it may come sooner"),
    *_ignored(
        Origin.OPENAI,
        "reasoning reasoning_effort",
        "told to the chat template: `reasoning_effort` of chats and sessions, `reasoning.effort` of responses",
    ),
    *_ignored(Origin.OPENAI, "verbosity", "a hint; templates are told by `chat_template_kwargs`"),
    *_ignored(Origin.OPENAI, "service_tier access_programs", "there is one tier; `priority` orders requests"),
    *_ignored(
        Origin.OPENAI,
        "prompt_cache_key prompt_cache_options prompt_cache_retention",
        f"KV is reused wherever a prefix is the same; {PERFORMANCE}",
    ),
    *_ignored(Origin.OPENAI, "user safety_identifier", "users are told apart by API key", where=EVERYWHERE),
    # vLLM: sampling.
    *_rejected(Origin.VLLM, "top_k min_p repetition_penalty min_tokens allowed_token_ids stop_token_ids ignore_eos"),
    *_rejected(Origin.VLLM, "include_stop_str_in_output skip_special_tokens"),
    *_rejected(Origin.VLLM, "prompt_logprobs", "chats and completions have it"),
    *_rejected(Origin.VLLM, "return_token_ids", "chats and completions have it", neutral=(False,)),
    *_rejected(Origin.VLLM, "bad_words", "use `logit_bias`", neutral=([],)),
    *_rejected(Origin.VLLM, "use_beam_search watermarking", neutral=(False,)),
    *_ignored(Origin.VLLM, "length_penalty early_stopping", "only read with `use_beam_search`, which is rejected"),
    *_rejected(Origin.VLLM, "logits_processors", neutral=([],)),
    *_rejected(Origin.VLLM, "repetition_detection", "use `repetition_penalty` or `dry_multiplier`"),
    *_rejected(Origin.VLLM, "thinking_token_budget", "chats, responses and sessions have it", neutral=(-1,)),
    *_rejected(Origin.VLLM, "vllm_xargs", "custom extensions are not loaded", neutral=({},)),
    *_ignored(Origin.VLLM, "spaces_between_special_tokens", "tokens are joined as the tokenizer spells them"),
    # vLLM: constraints.
    *_rejected(Origin.VLLM, "structured_outputs", CONSTRAINT, neutral=({},)),
    *_rejected(Origin.VLLM, "guided_json guided_regex guided_choice guided_grammar structural_tag", CONSTRAINT),
    *_rejected(Origin.VLLM, "guided_whitespace_pattern", CONSTRAINT),
    *_ignored(Origin.VLLM, "guided_decoding_backend", "there is one backend"),
    # vLLM: prompts.
    *_rejected(
        Origin.VLLM, "add_generation_prompt continue_final_message", "of chats", where=frozenset({Endpoint.CHAT})
    ),
    *_rejected(Origin.VLLM, "chat_template_kwargs", "only options that templates are known to have", neutral=({},)),
    *_rejected(Origin.VLLM, "chat_template", "templates are the model's own", where=PROMPTED),
    *_rejected(Origin.VLLM, "documents", "put them into the messages", neutral=([],)),
    *_rejected(
        Origin.VLLM,
        "add_special_tokens",
        "send token ids to leave them out",
        condition=SPECIAL_TOKENS,
        where=EVERYWHERE - {Endpoint.SESSIONS, Endpoint.TOKENIZE},
    ),
    *_rejected(Origin.VLLM, "prompt_embeds", "a prompt is a text or token ids", where=EVERYWHERE),
    *_rejected(Origin.VLLM, "truncate_prompt_tokens", "prompts are never cut", where=EVERYWHERE),
    *_ignored(
        Origin.VLLM, "truncation_side", "only read with `truncate_prompt_tokens`, which is rejected", where=EVERYWHERE
    ),
    *_ignored(Origin.VLLM, "mm_processor_kwargs media_io_kwargs return_mm_kwargs", NO_MEDIA, where=EVERYWHERE),
    *_rejected(Origin.VLLM, "previous_input_messages previous_response", "use `previous_response_id`"),
    # vLLM: what is told.
    *_rejected(Origin.VLLM, "logprob_token_ids", "use `top_logprobs` or `logprobs`", neutral=([],)),
    *_rejected(Origin.VLLM, "return_tokens_as_token_ids", "use `return_token_ids`", neutral=(False,)),
    *_rejected(Origin.VLLM, "return_prompt_text", "use `return_token_ids` and /detokenize", neutral=(False,)),
    *_rejected(Origin.VLLM, "enable_response_messages", neutral=(False,)),
    *_rejected(Origin.VLLM, "include_reasoning", REASONING, neutral=(True,)),
    *_ignored(
        Origin.VLLM,
        "return_token_offsets routed_experts_prompt_start",
        "belong to endpoints and models that are not served",
    ),
    *_ignored(Origin.VLLM, "stream_interval", "how a stream is cut into chunks; its text is the same"),
    # vLLM: serving.
    *_rejected(Origin.VLLM, "priority cache_salt", where=frozenset()),
    *_ignored(Origin.VLLM, "request_id", "requests are named by the header `X-Request-Id`", where=EVERYWHERE),
    *_rejected(
        Origin.VLLM,
        "kv_transfer_params ec_transfer_params",
        "servers of one database transfer KV by themselves",
        neutral=({},),
    ),
    *_rejected(Origin.VLLM, "normalize use_activation", "embeddings are normalized", neutral=(True,), where=EMBEDDING),
    *_rejected(Origin.VLLM, "additional_data", where=EMBEDDING),
    *_rejected(Origin.VLLM, "embed_dtype", "base64 is of float32", neutral=("float32",), where=EMBEDDING),
    *_rejected(
        Origin.VLLM, "endianness", "base64 is of little-endian numbers", neutral=("native", "little"), where=EMBEDDING
    ),
    # llama-server: sampling.
    *_rejected(Origin.LLAMA, "typical_p dry_multiplier dry_base dry_allowed_length xtc_probability xtc_threshold"),
    *_rejected(Origin.LLAMA, "dry_penalty_last_n repeat_last_n", "penalties cover all of the context", neutral=(-1,)),
    *_rejected(Origin.LLAMA, "dry_sequence_breakers", "there are none"),
    *_rejected(Origin.LLAMA, "repeat_penalty", "use `repetition_penalty`", neutral=(1,)),
    *_rejected(Origin.LLAMA, "mirostat dynatemp_range min_keep n_indent", neutral=(0,)),
    *_ignored(Origin.LLAMA, "mirostat_tau mirostat_eta", "only read with `mirostat`, which is rejected"),
    *_ignored(Origin.LLAMA, "dynatemp_exponent", "only read with `dynatemp_range`, which is rejected"),
    *_rejected(Origin.LLAMA, "top_n_sigma adaptive_target", condition=NEGATIVE),
    *_ignored(Origin.LLAMA, "adaptive_decay", "only read with `adaptive_target`, which is rejected"),
    *_rejected(Origin.LLAMA, "samplers", "the order of samplers is fixed", neutral=([],)),
    *_ignored(Origin.LLAMA, "backend_sampling", PERFORMANCE),
    *_rejected(
        Origin.LLAMA,
        "n_predict",
        "use `max_tokens`",
        neutral=(-1,),
        condition=("the value of `max_tokens`", _is("max_tokens")),
    ),
    *_rejected(Origin.LLAMA, "n_cmpl", "use `n`", neutral=(1,)),
    *_rejected(Origin.LLAMA, "t_max_predict_ms", "use `timeout_s`", neutral=(0, -1)),
    *_ignored(Origin.LLAMA, "t_max_prompt_ms", "llama-server does not implement it"),
    *_rejected(Origin.LLAMA, "lora", "there are no adapters", neutral=([],)),
    # llama-server: constraints.
    *_rejected(Origin.LLAMA, "grammar", CONSTRAINT, neutral=("",)),
    *_rejected(Origin.LLAMA, "json_schema", CONSTRAINT),
    *_ignored(
        Origin.LLAMA,
        "grammar_type grammar_lazy grammar_triggers preserved_tokens",
        "a grammar holds from the first token on",
    ),
    # llama-server: reasoning and parsing.
    *_rejected(Origin.LLAMA, "reasoning_format", REASONING, neutral=("auto", "deepseek")),
    *_rejected(Origin.LLAMA, "reasoning_control", REASONING, neutral=(False,)),
    *_rejected(
        Origin.LLAMA, "reasoning_budget_tokens thinking_budget_tokens", "use `thinking_token_budget`", neutral=(-1,)
    ),
    *_ignored(
        Origin.LLAMA,
        "reasoning_budget_message reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags",
        "only read with `reasoning_budget_tokens`, which is rejected",
    ),
    *_ignored(
        Origin.LLAMA,
        "parse_tool_calls chat_format chat_parser message_delimiters",
        "how calls are written follows from the chat template, or from --tool-format",
    ),
    *_rejected(Origin.LLAMA, "generation_prompt", "use `continue_final_message`", neutral=("",)),
    # llama-server: what is told.
    *_rejected(Origin.LLAMA, "n_probs", "use `logprobs`", neutral=(0,)),
    *_rejected(Origin.LLAMA, "post_sampling_probs", "log-probabilities are the model's own", neutral=(False,)),
    *_rejected(Origin.LLAMA, "return_tokens", "use `return_token_ids`", neutral=(False,)),
    *_rejected(Origin.LLAMA, "response_fields", neutral=([],)),
    *_ignored(Origin.LLAMA, "verbose timings_per_token return_progress", "diagnostics; see /v1/requests/{id}/timeline"),
    *_ignored(Origin.LLAMA, "sse_ping_interval", "comments, which clients skip"),
    # llama-server: the cache.
    *_ignored(Origin.LLAMA, "cache_prompt n_cache_reuse id_slot", f"where KV comes from; {PERFORMANCE}"),
    *_ignored(Origin.LLAMA, "n_keep n_discard", "the context is never shifted: what does not fit is a 400"),
    *_rejected(Origin.LLAMA, "embd_normalize", "embeddings are normalized", neutral=(2,), where=EMBEDDING),
    # SGLang.
    *_rejected(Origin.SGLANG, "regex ebnf", CONSTRAINT),
    *_rejected(Origin.SGLANG, "stop_regex", "use `stop`", neutral=("", [])),
    *_rejected(Origin.SGLANG, "no_stop_trim", "use `include_stop_str_in_output`", neutral=(False,)),
    *_rejected(Origin.SGLANG, "lora_path", "there are no adapters"),
    *_rejected(Origin.SGLANG, "custom_logit_processor custom_params session_params"),
    *_rejected(Origin.SGLANG, "return_hidden_states", "see /v1/embeddings", neutral=(False,)),
    *_rejected(Origin.SGLANG, "separate_reasoning", REASONING, neutral=(True,)),
    *_ignored(Origin.SGLANG, "stream_reasoning", "only read with `separate_reasoning`, which is rejected"),
    *_ignored(Origin.SGLANG, "rid", "requests are named by the header `X-Request-Id`", where=EVERYWHERE),
    # Anthropic.
    *_rejected(Origin.ANTHROPIC, "system stop_sequences", where=frozenset()),
    *_rejected(
        Origin.ANTHROPIC, "thinking", "`budget_tokens` is enforced; `display: omitted` is honoured", where=frozenset()
    ),
    *_rejected(Origin.ANTHROPIC, "output_config", f"`format` ({CONSTRAINT}) and `effort`", where=frozenset()),
    *_rejected(
        Origin.ANTHROPIC, "output_format", "the name of `output_config.format` in older clients", where=frozenset()
    ),
    *_ignored(
        Origin.ANTHROPIC,
        "cache_control",
        f"KV is reused wherever a prefix is the same; only decides how usage is counted, {PERFORMANCE}",
        where=MESSAGES,
    ),
    *_ignored(Origin.ANTHROPIC, "betas", "there are no betas", where=MESSAGES),
    *_ignored(Origin.ANTHROPIC, "inference_geo speed diagnostics", PERFORMANCE, where=MESSAGES),
    *_ignored(Origin.ANTHROPIC, "user_profile_id workspace_id", "users are told apart by API key", where=MESSAGES),
    *_rejected(Origin.ANTHROPIC, "container", "no code is executed", where=MESSAGES),
    *_rejected(Origin.ANTHROPIC, "mcp_servers", "tools are called by the client", neutral=([],), where=MESSAGES),
    # Ollama: of requests, and of their `options`.
    *_rejected(Origin.OLLAMA, "options", where=frozenset()),
    *_rejected(Origin.OLLAMA, "keep_alive", "for models that the server unloads (--keep-alive)", where=frozenset()),
    *_rejected(Origin.OLLAMA, "format", f"`json` or a schema, {CONSTRAINT}", where=frozenset()),
    *_rejected(Origin.OLLAMA, "think", "`true`, `false`, or an effort", where=frozenset()),
    *_rejected(Origin.OLLAMA, "raw truncate num_predict", where=frozenset()),
    *_rejected(Origin.OLLAMA, "images", "there is no media input", neutral=([],), where=OLLAMA),
    *_rejected(Origin.OLLAMA, "template", "templates are the model's own", neutral=("",), where=OLLAMA),
    *_rejected(Origin.OLLAMA, "context", "use /api/chat for conversations", neutral=([],), where=OLLAMA),
    *_rejected(Origin.OLLAMA, "width height steps", "only text is generated", neutral=(0,), where=OLLAMA),
    *_rejected(Origin.OLLAMA, "tfs_z", neutral=(1,), where=OLLAMA),
    *_ignored(
        Origin.OLLAMA,
        "num_ctx num_batch num_gpu main_gpu num_thread numa low_vram f16_kv logits_all vocab_only use_mmap use_mlock "
        "embedding_only",
        "set when the server is started",
        where=OLLAMA,
    ),
    *_ignored(Origin.OLLAMA, "num_keep", "the context is never shifted", where=OLLAMA),
    *_ignored(Origin.OLLAMA, "penalize_newline", "penalties cover all tokens", where=OLLAMA),
    # Our own.
    *_rejected(Origin.OWN, "max_context max_tokens_per_step", "quotas of the request", where=frozenset()),
    *_rejected(Origin.OWN, "timeout_s", "seconds after which the request ends; also the header `X-Request-Timeout`"),
    *_rejected(
        Origin.OWN,
        "session_id",
        "of chats: continue this session, `messages` are only what is new (vLLM's name for a routing hint)",
        where=frozenset({Endpoint.COMPLETIONS, Endpoint.RESPONSES}) | MESSAGES | OLLAMA,
    ),
    *_rejected(Origin.OWN, "pooling", "`last` or `mean`", where=frozenset()),
    *_ignored(
        Origin.OWN, "speculation", "`auto`, `off`, `lookup` or `draft`: how soon the answer comes, not what it says"
    ),
)
KNOWN = {field.name: field for field in FIELDS}
