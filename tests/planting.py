"""Planting bugs: a suite that can't fail proves nothing.

A bug replaces a piece of one function's source. If that piece is no longer there, the test says so: plant it anew.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class PlantedBug:
    name: str
    owner: Any
    function: str
    correct: str
    faulty: str


def plant(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the function by its faulty twin, wherever it was imported by name."""
    original = getattr(bug.owner, bug.function)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(bug.correct) == 1, f"{bug.name}: {bug.correct!r} is not in {bug.function} once"
    namespace = dict(original.__globals__)
    exec(source.replace(bug.correct, bug.faulty), namespace)
    faulty = namespace[bug.function]
    monkeypatch.setattr(bug.owner, bug.function, faulty)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("tokenmill") and getattr(module, bug.function, None) is original:
            monkeypatch.setattr(module, bug.function, faulty)
