"""Files of packaging/ that are made of the code, written by `make docs`: man page, shell completions, SBOM."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.completion import get_completion_script

from tokenmill import __version__
from tokenmill.cli.main import app

ROOT = Path(__file__).parent.parent
PACKAGING = ROOT / "packaging"


def man_page() -> str:
    """tokenmill(1), of the commands and their options."""
    group: Any = typer.main.get_command(app)
    lines = [f'.TH TOKENMILL 1 "" "tokenmill {__version__}"', ".SH NAME", "tokenmill \\- inference engine and server"]
    lines += [".SH SYNOPSIS", ".B tokenmill", "COMMAND [OPTIONS] [ARGUMENTS]", ".SH DESCRIPTION", _roff(group.help)]
    lines += ["Every command has", ".BR --help .", ".SH COMMANDS"]
    for name, command in _commands(group, "tokenmill"):
        lines += [f".SS {_roff(name)}", _roff((command.help or "").split("\n\n")[0])]
        for one in command.params:
            if one.hidden or "--help" in one.opts:
                continue
            names = ", ".join(f"\\fB{_roff(flag)}\\fR" for flag in (*one.opts, *one.secondary_opts))
            shown = names if one.param_type_name == "option" else f"\\fI{_roff(one.name.upper())}\\fR"
            lines += [".TP", shown, _roff(getattr(one, "help", "") or "")]
    lines += [".SH EXIT STATUS", "0 after an orderly end, 2 for wrong options, 3 if a model or the server could not be"]
    lines += ["started, 4 after a hang with --exit-on-hang.", ".SH FILES", ".I ~/.cache/tokenmill", "models and locks"]
    return "\n".join(lines) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for sub, one in command.commands.items():
        if one.hidden:
            continue
        if getattr(one, "commands", None) and sub != "bench":
            yield from _commands(one, f"{name} {sub}")
        yield f"{name} {sub}", one


def _roff(text: str) -> str:
    text = " ".join((text or "").split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def completion(shell: str) -> str:
    script = get_completion_script(prog_name="tokenmill", complete_var="_TOKENMILL_COMPLETE", shell=shell)
    return script.strip() + "\n"


def sbom() -> str:
    """CycloneDX: what the wheel contains (vendored files, with hashes) and what it requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["server"]]
    root = f"pkg:pypi/tokenmill@{__version__}"
    components: list[dict[str, Any]] = [
        {
            "type": "file",
            "name": f"tokenmill/server/web/vendor/{one['file']}",
            "bom-ref": f"vendor/{one['file']}",
            "purl": f"pkg:npm/{one['package'].replace('@', '%40')}@{one['version']}",
            "licenses": [{"expression": one["licence"]}],
            "hashes": [{"alg": "SHA-256", "content": one["sha256"]}],
        }
        for one in json.loads((ROOT / "src/tokenmill/server/web/vendor/MANIFEST.json").read_text())
    ]
    for requirement in sorted(set(required)):
        name, version, marker = re.findall(r"^([\w.-]+)(?:\[[^]]*\])?([^;]*)(?:; *(.*))?$", requirement)[0]
        properties = [{"name": "tokenmill:requires", "value": version.strip() or "any"}]
        properties += [{"name": "tokenmill:marker", "value": marker}] if marker else []
        ref = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}"
        components.append({"type": "library", "name": name, "bom-ref": ref, "purl": ref, "properties": properties})
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "tokenmill",
                "version": __version__,
                "bom-ref": root,
                "purl": root,
                "licenses": [{"expression": project["license"]}],
            }
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": [one["bom-ref"] for one in components]}],
    }
    return json.dumps(document, indent=1) + "\n"


FILES: Mapping[str, Callable[[], str]] = {
    "tokenmill.1": man_page,
    "sbom.cdx.json": sbom,
    "completion/tokenmill.bash": partial(completion, "bash"),
    "completion/_tokenmill": partial(completion, "zsh"),
    "completion/tokenmill.fish": partial(completion, "fish"),
}


def packaging_files() -> Iterator[tuple[Path, str]]:
    """The files as they should be."""
    for name, make in FILES.items():
        yield PACKAGING / name, make()
