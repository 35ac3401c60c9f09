"""A session out of a service and into one, as the bytes of a file."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from tokenmill.engine.request import Hints
from tokenmill.errors import SessionFileError
from tokenmill.session.explain import mark_before
from tokenmill.session.keeping import MIN_KV_TOKENS, export_kv, import_kv
from tokenmill.session.loaded import LoadedModel
from tokenmill.session.portable import pack, read_whole
from tokenmill.session.record import record_of, restored
from tokenmill.session.session import Session
from tokenmill.text.workers import INLINE_BYTES, TextWorkers

MAX_TEXT_BYTES = 8 << 20


async def exported(loaded: LoadedModel, session_id: str, *, kv: bool) -> bytes:
    """What a session is when its turn comes; with its KV, if that is wanted and there is any."""
    record, session = await loaded.master.ask(session_id, lambda one: (record_of(one), one))
    identity = await asyncio.to_thread(lambda: loaded.fingerprint)
    found = await export_kv(loaded.client, loaded.opened.model, session) if kv else None
    if found is None or not np.array_equal(found[0], record.tokens.array[: len(found[0])]):
        return await asyncio.to_thread(pack, record, identity)
    return await asyncio.to_thread(pack, record, identity, len(found[0]), found[1])


async def imported(
    loaded: LoadedModel,
    source: bytes | str | Path,
    name: str,
    hints: Hints,
    template_options: Collection[str] | None,
    texts: TextWorkers,
) -> Session:
    """A session from a file or its bytes, under this name and for whom the hints say; KV that fits is with its core.

    `template_options` are the names that its options for the template may have. Whoever says them does not know where
    the file comes from, and its KV is not taken either: it would be shared with all who begin alike.
    """
    data = source if isinstance(source, bytes) else await asyncio.to_thread(read_whole, Path(source))
    # Most of a large file is KV, which takes little.
    size = max(INLINE_BYTES, min(len(data), MAX_TEXT_BYTES))
    file = await texts.run(size, lambda: loaded.read_file(data, name))
    is_trusted = template_options is None
    unknown = set() if template_options is None else set(file.record.head["template_options"]) - set(template_options)
    if unknown:
        raise SessionFileError(f"its template options {', '.join(sorted(unknown))} are not taken here")
    core = loaded.routing.choose(file.record.head["system"], loaded.cores_alive())
    session = restored(file.record, core, asyncio.get_running_loop().time())
    renderer = loaded.renderer(session.options.template_options)
    session.options = replace(
        session.options, key=hints.key, namespace=hints.namespace, priority=hints.priority, renderer=renderer
    )
    session.mark = mark_before(session)
    if is_trusted and file.num_kv_tokens >= MIN_KV_TOKENS and file.fingerprint.form == loaded.fingerprint.form:
        tokens = file.record.tokens.array[: file.num_kv_tokens]
        try:
            await import_kv(loaded.client, loaded.opened.model, session, tokens, file.kv)
        except BaseException:  # whoever asked has gone
            loaded.routing.leave(core, session.system)
            loaded.client.release(name)
            raise
    return session
