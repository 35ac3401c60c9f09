"""`create_app`: the routes, what stands before them, and how exceptions become answers."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill import __version__
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.errors import TokenmillError
from tokenmill.server.auth import ApiKeys
from tokenmill.server.chat import chat_completions
from tokenmill.server.completions import completions
from tokenmill.server.config import ServerConfig
from tokenmill.server.embeddings import detokenize, embeddings, tokenize
from tokenmill.server.engine import CLIENT_CLOSED, ClientGone
from tokenmill.server.errors import ApiError, to_api_error
from tokenmill.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

log = logging.getLogger(__name__)


def create_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The server's application, over an engine that runs."""
    app = FastAPI(title="tokenmill", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(ApiKeys, key_hashes=config.key_hashes)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=config.max_body_bytes)
    app.add_middleware(RequestIds)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _failed)
    for ours in (ApiError, TokenmillError):
        app.add_exception_handler(ours, _failed)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that can be named."""
        return {"object": "list", "data": [_model(config)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        if name != config.model_name:
            raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")
        return _model(config)

    @app.post("/v1/chat/completions")
    async def chat(http: Request, body: ChatRequest) -> Response:
        """An answer to a conversation."""
        return await chat_completions(http, body, llm, config)

    @app.post("/v1/completions")
    async def complete(http: Request, body: CompletionRequest) -> Response:
        """What follows a text."""
        return await completions(http, body, llm, config)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest) -> dict[str, Any]:
        """Texts as vectors."""
        return await embeddings(body, llm, config)

    @app.post("/tokenize")
    async def to_tokens(body: TokenizeRequest) -> dict[str, Any]:
        """The ids of a text."""
        return tokenize(body, llm, llm.max_model_len)

    @app.post("/detokenize")
    async def to_text(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of ids."""
        return detokenize(body, llm)

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        """Does it take requests, and do the engine's steps end?"""
        if llm.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503, headers={"Retry-After": "5"})

    @app.get("/health/live")
    async def live() -> Response:
        """Does it run?"""
        return JSONResponse({"status": "live"})

    return app


class RequestIds:
    """A name for every request, in the headers of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"req-{secrets.token_hex(8)}".encode()

        async def with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        await self._app(scope, receive, with_name)


def _model(config: ServerConfig) -> dict[str, Any]:
    return {"id": config.model_name, "object": "model", "created": 0, "owned_by": "tokenmill"}


async def _failed(_: Request, error: Exception) -> Response:
    answer = to_api_error(error)
    if answer.status == 500:
        log.error("a request failed", exc_info=error)
    return JSONResponse(answer.body(), answer.status, headers=answer.headers)


async def _gone(_: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=CLIENT_CLOSED)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    answer = ApiError(400, f"{'.'.join(where) or 'body'}: {first['msg']}", param=where[0] if where else None)
    return JSONResponse(answer.body(), answer.status)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, str(error.detail))
    return JSONResponse(answer.body(), answer.status, headers=dict(error.headers or {}))
