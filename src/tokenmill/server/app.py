"""`create_app`: the routes, what stands before them, and how exceptions become answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import pydantic_core
from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from tokenmill import __version__
from tokenmill.errors import TokenmillError
from tokenmill.server import schemas
from tokenmill.server.auth import ApiKeys, HostCheck
from tokenmill.server.bodies import BodyLimit
from tokenmill.server.calls import ClientGone
from tokenmill.server.chat import start_chat
from tokenmill.server.completions import start_completions
from tokenmill.server.context import CLIENT_GONE, Gatekeeper, RequestContext, caller_of
from tokenmill.server.embeddings import detokenize, embeddings, tokenize
from tokenmill.server.errors import ApiError, log_failure, model_not_found, to_api_error
from tokenmill.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from tokenmill.server.responses import start_response
from tokenmill.server.served import Served
from tokenmill.server.validation import validation_error

DESCRIPTION = "Many conversations with one model: OpenAI's API, and extensions that other servers have as well."


def create_app(served: Served) -> FastAPI:
    """The server's application. Whoever calls it lets the model in when it is loaded."""
    app = FastAPI(
        title="tokenmill",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    config = served.config
    # The last one is the first to see a request.
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes)
    app.add_middleware(ApiKeys, key_hashes=config.key_hashes)
    if not config.key_hashes and not config.insecure:
        app.add_middleware(HostCheck, allowed=config.allowed_hosts | {config.host})
    app.add_middleware(Gatekeeper, gate=served.gate)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestContext, gate=served.gate)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    router = _openai(served)
    app.include_router(router, prefix="/v1")
    app.include_router(router, include_in_schema=False)  # for clients whose base URL has no /v1
    app.include_router(_others(served))
    return app


class JsonRequest(Request):
    """A body that is read strictly: no NaN, no lone surrogates, no nesting without end."""

    async def json(self) -> Any:
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            where = re.search(r"line \d+ column \d+", str(error))
            at = f": see {where.group()}" if where else ""
            raise HTTPException(400, f"the body is no valid JSON{at}") from None


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known: tuple[type[Exception], ...] = tuple(_HANDLERS)

        async def handle_json(http: Request) -> Response:
            try:
                return await handle(JsonRequest(http.scope, http.receive))
            except known:
                raise
            except Exception as error:  # here, where its answer still gets a name
                return await _failed(http, error)

        return handle_json


KEY = Depends(HTTPBearer(auto_error=False, description="An API key, if the server was given any."))
"""For the document only: who may come in is decided before any route."""


def _openai(served: Served) -> APIRouter:
    """OpenAI's endpoints."""
    api = APIRouter(route_class=JsonRoute, dependencies=[KEY])
    config = served.config

    @api.get("/models", responses={200: {"model": schemas.ModelList}, **schemas.errors(401, 503)}, tags=["models"])
    async def list_models() -> Response:
        """The models that can be named."""
        return JSONResponse({"object": "list", "data": [_model(served)]})

    @api.get(
        "/models/{name:path}",
        responses={200: {"model": schemas.Model}, **schemas.errors(401, 404, 503)},
        tags=["models"],
    )
    async def get_model(name: str) -> Response:
        """One of them."""
        if not name:
            return await list_models()
        if name != config.model_name:
            raise model_not_found(name)
        return JSONResponse(_model(served))

    @api.post("/chat/completions", responses=schemas.generated(schemas.ChatCompletion), tags=["generation"])
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """An answer to a conversation."""
        with served.call(http, body, "chatcmpl-") as call:
            answer = await start_chat(call, body, config, served.forms)
            return await call.stream(answer) if body.stream else JSONResponse(answer.whole(await call.finish()))

    @api.post("/completions", responses=schemas.generated(schemas.Completion), tags=["generation"])
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        """What follows a text, or each of several."""
        with served.call(http, body, "cmpl-") as call:
            answer = await start_completions(call, body, config, served.forms)
            return await call.stream(answer) if body.stream else JSONResponse(answer.whole(await call.finish()))

    @api.post("/responses", responses=schemas.generated(schemas.ResponseObject), tags=["generation"])
    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        """OpenAI's newer form of a chat. Nothing is stored."""
        with served.call(http, body, "resp_") as call:
            answer = await start_response(call, body, config, served.forms)
            return await call.stream(answer) if body.stream else JSONResponse(answer.whole(await call.finish()))

    @api.post(
        "/embeddings",
        responses={200: {"model": schemas.EmbeddingList}, **schemas.errors(400, 401, 404, 413, 429, 499, 500, 503)},
        tags=["texts"],
    )
    async def create_embedding(http: Request, body: EmbeddingRequest) -> Response:
        """Texts as vectors."""
        with served.call(http, body, "embd-") as call:
            return JSONResponse(await embeddings(call, body, config))

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


def _others(served: Served) -> APIRouter:
    """Endpoints that are not OpenAI's."""
    api = APIRouter(route_class=JsonRoute)
    refusals = schemas.errors(400, 401, 404, 413, 503)

    @api.post("/tokenize", responses={200: {"model": schemas.Tokens}, **refusals}, tags=["texts"], dependencies=[KEY])
    async def create_tokens(body: TokenizeRequest) -> Response:
        """The ids of a text."""
        return JSONResponse(await tokenize(body, served.find(body.model)))

    @api.post(
        "/detokenize", responses={200: {"model": schemas.Detokenized}, **refusals}, tags=["texts"], dependencies=[KEY]
    )
    async def create_text(body: DetokenizeRequest) -> Response:
        """The text of ids."""
        return JSONResponse(await detokenize(body, served.find(body.model)))

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


def _model(served: Served) -> dict[str, Any]:
    name = served.config.model_name
    about = {"id": name, "object": "model", "created": served.started, "owned_by": "tokenmill", "root": name}
    return {**about, "max_model_len": served.llm.max_model_len}


# -- from exceptions to answers ---------------------------------------------------------------------------------------


async def _failed(_: Request, error: Exception) -> Response:
    answer = to_api_error(error)
    log_failure(answer, error)
    return JSONResponse(answer.body(), answer.status, headers=answer.headers)


async def _gone(_: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=CLIENT_GONE)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    answer = validation_error(error.errors())
    return JSONResponse(answer.body(), answer.status)


async def _http(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is no such path", 405: f"this path does not take {http.method}"}
    answer = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
    return JSONResponse(answer.body(), answer.status, headers=dict(error.headers or {}))


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    RequestValidationError: _invalid,
    HTTPException: _http,
    ClientGone: _gone,
    ApiError: _failed,
    TokenmillError: _failed,
}
