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
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import typer

import tokenmill
from benchmarks import scaling
from benchmarks.fleet import scenarios
from tests.generated_packaging import packaging_files
from tests.requirements import CHECK_PAGES, CHECK_ROW, checks
from tokenmill.bench import report
from tokenmill.cli.bench import BENCHMARKS
from tokenmill.cli.main import app
from tokenmill.cli.serve import serve
from tokenmill.config import EngineConfig
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.server.api.anthropic import MessagesRequest
from tokenmill.server.api.ollama import ChatBody, EmbedRequest, GenerateRequest, Options
from tokenmill.server.app import create_app
from tokenmill.server.config import TABLE, ServerConfig
from tokenmill.server.fields import FIELDS, KNOWN, Endpoint, Origin, RequestField, Treatment
from tokenmill.server.models import OPTIONS, OWN, ModelSpec
from tokenmill.server.requests import Body, ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest
from tokenmill.server.served import Served

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


REJECTED_BY_BODY = {"images"}
"""Declared by a body that rejects all values but the neutral one."""


def fields_of(endpoint: Endpoint, names: str, *bodies: type[Body]) -> str:
    """What becomes of the fields of one API at its own endpoints, which take these bodies."""
    lines = ["| field | | notes |", "| --- | --- | --- |"]
    declared = {name for body in bodies for name in body.model_fields}
    for name in names.split():
        is_supported = name in declared - REJECTED_BY_BODY
        assert is_supported or endpoint in KNOWN[name].where, name
        cell = "supported" if is_supported else KNOWN[name].treatment.value
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
    shown = {"name": "`path` as given; of a local path, its last part"}
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
        rows.append((name, "yes" if name.strip("`") in TABLE else "-", *shown))
    rows += [("-", "-", *_flag_and_default(one), _help(one)) for one in options if one.name not in used]
    return _table(("`ServerConfig`", "TOML", "`tokenmill serve`", "default", "description"), rows)


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
                found[str(target)] = by_name[target if target in names else names[0]]
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
    return " ".join((option.help or "").split())


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


# -- reference ---------------------------------------------------------------------------------------------------------


def endpoints() -> str:
    """Every operation of the OpenAPI document, by its tag."""
    paths = create_app(Served(ServerConfig())).openapi()["paths"]
    rows: dict[str, list[tuple[str, str]]] = {}
    for path, methods in paths.items():
        for method, operation in methods.items():
            said = operation.get("description") or operation["summary"]
            (tag,) = operation.get("tags") or ["other"]
            rows.setdefault(tag, []).append(
                (_code(f"{method.upper()} {path}"), " ".join(said.split("\n\n")[0].split()))
            )
    parts = [f"## {tag}\n\n{_table(('request', 'description'), some)}" for tag, some in rows.items()]
    return "\n\n".join(parts)


def python_api() -> str:
    """Public classes with their methods, public functions, and the tree of errors."""
    parts = []
    for name in sorted(set(tokenmill.__all__) - {"__version__"}):
        thing = getattr(tokenmill, name)
        told = _paragraph(thing)
        if not inspect.isclass(thing):
            parts.append(f"## `{name}{_signature(thing)}`\n\n{told}")
            continue
        own = [(one, value) for one, value in vars(thing).items() if not one.startswith("_")]
        methods = [(one, value) for one, value in own if inspect.isfunction(value)]
        if is_dataclass(thing):
            made, shown = "(...)", _table(("field", "default"), _field_rows(thing))
        else:
            rows = [(_code(f"{one}{_signature(value)}"), _paragraph(value)) for one, value in methods]
            made, shown = _signature(thing), _table(("method", "description"), rows)
        parts.append(f"## `{name}{made}`\n\n{told}\n\n{shown}")
    return "\n\n".join(parts)


def _field_rows(kind: Any) -> list[tuple[str, str]]:
    return [(_code(one.name), _default(_value(one))) for one in fields(kind) if not one.name.startswith("_")]


def _signature(thing: Any) -> str:
    """Without annotations: names, and defaults that are short."""
    shown = []
    for one in inspect.signature(thing).parameters.values():
        prefix = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and "*" not in "".join(shown):
            shown.append("*")
        default = "" if one.default is one.empty else f"={one.default!r}"
        shown.append(f"{prefix}{one.name}{default if len(default) < 24 else '=...'}")
    return f"({', '.join(shown)})"


def _paragraph(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


# -- figures -----------------------------------------------------------------------------------------------------------

REPORTS = DOCS / "reports"
"""What `tokenmill bench report`, `benchmarks.gpu_serving` and `benchmarks.scaling` have written."""


def report_table(name: str) -> str:
    """All rows of a report."""
    found = json.loads((REPORTS / f"{name}.json").read_text())
    return f"{report.markdown(found)}\n\n{report.setting(found)}"


CPU_REPORTS = {"cpu": "135M", "cpu-1b": "1B"}
CPU_TASKS = ("prefill 512", "decode 16", "decode 4", "decode 1")
GPU_REPORTS = {"h200": "HTTP", "h200-offline": "offline"}
TURNS = {"stateless, prefix reuse": "stateless, prefix reuse", report.OFF: "stateless, no reuse"}


def _report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPORTS / f"{name}.json").read_text())
    return found


