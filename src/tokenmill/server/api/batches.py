"""`/v1/files` and `/v1/batches`: files of requests, and their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Path, Query, Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse, JSONResponse, Response

from tokenmill.server import schemas
from tokenmill.server.api.chat_completions import complete_chat
from tokenmill.server.api.completions import complete_text
from tokenmill.server.api.embeddings import create_embeddings
from tokenmill.server.api.responses import respond
from tokenmill.server.batch_runner import BatchJob
from tokenmill.server.bodies import KEY, JsonRoute, validation_error
from tokenmill.server.errors import ApiError
from tokenmill.server.fields import read_json
from tokenmill.server.middleware import Caller
from tokenmill.server.requests import (
    ChatRequest,
    CompletionRequest,
    CreateBatch,
    EmbeddingRequest,
    Hinted,
    ResponsesRequest,
)
from tokenmill.server.served import Served
from tokenmill.server.stored_files import FILE_TTL_S, MAX_TTL_S, MIN_TTL_S, StoredFile
from tokenmill.session.session import check_metadata

FILES = "/files"
MAX_FIELDS = 8
"""Of an upload's form."""
Item = TypeVar("Item", StoredFile, BatchJob)
Endpoint = tuple[type[Hinted], Callable[..., Awaitable[Response]]]
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": (ChatRequest, complete_chat),
    "/v1/completions": (CompletionRequest, complete_text),
    "/v1/embeddings": (EmbeddingRequest, create_embeddings),
    "/v1/responses": (ResponsesRequest, respond),
}
"""What a batch may run: the body of a line, and who answers it. The same as for requests of clients."""
INTERACTIVE = ("stream", "background", "session_id")
"""Fields that make no sense in a file."""
Order = Annotated[Literal["asc", "desc"], Query(description="By the time of creation.")]
After = Annotated[str | None, Query(description="The last id of the page before.")]
FileId = Annotated[str, Path(description="The id of a file.")]
BatchId = Annotated[str, Path(description="The id of a batch.")]


