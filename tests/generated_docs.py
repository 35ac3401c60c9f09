"""Parts of the docs that are generated from the code: `make docs` writes them, `test_docs.py` compares them."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from tests.requirements import CHECK_PAGES, CHECK_ROW, checks
from tokenmill.cli.bench import BENCHMARKS
from tokenmill.cli.main import app
from tokenmill.cli.serve import serve
from tokenmill.config import EngineConfig
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.server.api.anthropic import MessagesRequest
from tokenmill.server.api.ollama import ChatBody, EmbedRequest, GenerateRequest, Options
from tokenmill.server.config import ServerConfig
from tokenmill.server.fields import FIELDS, KNOWN, Endpoint, Origin, RequestField, Treatment
from tokenmill.server.models import OPTIONS, OWN, ModelSpec
from tokenmill.server.requests import Body, ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest

DOCS = Path(__file__).parent.parent / "docs"
BODIES: dict[Endpoint, type[Body]] = {
    Endpoint.CHAT: ChatRequest,
    Endpoint.COMPLETIONS: CompletionRequest,
    Endpoint.RESPONSES: ResponsesRequest,
    Endpoint.EMBEDDINGS: EmbeddingRequest,
    Endpoint.MESSAGES: MessagesRequest,
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
                if set(cells) == {"-"}:  # of an API that has a page of its own
                    continue
                lines.append(f"| {' | '.join([f'`{field.name}`', origin.value, *cells, _notes(field, cells)])} |")
    return "\n".join(lines)


OLLAMA = """
    model messages prompt system tools stream format options keep_alive think logprobs top_logprobs raw suffix images
    template context input truncate dimensions width height steps
"""
"""Fields of Ollama's requests..."""
OLLAMA_OPTIONS = """
    temperature top_p top_k min_p typical_p seed stop num_predict repeat_penalty repeat_last_n presence_penalty
    frequency_penalty mirostat mirostat_tau mirostat_eta tfs_z penalize_newline num_keep num_ctx num_batch num_gpu
    main_gpu num_thread numa low_vram f16_kv logits_all vocab_only use_mmap use_mlock embedding_only
"""
"""...and of their `options`."""
ANTHROPIC = """
    model messages max_tokens system stop_sequences stream temperature top_p top_k tools tool_choice thinking
    output_config output_format metadata service_tier cache_control container mcp_servers betas inference_geo speed
    diagnostics user_profile_id workspace_id
"""
"""Fields of Anthropic's Messages API."""


def fields_of(endpoint: Endpoint, names: str, *bodies: type[Body]) -> str:
    """What becomes of the fields of one API at its own endpoints, which take these bodies."""
    lines = ["| field | | notes |", "| --- | --- | --- |"]
    declared = {name for body in bodies for name in body.model_fields}
    for name in names.split():
        cell = "supported" if name in declared else KNOWN[name].treatment.value
        assert name in declared or endpoint in KNOWN[name].where, name
        lines.append(f"| `{name}` | {cell} | {_notes(KNOWN[name], [cell])} |")
    return "\n".join(lines)


def _cell(field: RequestField, endpoint: Endpoint) -> str:
    if field.name in BODIES[endpoint].model_fields:
        return "supported"
    return field.treatment.value if endpoint in field.where else "-"


def _notes(field: RequestField, cells: list[str]) -> str:
    has_more = bool(field.accepted) and Treatment.REJECTED.value in cells
    accepted = [f"accepted: {', '.join(field.accepted)}"] if has_more else []
    return "; ".join([field.note, *accepted] if field.note else accepted)


# -- options.md --------------------------------------------------------------------------------------------------------


def engine_options() -> str:
    """Of `LLM`, `AsyncLLM`, `SessionService`, a [[model]] table and `tokenmill serve`."""
    meaning, flags = docstrings(EngineOptions), _flags_by_target()
    return _table(
        ("Python", "TOML", "`tokenmill serve`", "default", "description"),
        [
            (_code(name), _code(name) if name in OPTIONS else "-", *_flag_and_default(flags.get(name)), meaning[name])
            for name in EngineOptions.__annotations__
        ],
    )


