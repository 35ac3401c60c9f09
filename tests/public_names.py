"""The public names: what `tokenmill` exports, commands and options, HTTP routes with their statuses and fields.

`public_names.txt` has them, one a line. `python -m tests.public_names` rewrites it, after names were added;
`test_public_names.py` fails if one is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from fastapi.routing import iter_route_contexts

import tokenmill
from tokenmill.cli.main import app as cli
from tokenmill.server.app import create_app
from tokenmill.server.config import ServerConfig
from tokenmill.server.served import Served

SNAPSHOT = Path(__file__).with_suffix(".txt")
BENCHMARKS = ("serve", "throughput", "sessions", "compare")
"""Those for users; the others are tools of the project."""
UNUSED = "422"
"""In FastAPI's document of every route with parameters; the server answers 400."""


def public_names() -> list[str]:
    return sorted({*python_names(), *command_names(typer.main.get_command(cli), "tokenmill"), *http_names()})


def python_names() -> Iterator[str]:
    return (f"python tokenmill.{name}" for name in tokenmill.__all__)


def command_names(command: Any, name: str) -> Iterator[str]:
    """A command, its arguments and options, and its subcommands'."""
    yield f"command {name}"
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else ["ARGUMENT"]
        yield from (f"command {name} {one}" for one in names)
    for child in getattr(command, "commands", {}).values():
        if name != "tokenmill bench" or child.name in BENCHMARKS:
            yield from command_names(child, f"{name} {child.name}")


def http_names() -> Iterator[str]:
    app = create_app(Served(ServerConfig()))
    for context in iter_route_contexts(app.routes):
        if context.path.startswith("/web/"):
            continue
        yield from (f"route {method} {_path(context.path)}" for method in context.methods or ())
    document = app.openapi()
    shapes = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"http {method.upper()} {_path(path)}"
            for one in operation.get("parameters", []):
                parameter = "{}" if one["in"] == "path" else one["name"]
                yield f"{name} {one['in']} {parameter}"
            yield from (f"{name} body {field}" for field in _content_fields(operation.get("requestBody", {}), shapes))
            for status, answer in operation["responses"].items():
                if status == UNUSED:
                    continue
                yield f"{name} {status}"
                told = f"{name} {status}" if status < "400" else "http error"  # errors have one shape
                yield from (f"{told} {field}" for field in _content_fields(answer, shapes))


def _path(path: str) -> str:
    """The names of a path's parameters are not public."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def _content_fields(part: Mapping[str, Any], shapes: Mapping[str, Any]) -> Iterator[str]:
    for content in part.get("content", {}).values():
        yield from _fields(content.get("schema", {}), shapes)


def _fields(schema: Mapping[str, Any], shapes: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The names of all fields, nested ones with dots."""
    if reference := schema.get("$ref"):
        schema = shapes[reference.rpartition("/")[2]]
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _fields(choice, shapes, prefix)
    if isinstance(schema.get("items"), Mapping):
        yield from _fields(schema["items"], shapes, prefix)
    for name, field in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _fields(field, shapes, f"{prefix}{name}.")


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{name}\n" for name in public_names()))
