"""`tokenmill generate`: one prompt to a stream of text, or many lines to JSON lines."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import arguments as shared
from tokenmill.cli.arguments import SamplingOptions, open_llm, read_extra
from tokenmill.errors import InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.outputs import RequestOutput
    from tokenmill.params import SamplingParams


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Prompt.", show_default="one prompt per line of --file")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Prompts, one per line; - reads standard input.", show_default="none"),
    ] = None,
    model: shared.Model = shared.DEFAULT,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the prompt as is, without the chat template.")] = False,
    system: shared.System = None,
    max_tokens: shared.MaxTokens = 256,
    temperature: shared.Temperature = None,
    top_p: shared.TopP = None,
    top_k: shared.TopK = None,
    min_p: shared.MinP = None,
    seed: shared.Seed = None,
    stop: shared.Stop = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(help="Constrain the answer to the JSON schema in this file.", show_default="none"),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Constrain the answer to this regular expression.", show_default="none")
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="Constrain the answer to one of these strings (repeatable).", show_default="none"),
    ] = None,
    backend: shared.Backend = "auto",
    extra: shared.Extra = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    deterministic: shared.Deterministic = False,
    context: shared.Context = None,
    threads: shared.Threads = None,
    workers: shared.Workers = 1,
) -> None:
    """Generate an answer to one prompt, or to a file of prompts.

    PROMPT streams its answer. --file (or piped standard input) holds one prompt per line; they run as a batch, and each
    answer is printed as one JSON object per line, in input order.
    """
    lines = _lines(prompt, file)
    if raw and system is not None:
        raise typer.BadParameter("--system cannot be used with --raw")
    sampling = SamplingOptions(max_tokens, temperature, top_p, top_k, min_p, seed, stop)
    sampling.check()
    outputs = _structured_outputs(json_schema, regex, choice)
    with open_llm(
        model,
        backend=backend,
        extra=read_extra(extra),
        dtype=dtype,
        device=device,
        deterministic=deterministic,
        max_model_len=context,
        num_threads=threads,
        workers=workers,
    ) as llm:
        params = replace(sampling.params(llm), structured_outputs=outputs)
        if prompt is not None:
            _stream(llm, _prompt(llm, prompt, system, raw), params)
        else:
            _batch(llm, lines, system, raw, params)


def _structured_outputs(json_schema: Path | None, regex: str | None, choice: list[str] | None) -> Any:
    """What the options ask for; a mistake shows before the model is loaded."""
    from tokenmill.params import StructuredOutputs

    given = {"--json-schema": json_schema, "--regex": regex, "--choice": choice}
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise typer.BadParameter(f"{' and '.join(names)} are mutually exclusive")
    if not names:
        return None
    try:
        if json_schema is not None:
            return StructuredOutputs(json=json_schema.read_text(encoding="utf-8"))
        return StructuredOutputs(regex=regex) if regex else StructuredOutputs(choice=tuple(choice or ()))
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{json_schema} cannot be read: {error}") from None
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None


def _lines(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts of a batch; read before the model is loaded, so that a mistake shows at once."""
    if prompt is not None:
        if file is not None:
            raise typer.BadParameter("PROMPT and --file are mutually exclusive")
        return []
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("PROMPT or --file is required")
    try:
        text = sys.stdin.read() if file is None or str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file or 'standard input'} cannot be read: {error}") from None
    lines = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    if not lines:
        raise typer.BadParameter(f"{file or 'standard input'} contains no prompts")
    return lines


def _prompt(llm: LLM, text: str, system: str | None, raw: bool) -> str | list[int]:
    """The text as the model expects it: as a question to it, unless it is to be continued as it is."""
    if raw or llm.text.template is None:
        if system is not None:
            raise InvalidRequest("--system requires a chat template, which this model does not have")
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.chat_prompt(messages)


def _stream(llm: LLM, prompt: str | list[int], params: SamplingParams) -> None:
    watch, shown = Stopwatch(), 0
    for output in llm.stream(prompt, params):
        watch.note_token()
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print(flush=True)
    if output.error is not None:
        raise RequestFailed(output.error)
    print(watch.summary(output.usage.completion_tokens, output.usage.cached_tokens), file=sys.stderr)


def _batch(llm: LLM, lines: Iterable[str], system: str | None, raw: bool, params: SamplingParams) -> None:
    prompts = [_checked_prompt(llm, number, line, system, raw) for number, line in enumerate(lines, 1)]
    failed = 0
    for line, output in zip(lines, llm.generate(prompts, params), strict=True):
        print(_json_line(_record(line, output)), flush=True)
        failed += output.error is not None
    if failed:
        raise RequestFailed(f"{failed} of {len(prompts)} prompts failed")


def _checked_prompt(llm: LLM, number: int, line: str, system: str | None, raw: bool) -> str | list[int]:
    """A line's prompt; one that can't be run is named before anything runs."""
    try:
        prompt = _prompt(llm, line, system, raw)
        llm.check_prompt(prompt)
    except InvalidRequest as error:
        raise InvalidRequest(f"prompt {number}: {error}") from None
    return prompt


def _json_line(record: dict[str, Any]) -> str:
    """One line, also for readers who take the odd characters that Unicode has for line ends."""
    line = json.dumps(record, ensure_ascii=False)
    return re.sub("[\x85\u2028\u2029]", lambda found: f"\\u{ord(found.group()):04x}", line)


def _record(line: str, output: RequestOutput) -> dict[str, Any]:
    record = {
        "prompt": line,
        "text": output.outputs[0].text,
        "finish_reason": output.outputs[0].finish_reason,
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": output.usage.completion_tokens,
    }
    return record if output.error is None else {**record, "error": output.error}


class Stopwatch:
    """Counts from the question to the first token and to the last."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None

    def note_token(self) -> None:
        if self._first is None:
            self._first = time.monotonic()

    def summary(self, num_tokens: int, num_cached: int) -> str:
        """One line. The rate is that of the tokens after the first, which also waited for the prompt."""
        now = time.monotonic()
        first = self._first if self._first is not None else now
        rate = f", {(num_tokens - 1) / (now - first):.1f} tok/s" if num_tokens > 1 and now > first else ""
        reused = f", {num_cached} prompt tokens cached" if num_cached else ""
        return f"{num_tokens} tokens{rate}, TTFT {first - self._began:.2f} s{reused}"
