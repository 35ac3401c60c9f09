"""`Conversation`: a chat over an exact token log, one question at a time. What the terminal shows is `chat.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenmill.text.delta import DeltaRenderer

if TYPE_CHECKING:
    from tokenmill.engine.llm import LLM
    from tokenmill.outputs import RequestOutput
    from tokenmill.params import SamplingParams
    from tokenmill.text.messages import Message


class Conversation:
    """Keeps the ids of everything said, so that each turn computes only what is new."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._renderer = DeltaRenderer(llm.chat_template)
        self.log: list[int] = []
        """Ids of prompts and answers, as the model has seen and said them."""
        self.past: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        """The messages that the log holds; before the first question, the system prompt."""
        self._ended_with: int | None = None

    def ask(self, question: str) -> Iterator[RequestOutput]:
        """The answer as it grows. Leaving the loop ends the answer; the conversation goes on with what was said."""
        new: list[Message] = [{"role": "user", "content": question}]
        step = self._renderer.extend(self.log, self.past, new, self._ended_with)
        prompt = [*self.log[: step.keep], *step.ids]
        output: RequestOutput | None = None
        try:
            for output in self._llm.stream(prompt, self._params):
                yield output
        finally:
            if output is not None:
                self._remember(prompt, new, output)

    def _remember(self, prompt: list[int], new: list[Message], output: RequestOutput) -> None:
        said = output.outputs[0]
        self.log = [*prompt, *said.token_ids]
        self.past = [*self.past, *new, {"role": "assistant", "content": said.text}]
        self._ended_with = said.stop_reason if isinstance(said.stop_reason, int) else None
