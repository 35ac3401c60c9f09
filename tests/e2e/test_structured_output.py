"""150 schemas of the features that public collections use: completed outputs of the default model satisfy them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tokenmill import LLM, SamplingParams, StructuredOutputs

pytestmark = [pytest.mark.req("R29"), pytest.mark.slow]

SCHEMAS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))


@pytest.mark.fault("T09")
@pytest.mark.parametrize("backend", ["torch", "llamacpp"])
def test_completed_outputs_satisfy_their_schemas(backend: str) -> None:
    """Drawn at a high temperature, so that what can go wrong does; some of them with whitespace of their own."""
    if backend == "llamacpp":
        pytest.importorskip("llama_cpp")
    params = [
        SamplingParams(
            temperature=1.2,
            seed=i,
            max_tokens=48,
            structured_outputs=StructuredOutputs(json=schema, any_whitespace=i % 30 == 3),
        )
        for i, schema in enumerate(SCHEMAS)
    ]
    with LLM(
        "smollm2-135m", backend=backend, device="cpu", max_num_seqs=32, kv_cache_tokens=16_384, num_threads=1
    ) as llm:
        outputs = llm.generate(["JSON: "] * len(SCHEMAS), params)
    num_complete = 0
    for schema, output in zip(SCHEMAS, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason in ("stop", "length"), (schema, output.error)
        if answer.finish_reason == "stop":
            num_complete += 1
            checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            checker(schema, format_checker=checker.FORMAT_CHECKER).validate(json.loads(answer.text))
    assert num_complete >= 135
