"""The shape of the package: how many files, how small, and which names are taken twice. `python -m tests.structure`.

Counted is everything in `src/tokenmill` but the web page. A small module is one under 100 lines; model families,
commands and `__init__` may be small. `test_structure.py` holds the limits.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "tokenmill"
SMALL_LINES = 100
SHARED_NAMES = frozenset({"__init__", "backend", "config", "errors", "model", "routes", "timeline"})
"""Modules that more than one package has."""
COMMANDS = ("cli/", "bench/")
"""Modules that are called what a user calls them."""
SCHEMAS = ("server/schemas.py", "entrypoints/wire.py")
"""Their classes are shapes of a protocol, and may be called what the thing is called inside."""


@dataclass(frozen=True)
class Structure:
    files: tuple[str, ...]
    small: tuple[str, ...]
    classes: Mapping[str, tuple[str, ...]]
    """Name -> the modules that define a class of it, where they are several."""
    basenames: Mapping[str, tuple[str, ...]]
    """Name -> the modules of it, where they are several."""


def structure() -> Structure:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if "web" not in path.relative_to(PACKAGE).parts]
    names = {str(path.relative_to(PACKAGE)): path for path in paths}
    return Structure(
        files=tuple(names),
        small=tuple(name for name, path in names.items() if _is_small(name, path)),
        classes=_several((one, name) for name, path in names.items() if name not in SCHEMAS for one in _classes(path)),
        basenames=_several(
            (path.stem, name)
            for name, path in names.items()
            if path.stem not in SHARED_NAMES and not name.startswith(COMMANDS)
        ),
    )


def _is_small(name: str, path: Path) -> bool:
    may_be = path.stem in ("__init__", "__main__") or "/families/" in name or name.startswith(COMMANDS[0])
    return not may_be and len(path.read_text().splitlines()) < SMALL_LINES


def _classes(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def _several(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, module in pairs:
        found[name].append(module)
    return {name: tuple(modules) for name, modules in found.items() if len(modules) > 1}


if __name__ == "__main__":
    now = structure()
    print(f"{len(now.files)} files, {len(now.small)} of them under {SMALL_LINES} lines:")
    for one in now.small:
        print(f"  {one}")
    for kind, several in (("class", now.classes), ("module", now.basenames)):
        for name, modules in several.items():
            print(f"{kind} {name}: {', '.join(modules)}")
