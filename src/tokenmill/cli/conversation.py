"""`Conversation`: a session of one's own, one question at a time. What the terminal shows is `chat.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenmill.session.session import Session, SessionOptions

if TYPE_CHECKING:
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.outputs import RequestOutput
    from tokenmill.params import SamplingParams


class Conversation:
    """A session on an `LLM` in this thread: an exact token log, so that each turn computes only what is new."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self.session = Session("chat", 0, SessionOptions(sampling=params), system, now=0.0)

    def ask(self, question: str) -> Iterator[RequestOutput]:
        """The answer as it grows. Leaving the loop ends the answer; the conversation goes on with what was said."""
        text = self._llm.text
        self.session.append(question, text, self._llm.engine.max_model_len, raw=False)
        self.session.commit_input(text)
        output: RequestOutput | None = None
        try:
            for output in self._llm.stream(self.session.log.tokens.tolist(), self._params):
                yield output
        finally:
            if output is not None:
                said = output.outputs[0]
                ending = (said.finish_reason, said.stop_reason)
                self.session.take_answer(said.token_ids, *ending, self._params, text.tokenizer)
