"""I01: requests of every shape that the OpenAPI document allows, and of every other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.server.refusals import (
    BODIES,
    QUICK_S,
    VOCABULARY,
)
from tests.server.serving import KEY, WAIT_S, running
from tokenmill import AsyncLLM
from tokenmill.config import EngineConfig
from tokenmill.core import FakeConfig, FakeModel
from tokenmill.server.config import ServerConfig, hash_key

# -- I01: what the document says, and what it does not say ------------------------------------------------------------

NUM_EXAMPLES = 50
SETTINGS = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = [f"GET {path}" for path in ("/v1/models", "/v1/models/{name}", "/health", "/health/live", "/health/ready")]
OPERATIONS += [f"POST {path}" for path in (*BODIES, "/v1/requests/{request_id}/cancel")]
OPERATIONS += [f"GET {path}" for path in ("/metrics", "/v1/scheduler", "/v1/requests/{request_id}/timeline")]
REFUSED = {"chat_template", "tools", "functions", "response_format", "chat_template_kwargs", "suffix", "background"}
REFUSED |= {"previous_response_id", "text", "prompt_logprobs", "top_logprobs", "stream_options", "best_of", "timeout_s"}


@pytest.fixture(scope="module")
def documented() -> Iterator[schemathesis.BaseSchema]:
    """A server whose answers are short, and its document."""
    model = FakeModel(FakeConfig(vocab_size=VOCABULARY, max_context=128, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=8192)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as one:
        schema = schemathesis.openapi.from_dict(one.get("/openapi.json").json())
        key = {"Authorization": f"Bearer {KEY}"}
        schema.config.update(base_url=f"http://127.0.0.1:{one.port}", headers=key, request_timeout=WAIT_S)
        schema.hook("map_body")(_with_our_model)
        yield schema
        one.wait_until_idle()


def _with_our_model(_: schemathesis.HookContext, body: Any) -> Any:
    is_named = isinstance(body, dict) and isinstance(body.get("model"), str)
    return {**body, "model": "fake"} if is_named else body


def _within_limits(case: schemathesis.Case) -> None:
    """The document does not say how large numbers may be: of what may be left out at most two fields are kept."""
    body = case.body
    if isinstance(body, dict):
        required = case.operation.body[0].definition["schema"].get("required", ())
        others = sorted(name for name in body if name not in {*required, *REFUSED})
        first = len(str(body)) % max(len(others), 1)
        case.body = {name: body[name] for name in body if name in {*required, *others[first : first + 2]}}
        for message in case.body.get("messages", ()):
            message |= {"role": "user"} if message["role"] == "tool" else {}
            message |= {"content": "a"} if message.get("content") is None else {}


def check_examples(schema: schemathesis.BaseSchema, label: str, mode: GenerationMode) -> Counter[int]:
    """Requests that are made up, and all that is checked of their answers; how many of each status there were."""
    operation = next(one.ok() for one in schema.get_all_operations() if one.ok().label == label)
    statuses: Counter[int] = Counter()

    @SETTINGS
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            _within_limits(case)
        response = case.call()
        statuses[response.status_code] += 1
        assert response.elapsed < QUICK_S
        case.validate_response(response, excluded_checks=[schemathesis.checks.positive_data_acceptance])

    check()
    return statuses


@pytest.mark.parametrize("label", OPERATIONS)
def test_i01_requests_of_the_documents_shape(documented: schemathesis.BaseSchema, label: str) -> None:
    statuses = check_examples(documented, label, GenerationMode.POSITIVE)
    assert set(statuses) <= {200, 400, 404}
    if label.removeprefix("POST ") in BODIES:
        assert statuses[200] >= NUM_EXAMPLES // 10, statuses


@pytest.mark.parametrize("path", BODIES)
def test_i01_requests_of_any_other_shape(documented: schemathesis.BaseSchema, path: str) -> None:
    # What is wrong with an item of /v1/responses is looked at after the model's name.
    assert set(check_examples(documented, f"POST {path}", GenerationMode.NEGATIVE)) <= {400, 404}


def test_i01_every_operation_is_tried(documented: schemathesis.BaseSchema) -> None:
    assert sorted(one.ok().label for one in documented.get_all_operations()) == sorted(OPERATIONS)
