"""How routes read bodies, and how exceptions become answers: the last steps before an endpoint, the first after it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from tokenmill.errors import SessionElsewhere, TokenmillError
from tokenmill.server.errors import ApiError, error_response
from tokenmill.server.fields import read_json
from tokenmill.server.forwarding import follow
from tokenmill.server.streaming import ClientGone, while_connected
from tokenmill.server.telemetry.figures import CLIENT_GONE
from tokenmill.text.workers import TextWorkers

KEY = Depends(HTTPBearer(auto_error=False, description="An API key, if the server was given any."))
"""For the document only: who may come in is decided before any route."""


class JsonRoute(APIRoute):
    """`with_texts` makes the class whose long bodies are parsed on a server's own threads."""

    texts: ClassVar[TextWorkers]

    @classmethod
    def with_texts(cls, texts: TextWorkers) -> type[JsonRoute]:
        return type(cls.__name__, (cls,), {"texts": texts})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known: tuple[type[Exception], ...] = tuple(HANDLERS)

        async def handle_json(http: Request) -> Response:
            try:
                if self.body_field is not None:  # not by FastAPI, which makes a 400 of every error
                    body = await http.body()
                    http.state.caller.body_bytes = len(body)
                    try:
                        if len(body) >= self.texts.inline_bytes:
                            parsing = self.texts.run(len(body), lambda: read_json(body))
                            http._json = await while_connected(http.state.caller, parsing)
                        elif body:
                            http._json = read_json(body)
                    except ValueError as error:
                        raise HTTPException(400, str(error)) from None
                return await handle(http)
            except SessionElsewhere as elsewhere:
                return await follow(http, handle, elsewhere)
            except ClientDisconnect:
                raise HTTPException(400, "the connection was closed before the body was complete") from None
            except known:
                raise
            except Exception as error:  # here, where its answer still gets a name
                return error_response(error, http.state.caller.error_body)

        return handle_json


# -- from exceptions to answers ---------------------------------------------------------------------------------------


async def _failed(http: Request, error: Exception) -> Response:
    return error_response(error, http.state.caller.error_body)


async def _gone(_: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=CLIENT_GONE)


async def _invalid(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    answer = validation_error(error.errors())
    return JSONResponse(http.state.caller.error_body(answer), answer.status)


async def _http(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "path not found", 405: f"method {http.method} not allowed"}
    answer = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
    return JSONResponse(http.state.caller.error_body(answer), answer.status, headers=dict(error.headers or {}))


HANDLERS: dict[type[Exception], Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    RequestValidationError: _invalid,
    HTTPException: _http,
    ClientGone: _gone,
    ApiError: _failed,
    TokenmillError: _failed,
}


# -- pydantic's errors in our words -----------------------------------------------------------------------------------


WORDS = {
    "missing": "is required",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "is too large",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "value_error": "{error}",
}


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong."""
    first = errors[0]
    inside, *where = first["loc"]
    if not where:
        words = "a JSON body is required" if first["type"] == "missing" else "the body must be a JSON object"
        return ApiError(400, words)
    words = WORDS.get(first["type"], "is not valid").format(**first.get("ctx", {}))
    path = f"{'.'.join(str(part) for part in where):.200}"
    return ApiError(400, f"{path} {words}", param=f"{where[0]!s:.200}" if inside == "body" else path)
