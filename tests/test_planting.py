"""Planted bugs survive a reformat of their targets, and fail when a target is gone."""

from __future__ import annotations

import ast
import dis
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from tests.planting import PlantedBug, plant

TESTS = Path(__file__).parent


def bugs_in(value: Any) -> Iterator[PlantedBug]:
    """The planted bugs in a list, a pair, the keys of a dict."""
    if isinstance(value, PlantedBug):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for one in value:
            yield from bugs_in(one)


def all_bugs() -> Iterator[PlantedBug]:
    for path in sorted(TESTS.rglob("test_*.py")):
        if path != Path(__file__) and "PlantedBug(" in path.read_text():
            name = ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
            yield from bugs_in(list(vars(importlib.import_module(name)).values()))


ALL = list(all_bugs())


def test_all_planted_bugs_are_looked_at() -> None:
    """A bug inside a test's body would not be found here: they are constants of their modules."""
    sources = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    assert len(ALL) == sum(source.count("PlantedBug(") for source in sources) > 60


def load(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def planted_code(bug: PlantedBug) -> CodeType:
    with pytest.MonkeyPatch.context() as patch:
        plant(bug, patch)
        found = inspect.getattr_static(bug.owner, bug.function)
        return inspect.unwrap(getattr(found, "__func__", found)).__code__


def instructions(code: CodeType) -> list[Any]:
    """What the code does, wherever its lines are: a line of its own may have a NOP, which jumps count."""
    constants = [instructions(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    jumps = {*dis.hasjrel, *dis.hasjabs}
    steps = [
        (one.opname, None if one.opcode in jumps else one.arg)
        for one in dis.get_instructions(code)
        if one.opname != "NOP"
    ]
    return [steps, code.co_names, constants[1:] if code.co_consts[:1] == (None,) else constants]


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: f"{bug.owner.__name__}-{bug.name}")
def test_a_reformatted_target_still_takes_the_bug(
    bug: PlantedBug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is written anew from its syntax tree: other lines, other quotes, no comments."""
    module = bug.owner if inspect.ismodule(bug.owner) else sys.modules[bug.owner.__module__]
    source = inspect.getsource(module)
    reformatted = ast.unparse(ast.parse(source))
    assert reformatted != source
    path = tmp_path / "reformatted.py"
    path.write_text(reformatted)
    twin = load(f"{module.__name__}_reformatted", path, monkeypatch)
    owner = twin if inspect.ismodule(bug.owner) else getattr(twin, bug.owner.__name__)
    assert instructions(planted_code(replace(bug, owner=owner))) == instructions(planted_code(bug))


TARGET = """
class Base:
    def greet(self):
        return "hello"

class Counter(Base):
    @staticmethod
    def static(a):
        return a + 1

    @property
    def prop(self):
        return 1

    def count(self, items):
        total = 0
        for item in items:
            total += item
        return total

    def greet(self):
        return super().greet() + "!"

    def twice(self, a):
        a = a + 1
        a = a + 1
        return a

def outer(a):
    def inner():
        return a + 1
    return inner()
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "planting_target.py"
    path.write_text(TARGET)
    return load("planting_target", path, monkeypatch)


@pytest.mark.parametrize(
    ("owner", "function", "correct", "faulty", "call", "expected"),
    [
        ("Counter", "count", "total += item", "total -= item", lambda t: t.Counter().count([1, 2]), -3),
        ("Counter", "count", "total+=item", "pass", lambda t: t.Counter().count([1, 2]), 0),
        ("Counter", "count", "items", "items[1:]", lambda t: t.Counter().count([1, 2]), 2),
        ("Counter", "count", "total = 0\nfor item in items:\n  total += item", "total = 7",
         lambda t: t.Counter().count([1, 2]), 7),
        ("Counter", "greet", "'!'", "'?'", lambda t: t.Counter().greet(), "hello?"),
        ("Counter", "static", "a + 1", "a - 1", lambda t: t.Counter.static(1), 0),
        ("Counter", "prop", "1", "2", lambda t: t.Counter().prop, 2),
        (None, "outer", "a + 1", "a + 2", lambda t: t.outer(1), 3),
    ],
)  # fmt: skip
def test_a_bug_is_there_until_it_is_undone(
    target: ModuleType, owner: str | None, function: str, correct: str, faulty: str,
    call: Callable[[ModuleType], Any], expected: Any,
) -> None:  # fmt: skip
    before = call(target)
    bug = PlantedBug("bug", target if owner is None else getattr(target, owner), function, correct, faulty)
    with pytest.MonkeyPatch.context() as patch:
        plant(bug, patch)
        assert call(target) == expected
    assert call(target) == before != expected


def test_a_function_imported_by_name_is_faulty_too(target: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = target.outer
    plant(PlantedBug("bug", target, "outer", "a + 1", "a"), monkeypatch)
    assert imported(1) == 1


@pytest.mark.parametrize(
    ("function", "correct", "faulty", "why"),
    [
        ("count", "total *= item", "pass", "occurs 0 times"),
        ("count", "total + item", "0", "occurs 0 times"),
        ("twice", "a = a + 1", "pass", "occurs 2 times"),
        ("twice", "a + 1", "a", "occurs 2 times"),
        ("sum", "total", "0", "Counter has no sum"),
        ("count", "total += item", "total  +=  item", "the faulty code is the correct code"),
    ],
)
def test_a_target_that_is_gone_or_ambiguous_fails(
    target: ModuleType, monkeypatch: pytest.MonkeyPatch, function: str, correct: str, faulty: str, why: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match=why):
        plant(PlantedBug("bug", target.Counter, function, correct, faulty), monkeypatch)


def test_a_source_that_changed_since_its_import_fails(target: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(str(target.__file__))
    path.write_text("\n\n" + path.read_text())
    with pytest.raises(pytest.fail.Exception, match="not where it was"):
        plant(PlantedBug("bug", target, "outer", "a + 1", "a"), monkeypatch)
