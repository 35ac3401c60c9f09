"""`LiveTurn`: an answer on its way, and everybody who reads it.

The engine's thread only leaves tokens in a mailbox. On the event loop they become text, and readers take what is new
since they last looked: deltas merge by themselves, so a reader that is slow or gone holds up nobody. A reader that has
not looked for too long loses the answer's rest; the session keeps what was said.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from tokenmill.engine.client import EngineClient
from tokenmill.errors import EngineDead, InvalidRequest
from tokenmill.outputs import FinishReason, GeneratedToken, RequestOutput, TokenLogprobs, Usage
from tokenmill.pipeline.prompts import Generation


@dataclass(frozen=True)
class Chunk:
    """What an answer has grown by. The last one has a finish reason and the turn's usage."""

    text: str
    token_ids: list[int]
    offset: int
    """Tokens of the answer before these: where to go on after a lost connection is `offset + len(token_ids)`."""
    logprobs: list[TokenLogprobs] | None = None
    """Of each of the tokens, if they were asked for."""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    durable: bool | None = None
    """Of the last one: is the turn on the disk? None: there is no store."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is over, in few bytes: for readers who come back."""

    text: str
    token_ids: array[int]
    ends: array[int]
    """Characters up to the end of each token."""
    end: Chunk
    """Finish reason, usage and error, without text."""
    request_id: str
    """Its name: another answer has another one."""

    async def read(self, offset: int = 0) -> AsyncIterator[Chunk]:
        """What it has from its `offset`-th token on, in one chunk."""
        if not 0 <= offset <= len(self.token_ids):
            raise InvalidRequest(f"the answer has {len(self.token_ids)} tokens; there is nothing at {offset}")
        begin = self.ends[offset - 1] if offset else 0
        scores = self.end.logprobs
        logprobs = None if scores is None else scores[offset:]
        ids = self.token_ids[offset:].tolist()
        yield replace(self.end, text=self.text[begin:], token_ids=ids, offset=offset, logprobs=logprobs)


