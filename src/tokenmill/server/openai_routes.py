"""OpenAI's endpoints, and the few others that every server has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response

from tokenmill.server import schemas
from tokenmill.server.chat import start_chat
from tokenmill.server.completions import start_completions
from tokenmill.server.context import caller_of
from tokenmill.server.embeddings import detokenized, embeddings, tokenized
from tokenmill.server.errors import ApiError
from tokenmill.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from tokenmill.server.responses import start_response
from tokenmill.server.routing import KEY, JsonRoute
from tokenmill.server.served import Served
from tokenmill.server.session_turns import in_turn


def openai_routes(served: Served) -> APIRouter:
    """What generates, and embeddings."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY])
    config = served.config

    @api.post("/chat/completions", responses=schemas.generated(schemas.ChatCompletion), tags=["generation"])
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """An answer to a conversation; with `session_id`, to what is new in one."""
        model = await served.requested_model(body.model)
        if body.session_id is not None and served.session(caller_of(http.scope), body.session_id)[0] is not model:
            raise ApiError(400, "the session is one with another model", param="model")
        with served.call(http, body, model, "chatcmpl-") as call:
            answer = await start_chat(call, body, model, config)
            return await call.stream(answer) if body.stream else JSONResponse(answer.whole(await call.finish()))

    @api.post("/completions", responses=schemas.generated(schemas.Completion), tags=["generation"])
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        """What follows a text, or each of several."""
        model = await served.requested_model(body.model)
        with served.call(http, body, model, "cmpl-") as call:
            answer = await start_completions(call, body, model, config)
            return await call.stream(answer) if body.stream else JSONResponse(answer.whole(await call.finish()))

    @api.post("/responses", responses=schemas.generated(schemas.ResponseObject), tags=["generation"])
    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        """OpenAI's newer form of a chat; with `previous_response_id` it goes on from an earlier one."""
        model = await served.requested_model(body.model)
        with served.call(http, body, model, "resp_") as call:
            answer = await start_response(call, body, model, served.responses, config)
            return await call.stream(answer) if body.stream else JSONResponse(answer.whole(await call.finish()))

    @api.post(
        "/embeddings",
        responses={200: {"model": schemas.EmbeddingList}, **schemas.errors(400, 401, 404, 413, 429, 499, 500, 503)},
        tags=["texts"],
    )
    async def create_embedding(http: Request, body: EmbeddingRequest) -> Response:
        """Texts as vectors."""
        model = await served.requested_model(body.model)
        with served.call(http, body, model, "embd-") as call:
            return JSONResponse(await embeddings(call, body, model, config))

    @api.post(
        "/requests/{request_id}/cancel",
        responses={200: {"model": schemas.Cancelled}, **schemas.errors(401, 404, 503)},
        tags=["generation"],
    )
    async def cancel_request(
        http: Request, request_id: Annotated[str, Path(description="The id of its answer, or its x-request-id.")]
    ) -> Response:
        """End a request that runs, wherever it is. Whoever waits for it is told."""
        num_cancelled = served.calls.cancel(request_id, caller_of(http.scope).key)
        if not num_cancelled:
            raise ApiError(404, f"no request {request_id!r:.140} runs", code="request_not_found")
        return JSONResponse({"id": request_id, "object": "request.cancelled", "cancelled": num_cancelled})

    return api


def other_routes(served: Served) -> APIRouter:
    """Endpoints that are not OpenAI's."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts))
    refusals = schemas.errors(400, 401, 404, 413, 429, 503)

    async def on_text(http: Request, work: Callable[[], bytes]) -> Response:
        answer = await in_turn(http, served.texts.run(caller_of(http.scope).body_bytes, work))
        return Response(answer, media_type="application/json")

    @api.post("/tokenize", responses={200: {"model": schemas.Tokens}, **refusals}, tags=["texts"], dependencies=[KEY])
    async def create_tokens(http: Request, body: TokenizeRequest) -> Response:
        """The ids of a text or a conversation."""
        body.check(served.config)
        options = body.template_options(served.config)
        model = await served.model(body.model)
        return await on_text(http, lambda: tokenized(body, model, options))

    @api.post(
        "/detokenize", responses={200: {"model": schemas.Detokenized}, **refusals}, tags=["texts"], dependencies=[KEY]
    )
    async def create_text(http: Request, body: DetokenizeRequest) -> Response:
        """The text of ids."""
        model = await served.model(body.model)
        return await on_text(http, lambda: detokenized(body, model.llm))

    health: dict[int | str, dict[str, Any]] = {200: {"model": schemas.Health}, 503: {"model": schemas.Health}}

    @api.head("/health", include_in_schema=False)
    @api.head("/health/ready", include_in_schema=False)
    @api.get("/health", responses=health, tags=["health"])
    @api.get("/health/ready", responses=health, tags=["health"])
    async def get_ready() -> Response:
        """Does it take requests, and do the engine's steps end?"""
        if served.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503, headers={"Retry-After": "5"})

    @api.head("/health/live", include_in_schema=False)
    @api.get("/health/live", responses={200: {"model": schemas.Health}}, tags=["health"])
    async def get_live() -> Response:
        """Does it run?"""
        return JSONResponse({"status": "live"})

    return api
