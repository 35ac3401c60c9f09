"""Planting bugs: a suite that cannot fail proves nothing.

A planted bug replaces one piece of one function: an expression, or one or more consecutive statements. Pieces are
compared as syntax trees, so a reformat of the target changes nothing. A piece that is missing, or that occurs more than
once, fails the test: the bug no longer says what it breaks and must be planted anew.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn, TypeVar

import pytest

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)
Found = TypeVar("Found")


@dataclass(frozen=True)
class PlantedBug:
    name: str
    owner: Any
    """Module or class that has the function."""
    function: str
    correct: str
    """The code to replace: a complete expression or complete statements."""
    faulty: str


def plant(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the function the code of its faulty twin; every reference to it, imported by name or bound, runs that."""
    function = _function(bug)
    monkeypatch.setattr(function, "__code__", _faulty_code(bug, function))


def _function(bug: PlantedBug) -> FunctionType:
    """The plain function behind a name: below properties, static and class methods, and decorators that wrap."""
    try:
        found = inspect.getattr_static(bug.owner, bug.function)
    except AttributeError:
        _fail(bug, f"{bug.owner.__name__} has no {bug.function}")
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        _fail(bug, f"{bug.function} is a {type(found).__name__}, not a function")
    return found


def _faulty_code(bug: PlantedBug, function: FunctionType) -> CodeType:
    """The function's code compiled from its module with the one piece replaced.

    The whole module is compiled, so that closures, `super()` and private names mean what they mean in place.
    """
    path = inspect.getsourcefile(function)
    assert path is not None
    tree = ast.parse(Path(path).read_text())
    definitions = [node for node in ast.walk(tree) if isinstance(node, Function) and _is_at(node, function.__code__)]
    if len(definitions) != 1:
        _fail(bug, f"the source of {bug.function} is not where it was when it was imported")
    _replace(bug, definitions[0])
    (code,) = [
        code
        for code in _codes(compile(tree, path, "exec", dont_inherit=True))
        if (code.co_qualname, code.co_firstlineno) == (function.__code__.co_qualname, function.__code__.co_firstlineno)
    ]
    return code


def _is_at(node: Function, code: CodeType) -> bool:
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    return (node.name, first) == (code.co_name, code.co_firstlineno)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# -- pieces of syntax -------------------------------------------------------------------------------------------------


def _replace(bug: PlantedBug, definition: Function) -> None:
    correct, faulty = ast.parse(textwrap.dedent(bug.correct)).body, ast.parse(textwrap.dedent(bug.faulty)).body
    if list(map(ast.dump, correct)) == list(map(ast.dump, faulty)):
        _fail(bug, "the faulty code is the correct code")
    if len(correct) == len(faulty) == 1 and isinstance(correct[0], ast.Expr) and isinstance(faulty[0], ast.Expr):
        _replace_expression(bug, definition, correct[0].value, faulty[0].value)
    else:
        _replace_statements(bug, definition, correct, faulty)


def _replace_expression(bug: PlantedBug, definition: Function, correct: ast.expr, faulty: ast.expr) -> None:
    wanted = ast.dump(correct)
    found = [
        node
        for statement in definition.body
        for node in ast.walk(statement)
        if isinstance(node, ast.expr) and ast.dump(node) == wanted
    ]
    target = _only(bug, found)

    class Replacement(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return _at(target, faulty) if node is target else self.generic_visit(node)

    Replacement().visit(definition)


def _replace_statements(bug: PlantedBug, definition: Function, correct: list[ast.stmt], faulty: list[ast.stmt]) -> None:
    wanted = [ast.dump(statement) for statement in correct]
    found = [
        (block, i)
        for block in _blocks(definition)
        for i in range(len(block) - len(wanted) + 1)
        if [ast.dump(statement) for statement in block[i : i + len(wanted)]] == wanted
    ]
    block, i = _only(bug, found)
    block[i : i + len(wanted)] = [_at(block[i], statement) for statement in faulty]


def _blocks(definition: Function) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(definition):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _at(target: ast.AST, node: Node) -> Node:
    """The node with the target's location on all its parts."""
    for part in ast.walk(node):
        ast.copy_location(part, target)
    return node


def _only(bug: PlantedBug, found: list[Found]) -> Found:
    if len(found) != 1:
        _fail(bug, f"{bug.correct!r} occurs {len(found)} times in {bug.function}, not once")
    return found[0]


def _fail(bug: PlantedBug, why: str) -> NoReturn:
    """Not an AssertionError, nor any other that the tests of planted bugs wait for."""
    pytest.fail(f"planted bug {bug.name!r}: {why}")
