"""The shapes of answers, for the OpenAPI document. Answers themselves are plain dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    durable_offset: int | None = Field(
        None, description="Only with the code `answer_lost`: tokens of the answer that are in the session's turns."
    )


class ErrorBody(BaseModel):
    error: ErrorDetail

    model_config = {
        "json_schema_extra": {
            "examples": [
                {
                    "error": {
                        "message": "temperature must be in [0, 100], not -1",
                        "type": "invalid_request_error",
                        "param": "temperature",
                        "code": None,
                    }
                }
            ]
        }
    }


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    status: Literal["unloaded", "loading", "loaded"]
    aliases: list[str]
    default_sampling_params: dict[str, float] | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class CachedModel(BaseModel):
    id: str
    object: Literal["cached_model"]
    bytes: int
    last_used: int


class CachedModels(BaseModel):
    object: Literal["list"]
    data: list[CachedModel]


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class CompletionDetails(ReasoningTokens):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = Field(None, description="The model's thinking; also as `reasoning`.")


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed", "queued", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(BaseModel):
    id: str
    object: Literal["response", "conversation.deleted", "chat.completion.deleted"]
    deleted: bool


class Item(BaseModel):
    """A message, a reasoning item, a function call or its output."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    status: str | None = None

    model_config = ConfigDict(extra="allow")


class ItemPage(BaseModel):
    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Conversation(BaseModel):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class StoredCompletion(ChatCompletion):
    metadata: dict[str, str]


