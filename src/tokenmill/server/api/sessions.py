"""`/v1/sessions`: conversations that the server keeps, so that a request brings only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import JSONResponse, Response

from tokenmill.engine.request import context_overflow
from tokenmill.errors import ContextOverflow, TokenmillError
from tokenmill.server import schemas
from tokenmill.server.api.items import as_message
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError
from tokenmill.server.middleware import Caller
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import (
    AnswerRequest,
    AppendInput,
    CreateSession,
    EditTurn,
    ForkSession,
    Hinted,
    ResumeAnswer,
    RewindSession,
    SaveSession,
    UpdateSession,
    check_calls,
    session_use,
    template_options,
)
from tokenmill.server.served import Served
from tokenmill.server.streaming import AnswerEvents, EventId, read_event_id, while_connected
from tokenmill.server.telemetry.timeline import cost_json
from tokenmill.session.answer import Answer
from tokenmill.session.records import MEDIA_TYPE
from tokenmill.session.session import Input, SessionInfo

SessionId = Annotated[str, Path(description="The session's id.", max_length=256)]
FILE = {"type": "string", "format": "binary"}
PAGE, MAX_PAGE = 100, 1000
"""Sessions in a list, unless told otherwise, and at most."""
RESTORE = "/sessions/restore"
"""Takes a session file."""
REFUSALS = (400, 401, 404, 409, 413, 429, 503)


def session_routes(served: Served) -> APIRouter:
    """All that can be done with sessions. One of another key's is not there."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["sessions"])
    config = served.config
    one: dict[int | str, dict[str, Any]] = {200: {"model": schemas.Session}, **schemas.errors(*REFUSALS)}
    made: dict[int | str, dict[str, Any]] = {
        201: {**one[200], "links": schemas.session_links("/id")},
        **schemas.errors(*REFUSALS),
    }

    async def find(http: Request, session_id: str) -> ServedModel:
        return await served.model_of(http.state.caller, session_id)

    async def look(http: Request, session_id: str) -> tuple[ServedModel, SessionInfo]:
        """A session that is only read: it stays where it is."""
        model = await served.model_of(http.state.caller, session_id, is_read=True)
        return model, await model.sessions.info(session_id)

    def shown(model: ServedModel, session_id: str, status: int = 200) -> JSONResponse:
        return JSONResponse(session_shape(model, model.sessions.get(session_id)), status)

    @api.post("/sessions", status_code=201, responses=made)
    async def create_session(http: Request, body: CreateSession) -> Response:
        """A new conversation, empty or with a past."""
        body.check(config)
        past = None if body.messages is None else as_input(body.messages, config, "messages")
        model = await served.models.use(body.model)
        if system := body.system:  # it would be found too long only with the first input
            ids = await while_connected(
                http.state.caller, served.texts.run(len(system), lambda: model.llm.prompt_ids(system))
            )
            if len(ids) >= (longest := model.llm.max_model_len):
                raise ContextOverflow(context_overflow(longest, len(ids), 1))
        hints = served.hints(http.state.caller.key, body)
        params = replace(model.chat_params, **body.changes())
        session_id = await model.sessions.create_session(
            system=body.system,
            sampling_params=params,
            overflow=body.overflow,
            overflow_keep=body.overflow_keep,
            template_options=template_options(body, config),
            key=hints.key,
            namespace=hints.namespace,
            priority=hints.priority,
            title=body.title,
            metadata=body.metadata,
        )
        if past is not None:
            try:
                await model.sessions.append_input(session_id, past)
            except BaseException:
                with suppress(TokenmillError):  # its model may have gone meanwhile
                    await model.sessions.end_session(session_id)
                raise
        http.state.caller.session_id = session_id
        return shown(model, session_id, 201)

    @api.get("/sessions", responses={200: {"model": schemas.SessionPage}, **schemas.errors(400, 401, 404, 503)})
    async def list_sessions(
        http: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Sessions on a page.")] = PAGE,
        after: Annotated[
            str | None, Query(max_length=256, description="The last session of the page before: `last_id`.")
        ] = None,
        order: Annotated[Literal["asc", "desc"], Query(description="By creation time.")] = "asc",
    ) -> Response:
        """The key's sessions, page by page."""
        found, has_more = await served.sessions(http.state.caller, limit, after, newest_first=order == "desc")
        data = [session_shape(model, info) for model, info in found]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": has_more})

    @api.get("/sessions/{session_id}", responses=one)
    async def get_session(http: Request, session_id: SessionId) -> Response:
        """What it is doing, and how long it is."""
        return JSONResponse(session_shape(*await look(http, session_id)))

    @api.delete(
        "/sessions/{session_id}",
        status_code=204,
        responses={202: {"model": schemas.UndeletedSession}, **schemas.errors(401, 404, 503)},
    )
    async def delete_session(http: Request, session_id: SessionId) -> Response:
        """Give everything up: an answer on its way ends. 202 if the session could not be removed from the disk yet."""
        ended = await (await find(http, session_id)).sessions.end_session(session_id)
        if ended.durable is not False:
            return Response(status_code=204)
        about = {"id": session_id, "object": "session.deleted", "durable": False, "problem": ended.problem}
        return JSONResponse(about, 202)

    @api.get(
        "/sessions/{session_id}/turns", responses={200: {"model": schemas.TurnList}, **schemas.errors(401, 404, 503)}
    )
    async def get_turns(http: Request, session_id: SessionId) -> Response:
        """What was said, turn by turn."""
        _, info = await look(http, session_id)
        return JSONResponse({"object": "list", "data": turns_shape(info)})

    @api.get(
        "/sessions/{session_id}/explain",
        responses={200: {"model": schemas.SessionExplanation}, **schemas.errors(401, 404, 503)},
    )
    async def explain(http: Request, session_id: SessionId) -> Response:
        """What its latest answers cost before their first token, and why."""
        names = served.telemetry.names.seen_by(http.state.caller.key)
        model = await served.model_of(http.state.caller, session_id, is_read=True)
        costs = model.sessions.explain(session_id)
        turns = [
            {
                "id": cost.request_id,
                **cost_json(cost, names),
                "proposed_tokens": cost.num_proposed,
                "accepted_tokens": cost.num_agreed,
            }
            for cost in costs
        ]
        return JSONResponse({"object": "session.explanation", "session_id": session_id, "turns": turns})

    @api.post("/sessions/{session_id}/append", responses=one)
    async def append_input(http: Request, session_id: SessionId, body: AppendInput) -> Response:
        """New input, without an answer yet."""
        model = await find(http, session_id)
        given = as_input(body.input, config)
        options = {"raw": bool(body.raw), "continue_final_message": bool(body.continue_final_message)}
        await while_connected(http.state.caller, model.sessions.append_input(session_id, given, **options))
        return shown(model, session_id)

    async def answer(http: Request, session_id: str, body: AnswerRequest, *, again: bool) -> Response:
        body.check(config)
        model = await find(http, session_id)
        given = None if body.input is None else as_input(body.input, config)
        caller: Caller = http.state.caller
        options = {"timeout_s": served.timeout(http.state.caller, body), "priority": body.priority, **body.changes()}
        options["quota"] = served.quota(caller.key, body)
        options |= {
            "use": session_use(model.sessions.tools_of(session_id), body),
            "thinking_budget": body.thinking_token_budget,
        }
        live = await while_connected(
            http.state.caller, model.sessions.answer(session_id, given=given, again=again, **options)
        )
        charge_for(live, caller)
        stream = AnswerEvents(http.state.caller, model.name, model.forms, session_id, live)
        caller.model = model.name
        served.telemetry.note_call(caller.key, caller.request_id, live.request_id)
        return stream.stream(0, config) if body.is_streamed else JSONResponse(await stream.whole())

    generated = schemas.generated(schemas.SessionAnswer) | schemas.errors(409)

    @api.post("/sessions/{session_id}/generate", responses=generated)
    async def generate(http: Request, session_id: SessionId, body: AnswerRequest) -> Response:
        """The answer to what was appended, or to `input`: as events, unless `stream` is false."""
        return await answer(http, session_id, body, again=False)

    @api.post("/sessions/{session_id}/regenerate", responses=generated)
    async def regenerate(http: Request, session_id: SessionId, body: AnswerRequest) -> Response:
        """Another answer in place of the last one."""
        return await answer(http, session_id, body, again=True)

    async def last_answer(
        caller: Caller, session_id: str, seen: EventId, token_ids: Sequence[int] = ()
    ) -> AnswerEvents:
        model = await served.model_of(caller, session_id, resumes=seen.request_id or "", may_be_stale=False)
        found = await model.sessions.last_answer(session_id, seen.request_id, token_ids)
        seen.check(found)
        if found.is_rerun:
            charge_for(found, caller)
        return AnswerEvents(caller, model.name, model.forms, session_id, found)

    @api.get("/sessions/{session_id}/stream", responses=generated)
    async def stream(
        http: Request, session_id: SessionId, last_event_id: Annotated[str | None, Header(max_length=512)] = None
    ) -> Response:
        """The running answer, or the last one, from the beginning or after the event named by Last-Event-ID.

        After a restart: 409 `answer_lost`, with the `durable_offset` of tokens that are in the session's turns.
        """
        seen = read_event_id(last_event_id)
        return (await last_answer(http.state.caller, session_id, seen)).stream(seen.offset, config)

    @api.post("/sessions/{session_id}/resume", responses=generated)
    async def resume(http: Request, session_id: SessionId, body: ResumeAnswer) -> Response:
        """The running answer, or the last one, after the tokens that the client has.

        An answer that its server has not finished is run again and begins with these tokens: no token of them is drawn.
        An event `restarted` says from which offset on the client's tokens are not those of the answer, if that is so.
        """
        seen = EventId(body.answer_id, len(body.token_ids), "answer_id")
        events = await last_answer(http.state.caller, session_id, seen, body.token_ids)
        return await events.stream_after(body.token_ids, config)

    @api.post("/sessions/{session_id}/cancel", responses=one)
    async def cancel(http: Request, session_id: SessionId) -> Response:
        """End the answer that is on its way; the session keeps what was said."""
        model = await find(http, session_id)
        await model.sessions.cancel_generate(session_id)
        return shown(model, session_id)

    @api.post(
        "/sessions/{session_id}/fork",
        status_code=201,
        responses={
            201: {"model": schemas.SessionList, "links": schemas.session_links("/data/0/id")},
            **schemas.errors(*REFUSALS),
        },
    )
    async def fork(http: Request, session_id: SessionId, body: ForkSession) -> Response:
        """New sessions that go on from here, or from a turn or token before."""
        model = await find(http, session_id)
        forking = model.sessions.fork(session_id, at_turn=body.at_turn, at_token=body.at_token, n=body.n or 1)
        names = await while_connected(http.state.caller, forking)
        data = [session_shape(model, model.sessions.get(name)) for name in names]
        return JSONResponse({"object": "list", "data": data}, 201)

    @api.post("/sessions/{session_id}/rewind", responses=one)
    async def rewind(http: Request, session_id: SessionId, body: RewindSession) -> Response:
        """Keep the first turns or tokens, up to the given number, and drop the rest."""
        model = await find(http, session_id)
        await while_connected(
            http.state.caller, model.sessions.rewind(session_id, at_turn=body.at_turn, at_token=body.at_token)
        )
        return shown(model, session_id)

    @api.post("/sessions/{session_id}/edit", responses=one)
    async def edit(http: Request, session_id: SessionId, body: EditTurn) -> Response:
        """Another text for an input turn; what came after it is forgotten."""
        model = await find(http, session_id)
        await while_connected(http.state.caller, model.sessions.edit(session_id, body.turn, body.content))
        return shown(model, session_id)

    file: dict[str, Any] = {"description": "A session file.", "content": {MEDIA_TYPE: {"schema": FILE}}}

    @api.post(
        "/sessions/{session_id}/save", responses={200: file, **schemas.errors(*REFUSALS)}, response_class=Response
    )
    async def save(http: Request, session_id: SessionId, body: SaveSession) -> Response:
        """The session as a file, to be restored here or elsewhere."""
        model = await find(http, session_id)
        data = await while_connected(http.state.caller, model.sessions.export(session_id, kv=bool(body.kv)))
        name = {"Content-Disposition": 'attachment; filename="conversation.session"'}
        return Response(data, media_type=MEDIA_TYPE, headers=name)

    @api.post(
        RESTORE,
        status_code=201,
        responses=made,
        openapi_extra={"requestBody": {"required": True, "content": {MEDIA_TYPE: {"schema": FILE}}}},
    )
    async def restore(
        http: Request, model: Annotated[str | None, Query(description="Of which model it is, if not the first.")] = None
    ) -> Response:
        """Create a session from a file written by `save`; it belongs to the caller."""
        hints = served.hints(http.state.caller.key, Hinted.model_validate({}))
        found = await served.models.use(model)
        data = await http.body()
        known = config.template_options | {"tools"}
        restoring = found.sessions.restore(data, key=hints.key, namespace=hints.namespace, template_options=known)
        session_id = await restoring
        return shown(found, session_id, 201)

    @api.post("/sessions/{session_id}", responses=one)  # after /sessions/restore, which is no session
    async def update_session(http: Request, session_id: SessionId, body: UpdateSession) -> Response:
        """Another title, or other metadata; after an answer that is on its way."""
        model = await find(http, session_id)
        await while_connected(http.state.caller, model.sessions.update_session(session_id, **body.changes()))
        return shown(model, session_id)

    return api


