"""`litellm`: the prefixes people use for servers of their own, and the errors it makes of ours."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a price list when it is imported
os.environ["LITELLM_LOG"] = "ERROR"

import litellm

from tests.clients.checking import PROMPT, TOO_LONG, Target, raises, run_checks

PREFIXES = ("openai", "hosted_vllm")


def options(target: Target, prefix: str, **more: Any) -> Any:
    where = {"model": f"{prefix}/{target.model}", "api_base": target.base_url, "api_key": target.api_key}
    return {**where, "num_retries": 0, "max_retries": 0, **more}


def chat(target: Target, prefix: str, **more: Any) -> dict[str, Any]:
    ask = [{"role": "user", "content": PROMPT}]
    return options(target, prefix, **{"messages": ask, "max_tokens": 12, "temperature": 0, **more})


def check_completion(target: Target) -> None:
    for prefix in PREFIXES:
        answer = litellm.completion(**chat(target, prefix))
        assert answer.choices[0].message.content, (prefix, answer)
        assert answer.choices[0].finish_reason in ("stop", "length"), (prefix, answer)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, (
            prefix,
            answer,
        )


def check_streaming(target: Target) -> None:
    for prefix in PREFIXES:
        whole = litellm.completion(**chat(target, prefix))
        stream = litellm.completion(**chat(target, prefix, stream=True, stream_options={"include_usage": True}))
        chunks = list(stream)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content, (prefix, text)
        built = litellm.stream_chunk_builder(chunks)
        assert built.usage.completion_tokens == whole.usage.completion_tokens, (prefix, built.usage, whole.usage)


def check_text_completion(target: Target) -> None:
    more = {"prompt": "The sea is", "max_tokens": 8}
    answer = litellm.text_completion(**options(target, "text-completion-openai", **more))
    assert answer.choices[0].text, answer


def check_embedding(target: Target) -> None:
    for prefix in PREFIXES:
        answer = litellm.embedding(**options(target, prefix, input=["the sea", "a train"]))
        assert [item["index"] for item in answer.data] == [0, 1], prefix
        assert all(isinstance(item["embedding"][0], float) for item in answer.data), prefix


def check_responses(target: Target) -> None:
    answer = litellm.responses(**options(target, "openai", input=PROMPT, max_output_tokens=16))
    assert answer.output[0].content[0].text, answer


def check_too_long_a_prompt_exceeds_the_context_window(target: Target) -> None:
    long = [{"role": "user", "content": TOO_LONG}]
    for prefix in PREFIXES:
        call = chat(target, prefix, messages=long)
        raises(litellm.ContextWindowExceededError, lambda call=call: litellm.completion(**call))


def check_a_wrong_key_is_refused(target: Target) -> None:
    for prefix in PREFIXES:
        call = chat(target, prefix, api_key="sk-wrong")
        raises(litellm.AuthenticationError, lambda call=call: litellm.completion(**call))


def check_errors(target: Target) -> None:
    for prefix in PREFIXES:
        unknown = {**chat(target, prefix), "model": f"{prefix}/nobody"}
        raises(litellm.NotFoundError, lambda call=unknown: litellm.completion(**call))
        wrong = chat(target, prefix, temperature=-1)
        raises(litellm.BadRequestError, lambda call=wrong: litellm.completion(**call))


async def check_async_completion_and_stream(target: Target) -> None:
    for prefix in PREFIXES:
        whole = await litellm.acompletion(**chat(target, prefix))
        text = ""
        async for chunk in await litellm.acompletion(**chat(target, prefix, stream=True)):
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content, (prefix, text)


if __name__ == "__main__":
    run_checks(vars())
