"""`Answer`: an answer of a session, on its way or over, and everybody who reads it.

Readers take what is new since they last looked: deltas merge by themselves, so a reader that is slow or gone holds up
nobody. An answer that nobody has read for too long is cancelled; the session keeps what was said. For the event loop.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial

from tokenmill.engine.plan import num_common
from tokenmill.errors import IntegrityError, InvalidRequest
from tokenmill.outputs import FinishReason, OutputDelta, TokenLogprobs, TurnPart, Usage
from tokenmill.pipeline.output import Engine, Generation
from tokenmill.text.detok import Detokenizer
from tokenmill.text.tokenizer import Tokenizer

_NO_PARTS = array("i")
_NOTHING_COMES = asyncio.Event()
"""Of answers that are over, for which nobody waits."""


def _said_before(_: Answer) -> None:
    """The end of an answer that is over was told when it came."""


class Answer:
    """What was said so far, in few bytes, and the generation that adds to it until it is over."""

    def __init__(
        self,
        generation: Generation,
        on_end: Callable[[Answer], asyncio.Future[bool] | None],
        stall_timeout_s: float | None,
        max_unread_bytes: int,
    ) -> None:
        self.request_id = generation.request_id
        """Its name: another answer has another one."""
        self.undo: Callable[[], None] | None = None
        """Takes back what was put in together with the question, if there is no answer at all."""
        self.on_void: Callable[[], None] | None = None
        """Takes all of it back, with its input..."""
        self.void: Callable[[], None] | None = None
        """...if it could not be noted in a store that is shared."""
        self.begun: Future[None] | None = None
        """Done when a store that is shared has noted that it begins."""
        self.is_rerun = False
        """Was it begun by another server? Readers may have had more of it than there is."""
        self.is_exact = True
        """Has it the same tokens as when it was run before?"""
        self.on_usage: Callable[[Usage], None] | None = None
        """Told what it has cost, once, whether anybody reads it or not."""
        self.text = ""
        self.token_ids = array("i")
        self._ends = array("i")
        """Characters up to the end of each token."""
        self._logprobs: list[TokenLogprobs] | None = None if generation.params.logprobs is None else []
        self.parts: list[TurnPart] | None = None if generation.plan is None else []
        """Its text as content, reasoning and tool calls, if it is read so..."""
        self._part_ends = _NO_PARTS if generation.plan is None else array("i")
        """...and after how many tokens each part was known."""
        self.end: OutputDelta | None = None
        """Finish reason, usage and error, without text; there before readers may hear of it."""
        self.durable: bool | None = None
        self.is_released = False
        """Has the engine let go of it? After a stop string that is some steps after its end."""
        self.is_over = False
        """May readers hear the end? Only when the turn is in the store, where there is one."""
        self._generation: Generation | None = generation
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._grown = asyncio.Event()
        self._stall_timeout_s = stall_timeout_s
        self._max_unread_bytes = max_unread_bytes
        self._num_read = 0
        """Characters that some reader has had."""
        self._unread_since: float | None = None
        """When there was first something that no reader has had."""
        self._alarm: asyncio.TimerHandle | None = None

    # -- for the session ----------------------------------------------------------------------------------------------

    def start(self, engine: Engine, core: int | None = None) -> None:
        generation = self.generation
        generation.start(engine, partial(self._grow, generation.choices[0].stage.ends), self._release, core)

    @property
    def generation(self) -> Generation:
        """What makes it. Not of the answer that a session keeps."""
        if self._generation is None:
            raise IntegrityError(f"answer {self.request_id} was made before")
        return self._generation

    def kept(self) -> Answer:
        """It is over: all that readers who come back need, without what only made it."""
        twin = copy.copy(self)
        twin._generation, twin.undo, twin.on_void, twin.begun, twin.is_over = None, None, None, None, True
        twin._on_end, twin._grown = _said_before, _NOTHING_COMES  # idle sessions are many: each keeps one
        return twin

    @classmethod
    def of_log(cls, request_id: str, token_ids: Sequence[int], finish_reason: str, tokenizer: Tokenizer) -> Answer:
        """One that another process has made: what its session's log has of it."""
        answer, detokenizer = cls.__new__(cls), Detokenizer(tokenizer)
        answer.request_id, answer.token_ids, answer.text = request_id, array("i", token_ids), ""
        answer._ends = array("i")
        for token in token_ids:
            answer.text += detokenizer.push(token)
            answer._ends.append(len(answer.text))
        answer.text += detokenizer.flush()
        answer._logprobs = answer.parts = answer._generation = answer.undo = None
        answer.void = answer.on_void = answer.on_usage = None
        answer.end = OutputDelta(offset=len(token_ids), finish_reason=finish_reason)
        answer.durable = answer.is_released = answer.is_over = True
        answer.is_rerun, answer.is_exact = False, True
        answer._num_read, answer._unread_since = 0, None
        answer._on_end, answer._grown = _said_before, _NOTHING_COMES
        return answer

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the answer; its last delta comes when the engine has let go of it."""
        if self._generation is not None:
            self._generation.cancel(reason)

    def _grow(self, ends: Sequence[int], delta: OutputDelta) -> None:
        """`ends`: characters up to the end of each token that has text; those of the very end may have none."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        num_tokens = len(self.token_ids)
        self._ends.extend(ends[len(self._ends) : num_tokens])
        if len(self._ends) < num_tokens:
            self._ends.extend([self._ends[-1] if self._ends else 0] * (num_tokens - len(self._ends)))
        if self._logprobs is not None and delta.logprobs is not None:
            self._logprobs += delta.logprobs
        if self.parts is not None and delta.parts:
            self.parts += delta.parts
            # An end that came without a token may still complete parts: nobody has had them with the tokens.
            self._part_ends.extend([num_tokens if delta.token_ids else num_tokens + 1] * len(delta.parts))
        self._grown.set()
        if delta.finish_reason is not None:
            self.end = delta._replace(text="", token_ids=(), offset=num_tokens, logprobs=None, parts=None)
            return
        # Cancel it if too much of its text is unread, or for longer than `stall_timeout_s`.
        num_unread = len(self.text) - self._num_read
        if num_unread and self._unread_since is None:
            self._unread_since = self._loop.time()
        limit = self._max_unread_bytes
        if 4 * num_unread > limit and len(self.text[self._num_read :].encode()) > limit:
            self.cancel(FinishReason.TIMEOUT)
        elif self._alarm is None and self._stall_timeout_s is not None:
            self._alarm = self._loop.call_later(self._stall_timeout_s, self._check_stall)

    def _release(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self.is_released = True
        if self.on_usage is not None and self.end is not None and self.end.usage is not None:
            self.on_usage(self.end.usage)
        saving = self._on_end(self)
        if saving is None:
            self._finish()
        else:
            saving.add_done_callback(self._finish)

    def _finish(self, _: asyncio.Future[bool] | None = None) -> None:
        self.is_over = True
        self._grown.set()

    # -- readers ------------------------------------------------------------------------------------------------------

    async def read(self, offset: int = 0) -> AsyncIterator[OutputDelta]:
        """What the answer has from its `offset`-th token on, as it grows; the last delta has the finish reason."""
        if self.is_rerun:
            await self._caught_up(offset)
            offset = min(offset, len(self.token_ids))
        if not 0 <= offset <= len(self.token_ids):
            so_far = "" if self.is_over else " so far"
            raise InvalidRequest(f"offset {offset} is beyond the answer of {len(self.token_ids)} tokens{so_far}")
        while True:
            is_over, num_tokens = self.is_over, len(self.token_ids)
            if is_over or num_tokens > offset:
                delta = self._since(offset, is_over=is_over)
                offset = num_tokens
                self._num_read = len(self.text)
                self._unread_since = None
                yield delta
                if is_over:
                    return
            else:
                self._grown.clear()  # nothing has come since this was looked at
                await self._grown.wait()

    async def agreement(self, token_ids: Sequence[int]) -> int:
        """How many of the first tokens that a reader has are those of the answer, once it has as many."""
        await self._caught_up(len(token_ids))
        return num_common(self.token_ids, token_ids)

    async def _caught_up(self, offset: int) -> None:
        """Wait until the answer has as many tokens as its reader."""
        while len(self.token_ids) < offset and not self.is_over:
            self._num_read, self._unread_since = len(self.text), None
            self._grown.clear()
            await self._grown.wait()

    def _since(self, offset: int, *, is_over: bool) -> OutputDelta:
        begin = self._ends[offset - 1] if offset else 0
        ids = self.token_ids[offset:].tolist()
        logprobs = None if self._logprobs is None else self._logprobs[offset:]
        parts = None
        if self.parts is not None:
            until = len(self.parts) if is_over else bisect.bisect_right(self._part_ends, len(self.token_ids))
            parts = self.parts[bisect.bisect_right(self._part_ends, offset) : until]
        if self.end is None or not is_over:  # text before a stop string may be that of no whole token: it is told last
            return OutputDelta(0, self.text[begin : self._ends[-1]], ids, offset, logprobs, parts=parts)
        return self.end._replace(
            text=self.text[begin:], token_ids=ids, offset=offset, logprobs=logprobs, durable=self.durable, parts=parts
        )

    def _check_stall(self) -> None:
        self._alarm = None
        if self.is_released or self._stall_timeout_s is None:
            return
        late = 0.0 if self._unread_since is None else self._loop.time() - self._unread_since
        if late >= self._stall_timeout_s:
            self.cancel(FinishReason.TIMEOUT)
        else:
            self._alarm = self._loop.call_later(self._stall_timeout_s - late, self._check_stall)
