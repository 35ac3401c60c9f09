"""`LoadedModel`: a model, its engine and its sessions: what `reload` replaces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from tokenmill.contract import ModelHandle
from tokenmill.engine.client import EngineClient, ThreadClient
from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.entrypoints.options import EngineOptions, open_for_engine
from tokenmill.errors import ConfigError, EngineDead, SessionFileError, TokenmillError, TooManyTokens
from tokenmill.pipeline.bridge import StepBridge
from tokenmill.pipeline.prompts import Intake
from tokenmill.session.explain import mark_before
from tokenmill.session.fingerprint import Fingerprint, fingerprint
from tokenmill.session.keeping import Keeper
from tokenmill.session.master import Master
from tokenmill.session.portable import SessionFile, read_fingerprint, unpack
from tokenmill.session.record import SessionRecord, restored
from tokenmill.session.routing import Policy, make_routing
from tokenmill.session.session import Session
from tokenmill.session.store import SessionStore, Stored
from tokenmill.text.delta import DeltaRenderer
from tokenmill.text.messages import num_chars

SAID_PER_CONTEXT = 2
"""A log that fits may be rendered to a few tokens more than the context has, but to no more than this."""
MOST_RENDERERS = 16
"""Template options whose renderer new sessions share: anybody may bring others each time."""


class LoadedModel:
    """One for each model that a service opens. Opening it takes as long as the model does.

    Of an `AsyncLLM` it uses the engine, beside whoever else does, and leaves it open.
    """

    def __init__(
        self,
        source: str | ModelHandle | AsyncLLM,
        options: EngineOptions,
        num_workers: int,
        policy: Policy,
        client: EngineClient | None,
        store: SessionStore | None = None,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, not {num_workers}")
        self.source, self.options, self.num_workers = source, options, num_workers
        self._renderers: dict[str, DeltaRenderer] = {}
        self.is_leaving = False
        """It is being unloaded: nothing new begins, and its sessions end."""
        self._is_ours = not isinstance(source, AsyncLLM)
        if isinstance(source, AsyncLLM):
            if options or client is not None:
                raise ConfigError("the engine is made already; it takes no options")
            opened = self.opened = source.opened
            self.client: EngineClient = source.client
            self.bridge = source.bridge
            self.routing = make_routing(policy, self.client.num_cores)
        else:
            opened = self.opened = open_for_engine(source, options)
            try:
                self.client = client or ThreadClient(opened.model, opened.config, opened.limits, num_cores=num_workers)
                self.bridge = StepBridge(self.client)
                self.routing = make_routing(policy, self.client.num_cores)
            except BaseException:
                opened.close()
                raise
        self.intake = Intake("session", opened.text, opened.model.info, self.client.max_model_len, seed=None)
        self.master = Master()
        try:
            self.keeper = None if store is None else Keeper(store, self.fingerprint, opened.model, self.client)
        except BaseException:
            self.free()
            raise

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Which model it is. Reads its files the first time: not for an event loop."""
        return fingerprint(self.opened.model, self.opened.text)

    def read_file(self, data: bytes, session_id: str) -> SessionFile:
        """A session's file, if it is of this model. Not for an event loop: it may hold a long conversation."""
        refusal = self.fingerprint.why_not(read_fingerprint(data).of_log)
        if refusal is not None:
            raise SessionFileError(refusal)
        file = unpack(data, session_id, self.opened.model.info.vocab_size)
        longest, said = self.client.max_model_len, self._num_said(file.record)
        if len(file.record.tokens) >= longest or said > SAID_PER_CONTEXT * longest:
            count = max(len(file.record.tokens), said)
            raise SessionFileError(f"its {count} tokens do not fit the context of {longest}")
        return file

    def _num_said(self, record: SessionRecord) -> int:
        """Tokens of all messages of a record, if they may be many: an event loop will have to render them."""
        has_raw_input = any(turn.kind == "input" and not turn.messages for turn in record.turns)
        past = [] if has_raw_input else [message for turn in record.turns for message in turn.messages]
        messages = [*past, *record.head["inbox"]] or [{"role": "system", "content": record.head["system"] or ""}]
        if self.opened.text.template is None or num_chars(messages) < self.client.max_model_len:
            return 0
        limit = SAID_PER_CONTEXT * self.client.max_model_len
        try:
            return len(self.opened.text.template.encode(messages, limit, **record.head["template_options"]))
        except TooManyTokens as error:
            return error.at_least
        except TokenmillError:  # then nobody else can render them either
            return 0

    def stored(self) -> list[Stored]:
        """Those of its sessions that are in the store. Waits for the disk."""
        return [] if self.keeper is None else self.keeper.load()

    def adopt(self, stored: Stored) -> Session:
        """Go on with a session that was in the store."""
        core = self.routing.choose(stored.record.head["system"], self.cores_alive())
        session = restored(stored.record, core, time.monotonic() - stored.idle_s)
        session.options = replace(session.options, renderer=self.renderer(session.options.template_options))
        session.has_saved_kv = True
        session.mark = mark_before(session)
        self.master.add(session)
        return session

    def renderer(self, options: Mapping[str, Any] | None) -> DeltaRenderer | None:
        """One for all sessions with these template options; None for a model without a template."""
        if self.opened.text.template is None:
            return None
        name = repr(sorted((options or {}).items(), key=repr))
        if name not in self._renderers:
            while len(self._renderers) >= MOST_RENDERERS:  # sessions that have it go on with it
                del self._renderers[next(iter(self._renderers))]
            self._renderers[name] = DeltaRenderer(self.opened.text.template, **(options or {}))
        return self._renderers[name]

    def cores_alive(self) -> list[int]:
        """`EngineDead` if there is none left."""
        alive = self.client.cores_alive
        if not alive:
            raise EngineDead("all engine cores are gone; reload the model")
        return alive

    async def close(self) -> None:
        await self.master.close()
        await asyncio.to_thread(self.free)

    def free(self) -> None:
        """Close the engine, if it is ours. Waits for its threads."""
        if self._is_ours:
            self.client.close()
            self.opened.close()
