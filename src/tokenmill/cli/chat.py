"""`tokenmill chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import arguments as shared
from tokenmill.cli.arguments import SamplingOptions, open_llm, read_extra
from tokenmill.cli.generate import Stopwatch
from tokenmill.errors import ContextOverflow, InvalidRequest

if TYPE_CHECKING:
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.outputs import RequestOutput, TurnPart
    from tokenmill.params import SamplingParams


class AnyTool(Mapping[str, Mapping[str, Any]]):
    """Schemas of functions of any name: what looks like a call is read as one, though no tools were declared."""

    def __contains__(self, _: object) -> bool:
        return True

    def __getitem__(self, _: str) -> Mapping[str, Any]:
        return {}

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 1


class Conversation:
    """A session on an `LLM` in this thread: an exact token log, so that each turn computes only what is new."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        from tokenmill.session.session import Session, SessionOptions

        self._llm = llm
        self._params = params
        self.session = Session("chat", 0, SessionOptions(sampling=params), system, now=0.0)

    def ask(self, question: str) -> Iterator[RequestOutput]:
        """The answer as it grows. Leaving the loop ends the answer; the conversation goes on with what was said."""
        from tokenmill.text.tool_grammar import ToolUse, plan_turn
        from tokenmill.text.turn_parser import ParsedTurn

        text = self._llm.text
        self.session.append(question, text, self._llm.engine.max_model_len, raw=False)
        self.session.commit_input(text)
        output: RequestOutput | None = None
        try:
            ids = self.session.log.tokens.tolist()
            params, plan = plan_turn(text.chat_template().turn_format, text.tokenizer, ids, self._params, ToolUse())
            for output in self._llm.stream(ids, params, plan=replace(plan, tools=AnyTool())):
                yield output
        finally:
            if output is not None:
                said = output.outputs[0]
                ending = (said.finish_reason, said.stop_reason)
                turn = ParsedTurn.of(said.parts or ())
                # Nothing has checked the arguments of a call: it stays in the conversation as it was written.
                parsed = None if turn.calls else turn
                self.session.take_answer(said.token_ids, *ending, self._params, text.tokenizer, parsed)


HELP = """  /new     start a new conversation
  /system  show or set the system prompt: /system You are a pirate.
  /help    show this help
  /exit    quit (also Ctrl-D)
Enter sends the message, Alt-Enter inserts a newline. Ctrl-C cancels the answer and keeps the conversation."""

COMMAND = re.compile(r"/[a-z]+")
"""What looks like a command; a path is a message like any other."""
Read = Callable[[], str]
"""The next thing the user says; `EOFError` when there is nothing more, `KeyboardInterrupt` to be asked again."""


ShowThinking = Annotated[bool, typer.Option("--show-thinking", help="Print the model's thinking, not only its length.")]


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
    show_thinking: ShowThinking = False,
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
        read = terminal_reader() if is_terminal else _line_reader
        talk(lambda prompt: Conversation(llm, params, prompt), system, read, show_thinking=show_thinking)


def talk(
    begin: Callable[[str | None], Conversation], system: str | None, read: Read, *, show_thinking: bool = False
) -> None:
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
            _answer(conversation, said, show_thinking=show_thinking)


def _system(
    system: str | None, new: str, conversation: Conversation, begin: Callable[[str | None], Conversation]
) -> tuple[str | None, Conversation]:
    """Show the system prompt, or begin anew with another."""
    if not new:
        print(system or "(default of the model)")
        return system, conversation
    print("(new conversation)")
    return new, begin(new)


CONTINUED = frozenset(
    {("content", "content"), ("reasoning", "reasoning"), ("arguments", "arguments"), ("call", "arguments")}
)
"""Kinds of parts that belong together, in this order."""


class AnswerPrinter:
    """Prints an answer as it grows: its text, its thinking (or how long that is), and calls that nobody runs."""

    def __init__(self, *, show_thinking: bool) -> None:
        self._show_thinking = show_thinking
        self._is_live = sys.stderr.isatty()
        """Is there a line that can be written over?"""
        self._num_shown = 0
        """Parts that were printed."""
        self._kind = "content"
        """Of the last of them."""
        self._num_reasoning = 0
        """Tokens."""
        self._is_in_line = True
        """Is the end of what was printed not the beginning of a line? An answer without text is an empty line."""

    def show(self, parts: Sequence[TurnPart], num_reasoning: int) -> None:
        """Print what is new."""
        self._num_reasoning = num_reasoning
        new, self._num_shown = parts[self._num_shown :], len(parts)
        for part in new:
            if (self._kind, part.kind) not in CONTINUED:
                self._end_part()
            if part.kind == "call":
                self._print("\n" if self._is_in_line else "", f"[call, not run: {part.name}(")
            elif part.kind != "reasoning" or self._show_thinking:
                self._print(part.text)
            self._kind = part.kind
        if self._kind == "reasoning" and not self._show_thinking and self._is_live:
            print(f"\r{self._thinking}", end="", file=sys.stderr, flush=True)

    def close(self, ending: str = "\n") -> None:
        """The answer has ended."""
        self._end_part()
        print(end=ending if self._is_in_line or ending.strip() else "", flush=True)

    def _print(self, *texts: str) -> None:
        print(*texts, sep="", end="", flush=True)
        self._is_in_line = not "".join(texts).endswith("\n")

    @property
    def _thinking(self) -> str:
        return f"thinking… ({self._num_reasoning} tokens)"

    def _end_part(self) -> None:
        """Another kind of part follows, or none."""
        if self._kind == "reasoning":
            if self._show_thinking:
                self._print("\n\n")
            else:
                print(f"\r{self._thinking}" if self._is_live else self._thinking, file=sys.stderr, flush=True)
        elif self._kind in ("call", "arguments"):
            self._print(")]\n")
        self._kind = "content"


def _answer(conversation: Conversation, question: str, *, show_thinking: bool) -> None:
    """Stream an answer. Ctrl-C ends it; what was said so far stays in the conversation."""
    watch, answer, output = Stopwatch(), conversation.ask(question), None
    printer = AnswerPrinter(show_thinking=show_thinking)
    try:
        for output in answer:
            watch.note_token()
            printer.show(output.outputs[0].parts or (), output.usage.reasoning_tokens)
        printer.close()
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]
        printer.close(" ...\n")
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


def terminal_reader() -> Read:
    """Editing, history over the arrow keys and Ctrl-R, several lines: readline's, where Python has it."""
    try:
        import readline
    except ImportError:  # Windows: its console has editing and history of its own
        return lambda: input("> ")
    from tokenmill.backends.library import cache_folder

    readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt-Enter
    path = cache_folder() / "chat_history.jsonl"
    with suppress(OSError, ValueError):  # a history that can't be kept is no reason not to talk
        for line in path.read_text().splitlines():
            readline.add_history(json.loads(line))

    def read() -> str:
        try:
            said = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()  # the cursor is beside the prompt
            raise
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            with path.open("a") as file:
                print(json.dumps(said), file=file)
        return said

    return read
