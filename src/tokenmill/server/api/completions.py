"""`POST /v1/completions`: text in, text out, several prompts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokenmill.engine.request import context_overflow
from tokenmill.errors import ContextOverflow, TooManyTokens
from tokenmill.outputs import OutputDelta, RequestOutput, TokenLogprobs, Usage
from tokenmill.pipeline.output import Generation
from tokenmill.server import schemas
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError
from tokenmill.server.middleware import Caller
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import CompletionRequest
from tokenmill.server.served import Served
from tokenmill.server.sse import DONE, SERVER_SENT_EVENTS, TextEvent, event
from tokenmill.server.streaming import Call, usage_of
from tokenmill.text.model_text import Infill

Prompt = str | list[int]


def completion_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["generation"])

    @api.post("/completions", responses=schemas.generated(schemas.Completion))
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        """What follows a text, or each of several."""
        return await complete_text(served, http.state.caller, body)

    return api


async def complete_text(served: Served, caller: Caller, body: CompletionRequest) -> Response:
    """What follows each prompt, whole or as a stream."""
    model = await served.models.use(body.model, default_model=served.config.default_model)
    call = served.call(caller, body, model, "cmpl-")
    writer = await start_completions(call, body, model, served.config)
    return await call.respond(writer, stream=bool(body.stream))


async def start_completions(
    call: Call, body: CompletionRequest, model: ServedModel, config: ServerConfig
) -> CompletionWriter:
    """Check it, and add a generation for each prompt to the call."""
    body.check(config)
    prompts = as_prompts(body.prompt, config.max_prompts, "prompt")
    more = {**body.changes(), "logprobs": body.logprobs}
    if body.max_tokens is not None:
        more["max_tokens"] = 1 if body.scores_only else body.max_tokens
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        more["prompt_logprobs"] = body.logprobs
    params = replace(model.default_params, **more)
    infill = infill_of(model) if body.suffix else None
    if infill is not None:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *infill.stop_ids))
    if params.structured_outputs is not None:
        await call.compile(params, body.constraining)
    wanted = None if body.scores_only else body.max_tokens

    def prompt_ids(prompt: Prompt) -> list[int]:
        if infill is None:
            return call.llm.prompt_ids(prompt)
        if not isinstance(prompt, str):
            raise ApiError(400, "suffix requires prompts that are texts, not token ids", param="suffix")
        return infill_ids(infill, model, prompt, body.suffix or "")

    for ids in await call.tokens(lambda: list(map(prompt_ids, prompts))):
        call.generate(ids, params, wanted)
    return CompletionWriter(call, body, prompts, params.n, model)


def infill_of(model: ServedModel, param: str = "suffix") -> Infill:
    """How the model fills in the middle; 400 if it was not trained to."""
    infill = model.llm.opened.text.infill
    if infill is None:
        what = f"{model.name} has no fill-in-the-middle tokens; use a model that was trained with some"
        raise ApiError(400, what, code="infill_not_supported", param=param)
    return infill


def infill_ids(infill: Infill, model: ServedModel, before: str, after: str, **more: Any) -> list[int]:
    """The prompt for a hole between two texts. For any thread."""
    longest = model.llm.max_model_len
    try:
        return infill.ids(before, after, longest, **more)
    except TooManyTokens as error:
        raise ContextOverflow(context_overflow(longest, error.at_least, 1, is_exact=False)) from None


def as_prompts(value: Any, most: int, param: str) -> list[Prompt]:
    """One prompt or several, as texts or as ids."""
    several = value if isinstance(value, list) and value and isinstance(value[0], (str, list)) else [value]
    if not 1 <= len(several) <= most:
        raise ApiError(400, f"at most {most} in one request, not {len(several)}", param=param)
    if not all(several):
        raise ApiError(400, "inputs must not be empty", param=param)
    return several


class CompletionWriter:
    """The completions of one call: choice i of prompt p has the index p * n + i."""

    framing = SERVER_SENT_EVENTS

    def __init__(
        self, call: Call, body: CompletionRequest, prompts: Sequence[Prompt], n: int, model: ServedModel
    ) -> None:
        self._call = call
        self._body = body
        self._prompts = prompts
        self._n = n
        self._forms = model.forms
        self._head = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": body.model or model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        self._offsets: dict[int, int] = {}
        """Characters of each choice that have been shown."""
        has_scores = body.logprobs is not None or body.prompt_logprobs is not None
        self._is_plain = not (has_scores or body.echo or body.wants_usage or body.return_token_ids)
        """Chunks have nothing but their text."""
        self._plain: dict[int, TextEvent] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            OutputDelta(place * self._n + one.index, one.text, one.token_ids, 0, one.logprobs, one.finish_reason)
            for place, output in enumerate(outputs)
            for one in output.outputs
        ]
        usage = self._usage([output.usage for output in outputs])
        return {**self._head, "choices": [self._choice(choice) for choice in choices], "usage": usage}

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: OutputDelta) -> bytes:
        if self._is_plain and delta.finish_reason is None:
            if delta.index not in self._plain:
                choice = self._choice(delta)
                self._plain[delta.index] = TextEvent(lambda text: {**self._head, "choices": [{**choice, "text": text}]})
            return self._plain[delta.index].encode(delta.text)
        made = {**self._head, "choices": [self._choice(delta)]}
        if self._body.wants_usage:
            used = [self._call.generation_of(delta).usage]
            made["usage"] = self._usage(used) if self._body.wants_usage_always else None
        return event(made)

    def closing(self) -> bytes:
        """Usage, if it was asked for."""
        if not self._body.wants_usage:
            return DONE
        usage = self._usage([generation.usage for generation in self._call.generations])
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _choice(self, delta: OutputDelta) -> dict[str, Any]:
        generation = self._call.generation_of(delta)
        is_first = delta.index not in self._offsets
        text, scores = delta.text, list[TokenLogprobs | None](delta.logprobs or [])
        ids: Sequence[int] = delta.token_ids
        if self._body.scores_only:
            text, ids, scores = "", [], []
        echo, before = "", self._offsets.get(delta.index, 0)
        if self._body.echo and is_first:
            echo = self._echo(delta, generation)
            ids = [*generation.prompt_token_ids, *ids]
            scores = [*(generation.prompt_logprobs or []), *scores]
        self._offsets[delta.index] = before + len(echo) + len(text)
        made: dict[str, Any] = {
            "index": delta.index,
            "text": echo + text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(ids, scores, before),
            "finish_reason": "length" if self._body.scores_only and delta.finish_reason else delta.finish_reason,
        }
        if self._body.return_token_ids:
            made["token_ids"] = list(delta.token_ids)
            made["prompt_token_ids"] = generation.prompt_token_ids if is_first else None
        if self._body.prompt_logprobs is not None and is_first and generation.prompt_logprobs is not None:
            made["prompt_logprobs"] = self._forms.for_prompt(generation.prompt_token_ids, generation.prompt_logprobs)
        return made

    def _logprobs(self, ids: Sequence[int], scores: Sequence[TokenLogprobs | None], before: int) -> dict[str, Any]:
        offsets = [before + offset for offset in self._forms.offsets(ids)[:-1]]
        return self._forms.for_completion(ids, scores, offsets)

    def _echo(self, delta: OutputDelta, generation: Generation) -> str:
        """The prompt's text: as it was given, or what its ids say."""
        prompt = self._prompts[delta.index // self._n]
        return prompt if isinstance(prompt, str) else self._forms.join(generation.prompt_token_ids)

    def _usage(self, used: Sequence[Usage]) -> dict[str, Any]:
        usage = usage_of(used)
        if self._body.scores_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage
