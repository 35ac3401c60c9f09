"""`tokenmill chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from tokenmill.cli import arguments as shared
from tokenmill.cli.arguments import SamplingOptions, open_llm, read_extra
from tokenmill.cli.generate import Stopwatch
from tokenmill.errors import ContextOverflow, InvalidRequest

if TYPE_CHECKING:
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.outputs import RequestOutput
    from tokenmill.params import SamplingParams


class Conversation:
    """A session on an `LLM` in this thread: an exact token log, so that each turn computes only what is new."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        from tokenmill.session.session import Session, SessionOptions

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


HELP = """  /new     start a new conversation
  /system  show or set the system prompt: /system You are a pirate.
  /help    show this help
  /exit    quit (also Ctrl-D)
Enter sends the message, Alt-Enter inserts a newline. Ctrl-C cancels the answer and keeps the conversation."""

COMMAND = re.compile(r"/[a-z]+")
"""What looks like a command; a path is a message like any other."""
Read = Callable[[], str]
"""The next thing the user says; `EOFError` when there is nothing more, `KeyboardInterrupt` to be asked again."""


def chat(
    model: shared.Model = shared.DEFAULT,
    system: shared.System = None,
    max_tokens: shared.MaxTokens = 1024,
    temperature: shared.Temperature = None,
    top_p: shared.TopP = None,
    top_k: shared.TopK = None,
    min_p: shared.MinP = None,
    seed: shared.Seed = None,
    stop: shared.Stop = None,
    backend: shared.Backend = "auto",
    extra: shared.Extra = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    deterministic: shared.Deterministic = False,
    context: shared.Context = None,
    threads: shared.Threads = None,
) -> None:
    """Chat with a model in the terminal. The KV cache is kept between turns."""
    sampling = SamplingOptions(max_tokens, temperature, top_p, top_k, min_p, seed, stop)
    sampling.check()
    with open_llm(
        model,
        backend=backend,
        extra=read_extra(extra),
        dtype=dtype,
        device=device,
        deterministic=deterministic,
        max_model_len=context,
        num_threads=threads,
    ) as llm:
        params = sampling.params(llm)
        llm.text.chat_template()  # a model that has none is told of before the first question
        is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal:
            print(f"{model}. /help for help.")
        read = _terminal_reader() if is_terminal else _line_reader
        talk(lambda prompt: Conversation(llm, params, prompt), system, read)


def talk(begin: Callable[[str | None], Conversation], system: str | None, read: Read) -> None:
    """Questions and answers until there is nothing more to read."""
    conversation = begin(system)
    while True:
        try:
            said = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        command, _, rest = said.partition(" ")
        if command == "/exit":
            return
        if command == "/new":
            conversation = begin(system)
            print("(new conversation)")
        elif command == "/system":
            system, conversation = _system(system, rest, conversation, begin)
        elif command == "/help":
            print(HELP)
        elif COMMAND.fullmatch(command):
            print(f"unknown command {command}; see /help")
        elif said:
            _answer(conversation, said)


def _system(
    system: str | None, new: str, conversation: Conversation, begin: Callable[[str | None], Conversation]
) -> tuple[str | None, Conversation]:
    """Show the system prompt, or begin anew with another."""
    if not new:
        print(system or "(default of the model)")
        return system, conversation
    print("(new conversation)")
    return new, begin(new)


def _answer(conversation: Conversation, question: str) -> None:
    """Stream an answer. Ctrl-C ends it; what was said so far stays in the conversation."""
    watch, shown, answer, output = Stopwatch(), 0, conversation.ask(question), None
    try:
        for output in answer:
            watch.note_token()
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
        print()
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]
        print(" ...", flush=True)
    except ContextOverflow as error:
        print(f"tokenmill: {error} Start a new conversation with /new.", file=sys.stderr)
        return
    except InvalidRequest as error:
        print(f"tokenmill: {error}", file=sys.stderr)
        return
    if output is not None:
        if output.error is not None and output.outputs[0].finish_reason != "cancelled":
            print(f"tokenmill: {output.error}", file=sys.stderr)
        print(watch.summary(output.usage.completion_tokens, output.usage.cached_tokens), file=sys.stderr)


def _line_reader() -> str:
    """Where nobody types: a line at a time."""
    try:
        line = sys.stdin.readline() if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not valid text: {error}") from None
    if not line:
        raise EOFError
    return line


def _terminal_reader() -> Read:
    """Editing, history over the arrow keys and Ctrl-R, several lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    from tokenmill.backends.library import cache_folder

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: object) -> None:
        event.current_buffer.validate_and_handle()  # type: ignore[attr-defined]

    @keys.add("escape", "enter")
    def _new_line(event: object) -> None:
        event.current_buffer.insert_text("\n")  # type: ignore[attr-defined]

    history: History = InMemoryHistory()
    path = cache_folder() / "chat_history"
    with suppress(OSError):  # a history that can't be kept is no reason not to talk
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        history = FileHistory(str(path))
    session: PromptSession[str] = PromptSession(history=history, multiline=True, key_bindings=keys)
    return lambda: session.prompt("> ", prompt_continuation="  ")
