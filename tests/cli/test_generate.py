"""`tokenmill generate`, `chat` and `pull` without a real model: usage, errors, batches, Ctrl-C."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.text.tool_templates import WRITTEN, use_template
from tokenmill import LLM, SamplingParams, StructuredOutputs
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.cli.chat import Conversation, talk
from tokenmill.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: exit code, standard output, standard error."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tokenmill", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        code = stop.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return call


FAKE = ("-m", "fake", "--temperature", "0", "--max-tokens", "5")


def test_a_prompt_is_streamed_and_lines_become_json(run: Run, tmp_path: Path) -> None:
    code, out, err = run("generate", "hello", *FAKE)
    assert code == 0
    assert "5 tokens" in err
    code, lines, err = run("generate", *FAKE, stdin="hello\nworld\n")
    records = [json.loads(line) for line in lines.splitlines()]
    assert [record["prompt"] for record in records] == ["hello", "world"]
    assert records[0]["text"] == out.removesuffix("\n")
    assert records[0]["completion_tokens"] == 5
    path = tmp_path / "prompts.txt"
    path.write_text("hello\nworld\n")
    assert run("generate", *FAKE, "--file", str(path))[1] == lines
    raw = run("generate", "hello", "--raw", *FAKE)[1]
    assert raw != out


def test_it_is_said_which_backend_a_model_goes_to_and_why(run: Run) -> None:
    code, out, err = run("generate", "hello", "-m", "smollm2-135m", "--max-tokens", "2", "--device", "cpu")
    assert code == 0
    assert out
    assert err.splitlines()[0].startswith(
        "tokenmill: SmolLM2-135M-Instruct.Q4_1.gguf: backend cpu (quantized, on the CPU)"
    )


def test_lines_are_lines_and_a_bad_one_is_named(run: Run) -> None:
    _, lines, _ = run("generate", *FAKE, stdin="a\u2028b\r\nc\x0cd\n")
    assert [json.loads(line)["prompt"] for line in lines.splitlines()] == ["a\u2028b", "c\x0cd"]
    code, out, err = run("generate", *FAKE, stdin="fine\n" + "x" * 5000 + "\n")
    assert code == 2
    assert out == ""
    assert err.startswith("tokenmill: prompt 2: This model's maximum context length is")


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (("generate", "a", "--file", "b"), "mutually exclusive"),
        (("generate", "--file", "/nowhere"), "cannot be read"),
        (("generate",), "standard input contains no prompts"),
        (("generate", "a", "-m", "fake", "--temperature", "-1"), "temperature must be in"),
        (("generate", "a", "-m", "fake", "--max-tokens", "0"), "max_tokens must be an integer from 1"),
        (("generate", "a" * 5000, "-m", "fake"), "maximum context length is"),
        (("generate", "a", "-m", "fake", "--dtype", "float16"), "does not support backend, dtype or device"),
        (("generate", "a", "-m", "fake", "--raw", "--system", "x"), "--system cannot be used with --raw"),
        (("generate", "a", "-m", "fake", "--colour"), "No such option"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], saying: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert saying in " ".join(err.replace("│", " ").split())


def test_a_model_that_is_not_there_is_exit_code_3(run: Run) -> None:
    code, _, err = run("generate", "a", "-m", "no-such-model")
    assert code == 3
    assert err.startswith("tokenmill: no model 'no-such-model'")
    assert run("pull", "no-such-model")[0] == 3


# -- chat -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def begin() -> Iterator[Callable[[str | None], Conversation]]:
    with LLM("fake") as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        yield lambda system: Conversation(llm, params, system)


def reader(*said: str | type[BaseException]) -> Callable[[], str]:
    left = list(said)

    def read() -> str:
        if not left:
            raise EOFError
        item = left.pop(0)
        if isinstance(item, str):
            return item
        raise item

    return read


def test_a_conversation_and_its_commands(
    begin: Callable[[str | None], Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Conversation] = []

    def noted(system: str | None) -> Conversation:
        made.append(begin(system))
        return made[-1]

    said = (
        "one",
        KeyboardInterrupt,
        "",
        "two",
        "/help",
        "/bogus",
        "/system",
        "/system be brief",
        "three",
        "/new",
        "/exit",
        "no",
    )
    talk(noted, None, reader(*said))
    out, err = capsys.readouterr()
    assert err.count(" tokens, ") == 3
    assert "/new     start a new conversation" in out
    assert "unknown command /bogus; see /help" in out
    assert "(default of the model)" in out
    roles = [[message["role"] for message in one.session.log.messages] for one in made]
    assert roles == [["user", "assistant"] * 2, ["system", "user", "assistant"], []]
    assert made[2].session.system == "be brief"


def test_ctrl_c_ends_the_answer_and_keeps_the_conversation(
    begin: Callable[[str | None], Conversation], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = begin(None)
    count = 0

    def interrupted(*values: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        sys.stdout.write(" ".join(map(str, values)) + options.get("end", "\n"))

    monkeypatch.setattr("builtins.print", interrupted)
    talk(lambda _: conversation, None, reader("one"))
    monkeypatch.undo()
    assert conversation.session.log.messages[0] == {"role": "user", "content": "one"}
    cut = len(conversation.session.log)
    *_, out = conversation.ask("two")
    assert out.usage.cached_tokens >= cut - 1
    assert len(conversation.session.log.messages) == 4


def test_a_full_context_is_told_and_the_conversation_stays(
    begin: Callable[[str | None], Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = begin(None)
    talk(lambda _: conversation, None, reader("one", "x" * 5000, "two"))
    err = capsys.readouterr().err
    assert "The prompt is too long: shorten it. Start a new conversation with /new." in err
    assert len(conversation.session.log.messages) == 4


NO_THINKING = WRITTEN["tagged JSON"].replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
"""Ends the thinking before an answer: so a constraint applies to all of it."""
SCRIPT = (
    "<think>\ndeep thought\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("show_thinking", [False, True])
def test_thinking_is_collapsed_and_calls_are_shown_as_calls(
    capsys: pytest.CaptureFixture[str], show_thinking: bool
) -> None:
    with LLM(FakeModel(FakeConfig(vocab_size=258))) as llm:
        use_template(llm, NO_THINKING)
        params = SamplingParams(max_tokens=300, structured_outputs=StructuredOutputs(choice=[SCRIPT]))
        made = Conversation(llm, params)
        talk(lambda _: made, None, reader("one", "two"), show_thinking=show_thinking)
        out, err = capsys.readouterr()
        answer = 'Let me see.\n[call, not run: get_weather({"city": "Rome"})]\n[call, not run: ping({})]\n'
        assert out == 2 * (f"deep thought\n\n{answer}" if show_thinking else answer)
        assert err.count("thinking… (") == (0 if show_thinking else 2)
        assert show_thinking or "thinking… (23 tokens)\n" in err, "up to the closing marker"
        assert [message["role"] for message in made.session.log.messages] == ["user", "assistant"] * 2


@pytest.mark.req("R29")
def test_an_answer_can_be_constrained(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type":"object","properties":{"color":{"enum":["red","blue"]}},"required":["color"]}')
    model = ("-m", "smollm2-135m", "--device", "cpu", "--temperature", "0")
    code, out, _ = run("generate", "A colour, as JSON.", *model, "--json-schema", str(schema))
    assert code == 0
    assert json.loads(out)["color"] in ("red", "blue")
    code, _, err = run("generate", "hi", *model, "--regex", "a+", "--choice", "b")
    assert code == 2
    assert "--regex and --choice are mutually exclusive" in err
    code, _, _ = run("generate", "hi", *model, "--json-schema", str(tmp_path / "missing.json"))
    assert code == 2
