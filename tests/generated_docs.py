"""Parts of the docs that are generated from the code: `make docs` writes them, `test_docs.py` compares them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.requirements import CHECK_PAGES, CHECK_ROW, checks
from tokenmill.server.fields import FIELDS, Endpoint, Origin, RequestField, Treatment
from tokenmill.server.requests import Body, ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest

DOCS = Path(__file__).parent.parent / "docs"
BODIES: dict[Endpoint, type[Body]] = {
    Endpoint.CHAT: ChatRequest,
    Endpoint.COMPLETIONS: CompletionRequest,
    Endpoint.RESPONSES: ResponsesRequest,
    Endpoint.EMBEDDINGS: EmbeddingRequest,
}
"""Columns of the table of request fields."""


def request_fields() -> str:
    """Every field, and what becomes of it at each endpoint."""
    lines = [
        f"| field | API | {' | '.join(endpoint.value for endpoint in BODIES)} | notes |",
        f"| --- | --- |{' --- |' * (len(BODIES) + 1)}",
    ]
    for origin in Origin:
        for field in sorted(FIELDS, key=lambda one: one.name):
            if field.origin is origin:
                cells = [_cell(field, endpoint) for endpoint in BODIES]
                lines.append(f"| {' | '.join([f'`{field.name}`', origin.value, *cells, _notes(field, cells)])} |")
    return "\n".join(lines)


def _cell(field: RequestField, endpoint: Endpoint) -> str:
    if field.name in BODIES[endpoint].model_fields:
        return "supported"
    return field.treatment.value if endpoint in field.where else "-"


def _notes(field: RequestField, cells: list[str]) -> str:
    has_more = bool(field.accepted) and Treatment.REJECTED.value in cells
    accepted = [f"accepted: {', '.join(field.accepted)}"] if has_more else []
    return "; ".join([field.note, *accepted] if field.note else accepted)


GENERATED = {"request-fields.md": {"fields": request_fields}}
"""Page -> name of the part -> what belongs there, between <!-- generated: NAME --> and <!-- end -->."""


def pages() -> Iterator[tuple[Path, str]]:
    """The pages that have generated parts, as they should be."""
    for name, parts in GENERATED.items():
        page = DOCS / name
        text = page.read_text()
        for part, make in parts.items():
            before, begin, rest = text.partition(f"<!-- generated: {part} -->\n")
            _, end, after = rest.partition("<!-- end -->")
            assert end, f"{name} has no place for {part}"
            text = f"{before}{begin}\n{make()}\n\n{end}{after}"
        yield page, text
    tests = checks()
    for name in CHECK_PAGES:
        page = DOCS / name
        yield page, CHECK_ROW.sub(lambda row: f"{row[1]} {_files(tests.get(row[2], []))} |", page.read_text())


def _files(paths: list[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


if __name__ == "__main__":
    for page, text in pages():
        page.write_text(text)
