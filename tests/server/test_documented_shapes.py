"""I01: requests of every shape that the OpenAPI document allows, and of every other."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi.routing import iter_route_contexts
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.server.conversing import converse
from tests.server.refusals import (
    BODIES,
    QUICK_S,
    VOCABULARY,
)
from tests.server.serving import HI, KEY, WAIT_S, Reply, Running, request, running
from tests.server.test_batches import CHAT, form, line
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.app import create_app
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.session.postgres import KV_PATH
from tokenmill.session.records import MEDIA_TYPE

# -- I01: what the document says, and what it does not say ------------------------------------------------------------

NUM_EXAMPLES, NUM_OF_SESSIONS, NUM_OF_STORED = 50, 20, 8
NUM_WALKS, NUM_STEPS = 8, 6
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = [f"GET {path}" for path in ("/v1/models", "/v1/models/{name}", "/health", "/health/live", "/health/ready")]
OPERATIONS += [f"POST {path}" for path in (*BODIES, "/v1/requests/{request_id}/cancel")]
OPERATIONS += [f"GET {path}" for path in ("/metrics", "/v1/loads", "/v1/scheduler", "/v1/servers", "/v1/usage")]
OPERATIONS += ["GET /v1/requests/{request_id}/timeline"]
FOR_ADMINS = ["POST /v1/models/load", "POST /v1/models/unload", "GET /v1/models/cached"]
FOR_ADMINS += ["POST /api/pull", "DELETE /api/delete"]
OPERATIONS += FOR_ADMINS
OF_ANTHROPIC = ["/v1/messages", "/v1/messages/count_tokens"]
OPERATIONS += [f"POST {path}" for path in OF_ANTHROPIC]
OF_OLLAMA = [f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "show")]
OPERATIONS += [f"POST {path}" for path in OF_OLLAMA]
OPERATIONS += [f"GET /api/{name}" for name in ("tags", "ps", "version")]
ANSWERED = [*BODIES, *OF_ANTHROPIC, *OF_OLLAMA[:4]]
SESSION = "/v1/sessions/{session_id}"
OF_SESSIONS = ["POST /v1/sessions", f"GET {SESSION}", f"GET {SESSION}/turns", f"GET {SESSION}/stream"]
OF_SESSIONS += [f"GET {SESSION}/explain", f"POST {SESSION}/save", f"POST {SESSION}"]
OF_SESSIONS += [f"POST {SESSION}/{verb}" for verb in ("append", "generate", "regenerate", "resume", "cancel", "fork")]
OF_SESSIONS += [f"POST {SESSION}/{verb}" for verb in ("rewind", "edit")]
RESPONSE, TALK, COMPLETION = (
    "/v1/responses/{response_id}",
    "/v1/conversations/{conversation_id}",
    "/v1/chat/completions/{completion_id}",
)
OF_STORED = [f"{method} {path}" for method in ("GET", "DELETE") for path in (RESPONSE, TALK, COMPLETION)]
OF_STORED += ["POST /v1/responses/input_tokens", f"POST {RESPONSE}/cancel", f"GET {RESPONSE}/input_items"]
OF_STORED += ["GET /v1/chat/completions", f"POST {COMPLETION}", f"GET {COMPLETION}/messages"]
OF_STORED += ["POST /v1/conversations", f"POST {TALK}", f"POST {TALK}/items", f"GET {TALK}/items"]
OF_STORED += [f"{method} {TALK}/items/{{item_id}}" for method in ("GET", "DELETE")]
FILE, BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
OF_BATCHES = ["POST /v1/files", "GET /v1/files", f"GET {FILE}", f"GET {FILE}/content", f"DELETE {FILE}"]
OF_BATCHES += ["POST /v1/batches", "GET /v1/batches", f"GET {BATCH}", f"POST {BATCH}/cancel"]
OF_LLAMA = ["POST /infill", "GET /props", "GET /slots", "POST /apply-template"]
OF_STORED += [*OF_BATCHES, *OF_LLAMA]
OPERATIONS += OF_STORED
ENDLESS = ["GET /v1/scheduler/events"]
"""A stream without an end is never complete."""
GUESSES = [f"POST {SESSION}/rewind", f"POST {SESSION}/edit"]
"""Turns that are there are few."""
OPERATIONS += [*OF_SESSIONS, f"DELETE {SESSION}", "GET /v1/sessions", "POST /v1/sessions/restore"]
REFUSED = {"chat_template", "tools", "functions", "response_format", "chat_template_kwargs", "suffix", "background"}
REFUSED |= {"previous_response_id", "text", "prompt_logprobs", "top_logprobs", "stream_options", "best_of", "timeout_s"}


@schemathesis.serializer(MEDIA_TYPE)
def as_file(_: Any, value: Any) -> bytes:
    """Made-up bytes are not a session file."""
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")


@pytest.fixture(scope="module")
def documented() -> Iterator[schemathesis.BaseSchema]:
    """A server whose answers are short, and its document."""
    model = FakeModel(FakeConfig(vocab_size=VOCABULARY, max_context=128, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=1024), kv_cache_tokens=8192)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as one:
        schema = schemathesis.openapi.from_dict(one.get("/openapi.json").json())
        key = {"Authorization": f"Bearer {KEY}"}
        schema.config.update(base_url=f"http://127.0.0.1:{one.port}", headers=key, request_timeout=WAIT_S)
        schema.hook("map_body")(_with_our_model)

        @schema.hook
        def map_path_parameters(_: schemathesis.HookContext, parameters: Any) -> Any:
            """A session that is there: a question and its answer; or something stored."""
            if isinstance(parameters, dict) and (stored := STORED.keys() & parameters.keys()):
                return {**parameters, **_stored(one, stored.pop())}
            if not isinstance(parameters, dict) or "session_id" not in parameters:
                return parameters
            talk = converse(one)
            talk.ask("a", max_tokens=2)
            return {**parameters, "session_id": talk.id}

        yield schema
        one.wait_until_idle()


STORED: dict[str, tuple[str, Any]] = {
    "response_id": ("/v1/responses", {"input": "a", "max_output_tokens": 2, "background": True}),
    "conversation_id": ("/v1/conversations", {"items": [{"role": "user", "content": "a", "id": "msg_a"}]}),
    "completion_id": ("/v1/chat/completions", {"messages": HI, "max_tokens": 2, "store": True}),
    "file_id": ("/v1/files", None),
    "batch_id": ("/v1/batches", None),
}


def _stored(server: Running, name: str) -> dict[str, str]:
    """Something of this kind that is there."""
    if name in ("file_id", "batch_id"):
        body, headers = form({"purpose": "batch"}, json.dumps(line("a")).encode())
        file = server.post("/v1/files", body, headers=headers).json()["id"]
        begun = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        return {name: file if name == "file_id" else server.post("/v1/batches", begun).json()["id"]}
    reply = server.post(*STORED[name])
    assert reply.status == 200, reply.body
    return {name: reply.json()["id"]} | ({"item_id": "msg_a"} if name == "conversation_id" else {})


def _with_our_model(_: schemathesis.HookContext, body: Any) -> Any:
    is_named = isinstance(body, dict) and isinstance(body.get("model"), str)
    return {**body, "model": "fake"} if is_named else body


def _within_limits(case: schemathesis.Case) -> None:
    """The document does not say how large numbers may be: of what may be left out at most two fields are kept."""
    body = case.body
    if isinstance(body, dict):
        required = case.operation.body[0].definition["schema"].get("required", ())
        required = {*required, next((name for name in ("prompt", "content", "messages") if body.get(name)), "")}
        others = sorted(name for name in body if name not in {*required, *REFUSED})
        first = len(str(body)) % max(len(others), 1)
        case.body = {name: body[name] for name in body if name in {*required, *others[first : first + 2]}}
        messages = case.body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                message |= {"role": "user"} if message.get("role", "tool") == "tool" else {}
                message |= {"content": "a"} if message.get("content") is None else {}


def check_examples(schema: schemathesis.BaseSchema, label: str, mode: GenerationMode) -> Counter[int]:
    """Requests that are made up, and all that is checked of their answers; how many of each status there were."""
    operation = next(one.ok() for one in schema.get_all_operations() if one.ok().label == label)
    statuses: Counter[int] = Counter()

    excluded: list[Any] = [schemathesis.checks.positive_data_acceptance]
    if label == "POST /v1/files":  # the bytes of a file are taken for no string
        excluded.append(schemathesis.checks.negative_data_rejection)
    num_examples = NUM_OF_SESSIONS if "/sessions" in label else NUM_OF_STORED if label in OF_STORED else NUM_EXAMPLES

    @settings(SETTINGS, max_examples=num_examples)
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            _within_limits(case)
        response = case.call()
        statuses[response.status_code] += 1
        assert response.elapsed < QUICK_S
        case.validate_response(response, excluded_checks=excluded)

    check()
    return statuses


@pytest.mark.parametrize("label", OPERATIONS)
def test_i01_requests_of_the_documents_shape(documented: schemathesis.BaseSchema, label: str) -> None:
    statuses = check_examples(documented, label, GenerationMode.POSITIVE)
    if label in OF_SESSIONS:
        assert set(statuses) <= {200, 201, 400, 404, 409}
        least = 0 if label in GUESSES else NUM_OF_SESSIONS // 10
        assert statuses[200] + statuses[201] >= least, statuses
    elif label == f"DELETE {SESSION}":
        assert set(statuses) == {204}
    elif label in OF_STORED:
        assert set(statuses) <= {200, 400, 404, 409}
        is_guess = label in ("POST /infill", "POST /v1/batches", f"POST {BATCH}/cancel")
        assert statuses[200] or is_guess, statuses
    elif label in FOR_ADMINS:
        assert set(statuses) == {403}, "its key is none for that"
    else:
        assert set(statuses) <= {200, 400, 404}
    if label.removeprefix("POST ") in ANSWERED:
        assert statuses[200] >= NUM_EXAMPLES // 10, statuses


@pytest.mark.parametrize("path", ANSWERED)
def test_i01_requests_of_any_other_shape(documented: schemathesis.BaseSchema, path: str) -> None:
    # What is wrong with an item of /v1/responses is looked at after the model's name.
    assert set(check_examples(documented, f"POST {path}", GenerationMode.NEGATIVE)) <= {400, 404}


@pytest.mark.parametrize(
    "label", [label for label in OF_SESSIONS if label.startswith("POST ") and "cancel" not in label]
)
def test_i01_requests_about_sessions_of_any_other_shape(documented: schemathesis.BaseSchema, label: str) -> None:
    assert set(check_examples(documented, label, GenerationMode.NEGATIVE)) <= {200, 201, 400, 404, 409}


@pytest.mark.fault("F03")
def test_i01_operations_one_after_the_other(documented: schemathesis.BaseSchema) -> None:
    """Along the links of the document: a session is used, forked and deleted, in any order."""
    statuses: dict[str, Counter[int]] = defaultdict(Counter)
    machine: Any = documented.include(path_regex="^/v1/sessions/.session_id").as_state_machine()

    class Walk(machine):  # type: ignore[misc]
        def before_call(self, case: schemathesis.Case) -> None:
            _within_limits(case)

        def validate_response(self, response: Any, case: schemathesis.Case, **_: Any) -> None:
            statuses[case.operation.label][response.status_code] += 1
            assert response.elapsed < QUICK_S
            case.validate_response(response, excluded_checks=[schemathesis.checks.positive_data_acceptance])

    Walk.run(settings=settings(SETTINGS, max_examples=NUM_WALKS, stateful_step_count=NUM_STEPS))
    assert sum(counted[200] + counted[201] + counted[204] for counted in statuses.values()) > NUM_WALKS
    assert {status for counted in statuses.values() for status in counted} <= {200, 201, 204, 400, 404, 409, 415}


FIRST: dict[str, dict[str, Any]] = {
    "/v1/sessions": {"model": "fake", "messages": [{"role": "user", "content": "a"}]},
    f"{SESSION}/fork": {},
    "/v1/responses": {"model": "fake", "input": "a", "max_output_tokens": 2},
}
"""A request for each response that has links."""
CALLS: dict[str, Any] = {"append": {"input": "b"}, "generate": {"max_tokens": 2}, "edit": {"turn": 0, "content": "c"},
                         "rewind": {"at_turn": 0}, "update": {"title": "t"}, "resume": {"token_ids": []}}  # fmt: skip


@pytest.mark.fault("F03")
def test_i01_the_links_of_the_document_lead_somewhere(server: Running) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    linked = {
        (path, status): answer["links"]
        for path, methods in paths.items()
        for status, answer in methods.get("post", {}).get("responses", {}).items()
        if "links" in answer and not path.endswith("restore")
    }
    assert {path for path, _ in linked} == set(FIRST)
    for (path, status), links in linked.items():
        for name, link in links.items():
            talk = converse(server)
            talk.ask("a", max_tokens=2)
            first = server.post(path.replace("{session_id}", talk.id), FIRST[path])
            assert first.status == int(status), first.body
            (target, method) = link["operationRef"].removeprefix("#/paths/").rsplit("/", 1)
            target = target.replace("~1", "/")
            assert method in paths[target], name
            for parameter, expression in link.get("parameters", {}).items():
                target = target.replace(f"{{{parameter}}}", found_by(expression, first, FIRST[path]))
            body = {key: found_by(value, first, FIRST[path]) for key, value in link.get("requestBody", {}).items()}
            body |= CALLS.get(name, {})
            reply = request(server.port, method.upper(), target, body if method == "post" else None)
            assert reply.status in (200, 201, 204) or (name, reply.status) in REFUSED_LINKS, (name, reply.body)


REFUSED_LINKS = {("stream", 400), ("resume", 400), ("regenerate", 400), ("edit", 400), ("rewind", 400)}
"""A session without an answer has nothing to stream or to draw again, and little to go back to."""


def found_by(expression: str, first: Reply, sent: dict[str, Any]) -> str:
    """The value that a runtime expression of OpenAPI stands for; other texts are values."""
    source, mark, pointer = expression.partition("#/")
    if not mark:
        return expression
    value = first.json() if source == "$response.body" else sent
    for part in pointer.split("/"):
        value = value[int(part) if isinstance(value, list) else part]
    return str(value)


def test_i01_every_operation_is_tried(documented: schemathesis.BaseSchema) -> None:
    assert sorted(one.ok().label for one in documented.get_all_operations()) == sorted([*OPERATIONS, *ENDLESS])


def test_21_8_every_route_is_in_the_document(server: Running) -> None:
    """Each of /v1 for clients with each of its methods; the others are the same without the prefix."""
    routes = {
        (method.lower(), context.path.replace(":path}", "}"))
        for context in iter_route_contexts(create_app(server.served).routes)
        for method in context.methods or ()
    }
    paths = server.get("/openapi.json").json()["paths"]
    documented = {(method, path) for path, methods in paths.items() for method in methods}
    of_v1 = {one for one in routes if one[1].startswith("/v1/") and one[1] != KV_PATH}
    assert ("get", "/v1/scheduler/events") in of_v1
    assert of_v1 <= documented
    events = paths["/v1/scheduler/events"]["get"]
    assert list(events["responses"]["200"]["content"]) == ["text/event-stream"]
    assert [parameter["name"] for parameter in events["parameters"]] == ["pace_s", "server"]
