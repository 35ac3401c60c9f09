"""llama-server's own endpoints that editors and tools ask for: `/infill`, `/props`, `/slots`, `/apply-template`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from tokenmill import __version__
from tokenmill.engine.events import CoreSnapshot
from tokenmill.outputs import OutputDelta, RequestOutput
from tokenmill.server import schemas
from tokenmill.server.api.completions import infill_ids, infill_of
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.errors import ApiError
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import InfillRequest, TemplateRequest, check_messages, template_options
from tokenmill.server.served import Served
from tokenmill.server.sse import SERVER_SENT_EVENTS, event
from tokenmill.server.streaming import Call, folded, while_connected

ModelQuery = Annotated[str | None, Query(description="The model, where the server has several.")]


def llama_routes(served: Served) -> APIRouter:
    """At the root only, as llama-server has them."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["llama-server"])

    @api.post("/infill", responses=schemas.generated(schemas.Infilled))
    async def create_infill(http: Request, body: InfillRequest) -> Response:
        """What belongs between two texts."""
        model = await served.models.use(body.model)
        call = served.call(http.state.caller, body, model, "infill-")
        body.check(served.config)
        infill, files = infill_of(model, "input_prefix"), body.files
        wanted = None if body.n_predict < 0 else max(1, body.n_predict)
        stops = (*body.changes().get("stop_token_ids", ()), *infill.stop_ids)
        changes = {**body.changes(), "stop_token_ids": stops, "max_tokens": wanted}
        params = replace(model.default_params, **changes)
        if params.structured_outputs is not None:
            await call.compile(params, body.constraining)
        more: dict[str, Any] = {"files": files, "begun": body.prompt}
        ids = await call.tokens(lambda: infill_ids(infill, model, body.input_prefix, body.input_suffix, **more))
        call.generate(ids, params, wanted)
        return await call.respond(InfillWriter(call, body, model), stream=bool(body.stream))

    @api.get("/props", responses={200: {"model": schemas.Props}, **schemas.errors(401, 404, 503)})
    async def get_props(model: ModelQuery = None) -> Response:
        """What a client may want to know of a model."""
        return JSONResponse(props(await served.models.use(model)))

    @api.get("/slots", responses={200: {"model": list[schemas.LlamaSlot]}, **schemas.errors(401, 404, 503)})
    async def get_slots(model: ModelQuery = None) -> Response:
        """The rows of a model's engine, and which of them are busy."""
        used = await served.models.use(model)
        snapshots = [watch.snapshot()[0] for watch in served.telemetry.watches.get(used.name, [])]
        return JSONResponse(slots(snapshots, used.llm.max_model_len))

    @api.post(
        "/apply-template", responses={200: {"model": schemas.Rendered}, **schemas.errors(400, 401, 404, 413, 503)}
    )
    async def apply_template(http: Request, body: TemplateRequest) -> Response:
        """A conversation as the prompt that the model's chat template makes of it."""
        check_messages(body.messages, served.config)
        options = template_options(body, served.config)
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        template = (await served.models.use(body.model)).llm.opened.text.chat_template()
        caller = http.state.caller
        rendering = served.texts.run(caller.body_bytes, lambda: template.render(messages, **options))
        return JSONResponse({"prompt": await while_connected(caller, rendering)})

    return api


def props(model: ServedModel) -> dict[str, Any]:
    """A model's properties. Its path is the server's business."""
    text, llm, params = model.llm.opened.text, model.llm, model.default_params
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    return {
        "default_generation_settings": {
            "n_ctx": llm.max_model_len,
            "params": {name: getattr(params, name) for name in names},
        },
        "total_slots": llm.opened.config.max_num_seqs * llm.num_cores,
        "model_alias": model.name,
        "model_path": model.name,
        "chat_template": "" if text.template is None else text.template.source,
        "bos_token": text.variables.get("bos_token") or "",
        "eos_token": text.variables.get("eos_token") or "",
        "modalities": {"vision": False, "audio": False},
        "infill": text.infill is not None,
        "is_sleeping": False,
        "build_info": f"tokenmill-{__version__}",
    }


def slots(snapshots: Sequence[CoreSnapshot], max_model_len: int) -> list[dict[str, Any]]:
    """The rows of all cores, numbered through. Whose they are is not told."""
    rows = [slot for snapshot in snapshots for slot in snapshot.slots]
    return [
        {
            "id": number,
            "n_ctx": max_model_len,
            "speculative": False,
            "is_processing": slot.state != "idle",
            "n_past": slot.num_computed,
            "n_tokens": slot.num_tokens,
        }
        for number, slot in enumerate(rows)
    ]


class InfillWriter:
    """The middle, whole or in pieces, as llama-server's /infill tells it."""

    framing = SERVER_SENT_EVENTS

    def __init__(self, call: Call, body: InfillRequest, model: ServedModel) -> None:
        self._call = call
        self._model_name = body.model or model.name
        self._is_silent = body.n_predict == 0
        """Only the prompt is to be computed, so that the next request finds it."""
        self._deltas: list[OutputDelta] = []

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (choice,) = output.outputs
        text, used = "" if self._is_silent else choice.text, output.usage
        is_word = isinstance(choice.stop_reason, str)
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model_name,
            "tokens_predicted": 0 if self._is_silent else used.completion_tokens,
            "tokens_evaluated": used.prompt_tokens,
            "tokens_cached": used.cached_tokens,
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": "limit" if choice.finish_reason == "length" else "word" if is_word else "eos",
            "stopping_word": choice.stop_reason if is_word else "",
            "timings": self._timings(used.prompt_tokens - used.cached_tokens, used.completion_tokens),
        }

    def _timings(self, num_prompt: int, num_predicted: int) -> dict[str, float]:
        caller, now = self._call.caller, time.monotonic()
        first = caller.first_token_at or now
        timings: dict[str, float] = {}
        for name, count, seconds in (
            ("prompt", num_prompt, first - caller.began),
            ("predicted", num_predicted, now - first),
        ):
            timings |= {
                f"{name}_n": count,
                f"{name}_ms": round(1000 * seconds, 3),
                f"{name}_per_token_ms": round(1000 * seconds / max(1, count), 3),
                f"{name}_per_second": round(count / max(seconds, 1e-6), 3),
            }
        return timings

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: OutputDelta) -> bytes:
        self._deltas.append(delta)
        if not delta.text or self._is_silent:
            return b""
        return event({"index": 0, "content": delta.text, "tokens": list(delta.token_ids), "stop": False, "id_slot": -1})

    def closing(self) -> bytes:
        """What has been said is not repeated: the last event has the figures."""
        return event({**self.whole(folded(self._call.generations, self._deltas)), "content": ""})

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())