def scheduling_parameters() -> str:
    """What only `config=EngineConfig(...)` sets."""
    rows = [row for row in _dataclass_rows(EngineConfig) if row[0].strip("`") not in EngineOptions.__annotations__]
    return _table(("Python", "default", "description"), rows)


def model_settings() -> str:
    """Keys of a [[model]] table that are not options of the engine."""
    meaning = {**docstrings(ModelSpec), "path": "Name (models.md), Hugging Face directory or .gguf file."}
    defaults = {one.name: one.default for one in fields(ModelSpec)}
    shown = {"name": "file or directory name"}
    rows = [(_code(name), shown.get(name) or _default(defaults.get(name, MISSING)), meaning[name]) for name in OWN]
    return _table(("TOML", "default", "description"), rows)


def server_options() -> str:
    """Of `tokenmill serve` and of `ServerConfig`."""
    flags, options = _flags_by_target(), _parameters(_command("serve"))
    used = {flag.name for flag in flags.values()}
    rows = []
    for name, default, meaning in _dataclass_rows(ServerConfig):
        option = flags.get(name.strip("`"))
        shown = ("-", default, meaning) if option is None else (*_flag_and_default(option), _help(option))
        rows.append((name, *shown))
    rows += [("-", *_flag_and_default(one), _help(one)) for one in options if one.name not in used]
    return _table(("`ServerConfig`", "`tokenmill serve`", "default", "description"), rows)


def command_options() -> str:
    """Of all other commands."""
    group: Any = typer.main.get_command(app)
    parts = []
    for name, command in _commands(group, "tokenmill"):
        own = [(*_flag_and_default(one), _help(one)) for one in _parameters(command)]
        if own and name not in ("tokenmill", "tokenmill serve"):
            parts.append(f"### `{name}`\n\n{_table(('option', 'default', 'description'), own)}")
    for bench in BENCHMARKS:
        parser = _bench_parser(f"tokenmill.bench.{bench}")
        own = [
            _bench_row(parser, action)
            for action in parser._actions
            if action.help != argparse.SUPPRESS and action.dest != "help"
        ]
        parts.append(f"### `tokenmill bench {bench}`\n\n{_table(('option', 'default', 'description'), own)}")
    return "\n\n".join(parts)


