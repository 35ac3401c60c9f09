"""The code in the README runs as it stands."""

import inspect
import re
from pathlib import Path

import pytest

from tokenmill import errors
from tokenmill.engine.lifecycle import ENDINGS

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_the_readme_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


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
