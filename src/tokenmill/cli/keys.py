"""`tokenmill keys`: add, list and revoke the keys of a keys file. A running server reads it again on SIGHUP."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.errors import ConfigError

File = Annotated[
    Path, typer.Option("--file", "-f", envvar="TOKENMILL_KEYS_FILE", help="Keys file (TOML or JSON).", dir_okay=False)
]
Name = Annotated[str, typer.Argument(help="Name of the key, in logs, metrics and usage.")]
DEFAULT_FILE = Path("keys.toml")
DAY_S = 86_400
KEY_BYTES = 32
RELOAD = "A running server reads the file on SIGHUP."

keys = typer.Typer(help="API keys of a server.", no_args_is_help=True, rich_markup_mode=None)


@keys.command()
def add(
    name: Name,
    file: File = DEFAULT_FILE,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="Limit such as requests_per_minute=60 (repeatable).")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Expiry: days from now, or a date or time (ISO 8601, UTC).", show_default="never")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow loading models and seeing all usage.")] = False,
) -> None:
    """Create a key: prints it once and writes its hash."""
    from tokenmill.server.config import hash_key
    from tokenmill.server.keys import read_keys, read_time

    key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
    table: dict[str, Any] = {"name": name, "sha256": hash_key(key).hex()}
    if admin:
        table["admin"] = True
    if expires is not None:
        days = re.fullmatch(r"\d+", expires)
        at = time.time() + DAY_S * int(expires) if days else read_time(expires, "--expires")
        table["expires"] = datetime.fromtimestamp(at, UTC).replace(microsecond=0).isoformat()
    for one in limit or ():
        what, _, count = one.partition("=")
        if not count.isdigit():
            raise ConfigError(f"--limit must be NAME=N, not {one!r}")
        table[what] = int(count)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if file.suffix == ".json":
        content = json.loads(before or "{}")
        content["key"] = [*content.get("key", []), table]
        after = json.dumps(content, indent=2) + "\n"
    else:
        lines = "".join(f"{what} = {json.dumps(value)}\n" for what, value in table.items())
        after = f"{before.rstrip()}\n\n[[key]]\n{lines}".lstrip()
    _replace(file, after, read_keys)
    typer.echo(key)
    typer.echo(f"tokenmill: added {name} to {file}; the key is not shown again. {RELOAD}", err=True)


@keys.command("list")
def list_keys(file: File = DEFAULT_FILE) -> None:
    """List the keys: names, expiry and limits."""
    from tokenmill.server.keys import LIMITS, read_keys

    for key in read_keys(file).keys:
        at = key.expires_at
        about = ["admin"] if key.is_admin else []
        if at is not None:
            about.append(
                f"{'expired' if at <= time.time() else 'expires'} {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}Z"
            )
        limits = {name: getattr(key.limits, name) for name in LIMITS}
        about += [f"{name}={value}" for name, value in limits.items() if value is not None]
        typer.echo(f"{key.name:<24} {key.id[:8]}  {' '.join(about)}".rstrip())


@keys.command()
def revoke(name: Name, file: File = DEFAULT_FILE) -> None:
    """Remove a key from the file."""
    from tokenmill.server.keys import read_keys

    if name not in {key.name for key in read_keys(file).keys}:
        raise ConfigError(f"{file} has no key {name!r}")
    before = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        content = json.loads(before)
        content["key"] = [table for table in content["key"] if table["name"] != name]
        after = json.dumps(content, indent=2) + "\n"
    else:
        after = without_table(before, name)

    def check(path: Path) -> None:
        if name in {key.name for key in read_keys(path).keys}:
            raise ConfigError(f"{file} is laid out in a way that cannot be edited; remove {name!r} by hand")

    _replace(file, after, check)
    typer.echo(f"tokenmill: removed {name} from {file}. {RELOAD}", err=True)


def without_table(text: str, name: str) -> str:
    """TOML without the [[key]] table of this name; everything else, comments included, as it was."""
    parts = re.split(r"(?m)^(?=[ \t]*\[)", text)
    named = re.compile(rf"""(?m)^[ \t]*name[ \t]*=[ \t]*["']{re.escape(name)}["']""")
    kept = [part for part in parts if not (re.match(r"[ \t]*\[\[[ \t]*key[ \t]*\]\]", part) and named.search(part))]
    return "".join(kept)


def _replace(file: Path, text: str, check: Callable[[Path], object]) -> None:
    """Write a file that only its owner can read; the old one stays if the new one is wrong."""
    draft = file.with_name(f".{file.stem}-{secrets.token_hex(4)}{file.suffix}")
    try:
        draft.touch(mode=0o600)
        draft.write_text(text, encoding="utf-8")
        check(draft)
        draft.replace(file)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(draft), str(file))) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)