def charge_for(live: Answer, caller: Caller) -> None:
    """Charge an answer when it ends: whoever reads it, and whether its client is still there."""
    if live.is_released and live.end is not None and live.end.usage is not None:
        caller.account.charge(live.end.usage)
    else:
        live.on_usage = caller.account.charge


def session_shape(model: ServedModel, info: SessionInfo) -> dict[str, Any]:
    return {
        "id": info.session_id,
        "object": "session",
        "model": model.name,
        "title": info.title,
        "metadata": dict(info.metadata),
        "created_at": int(info.created_at),
        "last_used_at": int(info.used_at),
        "state": info.state,
        "num_tokens": info.num_tokens,
        "num_turns": len(info.turns),
        "pending": [dict(message) for message in info.pending],
        "durable": info.durable,
        "problem": info.problem,
    }


def turns_shape(info: SessionInfo) -> list[dict[str, Any]]:
    return [
        {
            "index": i,
            "kind": turn.kind,
            "messages": [dict(message) for message in turn.messages],
            "num_tokens": turn.num_tokens,
            "finish_reason": turn.finish_reason,
        }
        for i, turn in enumerate(info.turns)
    ]


def as_input(given: Any, config: ServerConfig, param: str = "input") -> Input:
    """What a session is to take in."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"{param} must be a string, a list of messages or a list of token ids", param=param)
    if all(type(one) is int for one in given):
        return given
    if len(given) > config.max_messages:
        raise ApiError(400, f"at most {config.max_messages} messages", param=param)
    messages = [_session_message(item, config, param) for item in given]
    check_calls(messages, param)
    return messages


def _session_message(item: Any, config: ServerConfig, param: str) -> dict[str, Any]:
    """A message of any role; tool calls and their results keep what belongs to them."""
    calls = item.get("tool_calls") if isinstance(item, dict) and item.get("role") == "assistant" else None
    if not calls:
        message: dict[str, Any] = dict(as_message(item, config.max_content_parts, param))
        if message["role"] == "tool":
            if not isinstance(item.get("tool_call_id"), str):
                raise ApiError(400, "a tool message requires tool_call_id", param=param)
            message["tool_call_id"] = item["tool_call_id"]
        return message
    content = item.get("content")
    said = None if content is None else as_message(item, config.max_content_parts, param)["content"]
    return {"role": "assistant", "content": said, "tool_calls": calls}
