"""The code in the README and in docs/ runs as it stands, or says why not."""

import ast
import asyncio
import inspect
import json
import re
import shlex
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.generated_docs import _bench_parser, _commands, pages
from tests.server.serving import child
from tokenmill import errors
from tokenmill.cli.bench import BENCHMARKS
from tokenmill.cli.main import app
from tokenmill.config import EngineConfig
from tokenmill.engine.request import ENDINGS
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import to_api_error
from tokenmill.server.models import OWN

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ADDRESS = "127.0.0.1:8000"
"""Where `make serve` listens."""
SHELLS = ("sh", "bash", "console")
ASKED = {"README.md", "docs/quickstart.md", "docs/ollama.md"}
"""Pages with commands that ask a server."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    code: str
    excuse: str
    """Why it is not run; empty where it is."""

    @property
    def is_run(self) -> bool:
        return not self.excuse

    def __str__(self) -> str:
        return f"{self.page}: {self.code.splitlines()[0]}"


FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<excuse>[^\n]+) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$",
    flags=re.DOTALL | re.MULTILINE,
)
BLOCKS = [
    Block(str(page.relative_to(ROOT)), one["language"], textwrap.dedent(one["code"]), one["excuse"] or "")
    for page in PAGES
    for one in FENCE.finditer(page.read_text())
]
PYTHON = [one for one in BLOCKS if one.language == "python" and one.is_run]
SESSIONS = "docs/sessions-http.md"
"""Its blocks follow each other, and have a test of their own."""


@pytest.mark.parametrize("block", [one for one in PYTHON if ADDRESS not in one.code and one.page != SESSIONS], ids=str)
def test_printed_code_runs(block: Block) -> None:
    run_block(block.code, block.page)


def run_block(code: str, page: str) -> None:
    """As a program; with `await` at its top level, as in a notebook."""
    made = eval(compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {"__name__": "__main__"})
    if made is not None:
        asyncio.run(made)


@pytest.mark.req("R34")
def test_what_the_pages_say_to_a_server_works_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with child(tmp_path / "log") as served:
        here = f"127.0.0.1:{served.port}"
        for block in [one for one in PYTHON if ADDRESS in one.code]:
            run_block(block.code.replace(ADDRESS, here), block.page)
            said = capsys.readouterr().out
            assert re.search("Tokyo|sunset at", said) or "print(" not in block.code, block
        shell = [one for one in BLOCKS if one.language == "sh" and one.is_run and ADDRESS in one.code]
        assert {one.page for one in shell} == ASKED
        for block in shell:
            said = said_by(block.code, here)
            assert "Tokyo" in said, block
            if "/v1/sessions" in block.code:
                first, second, end = said.split("data: [DONE]")
                assert "Tokyo" in first
                assert '"finish_reason":"stop"' in second
                assert not end.strip()


def test_every_block_is_run_or_says_why_not() -> None:
    tested = {*ASKED, SESSIONS}
    for one in BLOCKS:
        if one.language in ("sh", "bash") and one.is_run:
            assert one.page in tested, f"{one}: run it, or put `<!-- not run: REASON -->` before it"
        if one.language == "json" and one.is_run:
            json.loads(one.code)
        if one.language == "toml" and one.is_run:
            tomllib.loads(one.code)


def test_every_command_that_is_printed_has_the_options_that_are_printed() -> None:
    """In blocks, and in the tables of migration.md, which have our flags in their second column."""
    known = dict(_flags())
    printed = [(one.page, line) for one in BLOCKS if one.language in SHELLS for line in _lines(one.code)]
    assert len(printed) > 30
    for page, line in printed:
        words = shlex.split(line, comments=True)
        name = " ".join(words[:3]) if " ".join(words[:3]) in known else " ".join(words[:2])
        assert name in known, f"{page}: there is no command {name!r}"
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("-") and not flag[1:].isdigit():
                assert flag in known[name], f"{page}: `{name}` has no {flag}"
    every = set().union(*known.values())
    for row in re.findall(r"^\|[^|]*\|([^|]*)\|", (ROOT / "docs" / "migration.md").read_text(), flags=re.MULTILINE):
        for flag in re.findall(r"(?<![\w-])--[a-z-]+", row):
            assert flag in every or not flag.strip("-"), f"migration.md: there is no {flag}"


def _lines(code: str) -> list[str]:
    """Commands of ours in a block of shell: continued lines joined, prompts and what follows in a pipe cut off."""
    joined = re.sub(r"\\\n\s*", " ", code)
    found = [re.sub(r"^(\$ )?([A-Z_]+=\S+ )*", "", line.strip()) for line in joined.splitlines()]
    return [re.split(r" (?:\||>|&|&&|\|\|)(?: |$)", line)[0] for line in found if line.startswith("tokenmill ")]


def _flags() -> Iterator[tuple[str, set[str]]]:
    for name, command in _commands(typer.main.get_command(app), "tokenmill"):
        yield name, {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
    for bench in BENCHMARKS:
        parser = _bench_parser(f"tokenmill.bench.{bench}")
        actions = list(parser._actions)
        if bench == "compare":  # --server has more
            actions += _bench_parser("tokenmill.bench.servers")._actions
        yield f"tokenmill bench {bench}", {flag for action in actions for flag in action.option_strings}


@pytest.mark.req("R36")
def test_what_the_docs_say_about_sessions_works_as_printed(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines, restarted, _ = re.findall(
        r"```(?:bash|python)\n(.*?)```", (ROOT / "docs/sessions-http.md").read_text(), flags=re.DOTALL
    )
    two_turns = "".join(lines.splitlines(keepends=True)[:4])
    with child(tmp_path / "log", "--dtype", "auto") as served:
        said = said_by(lines, f"127.0.0.1:{served.port}")
        continued = said_by(two_turns + restarted, f"127.0.0.1:{served.port}")
    assert '"text":" Rome' in continued
    stream, _, rest = said.partition("data: [DONE]")
    assert "Tokyo" in stream
    decoder, answers = json.JSONDecoder(), []
    while rest := rest.strip():
        answer, end = decoder.raw_decode(rest)
        answers.append(answer)
        rest = rest[end:]
    italy, turns, another, forked, edited, spain, empty = answers
    assert italy["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    assert [turn["kind"] for turn in turns["data"]] == ["input", "answer", "input", "answer"]
    assert another["session_id"] == italy["session_id"] != forked["data"][0]["id"]
    assert edited["pending"] == [{"role": "user", "content": "And of Spain?"}]
    assert spain["finish_reason"] in ("stop", "length")
    assert empty["num_tokens"] == 0


def said_by(lines: str, here: str) -> str:
    """What these lines of shell print, with a server at `here`."""
    command = ["bash", "-ec", lines.replace(ADDRESS, here)]
    return subprocess.run(command, capture_output=True, check=True, timeout=300, text=True).stdout


def test_every_relative_link_in_the_docs_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", FENCE.sub("", page.read_text())):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_row_of_a_table_is_cut_off_from_its_header() -> None:
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), flags=re.MULTILINE):
            assert re.search(r"\A.*\n\|[ :|-]+\|\n", table), f"{page.name} has a table without a header:\n{table}"


@pytest.mark.req("R49")
def test_every_error_and_every_ending_is_in_the_table() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    for name, error in inspect.getmembers(errors, inspect.isclass):
        if issubclass(error, errors.TokenmillError) and error is not errors.TokenmillError:
            assert f"`{name}`" in page
    for reason, ending in ENDINGS.items():
        assert f"| `{reason.value}` | {ending.state.value} | {ending.openai or '-'} | {ending.http_status} |" in page


@pytest.mark.req("R49")
def test_the_statuses_in_the_table_of_errors_are_those_of_the_server() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| [-\d]+ \|$", page, flags=re.MULTILINE)
    assert len(rows) > 8
    for name, status in rows:
        error = getattr(errors, name)
        told = to_api_error(error(1, 2) if name == "TooManyTokens" else error("reason"))
        assert told.status == int(status), name


def test_every_option_is_in_the_table_of_options() -> None:
    """By all its names, whatever the generator thinks."""
    page = (ROOT / "docs" / "options.md").read_text()
    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {flag for one in serve.params for flag in one.opts if flag.startswith("-")} - {"--help"}
    parameters = {one.name for kind in (EngineConfig, ServerConfig) for one in fields(kind)}
    names = {*EngineOptions.__annotations__, *parameters, *flags, *OWN}
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


def test_21_5_generated_parts_of_the_docs_are_what_the_code_says() -> None:
    for page, text in pages():
        assert page.read_text() == text, f"{page.name} is not what `make docs` writes"