async def answer(served: Served, url: str, caller: Caller, raw: bytes) -> Response:
    """Answer a line, as its endpoint would."""
    body_type, respond_to = ENDPOINTS[url]
    line = await served.texts.run(len(raw), lambda: read_json(raw, "the line"))
    try:
        body = body_type.model_validate(line["body"])
    except ValidationError as error:
        raise validation_error([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None
    for name in INTERACTIVE:
        if getattr(body, name, None):
            raise ApiError(400, f"{name} is not supported in batches", param=name)
    return await respond_to(served, caller, body)


def batch_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["batches"])
    files, batches = served.files, served.batches
    about_file: dict[int | str, dict[str, Any]] = {200: {"model": schemas.FileObject}}
    about_batch: dict[int | str, dict[str, Any]] = {200: {"model": schemas.BatchObject}}

    # -- files --------------------------------------------------------------------------------------------------------

    @api.post(FILES, responses={**about_file, **schemas.errors(400, 401, 403, 413, 415, 503, 507)}, openapi_extra=FORM)
    async def upload_file(http: Request) -> Response:
        """Upload a file of requests for a batch, as a form with the fields `file` and `purpose`."""
        async with http.form(max_files=1, max_fields=MAX_FIELDS) as form:
            upload = form.get("file")
            if not isinstance(upload, UploadFile) or not upload.size:
                raise ApiError(400, "file is required, and must not be empty", param="file")
            if form.get("purpose") != "batch":
                raise ApiError(400, "purpose must be batch", param="purpose")
            if upload.size > served.config.max_file_bytes:
                raise ApiError(413, f"a file may have {served.config.max_file_bytes} bytes", param="file")
            seconds = form.get("expires_after[seconds]")
            is_number = isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 9
            ttl_s = _ttl_s(form.get("expires_after[anchor]"), int(str(seconds)) if is_number else seconds)
            name = upload.filename or "upload.jsonl"
            file = await files.add(http.state.caller.key, upload.file, upload.size, name, ttl_s)
        return JSONResponse(file.shape())

    @api.get(FILES, responses={200: {"model": schemas.FileList}, **schemas.errors(400, 401, 404, 503)})
    async def list_files(
        http: Request,
        purpose: Annotated[str | None, Query(description="Only files of this purpose.")] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Order = "desc",
        after: After = None,
    ) -> Response:
        """The files of the caller's key."""
        await files.refresh()
        found = files.of(http.state.caller.key, purpose)
        return JSONResponse(_page(found if order == "asc" else found[::-1], limit, after))

    @api.get(FILES + "/{file_id}", responses={**about_file, **schemas.errors(401, 404, 503)})
    async def get_file(http: Request, file_id: FileId) -> Response:
        """What is known of a file."""
        await files.refresh()
        return JSONResponse(files.find(http.state.caller.key, file_id).shape())

    @api.get(
        FILES + "/{file_id}/content",
        responses={200: {"content": {"application/octet-stream": {}}}, **schemas.errors(401, 404, 503)},
        response_class=Response,
    )
    async def get_content(http: Request, file_id: FileId) -> Response:
        """The content of a file."""
        await files.refresh()
        file = files.find(http.state.caller.key, file_id)
        return FileResponse(await files.content(file.id), media_type="application/octet-stream", filename=file.filename)

    @api.delete(
        FILES + "/{file_id}", responses={200: {"model": schemas.FileDeleted}, **schemas.errors(401, 404, 409, 503)}
    )
    async def delete_file(http: Request, file_id: FileId) -> Response:
        """Delete a file, unless a batch still reads it."""
        await files.refresh()
        await batches.refresh()
        file = files.find(http.state.caller.key, file_id)
        if batches.uses(file):
            raise ApiError(409, "a batch that is not over reads this file; cancel it first", code="file_in_use")
        await files.delete(file)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    # -- batches ------------------------------------------------------------------------------------------------------

    @api.post("/batches", responses={**about_batch, **schemas.errors(400, 401, 404, 413, 429, 503, 507)})
    async def create_batch(http: Request, body: CreateBatch) -> Response:
        """Run the requests of a file in the background."""
        await files.refresh()
        await batches.refresh()
        file = files.find(http.state.caller.key, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise ApiError(400, f"the purpose of the file is {file.purpose}, not batch", param="input_file_id")
        metadata = None if body.metadata is None else check_metadata(body.metadata)
        lives = body.output_expires_after or {}
        ttl_s = _ttl_s(lives.get("anchor"), lives.get("seconds"), "output_expires_after")
        made = await batches.create(
            http.state.caller.key, body.url, file, body.completion_window, metadata, output_ttl_s=ttl_s
        )
        return JSONResponse(made.shape())

    @api.get("/batches", responses={200: {"model": schemas.BatchList}, **schemas.errors(400, 401, 404, 503)})
    async def list_batches(
        http: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: After = None
    ) -> Response:
        """The batches of the caller's key, newest first."""
        await batches.refresh()
        return JSONResponse(_page(batches.of(http.state.caller.key)[::-1], limit, after))

    @api.get("/batches/{batch_id}", responses={**about_batch, **schemas.errors(401, 404, 503)})
    async def get_batch(http: Request, batch_id: BatchId) -> Response:
        """The state of a batch."""
        await batches.refresh()
        return JSONResponse(batches.find(http.state.caller.key, batch_id).shape())

    @api.post("/batches/{batch_id}/cancel", responses={**about_batch, **schemas.errors(401, 404, 409, 503, 507)})
    async def cancel_batch(http: Request, batch_id: BatchId) -> Response:
        """End a batch; the results so far can be read."""
        await batches.refresh()
        batch = batches.find(http.state.caller.key, batch_id)
        batch = await batches.cancel(batch)
        return JSONResponse(batch.shape())

    return api


FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": ["batch"]},
                        "expires_after[anchor]": {"enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S},
                    },
                }
            }
        },
    }
}
"""The form of an upload, for the OpenAPI document."""


def _ttl_s(anchor: Any, seconds: Any, param: str = "expires_after") -> int:
    """For how long a file is kept."""
    if anchor is None and seconds is None:
        return FILE_TTL_S
    if anchor != "created_at" or type(seconds) is not int or not MIN_TTL_S <= seconds <= MAX_TTL_S:
        what = f"must have the anchor created_at, and {MIN_TTL_S} to {MAX_TTL_S} seconds"
        raise ApiError(400, f"{param} {what}", param=param)
    return seconds


def _page(found: Sequence[Item], limit: int, after: str | None) -> dict[str, Any]:
    """A page of a list, from the one after an id on."""
    begin = 0
    if after is not None:
        begin = 1 + next((place for place, one in enumerate(found) if one.id == after), -1)
        if not begin:
            raise ApiError(400, f"{after!r:.80} is not in this list", param="after")
    page = [one.shape() for one in found[begin : begin + limit]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": begin + limit < len(found)}
