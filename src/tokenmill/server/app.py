"""`create_app`: the routes, and what stands before them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from tokenmill import __version__
from tokenmill.server.auth import ApiKeys, HostCheck
from tokenmill.server.bodies import BodyLimit
from tokenmill.server.context import Gatekeeper, RequestContext
from tokenmill.server.model_routes import model_routes
from tokenmill.server.openai_routes import openai_routes, other_routes
from tokenmill.server.page import page_routes
from tokenmill.server.routing import HANDLERS, KEY, JsonRoute
from tokenmill.server.served import Served
from tokenmill.server.session_routes import session_routes
from tokenmill.server.telemetry.routes import telemetry_routes

DESCRIPTION = "Many conversations at once: OpenAI's API, sessions, and extensions that other servers have as well."


def create_app(served: Served) -> FastAPI:
    """The server's application. Whoever calls it lets the models in when they are loaded."""
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
    app.add_middleware(ApiKeys, key_hashes=config.every_key_hash, public=served.public)
    if not config.key_hashes and not config.insecure:
        app.add_middleware(HostCheck, allowed=config.allowed_hosts | {config.host})
    app.add_middleware(Gatekeeper, gate=served.gate)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    telemetry = served.telemetry
    app.add_middleware(RequestContext, gate=served.gate, traffic=telemetry.traffic, on_done=telemetry.note_done)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    for router in (model_routes(served), openai_routes(served), session_routes(served)):
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)  # for clients whose base URL has no /v1
    app.include_router(other_routes(served))
    app.include_router(telemetry_routes(served, JsonRoute.with_texts(served.texts)), dependencies=[KEY])
    if config.web:
        app.include_router(page_routes())
    return app
