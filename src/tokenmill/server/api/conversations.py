"""`/v1/conversations`: OpenAI's conversations, to which responses add their items.

A conversation is a document with its items. Once a response goes on with it, it also has a session, which holds the
same as a token log: while nothing but responses changes the items, only what is new is rendered and computed. Without
one, or with another model or other instructions, a new session is made from the items.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response

from tokenmill.errors import SessionNotFound, TokenmillError
from tokenmill.server import schemas
from tokenmill.server.api.items import After, Item, Limit, Order, as_items, as_messages, item_id, item_page, page_of
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.errors import RETRY_SOON, ApiError
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import CreateConversation, CreateItems, UpdateMetadata
from tokenmill.server.served import CONVERSATION, Served
from tokenmill.session.session import check_metadata

ConversationId = Annotated[str, Path(description="The conversation's id.", max_length=256)]
ItemId = Annotated[str, Path(description="The item's id.", max_length=256)]


@dataclass(frozen=True)
class Talk:
    """A conversation as it is stored."""

    id: str
    key: str
    created_at: int
    metadata: Mapping[str, str]
    items: Sequence[Item]
    session: Mapping[str, Any] | None = None
    """Which session has its items as a token log, and how many of them; None: there is none."""

    @property
    def body(self) -> dict[str, Any]:
        return {
            "created_at": self.created_at,
            "metadata": dict(self.metadata),
            "items": list(self.items),
            "session": self.session,
        }

    @property
    def shape(self) -> dict[str, Any]:
        about = {"id": self.id, "object": "conversation", "created_at": self.created_at}
        return {**about, "metadata": dict(self.metadata)}


async def find_talk(served: Served, name: str, key: str, param: str = "conversation_id") -> Talk:
    """A conversation of this key; those of other keys are not found."""
    found = await served.document(CONVERSATION, name, key)
    if found is None:
        raise ApiError(404, f"conversation {name!r:.80} not found", code="conversation_not_found", param=param)
    return Talk(name, key, **found.body)


async def save_talk(served: Served, talk: Talk, before: Talk | None = None) -> None:
    """Store a new conversation, or what has become of the one `before`, unless another server has changed that."""
    name, key = talk.id, talk.key
    if before is None:
        await served.put(CONVERSATION, name, key, talk.body)
    elif not await served.put(CONVERSATION, name, key, talk.body, replaces=True, expected=before.body):
        await find_talk(served, name, key)  # unless it was deleted meanwhile
        raise conversation_locked()


def with_items(talk: Talk, more: Sequence[Item], session: Mapping[str, Any] | None) -> Talk:
    """The conversation gone on with; `session` has all of it as a token log. Ids that are taken are replaced."""
    items, taken = list(talk.items), {item["id"] for item in talk.items}
    for item in more:
        items.append({**item, "id": item_id(item["type"])} if item["id"] in taken else item)
        taken.add(items[-1]["id"])
    known = None if session is None else {**session, "num_items": len(items)}
    return Talk(talk.id, talk.key, talk.created_at, talk.metadata, items, known)


async def session_of(talk: Talk, model: ServedModel, wanted: Mapping[str, Any]) -> str | None:
    """The session that a response can go on with: of this model, made as is wanted now, and with nothing besides."""
    if talk.session is None or json.loads(json.dumps(wanted)) != talk.session["made"]:
        return None
    name = str(talk.session["id"])
    with suppress(SessionNotFound):
        is_same = await model.sessions.whose(name) == talk.key
        if is_same:
            await model.sessions.open(name)
        return name if is_same and len(model.sessions.get(name).turns) == talk.session.get("num_turns") else None
    return None


async def end_session(served: Served, talk: Talk) -> None:
    """Its session is of no more use."""
    name = None if talk.session is None else str(talk.session["id"])
    for model in served.models.loaded if name is not None else ():
        with suppress(TokenmillError):  # it is another model's, or has ended by itself
            if await model.sessions.whose(str(name)) == talk.key:
                await model.sessions.end_session(str(name))


def conversation_routes(served: Served) -> APIRouter:
    """All that can be done with conversations. One of another key's is not there."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["conversations"])
    refusals = schemas.errors(400, 401, 404, 409, 413, 429, 503)
    one: dict[int | str, dict[str, Any]] = {200: {"model": schemas.Conversation}, **refusals}
    several: dict[int | str, dict[str, Any]] = {200: {"model": schemas.ItemPage}, **refusals}
    changing = asyncio.Lock()
    """Around reading a conversation and writing it: changes do not overtake each other."""

    async def find(http: Request, name: str) -> Talk:
        return await find_talk(served, name, http.state.caller.key)

    def check_free(talk: Talk) -> None:
        if (talk.key, talk.id) in served.busy_conversations:
            raise conversation_locked()

    def checked(given: Any) -> list[Item]:
        """New items, in the form in which they are stored."""
        if not given:
            return []
        items = as_items(given, "items")
        as_messages(items, served.config.max_content_parts, known_calls=None, param="items")
        return items

    @api.post("/conversations", responses=one)
    async def create_conversation(http: Request, body: CreateConversation) -> Response:
        """A new conversation, empty or with items."""
        name, items = f"conv_{secrets.token_hex(24)}", checked(body.items)
        talk = Talk(name, http.state.caller.key, int(time.time()), check_metadata(body.metadata), items)
        await save_talk(served, talk)
        return JSONResponse(talk.shape)

    @api.get("/conversations/{conversation_id}", responses=one)
    async def get_conversation(http: Request, conversation_id: ConversationId) -> Response:
        """When it was created, and its metadata."""
        return JSONResponse((await find(http, conversation_id)).shape)

    @api.post("/conversations/{conversation_id}", responses=one)
    async def update_conversation(http: Request, conversation_id: ConversationId, body: UpdateMetadata) -> Response:
        """Other metadata."""
        async with changing:
            talk = await find(http, conversation_id)
            check_free(talk)
            metadata = check_metadata(body.metadata)
            changed = replace(talk, metadata=metadata)
            await save_talk(served, changed, talk)
        return JSONResponse(changed.shape)

    @api.delete("/conversations/{conversation_id}", responses={200: {"model": schemas.Deleted}, **refusals})
    async def delete_conversation(http: Request, conversation_id: ConversationId) -> Response:
        """Give it up, and its items; responses stay."""
        async with changing:
            talk = await find(http, conversation_id)
            check_free(talk)
            await asyncio.wrap_future(served.documents.delete(CONVERSATION, talk.id, talk.key))
        await end_session(served, talk)
        return JSONResponse({"id": talk.id, "object": "conversation.deleted", "deleted": True})

    @api.post("/conversations/{conversation_id}/items", responses=several)
    async def create_items(http: Request, conversation_id: ConversationId, body: CreateItems) -> Response:
        """Add items: the next response goes on from them."""
        items = checked(body.items)
        async with changing:
            talk = await find(http, conversation_id)
            check_free(talk)
            taken = {item["id"] for item in talk.items}
            if twice := next((item["id"] for item in items if item["id"] in taken), None):
                raise ApiError(400, f"the conversation has an item {twice!r:.80} already", param="items")
            await save_talk(served, replace(talk, items=[*talk.items, *items]), talk)  # its session has their beginning
        return JSONResponse(page_of(items, has_more=False))

    @api.get("/conversations/{conversation_id}/items", responses=several)
    async def list_items(
        http: Request, conversation_id: ConversationId, limit: Limit = 20, after: After = None, order: Order = "desc"
    ) -> Response:
        """Its items, page by page."""
        return JSONResponse(item_page((await find(http, conversation_id)).items, limit, after, order))

    @api.get("/conversations/{conversation_id}/items/{item_id}", responses={200: {"model": schemas.Item}, **refusals})
    async def get_item(http: Request, conversation_id: ConversationId, item_id: ItemId) -> Response:
        return JSONResponse(_item(await find(http, conversation_id), item_id))

    @api.delete("/conversations/{conversation_id}/items/{item_id}", responses=one)
    async def delete_item(http: Request, conversation_id: ConversationId, item_id: ItemId) -> Response:
        """Forget an item: the conversation goes on as if it had never been there."""
        async with changing:
            talk = await find(http, conversation_id)
            check_free(talk)
            gone = _item(talk, item_id)
            left = [item for item in talk.items if item is not gone]
            await save_talk(served, replace(talk, items=left, session=None), talk)
        await end_session(served, talk)
        return JSONResponse(talk.shape)

    return api


def conversation_locked() -> ApiError:
    what = "another response is being added to this conversation; wait for it, or cancel it"
    return ApiError(409, what, code="conversation_locked", param="conversation", headers=RETRY_SOON)


def _item(talk: Talk, item_id: str) -> Item:
    found = next((item for item in talk.items if item["id"] == item_id), None)
    if found is None:
        raise ApiError(404, f"item {item_id!r:.80} not found", code="item_not_found", param="item_id")
    return found
