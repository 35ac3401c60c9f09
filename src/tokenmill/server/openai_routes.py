"""OpenAI's endpoints that generate."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokenmill.server import schemas
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.chat import start_chat
from tokenmill.server.completions import start_completions
from tokenmill.server.errors import ApiError
from tokenmill.server.middleware import caller_of
from tokenmill.server.requests import (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
)
from tokenmill.server.responses import start_response
from tokenmill.server.served import Served


def openai_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY])
    config = served.config

    @api.post("/chat/completions", responses=schemas.generated(schemas.ChatCompletion), tags=["generation"])
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """An answer to a conversation; with `session_id`, to what is new in one."""
        model = await served.requested_model(body.model)
        if body.session_id is not None and served.session(caller_of(http.scope), body.session_id)[0] is not model:
            raise ApiError(400, "the session is one with another model", param="model")
        with served.call(http, body, model, "chatcmpl-") as call:
            return await call.respond(await start_chat(call, body, model, config), stream=bool(body.stream))

    @api.post("/completions", responses=schemas.generated(schemas.Completion), tags=["generation"])
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        """What follows a text, or each of several."""
        model = await served.requested_model(body.model)
        with served.call(http, body, model, "cmpl-") as call:
            return await call.respond(await start_completions(call, body, model, config), stream=bool(body.stream))

    @api.post("/responses", responses=schemas.generated(schemas.ResponseObject), tags=["generation"])
    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        """OpenAI's newer form of a chat; with `previous_response_id` it goes on from an earlier one."""
        model = await served.requested_model(body.model)
        with served.call(http, body, model, "resp_") as call:
            writer = await start_response(call, body, model, served.responses, config)
            return await call.respond(writer, stream=bool(body.stream))

    return api
