"""Which models a server has, from what was said on the command line or in a TOML file.

[[model]]
name = "small"                  # what clients call it
path = "smollm2-135m"           # a name, a Hugging Face directory or a .gguf file
aliases = ["default"]
keep_alive_s = 600              # unload it when it was not used for so long
at_start = false                # load it when it is first asked for
dtype = "int8"                  # and any other option of the engine
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.entrypoints.fit import Fit, plan_fit
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.errors import ConfigError
from tokenmill.server.models import ModelSpec


def _plain_type(kind: Any) -> Any:
    """Of a table, that it is one; what is in it is checked by whoever reads it. A whole number is a number, too."""
    return (int, float) if kind is float else get_origin(kind) or kind


OWN: dict[str, Any] = {"name": str, "path": str, "aliases": list, "keep_alive_s": (int, float), "at_start": bool}
"""Settings of a model that are not the engine's, and what they are."""
OPTIONS = {
    name: _plain_type((get_args(kind) or (kind,))[0])
    for name, kind in get_type_hints(EngineOptions).items()
    if name not in ("tokenizer", "config")
}
"""Settings that are the engine's."""


def named(given: str) -> tuple[str, str]:
    """The name and the path of NAME=PATH, or of a path alone."""
    name, is_named, path = given.partition("=")
    if not is_named:
        return short_name(given), given
    if not name or not path:
        raise ConfigError(f"--model is NAME=PATH, not {given!r}")
    return name, path


def short_name(path: str) -> str:
    """What a model is called, if nobody says otherwise."""
    return Path(path).name if "/" in path else path


def spec(
    name: str,
    path: str,
    options: Mapping[str, Any],
    *,
    aliases: Sequence[str] = (),
    keep_alive_s: float | None = None,
    at_start: bool = True,
) -> ModelSpec:
    """A model by its name and path, with options for its engine."""
    if keep_alive_s is not None and not keep_alive_s > 0:
        raise ConfigError(f"keep_alive_s must be positive, not {keep_alive_s}")

    def load() -> AsyncLLM:
        return AsyncLLM(path, **options)

    def fit() -> Fit:
        chosen = {
            name: options[name] for name in ("dtype", "device", "backend", "extra") if options.get(name) is not None
        }
        return plan_fit(path, 1, options.get("max_model_len"), free_bytes=None, **chosen)

    return ModelSpec(
        name=name,
        load=load,
        fit=None if path == "fake" else fit,
        aliases=frozenset(aliases),
        keep_alive_s=keep_alive_s,
        at_start=at_start,
    )


def read_catalogue(path: Path, options: Mapping[str, Any], keep_alive_s: float | None = None) -> list[ModelSpec]:
    """The models of a TOML file; `options` and `keep_alive_s` hold where it says nothing."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    unknown = set(content) - {"model"}
    if unknown:
        raise ConfigError(f"{path} has {', '.join(sorted(unknown))}; known: [[model]] tables")
    tables = content.get("model")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path} has no [[model]] table")
    return [_from_table(table, path, options, keep_alive_s) for table in tables]


def _from_table(
    table: Mapping[str, Any], file: Path, options: Mapping[str, Any], keep_alive_s: float | None
) -> ModelSpec:
    where = f"{file}, model {table.get('name', table.get('path', '?'))!r}"
    known = {**OWN, **OPTIONS}
    unknown = set(table) - set(known)
    if unknown:
        what = f"unknown setting {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
        raise ConfigError(f"{where}: {what}")
    for name, kind in known.items():
        if name in table and (not isinstance(table[name], kind) or isinstance(table[name], bool) != (kind is bool)):
            raise ConfigError(f"{where}: {name} can't be {table[name]!r}")
    if "path" not in table:
        raise ConfigError(f"{where}: path is missing")
    if not all(isinstance(alias, str) for alias in table.get("aliases", [])):
        raise ConfigError(f"{where}: aliases are texts")
    own = {name: table[name] for name in ("aliases", "at_start") if name in table}
    name = table.get("name") or short_name(table["path"])
    return spec(
        name,
        table["path"],
        {**options, **{key: table[key] for key in set(OPTIONS) & set(table)}},
        keep_alive_s=table.get("keep_alive_s", keep_alive_s),
        **own,
    )
