"""Fields that the server does not support: rejected by name where ignoring them would change the answer."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.generated_docs import BODIES as REQUESTS
from tests.server.refusals import BODIES, CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, check_refusal, nothing_runs
from tests.server.serving import Running
from tokenmill.server.api.ollama import ChatBody, EmbedRequest, GenerateRequest, Options
from tokenmill.server.fields import FIELDS, KNOWN, Endpoint, RequestField, Treatment

PATHS = {
    Endpoint.CHAT: CHAT,
    Endpoint.COMPLETIONS: COMPLETIONS,
    Endpoint.RESPONSES: RESPONSES,
    Endpoint.EMBEDDINGS: EMBEDDINGS,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CONSTRAINTS: dict[str, Any] = {
    "use_beam_search": True,
    "stop_regex": r"\d",
    "truncate_prompt_tokens": 4,
    "return_tokens_as_token_ids": True,
    "logprob_token_ids": [97],
    "bad_words": ["no"],
    "modalities": ["audio"],
}
"""What clients have sent and got an answer without."""
VLLM = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids return_token_offsets return_prompt_text return_mm_kwargs routed_experts_prompt_start cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget
    include_reasoning prompt_embeds best_of guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern structural_tag logits_processors enable_response_messages
    previous_input_messages previous_response additional_data normalize use_activation embed_dtype endianness
"""
"""Fields of its chat, completion, response and embedding requests that OpenAI's do not have."""
LLAMA_SERVER = """
    verbose timings_per_token cache_prompt return_tokens return_progress sse_ping_interval n_predict n_indent n_keep
    n_discard n_cmpl n_cache_reuse t_max_predict_ms t_max_prompt_ms response_fields top_k min_p top_n_sigma
    xtc_probability xtc_threshold typical_p dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty
    dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau
    mirostat_eta adaptive_target adaptive_decay n_probs min_keep backend_sampling post_sampling_probs lora
    json_schema grammar grammar_lazy grammar_type grammar_triggers preserved_tokens chat_format reasoning_format
    generation_prompt parse_tool_calls chat_parser continue_final_message echo reasoning_control
    reasoning_budget_tokens thinking_budget_tokens reasoning_budget_message reasoning_budget_start_tag
    reasoning_budget_end_tag reasoning_budget_end_tags message_delimiters id_slot samplers ignore_eos embd_normalize
"""
"""Fields that its OpenAI-compatible endpoints hand on to its own schema."""


def rejected_at(endpoint: Endpoint) -> list[RequestField]:
    declared = REQUESTS[endpoint].model_fields
    fields = [field for field in FIELDS if endpoint in field.where and field.name not in declared]
    return [field for field in fields if field.treatment is Treatment.REJECTED]


def unsupported(field: RequestField, body: dict[str, Any]) -> Any:
    """A value that asks for something."""
    return next(value for value in (True, False, 7, "x", [1], {"a": 1}) if not field.accepts(value, body))


# -- over the wire ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("stream", [False, True])
def test_21_5_a_constraint_is_rejected_by_name(server: Running, name: str, stream: bool) -> None:
    with nothing_runs(server):
        for path in (CHAT, COMPLETIONS, RESPONSES):
            body = {**BODIES[path], name: CONSTRAINTS[name], "stream": stream}
            error = check_refusal(server.post(path, body), 400, name)
            assert error["code"] == "unsupported_parameter"
            assert name in error["message"]


def test_21_5_echo_is_for_completions(server: Running) -> None:
    for path in (CHAT, RESPONSES):
        check_refusal(server.post(path, {**BODIES[path], "echo": True}), 400, "echo")
        assert server.post(path, {**BODIES[path], "echo": False}).status == 200
    assert server.post(COMPLETIONS, {**BODIES[COMPLETIONS], "echo": True}).status == 200