class LiveTurn:
    """One answer. All methods but `hear` are for the event loop."""

    def __init__(
        self,
        generation: Generation,
        client: EngineClient,
        on_end: Callable[[LiveTurn], asyncio.Future[bool] | None],
        stall_timeout_s: float | None,
        max_unread_bytes: int,
    ) -> None:
        self.generation = generation
        self.request_id = generation.output.request_id
        """Its caller's name for it; that of the engine is longer."""
        self.undo: Callable[[], None] | None = None
        """Takes back what was put in together with the question, if there is no answer at all."""
        self._client = client
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._mailbox: deque[GeneratedToken] = deque()
        self._is_awake = False
        self._grown = asyncio.Event()
        self._stall_timeout_s = stall_timeout_s
        self._max_unread_bytes = max_unread_bytes
        self._num_read = 0
        """Characters that some reader has had."""
        self._unread_since: float | None = None
        """When there was first something that no reader has had."""
        self._alarm: asyncio.TimerHandle | None = None
        self.has_ended = False
        """Has the engine let go of it? After a stop string that is a step later."""
        self.is_over = False
        """May readers hear the end? Only when the turn is in the store, where there is one."""
        self.durable: bool | None = None

    # -- from the engine ----------------------------------------------------------------------------------------------

    def hear(self, generated: GeneratedToken) -> None:
        """On the engine's thread: leave it, and wake the loop unless it is on its way."""
        self._mailbox.append(generated)
        if not self._is_awake:
            self._is_awake = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                return  # the loop is closed: nobody reads any more

    def _drain(self) -> None:
        self._is_awake = False
        while self._mailbox:
            self._take(self._mailbox.popleft())
        self._grown.set()
        self._grown = asyncio.Event()
        if not self.has_ended:
            self._watch_reader()

    def _take(self, generated: GeneratedToken) -> None:
        self.generation.deliver(0, generated, self._client.finish)
        if generated.is_finished:
            self._stop_alarm()
            self.has_ended = True
            saving = self._on_end(self)
            if saving is None:
                self.is_over = True
            else:
                saving.add_done_callback(self._kept)

    def _kept(self, _: asyncio.Future[bool]) -> None:
        self.is_over = True
        self._grown.set()

    # -- for the session ----------------------------------------------------------------------------------------------

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the answer; its terminal chunk comes when the engine has let go of it."""
        with suppress(EngineDead):  # then its ending is on its way
            self._client.cancel(self.generation.choices[0].request.request_id, reason)

    def answer(self) -> Answer:
        """It is over: all of it, without what only a running one needs."""
        output, stream = self.generation.output.outputs[0], self.generation.choices[0].stream
        ends = array("i", (stream.num_chars(count + 1) for count in range(len(output.token_ids))))
        end = self._chunk("", [], 0, is_over=True)
        end = replace(end, logprobs=output.logprobs)
        return Answer(output.text, array("i", output.token_ids), ends, end, self.request_id)

    @property
    def num_settled(self) -> int:
        """Tokens that readers may have: their text can't be taken back any more."""
        output = self.generation.output.outputs[0]
        return len(output.token_ids) if self.is_over else self.generation.choices[0].stream.num_settled

    # -- readers ------------------------------------------------------------------------------------------------------

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        """The output so far, one object that grows, each time it has; as `AsyncLLM.generate` gives it."""
        async for _ in self.read():
            yield self.generation.output

    async def read(self, offset: int = 0) -> AsyncIterator[Chunk]:
        """What the answer has from its `offset`-th token on, as it grows; the last chunk has the finish reason."""
        if not 0 <= offset <= self.num_settled:
            raise InvalidRequest(f"the answer has {self.num_settled} tokens so far; there is nothing at {offset}")
        output = self.generation.output.outputs[0]
        num_chars = self.generation.choices[0].stream.num_chars(offset)
        while True:
            grown = self._grown
            is_over, settled = self.is_over, self.num_settled
            text = output.text[num_chars : self._num_visible(settled)]
            if is_over or text or settled > offset:
                chunk = self._chunk(text, output.token_ids[offset:settled], offset, is_over)
                offset, num_chars = settled, num_chars + len(text)
                self._note_read(num_chars)
                yield chunk
                if is_over:
                    return
            else:
                await grown.wait()

    def _num_visible(self, settled: int) -> int | None:
        """Characters of settled tokens: a chunk's text and its ids belong together, so that one can go on after it."""
        return None if self.is_over else self.generation.choices[0].stream.num_chars(settled)

    def _chunk(self, text: str, ids: list[int], offset: int, is_over: bool) -> Chunk:
        whole = self.generation.output
        scores = whole.outputs[0].logprobs
        logprobs = None if scores is None else scores[offset : offset + len(ids)]
        if not is_over:
            return Chunk(text, ids, offset, logprobs)
        ending = (whole.outputs[0].finish_reason, whole.usage, whole.error, self.durable)
        return Chunk(text, ids, offset, logprobs, *ending)

    # -- readers that do not read -------------------------------------------------------------------------------------

    def _note_read(self, num_chars: int) -> None:
        self._num_read = max(self._num_read, num_chars)
        self._unread_since = self._loop.time() if self._unread() else None

    def _unread(self) -> str:
        return self.generation.output.outputs[0].text[self._num_read :]

    def _watch_reader(self) -> None:
        """Something is there to read: it must be, before long."""
        unread = self._unread()
        if unread and self._unread_since is None:
            self._unread_since = self._loop.time()
        if 4 * len(unread) > self._max_unread_bytes and len(unread.encode()) > self._max_unread_bytes:
            self.cancel(FinishReason.TIMEOUT)
        elif self._alarm is None and self._stall_timeout_s is not None:
            self._alarm = self._loop.call_later(self._stall_timeout_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        self._alarm = None
        if self.has_ended or self._stall_timeout_s is None:
            return
        late = 0.0 if self._unread_since is None else self._loop.time() - self._unread_since
        if late >= self._stall_timeout_s:
            self.cancel(FinishReason.TIMEOUT)
        else:
            self._alarm = self._loop.call_later(self._stall_timeout_s - late, self._look_at_reader)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
