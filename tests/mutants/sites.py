"""Where a module can be mutated, and how: single-point changes inside functions.

A mutant replaces one span of the source, so the rest of the file keeps its lines. Five kinds: a comparison flipped, a
number or bound off by one, a statement dropped, two arguments swapped, a branch negated. Messages of errors and of the
log, assertions, annotations and text for people (`__repr__`) are left alone: tests are not meant to hold them in place.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMMUTATIVE = {"min", "max"}
LOGS = {"log", "logger", "logging", "warnings"}
FOR_PEOPLE = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Mutant:
    path: str
    """Of the module, below the root of the repository."""
    function: str
    """Qualified name of the outermost function around it."""
    kind: str
    line: int
    statement: int
    """First line of the statement around it: where it counts as covered if its own line has no code."""
    begin: int
    end: int
    """Span of the source in bytes."""
    text: str
    """What replaces the span."""

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Changed lines, in the manner of diff."""
        before, after = source.decode().splitlines(), self.applied(source).decode().splitlines()
        changes = difflib.unified_diff(before, after, lineterm="", n=0)
        return "\n".join(line for line in changes if not line.startswith(("---", "+++", "@@")))

    def key(self, source: bytes) -> str:
        """Names the change by what it does to its function, wherever that is and however it is formatted."""
        texts = [_normalized(one, self.function) for one in (source, self.applied(source))]
        return hashlib.sha256("\0".join([self.path, self.function, *texts]).encode()).hexdigest()[:16]


def _normalized(source: bytes, function: str) -> str:
    return "\n".join(ast.unparse(node) for name, node in _functions(ast.parse(source)) if name == function)


def sample(root: Path, paths: Iterable[Path], count: int, seed: int) -> list[Mutant]:
    """So many of the modules' mutants: sites drawn evenly, then one of each site's changes."""
    sites: dict[tuple[str, int, int, str], list[Mutant]] = {}
    for path in sorted(paths):
        for mutant in mutants_of(str(path.relative_to(root)), path.read_bytes()):
            sites.setdefault((mutant.path, mutant.begin, mutant.end, mutant.kind), []).append(mutant)
    chance = random.Random(seed)
    drawn = chance.sample(sorted(sites), min(count, len(sites)))
    return [chance.choice(sites[site]) for site in drawn]


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for name, function in _functions(ast.parse(source)):
        if function.name in FOR_PEOPLE:
            continue
        for change in _Changes(function).found:
            node = change.node
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(path, name, change.kind, node.lineno, change.statement, begin, end, change.text)


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions and methods of the module; those inside others belong to them."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, Function):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}{node.name}.")

    return inside(tree.body, "")


# -- changes of one function ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    kind: str
    node: ast.expr | ast.stmt
    text: str
    statement: int


class _Changes(ast.NodeVisitor):
    def __init__(self, function: Function) -> None:
        self.found: list[_Change] = []
        self._function = function
        self._statement = function
        for statement in function.body:
            self.visit(statement)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            outer, self._statement = self._statement, node
            if self._can_be_dropped(node):
                self._add("statement dropped", node, "pass")
            super().visit(node)
            self._statement = outer
        else:
            super().visit(node)

    def _add(self, kind: str, node: ast.expr | ast.stmt, changed: str | ast.expr) -> None:
        text = changed if isinstance(changed, str) else ast.unparse(changed)
        if not isinstance(changed, (str, ast.Call)):
            text = f"({text})"
        self.found.append(_Change(kind, node, text, self._statement.lineno))

    def _can_be_dropped(self, node: ast.stmt) -> bool:
        """Not what leaves a name undefined, nor a last return: any test would fail."""
        if isinstance(node, (ast.AugAssign, ast.Delete, ast.Raise, ast.Break, ast.Continue)):
            return True
        if isinstance(node, ast.Expr):
            return not isinstance(node.value, ast.Constant) and not _is_log(node.value)
        if isinstance(node, ast.Return):
            return node is not self._function.body[-1]
        if isinstance(node, ast.Assign) and self._function.name != "__init__":
            return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
        return False

    # What is not looked into.

    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # Branches.

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        self._add("branch negated", test, test.operand if is_negated else ast.UnaryOp(ast.Not(), test))

    # Comparisons, numbers, bounds, arguments.

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            for table in (BOUNDARY, OPPOSITE):
                if type(op) in table:
                    ops = [*node.ops[:i], table[type(op)](), *node.ops[i + 1 :]]
                    self._add("comparison flipped", node, ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add("off by one", node, str(node.value + 1))
            self._add("off by one", node, f"({node.value - 1})")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.op, ast.LShift):  # 1 << 20 is a size, and no size is exact
            self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        self._shift(node.lower, node.upper)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_log(node):
            return
        name = ast.unparse(node.func)
        if name == "range":
            self._shift(*node.args[:2])
        if name not in COMMUTATIVE:
            self._swap_arguments(node)
        self.generic_visit(node)

    def _shift(self, *bounds: ast.expr | None) -> None:
        for bound in bounds:
            if bound is not None and not isinstance(bound, (ast.Constant, ast.Starred)):
                self._add("off by one", bound, ast.BinOp(bound, ast.Add(), ast.Constant(1)))
                self._add("off by one", bound, ast.BinOp(bound, ast.Sub(), ast.Constant(1)))

    def _swap_arguments(self, node: ast.Call) -> None:
        for i, (one, other) in enumerate(zip(node.args, node.args[1:], strict=False)):
            if isinstance(one, ast.Starred) or isinstance(other, ast.Starred) or ast.dump(one) == ast.dump(other):
                continue
            args = [*node.args[:i], other, one, *node.args[i + 2 :]]
            self._add("arguments swapped", node, ast.Call(node.func, args, node.keywords))


def _is_log(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGS
    )