@pytest.mark.parametrize("endpoint", PATHS, ids=lambda one: one.value)
def test_21_5_every_field_in_the_list_is_treated_as_it_says(server: Running, endpoint: Endpoint) -> None:
    path = PATHS[endpoint]
    body = {**BODIES[path], **({} if endpoint is Endpoint.EMBEDDINGS else {"temperature": 0})}
    rejected = rejected_at(endpoint)
    with nothing_runs(server):
        for field in rejected:
            reply = server.post(path, {**body, field.name: unsupported(field, body)})
            check_refusal(reply, 400, field.name)
    answer = said(server.post(path, body).json())
    for place in range(max(len(field.neutral) for field in FIELDS)):
        neutral = {field.name: field.neutral[place] for field in rejected if len(field.neutral) > place}
        assert said(server.post(path, {**body, **neutral}).json()) == answer
    assert said(server.post(path, {**body, **dict.fromkeys(field.name for field in rejected)}).json()) == answer
    declared = REQUESTS[endpoint].model_fields
    ignored = [one.name for one in FIELDS if one.treatment is Treatment.IGNORED and one.name not in declared]
    for value in ("x", 5, True, [1], {"a": 1}):
        assert said(server.post(path, {**body, **dict.fromkeys(ignored, value)}).json()) == answer


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (CHAT, {"response_format": {"type": "text"}}),
        (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "low"}}),
        (RESPONSES, {"text": {"verbosity": "low"}}),
        (COMPLETIONS, {"best_of": 2, "n": 2}),
        (COMPLETIONS, {"max_tokens": 2, "max_completion_tokens": 2}),
        (RESPONSES, {"max_output_tokens": 2, "max_tokens": 2}),
        (CHAT, {"max_tokens": 2, "n_predict": 2}),
        (CHAT, {"top_n_sigma": -1.0}),
        (CHAT, {"add_special_tokens": False}),
        (COMPLETIONS, {"add_special_tokens": True}),
    ],
)
def test_21_5_values_that_ask_for_nothing_are_accepted(server: Running, path: str, changes: dict[str, Any]) -> None:
    assert server.post(path, {**BODIES[path], **changes}).status == 200


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (COMPLETIONS, {"best_of": 2}),
        (COMPLETIONS, {"max_completion_tokens": 3, "max_tokens": 2}),
        (RESPONSES, {"max_tokens": 3}),
        (RESPONSES, {"response_format": {"type": "json_object"}}),
        (CHAT, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
        (RESPONSES, {"n": 2}),
        (RESPONSES, {"prompt_logprobs": 1}),
        (CHAT, {"instructions": "be brief"}),
        (CHAT, {"add_special_tokens": True}),
        (COMPLETIONS, {"add_special_tokens": False}),
    ],
)
def test_21_5_the_same_fields_with_a_meaning_are_not(server: Running, path: str, changes: dict[str, Any]) -> None:
    check_refusal(server.post(path, {**BODIES[path], **changes}), 400, next(iter(changes)))


def test_21_5_sessions_reject_what_chats_reject(server: Running) -> None:
    session = server.post("/v1/sessions", {"model": "fake"}).json()["id"]
    for name, value in CONSTRAINTS.items():
        check_refusal(server.post("/v1/sessions", {name: value}), 400, name)
        answer = {"input": "hi", "max_tokens": 2, "stream": False, name: value}
        check_refusal(server.post(f"/v1/sessions/{session}/generate", answer), 400, name)
    assert server.get(f"/v1/sessions/{session}").json()["num_tokens"] == 0


def said(answer: Any) -> Any:
    """What does not change from one request to the next."""
    if "data" in answer:
        return answer["data"]
    if "output" in answer:
        return [item["content"] for item in answer["output"]]
    return answer["choices"]


# -- the list ---------------------------------------------------------------------------------------------------------


def test_21_5_every_field_is_listed_once() -> None:
    assert len(KNOWN) == len(FIELDS)
    bodies = [*REQUESTS.values(), ChatBody, GenerateRequest, EmbedRequest, Options]
    for body in bodies:
        assert set(body.model_fields) <= set(KNOWN)
    for field in FIELDS:
        is_declared = any(field.name in body.model_fields for body in bodies)
        assert is_declared or field.where, f"{field.name} is for no endpoint"
        assert field.note or field.treatment is not Treatment.IGNORED, f"why {field.name} can be ignored is not said"


def test_21_5_every_field_of_the_other_servers_is_listed() -> None:
    theirs: dict[Endpoint, Any] = {
        Endpoint.CHAT: chat_create_params.CompletionCreateParamsBase,
        Endpoint.COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
        Endpoint.RESPONSES: response_create_params.ResponseCreateParamsBase,
        Endpoint.EMBEDDINGS: embedding_create_params.EmbeddingCreateParams,
    }
    for endpoint, params in theirs.items():
        names = set(params.__annotations__)
        assert names <= set(KNOWN)
        unknown = [name for name in names - set(REQUESTS[endpoint].model_fields) if endpoint not in KNOWN[name].where]
        assert unknown == [], endpoint
    assert {*VLLM.split(), *LLAMA_SERVER.split()} <= set(KNOWN)
