"""An answer's way: from a session's log to its engine core, and from there back into the log and the store."""

from __future__ import annotations

import asyncio
import secrets

from tokenmill.engine.request import Hints, context_overflow
from tokenmill.errors import AnswerLost, ContextOverflow, IntegrityError, InvalidRequest, TokenmillError
from tokenmill.params import SamplingParams
from tokenmill.session.explain import note_cost
from tokenmill.session.live import Answer
from tokenmill.session.loaded import LoadedModel
from tokenmill.session.session import LastAnswer, Session, SessionState
from tokenmill.session.upkeep import Upkeep, save


def commit_prompt(loaded: LoadedModel, session: Session, params: SamplingParams, must_fit: bool) -> None:
    """Put what a session has taken in into its log, with room for an answer. If it raises, the log may have changed."""
    longest = loaded.client.max_model_len
    wanted = params.max_tokens or 1
    # Where it is only an upper bound, a large `max_tokens` must not drive out the conversation.
    session.reserve(loaded.opened.text, longest, wanted if must_fit else min(wanted, longest // 2))
    session.commit_input(loaded.opened.text)
    if must_fit and params.max_tokens is not None and len(session.log) + params.max_tokens > longest:
        raise ContextOverflow(context_overflow(longest, len(session.log), params.max_tokens))


def begin_answer(
    upkeep: Upkeep,
    loaded: LoadedModel,
    session: Session,
    params: SamplingParams,
    hints: Hints,
    request_id: str | None,
    timeout_s: float | None,
) -> Answer:
    """Ask the engine for an answer to a session's log."""
    name = request_id or f"answer-{secrets.token_hex(12)}"
    generation = loaded.intake.generation(session.log.tokens.array, params, name, hints, timeout_s)
    live = Answer(
        generation,
        lambda done: _finished(upkeep, loaded, session, done),
        upkeep.limits.stall_timeout_s,
        upkeep.limits.max_unread_bytes,
    )
    if session.core not in loaded.cores_alive():  # its core is gone for good: it is a log, and goes on elsewhere
        loaded.routing.leave(session.core, session.system)
        session.core = loaded.routing.choose(session.system, loaded.cores_alive())
    live.start(loaded.bridge, session.core)
    session.live, session.state = live, SessionState.GENERATING
    return live


def _finished(upkeep: Upkeep, loaded: LoadedModel, session: Session, live: Answer) -> asyncio.Future[bool] | None:
    """The engine has let go of an answer, however it ended. It is over when it is in the store, if there is one."""
    if session.state is SessionState.ENDED or session.live is not live:
        live.durable = False if loaded.keeper is not None and session.options.is_kept else None
        return None
    if live.end is None:
        raise IntegrityError(f"the engine has let go of answer {live.request_id} before its end")
    if live.undo is not None and not live.token_ids and live.end.is_failure:
        live.undo()
    ending = (live.end.finish_reason, live.end.stop_reason)
    session.take_answer(live.token_ids, *ending, live.generation.params, loaded.opened.text.tokenizer)
    if live.token_ids:
        session.last_answer = LastAnswer(live.request_id, len(live.token_ids))
    note_cost(session, live.generation, loaded.opened)
    upkeep.used(loaded, session)
    saving = save(loaded, session)
    if saving is None:
        _settle(loaded, session, live)
    else:
        saving.add_done_callback(lambda done: _settle(loaded, session, live, done.result()))
    return saving


def no_answer(session: Session, request_id: str | None) -> TokenmillError:
    """Why there is nothing to read of a session's last answer, or of the one with this id."""
    known = session.last_answer
    if known is None and request_id is None:
        return InvalidRequest(f"session {session.session_id} has no answer to read")
    is_kept = known is not None and request_id in (None, known.request_id)
    offset = known.num_tokens if known is not None and is_kept else 0
    what = f"the answer can't be resumed after a restart; {offset} tokens of it are in the session's turns"
    return AnswerLost(what, durable_offset=offset)


def _settle(loaded: LoadedModel, session: Session, live: Answer, durable: bool | None = None) -> None:
    """An answer is over: the session is free for what comes next."""
    live.durable = durable
    if session.state is SessionState.ENDED or session.live is not live:
        return
    session.live, session.answer = None, live.kept()
    session.state = SessionState.APPENDING if session.is_unanswered else SessionState.IDLE
    loaded.master.note_free(session)
    if loaded.keeper is not None and session.options.is_kept:
        loaded.keeper.note_answered(session)
