"""The code in the README runs as it stands."""

import inspect
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.serving import child
from tokenmill import errors
from tokenmill.engine.lifecycle import ENDINGS

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
ADDRESS = "127.0.0.1:8000"
"""Where `make serve` listens."""


@pytest.mark.parametrize("block", [one for one in BLOCKS if ADDRESS not in one], ids=lambda one: one.splitlines()[0])
def test_the_readme_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.req("R34")
def test_what_the_readme_says_to_a_server_works_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with child(tmp_path / "log") as served:
        here = f"127.0.0.1:{served.port}"
        (client,) = [one for one in BLOCKS if ADDRESS in one]
        exec(compile(client.replace(ADDRESS, here), "README.md", "exec"), {})
        assert "Paris" in capsys.readouterr().out
        (curl,) = SHELL
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        done = subprocess.run(["sh", "-c", curl.replace(ADDRESS, here)], capture_output=True, check=True, timeout=300)
        assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_every_relative_link_in_the_docs_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.req("R49")
def test_every_error_and_every_ending_is_in_the_table() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    for name, error in inspect.getmembers(errors, inspect.isclass):
        if issubclass(error, errors.TokenmillError) and error is not errors.TokenmillError:
            assert f"`{name}`" in page
    for reason, ending in ENDINGS.items():
        assert f"| `{reason.value}` | {ending.state.value} | {ending.openai or '-'} | {ending.http_status} |" in page
