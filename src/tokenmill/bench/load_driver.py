"""Sends a workload: conversations that begin at their moments, turn after turn, not too many requests at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.bench.load_clients import RequestFailed, Sample, Stream, Target, call, chat_body, completion_body
from tokenmill.bench.workloads import Conversation, Turn
from tokenmill.progress import ProgressLine


@dataclass
class Load:
    """Sends conversations to a server and keeps what became of their requests."""

    target: Target
    model: str
    endpoint: str
    is_chat: bool
    timeout_s: float
    sampling: Mapping[str, Any]
    """Fields of every request's body."""
    uses_sessions: bool
    places: AbstractAsyncContextManager[Any]
    """Where a request waits while too many others run."""
    samples: list[Sample] = field(default_factory=list)

    async def run(self, conversations: Sequence[Conversation], moments: Sequence[float]) -> float:
        """All of them, each beginning at its moment; how many seconds it took."""
        num_requests = sum(len(one.turns) for one in conversations)
        began = time.perf_counter()
        with ProgressLine("requests", num_requests) as line:
            async with asyncio.TaskGroup() as tasks:
                for conversation, moment in zip(conversations, moments, strict=True):
                    await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
                    tasks.create_task(self._converse(conversation, line))
        return time.perf_counter() - began

    async def warm_up(self, conversations: Sequence[Conversation]) -> None:
        """The first turn of each; nothing of it is kept."""
        await asyncio.gather(*(self._send(self._body(one.turns[0], [])) for one in conversations))

    async def _converse(self, conversation: Conversation, line: ProgressLine) -> None:
        """Turn after turn; the first failure is the end."""
        history: list[dict[str, str]] = []
        session: str | None = None
        try:
            for turn in conversation.turns:
                if self.uses_sessions and session is None:
                    session = await self._open_session()
                sample = await self._send(self._body(turn, history, session))
                self._keep(sample, line)
                if not sample.is_ok:
                    break
                if self.is_chat and session is None:
                    history += [_message("user", turn), {"role": "assistant", "content": sample.text}]
        except RequestFailed as error:  # its session could not be opened
            self._keep(Sample(time.perf_counter(), error=error.kind, detail=error.detail), line)
        if session is not None:
            with suppress(RequestFailed):  # it ends by itself some time
                await call(self.target, "DELETE", f"/v1/sessions/{session}")

    async def _send(self, body: Mapping[str, Any]) -> Sample:
        arrived = time.perf_counter()
        async with self.places:
            queued_s = time.perf_counter() - arrived
            sample = await Stream(self.target, self.endpoint, body, self.timeout_s).run()
        return replace(sample, queued_s=queued_s)

    def _body(self, turn: Turn, history: Sequence[Mapping[str, str]], session: str | None = None) -> Mapping[str, Any]:
        if not self.is_chat:
            return completion_body(self.model, turn.prompt, turn.max_tokens, **self.sampling)
        named = {} if session is None else {"session_id": session}
        messages = [*history, _message("user", turn)]
        return chat_body(self.model, messages, turn.max_tokens, **self.sampling, **named)

    async def _open_session(self) -> str:
        return str((await call(self.target, "POST", "/v1/sessions", {"model": self.model}))["id"])

    def _keep(self, sample: Sample, line: ProgressLine) -> None:
        self.samples.append(sample)
        line.update(len(self.samples), self._so_far)

    def _so_far(self, took_s: float) -> str:
        num_failed = sum(not one.is_ok for one in self.samples)
        return f"{num_failed} failed, {sum(one.output_tokens for one in self.samples) / took_s:.0f} tok/s"


def _message(role: str, turn: Turn) -> dict[str, str]:
    assert isinstance(turn.prompt, str), "chats are texts"
    return {"role": role, "content": turn.prompt}
