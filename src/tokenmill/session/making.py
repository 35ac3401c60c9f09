"""New sessions: from nothing, and from another one. `transfer.py` makes them from files."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from tokenmill.engine.request import Hints
from tokenmill.errors import ConfigError, InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.session.loaded import LoadedModel
from tokenmill.session.sampling import changed, of_fork
from tokenmill.session.session import (
    Overflow,
    Session,
    SessionOptions,
    check_metadata,
    check_overflow_keep,
    check_template_options,
    check_title,
)

NAME_BYTES = 16
"""Of a session's name: nobody guesses one."""


def new_name() -> str:
    return secrets.token_urlsafe(NAME_BYTES)


def new_session(
    loaded: LoadedModel,
    *,
    system: str | None,
    sampling_params: SamplingParams | None,
    seed: int | None,
    overflow: Overflow,
    overflow_keep: float,
    template_options: Mapping[str, Any] | None,
    key: str,
    namespace: Hashable,
    priority: int,
    is_kept: bool,
    title: str | None,
    metadata: Mapping[str, str] | None,
) -> Session:
    """An empty conversation, routed to one engine core; what it is asked to be is checked."""
    if overflow not in ("error", "drop_oldest_turns"):
        raise ConfigError(f"overflow {overflow!r} is not known; known: 'error', 'drop_oldest_turns'")
    if system is not None and not isinstance(system, str):
        raise InvalidRequest(f"the system prompt must be a text, not {type(system).__name__}")
    Hints(key=key, namespace=namespace, priority=priority)
    sampling = loaded.opened.text.sampling_params(max_tokens=None) if sampling_params is None else sampling_params
    chosen = seed if seed is not None else getattr(sampling, "seed", None)
    options = SessionOptions(
        sampling=changed(sampling, {"seed": secrets.randbits(63) if chosen is None else chosen}),
        overflow=overflow,
        overflow_keep=check_overflow_keep(overflow_keep),
        template_options=check_template_options(template_options),
        key=key,
        namespace=namespace,
        priority=priority,
        renderer=loaded.renderer(template_options),
        is_kept=is_kept,
    )
    label = check_title(title), check_metadata(metadata)
    core = loaded.routing.choose(system, loaded.cores_alive())
    session = Session(new_name(), core, options, system, asyncio.get_running_loop().time())
    session.title, session.metadata = label
    return session


def new_fork(loaded: LoadedModel, session: Session, at_turn: int | None, at_token: int | None) -> Session:
    """A session that goes on from another one, or from a turn or token of it, on the same engine core."""
    options = replace(session.options, sampling=of_fork(session.options.sampling, session.num_forks + 1))
    child = Session(new_name(), session.core, options, session.system, asyncio.get_running_loop().time())
    child.restore(session.snapshot())
    child.mark = session.mark
    child.title, child.metadata = session.title, session.metadata
    if at_turn is not None or at_token is not None:
        child.rewind(loaded.opened.text, at_turn, at_token)
    session.num_forks += 1
    loaded.routing.stay(child.core, child.system)
    return child