def docstrings(kind: type) -> dict[str, str]:
    """Attribute -> the first paragraph of the string below it, which every attribute must have."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            assert said, f"{kind.__name__}.{node.target.id} has no docstring"
            found[node.target.id] = " ".join(inspect.cleandoc(str(said)).split("\n\n")[0].split())
    return found


def _flags_by_target() -> dict[str, Any]:
    """Engine option or `ServerConfig` field -> the option of `tokenmill serve` that sets it, read from `serve`."""
    by_name = {one.name: one for one in _parameters(_command("serve"))}
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(inspect.getsource(serve))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ServerConfig":
            pairs = [(one.arg, one.value) for one in node.keywords]
        elif isinstance(node, ast.Dict):
            pairs = [
                (key.value, value)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            ]
        else:
            continue
        for target, value in pairs:
            names = [one.id for one in ast.walk(value) if isinstance(one, ast.Name) and one.id in by_name]
            if names:
                found[str(target)] = by_name[names[0]]
    return found


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for sub, one in getattr(command, "commands", {}).items():
        if not one.hidden and sub != "bench":
            yield from _commands(one, f"{name} {sub}")


def _command(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name]


def _parameters(command: Any) -> list[Any]:
    return [one for one in command.params if not one.hidden and "--help" not in one.opts]


def _flag_and_default(option: Any) -> tuple[str, str]:
    """The cells of an option of the command line."""
    if option is None:
        return "-", "none"
    names = [*option.opts, *option.secondary_opts]
    shown = " / ".join(_code(one) for one in names) if names[0].startswith("-") else _code(option.name.upper())
    if option.envvar:
        shown += f" (or {_code(option.envvar)})"
    if isinstance(option.show_default, str):
        return shown, option.show_default
    return shown, "required" if option.required else "none" if option.multiple else _default(option.default)


def _help(option: Any) -> str:
    return " ".join(re.sub(r"\\\[", "[", option.help or "").split())


def _bench_parser(module: str) -> argparse.ArgumentParser:
    """The parser that a benchmark makes."""
    found: list[argparse.ArgumentParser] = []

    def parse_args(parser: argparse.ArgumentParser, *_: Any) -> None:
        found.append(parser)
        raise SystemExit

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args), contextlib.suppress(SystemExit):
        import_module(module).main([])
    return found[0]


def _bench_row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    text = parser._get_formatter()._expand_help(action)
    meaning, _, default = text.partition(" (default: ")
    name = " / ".join(_code(one) for one in action.option_strings) or _code(action.dest.upper())
    return name, default.removesuffix(")") or ("required" if action.required else "off"), meaning


def _dataclass_rows(kind: Any) -> list[tuple[str, str, str]]:
    meaning = docstrings(kind)
    return [(_code(one.name), _default(_value(one)), meaning[one.name]) for one in fields(kind)]


def _value(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _default(value: Any) -> str:
    if value is MISSING:
        return "required"
    if value is None or value == () or value == frozenset():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value == int(value) and abs(value) >= 10_000 else f"{value:g}"
    return ", ".join(_code(str(one)) for one in sorted(value)) if isinstance(value, frozenset) else _code(str(value))


def _code(text: str) -> str:
    return f"`{text}`"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


# -- third-party.md ----------------------------------------------------------------------------------------------------

ROOT = DOCS.parent
LICENSES = {"axe-playwright-python": "MIT", "opentelemetry-exporter-otlp-proto-http": "Apache-2.0", "xllamacpp": "MIT"}
"""Of packages that name it in their license file alone, and of those that the tests do not install."""


def python_packages() -> str:
    """Direct dependencies and pinned packages. A license is looked up once for each version: the installed package has
    it, and not every package is installed everywhere.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"runtime": project["dependencies"], **project["optional-dependencies"]}
    uses: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    for extra, requirements in needed.items():
        for requirement in requirements:
            (name,) = re.findall(r"^[A-Za-z0-9._-]+", requirement)
            if name != "tokenmill":
                uses.setdefault(_normal(name), []).append(extra)
                versions[_normal(name)] = requirement[len(name) :].partition(";")[0].strip() or "any"
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            versions[_normal(name)] = version
    known = dict(re.findall(r"^\| (\S+ \| [^|]+) \| ([^|]+) \|", (DOCS / "third-party.md").read_text(), re.MULTILINE))
    rows = []
    for name, version in sorted(versions.items()):
        license_ = known.get(f"{name} | {version}") or _license(name)
        rows.append((name, version, license_, ", ".join(uses.get(name, ["tests"]))))
    return _table(("package", "version", "license", "needed by"), rows)


def vendored_files() -> str:
    """JavaScript and fonts of the web page."""
    manifest = json.loads((ROOT / "src/tokenmill/server/web/vendor/MANIFEST.json").read_text())
    rows = dict.fromkeys((one["package"], one["version"], one["licence"]) for one in manifest)
    return _table(("package", "version", "license"), list(rows))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _license(name: str) -> str:
    """What an installed package says of itself."""
    if name in LICENSES:
        return LICENSES[name]
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"docs/third-party.md has no license of {name}; install the package, then `make docs`"
        ) from None
    said = metadata.get("License-Expression") or metadata.get("License") or ""
    classified = [one.split(" :: ")[-1] for one in metadata.get_all("Classifier") or () if one.startswith("License ::")]
    found = said.partition("\n")[0] if 0 < len(said.partition("\n")[0]) < 120 else ", ".join(classified)
    assert found, f"{name} names no license"
    return found


GENERATED: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "request-fields.md": {"fields": request_fields},
    "anthropic.md": {"fields": partial(fields_of, Endpoint.MESSAGES, ANTHROPIC, MessagesRequest)},
    "ollama.md": {
        "fields": partial(fields_of, Endpoint.OLLAMA, OLLAMA, ChatBody, GenerateRequest, EmbedRequest),
        "options": partial(fields_of, Endpoint.OLLAMA, OLLAMA_OPTIONS, Options),
    },
    "options.md": {
        "engine": engine_options,
        "scheduling": scheduling_parameters,
        "model": model_settings,
        "server": server_options,
        "commands": command_options,
    },
    "third-party.md": {"python": python_packages, "web": vendored_files},
}
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
