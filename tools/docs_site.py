"""Hooks of the documentation site (mkdocs.yml): pages that live outside docs/, and links to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
    "examples/agents": "examples.md",
}
"""A path in the repository -> its page."""
LINK = re.compile(r"\]\((?!https?:|#|<)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for source, page in OUTSIDE.items():
        if source.endswith(".md") and source != "README.md":
            files.append(File.generated(config, page, content=moved((ROOT / source).read_text(), source, "")))
    files.append(File.generated(config, "examples.md", content=examples()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the pages made of what they name."""
    return moved(markdown, f"docs/{page.file.src_uri}", posixpath.dirname(page.file.src_uri))


def moved(text: str, source: str, folder: str) -> str:
    """The text of a file of the repository, as a page in `folder` of the site."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        page = OUTSIDE.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        return found[0] if page is None else f"]({posixpath.relpath(page, folder or '.')}"

    return LINK.sub(link, text)


def examples() -> str:
    """The agents of examples/, whole."""
    files = sorted((ROOT / "examples" / "agents").glob("*.py"))
    shown = [f"## `{file.relative_to(ROOT)}`\n\n```python\n{file.read_text()}```" for file in files]
    return "\n\n".join(["# Examples\n\nRun by the tests against a real server.", *shown])