def readme_figures() -> str:
    """Beside llama.cpp, vLLM and stateless requests: throughput and ratios, and the commands that measure them."""
    reports = {name: _report(name) for name in (*CPU_REPORTS, *GPU_REPORTS)}
    rows = {name: _rows(found) for name, found in reports.items()}
    cpu = [
        (
            reports[name]["model"].removesuffix(".gguf"),
            *(_beside(rows[name].get(task), "llama.cpp") for task in CPU_TASKS),
        )
        for name in CPU_REPORTS
    ]
    parts = [
        "CPU, tok/s (ratio to llama.cpp's `llama_decode` in the same run):",
        _table(("", *CPU_TASKS), cpu),
    ]
    titles = {
        "h200": "H200, new tok/s over HTTP, 512 + 256 tokens, default settings (ratio to vLLM in the same run):",
        "h200-offline": "H200, tok/s offline without KV reuse (ratio to vLLM on such a card); mixed lengths are 100 to "
        "1,024 tokens of prompt and output, at temperature 0.6:",
    }
    for name, title in titles.items():
        sections = reports[name]["sections"]
        table = [(one["title"].rpartition(", ")[2], *(_beside(row, "vllm") for row in one["rows"])) for one in sections]
        parts += [title, _table(("", *(row["name"] for row in sections[0]["rows"])), table)]
    turn, unit = rows["cpu"]["turn 6, p50 TTFT"], "ms"
    times = (("session", turn["median"]), *((shown, turn["medians"][other]) for other, shown in TURNS.items()))
    parts += [
        "Sessions, p50 time to first token of turn 6 (100 + 100 tokens a turn, SmolLM2-135M, CPU):",
        _table([name for name, _ in times], [[f"{value:,.0f} {unit}" for _, value in times]]),
        "\n".join(f"- {report.setting(found)}" for found in reports.values()),
    ]
    return "\n\n".join(parts)


def _beside(row: Mapping[str, Any] | None, other: str) -> str:
    """Ours, and how many times as much as the other's."""
    return "" if row is None or other not in row["ratios"] else f"{row['median']:,.0f} ({row['ratios'][other]:.2f})"


def proof_chart() -> str:
    """The ratios of the README as bars."""
    bars = [
        {"name": f"CPU, {size}: {task}", "ratios": {"llama.cpp": ratio}}
        for name, size in CPU_REPORTS.items()
        for task in CPU_TASKS
        if (ratio := _rows(_report(name))[task]["ratios"].get("llama.cpp")) is not None
    ]
    for name, how in GPU_REPORTS.items():
        for section in _report(name)["sections"]:
            shape = section["title"].rpartition(", ")[2].removesuffix(" shape")
            bars += [
                {"name": f"H200, {how}, {shape}: {row['name']}", "ratios": {"vLLM": row["ratios"]["vllm"]}}
                for row in section["rows"]
            ]
    turn = _rows(_report("cpu"))["turn 6, p50 TTFT"]["ratios"]
    bars += [{"name": "Session, turn 6", "ratios": {shown: turn[other]}} for other, shown in TURNS.items()]
    return report.ratio_chart(bars, "tokenmill / others, higher is better")


SWITCHED = {
    ("16 clients", "off"): "continuous batching: tok/s of 16 clients over HTTP",
    ("turn 6, p50 TTFT", "off"): "KV reuse between turns: TTFT of turn 6, against no reuse at all",
    (
        "turn 6, p50 TTFT",
        "stateless, prefix reuse",
    ): "sessions: TTFT of turn 6, against stateless requests with prefix reuse",
    ("16 x (400 + 32)", "off"): "shared prefix: 16 prompts with 400 tokens in common",
    ("p99 ITL beside 2,000 tokens", "off"): "bounded prompt steps: p99 ITL while 2,000 prompt tokens arrive",
    ("1 forms", "off"): "forced tokens: tok/s of a JSON form",
    ("copy of a text", "off"): "speculation: tok/s of a copied text",
}
"""Row of the report and what it is compared with -> what the ratio shows."""


def switches() -> str:
    """The gain of each optimization, and the noise of its row."""
    rows = _rows(json.loads((REPORTS / "cpu.json").read_text()))
    shown = [
        (told, f"{rows[name]['ratios'][other]:.1f}", report.noise_of(rows[name]))
        for (name, other), told in SWITCHED.items()
    ]
    return _table(("", "ratio", "A/A"), shown)


def _rows(found: Mapping[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for section in found["sections"] for row in section["rows"]}


def fleet_table(name: str) -> str:
    return scenarios.shown(name, json.loads((REPORTS / "fleet.json").read_text())[name]["rows"])


def scaling_table() -> str:
    """The curves, and what else was measured with them."""
    found = json.loads((REPORTS / "scaling.json").read_text())
    notes = {one["name"]: one["notes"] for one in found["curves"]}
    idle, turns = notes["idle"], notes["turns"]
    told = (
        f"Turn 1,000 costs {turns['last_to_first']:.2f} times turn 10. An idle session with 65 tokens takes "
        f"{idle['bytes_per_idle_session']:,.0f} bytes (limit: 4 KB + 8 bytes per token, "
        f"{idle['most_bytes_per_idle_session']:,.0f}). Python {found['python']}, {found['date']}."
    )
    return f"{scaling.table(found['curves'])}\n\n{told}"


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
    "http.md": {"endpoints": endpoints},
    "api.md": {"api": python_api},
    "../README.md": {"figures": readme_figures},
    "benchmarks.md": {"switches": switches, "report": partial(report_table, "cpu"), "scaling": scaling_table},
    "fleet.md": {name: partial(fleet_table, name) for name in ("validation", *scenarios.SCENARIOS)},
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
    yield from packaging_files()
    yield DOCS / "images" / "proof.svg", proof_chart()


def _files(paths: list[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


if __name__ == "__main__":
    for page, text in pages():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text)
