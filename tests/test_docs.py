"""The code in the README and in docs/python.md runs as it stands."""

import inspect
import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.generated_docs import pages
from tests.server.serving import child
from tokenmill import errors
from tokenmill.cli.main import app
from tokenmill.config import EngineConfig
from tokenmill.engine.request import ENDINGS
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import to_api_error
from tokenmill.server.models import OWN

ROOT = Path(__file__).parent.parent
BLOCKS = [
    block
    for page in ("README.md", "docs/python.md")
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
]
SHELL = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
ADDRESS = "127.0.0.1:8000"
"""Where `make serve` listens."""


@pytest.mark.parametrize("block", [one for one in BLOCKS if ADDRESS not in one], ids=lambda one: one.splitlines()[0])
def test_printed_code_runs(block: str) -> None:
    exec(compile(block, "docs", "exec"), {})


@pytest.mark.req("R34")
def test_what_the_readme_says_to_a_server_works_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with child(tmp_path / "log") as served:
        here = f"127.0.0.1:{served.port}"
        (client,) = [one for one in BLOCKS if ADDRESS in one]
        exec(compile(client.replace(ADDRESS, here), "README.md", "exec"), {})
        assert "Tokyo" in capsys.readouterr().out
        chat, session = SHELL
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        assert "Tokyo" in json.loads(said_by(chat, here))["choices"][0]["message"]["content"]
        first, second, end = said_by(session, here).split("data: [DONE]")
        assert "Tokyo" in first
        assert '"finish_reason":"stop"' in second
        assert not end.strip()


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
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_row_of_a_table_is_cut_off_from_its_header() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
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