class CompletionPage(BaseModel):
    object: Literal["list"]
    data: list[StoredCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessage(BaseModel):
    id: str
    role: str
    content: str | list[dict[str, Any]] | None = None

    model_config = ConfigDict(extra="allow")


class MessagePage(BaseModel):
    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicUsage(BaseModel):
    input_tokens: int = Field(description="Prompt tokens that are in neither of the next two.")
    cache_creation_input_tokens: int = Field(description="With `cache_control`: prompt tokens that were computed.")
    cache_read_input_tokens: int = Field(description="Prompt tokens whose KV was reused.")
    output_tokens: int
    output_tokens_details: dict[str, int]
    service_tier: Literal["standard"]


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks: `text`, `thinking` and `tool_use`.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class OllamaError(BaseModel):
    error: str


class OllamaEnd(BaseModel):
    """How an answer ended; durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaChat(OllamaEnd):
    message: dict[str, Any]


class OllamaGenerate(OllamaEnd):
    response: str
    thinking: str | None = None


class OllamaEmbed(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(BaseModel):
    embedding: list[float]


class OllamaModels(BaseModel):
    models: list[dict[str, Any]]


class OllamaShow(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    version: str


class OllamaStatus(BaseModel):
    status: str


class Infilled(BaseModel):
    """llama-server's answer."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: dict[str, float]


class Props(BaseModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str = Field(description="The name of the model: where it lies is not told.")
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    infill: bool = Field(description="Has the model fill-in-the-middle tokens?")
    is_sleeping: bool
    build_info: str


class LlamaSlot(BaseModel):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    n_past: int = Field(description="Tokens that have been computed.")
    n_tokens: int


class Rendered(BaseModel):
    prompt: str


class FileObject(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class LineError(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class LineErrors(BaseModel):
    object: Literal["list"]
    data: list[LineError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None = Field(description="The model that the first line names.")
    errors: LineErrors | None = Field(description="Why the batch failed: what is wrong with its lines.")
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = Field(description="The answers, one line each, in the order in which they were done.")
    error_file_id: str | None = Field(description="Lines that ended with an error.")
    created_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    expires_at: int
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Session(BaseModel):
    id: str
    object: Literal["session"]
    model: str
    title: str | None
    metadata: dict[str, str]
    created_at: int
    last_used_at: int
    state: Literal["idle", "appending", "generating", "ended"]
    num_tokens: int
    num_turns: int
    pending: list[dict[str, Any]]
    durable: bool | None
    problem: str | None


class UndeletedSession(BaseModel):
    """A session that has ended, but is still on the disk: unless a retry succeeds, it is there after a restart."""

    id: str
    object: Literal["session.deleted"]
    durable: Literal[False]
    problem: str


class SessionList(BaseModel):
    object: Literal["list"]
    data: list[Session]


class SessionPage(SessionList):
    first_id: str | None
    last_id: str | None
    has_more: bool


class Turn(BaseModel):
    index: int
    kind: Literal["input", "answer"]
    messages: list[dict[str, Any]]
    num_tokens: int | None
    finish_reason: str | None


class TurnList(BaseModel):
    object: Literal["list"]
    data: list[Turn]


class SessionAnswer(BaseModel):
    id: str
    object: Literal["session.answer"]
    session_id: str
    model: str
    text: str
    token_ids: list[int]
    offset: int
    logprobs: list[dict[str, Any]] | None
    finish_reason: str
    usage: Usage
    durable: bool | None
    message: AssistantMessage | None = Field(None, description="Where an answer may have tool calls or thinking.")


class Piece(BaseModel):
    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int] | list[Piece]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class Cancelled(BaseModel):
    id: str
    object: Literal["request.cancelled"]
    cancelled: int


class CoreLoad(BaseModel):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int


class Loads(BaseModel):
    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[CoreLoad]


class Health(BaseModel):
    status: Literal["ready", "not ready", "live", "engine lost"]


# -- telemetry --------------------------------------------------------------------------------------------------------


class Slot(BaseModel):
    slot: int
    state: Literal["idle", "prefilling", "generating"]
    request: str | None = None
    session: str | None = None
    tokens: int | None = None
    computed: int | None = None


class Waiting(BaseModel):
    request: str
    session: str | None
    tokens: int
    preempted: bool


class Parked(BaseModel):
    seq: int
    session: str | None
    tokens: int


class ParkedTokens(BaseModel):
    all: int
    plain: int


class Cells(BaseModel):
    all: int
    free: int
    used: int


class Rates(BaseModel):
    ticks: float
    generated_tokens: float
    prefill_tokens: float
    hit_rate: float | None


class Core(BaseModel):
    core: int
    tick: int
    slots: list[Slot]
    waiting: list[Waiting]
    parked: list[Parked]
    parked_tokens: ParkedTokens
    cells: Cells
    rates: Rates


class ServedModel(BaseModel):
    model: str
    cores: list[Core]


class Scheduler(BaseModel):
    object: Literal["scheduler"]
    models: list[ServedModel]


class ServerEntry(BaseModel):
    id: str = Field(description="For the parameter `server`.")
    object: Literal["server"]
    is_this: bool = Field(description="Has this server answered?")


class ServerList(BaseModel):
    object: Literal["list"]
    data: list[ServerEntry]


class KeyUsage(BaseModel):
    object: Literal["usage"]
    key: str = Field(description="The name of the API key.")
    admin: bool
    expires_at: int | None
    running: int = Field(description="Requests that are not done.")
    requests: int = Field(description="Requests that were admitted and are done.")
    refused: int = Field(description="Requests that exceeded a limit of the key, or found the queue full.")
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    sessions: int
    session_bytes: int
    stored_responses: int
    stored_bytes: int = Field(description="Of stored responses, chat completions, conversations and the like.")
    file_bytes: int
    limits: dict[str, int] = Field(description="The limits of the key, by their names in the keys file.")
    remaining: dict[str, int] = Field(description="What is left now of the limits on requests and tokens.")


class UsageList(BaseModel):
    object: Literal["list"]
    since: int = Field(description="When the server started, in seconds since the epoch.")
    data: list[KeyUsage]


class TimelinePhase(BaseModel):
    phase: Literal["queued", "prefill", "decode", "preempted"]
    begin: float
    seconds: float


class TimelineParts(BaseModel):
    received: float
    queued: float
    prefill: float
    neighbours_prefill: float
    decode: float
    preempted: float
    delivery: float
    client_blocked: float


class TimelineCause(BaseModel):
    cause: Literal["queue", "queue_full", "long_neighbour", "preempted", "slow_reader", "prompt"]
    seconds: float
    why: str


class Difference(BaseModel):
    token: int
    turn: int | None
    message: int | None
    role: str | None
    before: str
    now: str


class Evicted(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    seconds_before: float
    by: str | None = Field(alias="for")


class CacheCost(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    cause: str
    why: str
    difference: Difference | None
    evicted: Evicted | None


class TurnCost(CacheCost):
    id: str
    proposed_tokens: int
    accepted_tokens: int


class SessionExplanation(BaseModel):
    object: Literal["session.explanation"]
    session_id: str
    turns: list[TurnCost]


class GenerationTimeline(BaseModel):
    id: str
    model: str
    core: int
    phases: list[TimelinePhase]
    seconds: float
    parts: TimelineParts
    causes: list[TimelineCause]
    cache: CacheCost | None
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    preemptions: int
    finish_reason: str | None


class RequestTimeline(BaseModel):
    id: str
    object: Literal["request.timeline"]
    generations: list[GenerationTimeline]


# -- what the document says of statuses -------------------------------------------------------------------------------


def errors(*statuses: int, shape: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The errors that an endpoint may answer with; all of them have the same shape, that of its API."""
    meanings = {
        400: "The request is wrong: `param` and `message` say where and why.",
        401: "An API key is needed.",
        403: "The key may not do this.",
        404: "There is no such thing.",
        409: "Not as things are: `message` says why.",
        413: "The body is too large.",
        415: "The body is of the wrong type.",
        429: "Too many requests: try again after `Retry-After` seconds.",
        499: "The request was cancelled.",
        500: "The request failed.",
        503: "Not now: loading, stopping, or too long in the queue. Try again after `Retry-After` seconds.",
        504: "The request took longer than it may.",
        507: "The model does not fit into the memory that is free.",
    }
    return {status: {"model": shape, "description": meanings[status]} for status in statuses}


def generated(model: type[BaseModel], shape: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint that generates: whole, as a stream, or an error."""
    # Without a type: some read the schema as that of a stream, and some as that of each event.
    stream = {"text/event-stream": {"schema": {"description": "With `stream`: events as they come."}}}
    refusals = errors(400, 401, 404, 413, 429, 499, 500, 503, 504, shape=shape)
    return {200: {"model": model, "content": stream}, **refusals}


def session_links(id_at: str) -> dict[str, Any]:
    """What can be done with a session, by the place of its id in a response: links of the OpenAPI document."""
    session = "#/paths/~1v1~1sessions~1{session_id}"
    readers = ("turns", "explain", "stream")
    verbs = ("append", "generate", "regenerate", "resume", "cancel", "fork", "rewind", "edit", "save")
    operations = {
        **{name: f"{session}/{method}" for name, method in (("get", "get"), ("update", "post"), ("delete", "delete"))},
        **{name: f"{session}~1{name}/get" for name in readers},
        **{name: f"{session}~1{name}/post" for name in verbs},
    }
    parameters = {"session_id": f"$response.body#{id_at}"}
    return {name: {"operationRef": operation, "parameters": parameters} for name, operation in operations.items()}


def response_links() -> dict[str, Any]:
    """A response can be gone on from."""
    body = {"model": "$request.body#/model", "previous_response_id": "$response.body#/id", "input": "go on"}
    return {"continue": {"operationRef": "#/paths/~1v1~1responses/post", "requestBody": body}}


def lines(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint of Ollama's: lines of JSON, or with `stream: false` one object."""
    stream = {"application/x-ndjson": {"schema": {"description": "One object a line, unless `stream` is false."}}}
    refusals = errors(400, 401, 404, 413, 429, 499, 500, 503, 504, shape=OllamaError)
    return {200: {"model": model, "content": stream}, **refusals}
