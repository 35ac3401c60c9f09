"""`/v1/models`: which there are; loading and unloading them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tokenmill.server import schemas
from tokenmill.server.auth import check_admin
from tokenmill.server.context import caller_of
from tokenmill.server.models import describe
from tokenmill.server.requests import LoadModel, UnloadModel
from tokenmill.server.routing import KEY, JsonRoute
from tokenmill.server.served import Served


def model_routes(served: Served) -> APIRouter:
    """The models of a server."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["models"])
    models, config = served.models, served.config
    about_one: dict[int | str, dict[str, Any]] = {200: {"model": schemas.Model}}

    @api.get("/models", responses={200: {"model": schemas.ModelList}, **schemas.errors(401, 503)})
    async def list_models() -> Response:
        """The models that can be named, loaded or not."""
        data = [describe(place, served.started) for place in models.places]
        return JSONResponse({"object": "list", "data": data})

    @api.post("/models/load", responses={**about_one, **schemas.errors(400, 401, 403, 404, 503, 507)})
    async def load_model(http: Request, body: LoadModel) -> Response:
        """Load a model that the server knows, if it fits. One that is loaded stays as it is."""
        check_admin(caller_of(http.scope), config)
        await served.model(body.model)
        return JSONResponse(describe(models.place(body.model), served.started))

    @api.post("/models/unload", responses={**about_one, **schemas.errors(400, 401, 403, 404, 409, 503)})
    async def unload_model(http: Request, body: UnloadModel) -> Response:
        """Unload a model: its memory is free. The next request for it loads it again."""
        check_admin(caller_of(http.scope), config)
        place = models.place(body.model)
        await models.unload(place, force=bool(body.force))
        return JSONResponse(describe(place, served.started))

    @api.get("/models/{name:path}", responses={**about_one, **schemas.errors(401, 404, 503)})
    async def get_model(name: str) -> Response:
        """One of them."""
        return JSONResponse(describe(models.place(name), served.started)) if name else await list_models()

    return api
