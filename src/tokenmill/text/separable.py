"""Does a chat template write each message on its own? Then a long conversation need not be rendered to extend it.

A separable template writes a beginning, one piece a message, and an end:

    beginning + piece(0) + piece(1) + ... + piece(n - 1) + end

A piece depends on its message, on the first messages of the conversation, on its neighbors up to `REACH` away, on
whether it is the first or the last one, and on whether its index is even. So if an even number of messages is taken out
of the middle, exactly their pieces are missing in the output (and the pieces next to the gap may differ, as they have
other neighbors). `shortened` takes them out.

That is proved from the template's syntax tree. A construct that is not known to keep it true makes the template not
separable, which costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from jinja2 import nodes

from tokenmill.errors import InvalidRequest
from tokenmill.text.environment import parse_template

T = TypeVar("T")
HEAD = 4
"""First messages that a template may look at by their number."""
REACH = 2
"""How far away the neighbors are that a piece may depend on."""
TAIL = 2 * REACH + 2
"""Last messages that are kept: pieces next to the gap must not depend on whether the last but one is the last."""

LOOP_FACTS = frozenset({"first", "last", "previtem", "nextitem"})
PLACES = ("index0", "index")
STATEFUL = frozenset({"cycler", "joiner", "lipsum", "self", "super", "caller"})
UNKNOWN = (
    nodes.Block, nodes.Break, nodes.CallBlock, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include,
    nodes.NSRef,
)  # fmt: skip


def shortened(messages: Sequence[T]) -> Sequence[T]:
    """The conversation without its middle, for a separable template."""
    num_gone = (len(messages) - HEAD - TAIL) // 2 * 2
    return messages if num_gone <= 0 else [*messages[:HEAD], *messages[HEAD + num_gone :]]


def is_separable(source: str) -> bool:
    """Does the template write each message on its own?"""
    try:
        _Proof(parse_template(source))
    except (_NotProved, InvalidRequest):
        return False
    return True


class _NotProved(Exception):
    """The template does something that may make it not separable."""


class _Proof:
    """Walks through a template's tree, and raises `_NotProved` where it finds what it does not know."""

    def __init__(self, tree: nodes.Template) -> None:
        self._loop: nodes.For | None = None
        """The innermost loop."""
        self._messages_loop: nodes.For | None = None
        """The only loop over the messages, once it is met."""
        self._lists: set[str] = set()
        """Names of all messages, or of all but the first ones..."""
        self._num_skipped = 0
        """...and how many these leave out at most."""
        self._find_lists(tree)
        for node in tree.body:
            self._statement(node)

    def _find_lists(self, tree: nodes.Template) -> None:
        assigned = [
            (one.target.name, one.node) for one in tree.find_all(nodes.Assign) if isinstance(one.target, nodes.Name)
        ]
        found = {"messages"}
        while found > self._lists:
            self._lists = found
            found = found | {name for name, value in assigned if self._is_list(value)}
        self._require(not any(name in found and not self._is_list(value) for name, value in assigned))
        self._num_skipped = sum(self._is_list(one) for one in tree.find_all(nodes.Getitem))

    @staticmethod
    def _require(condition: bool) -> None:
        if not condition:
            raise _NotProved

    # -- statements ---------------------------------------------------------------------------------------------------

    def _statement(self, node: nodes.Node) -> None:
        """A statement outside of all loops, whose output is the template's."""
        if isinstance(node, nodes.If):
            self._visit(node.test)
            for one in [*node.body, *node.elif_, *node.else_]:
                self._statement(one)
        elif isinstance(node, nodes.Scope):
            for one in node.body:
                self._statement(one)
        elif isinstance(node, nodes.For) and self._is_list(node.iter):
            self._loop_over_messages(node)
        elif isinstance(node, nodes.Assign) and self._is_list(node.node):
            self._require(isinstance(node.target, nodes.Name))
        else:
            self._visit(node)

    def _loop_over_messages(self, node: nodes.For) -> None:
        """The only one; each round writes the piece of a message."""
        self._require(self._messages_loop is None and node.test is None and not node.recursive)
        self._visit(node.target)
        self._messages_loop = node
        with self._inside(node):
            for one in node.body:
                self._visit(one)
        for one in node.else_:
            self._visit(one)

    @contextmanager
    def _inside(self, loop: nodes.For) -> Iterator[None]:
        outer, self._loop = self._loop, loop
        yield
        self._loop = outer

    # -- everything else ----------------------------------------------------------------------------------------------

    def _visit(self, node: nodes.Node) -> None:
        self._require(not isinstance(node, UNKNOWN))
        if self._is_known(node):
            return
        match node:
            case nodes.Name():
                self._require(node.name not in self._lists and node.name not in STATEFUL)
                self._require(node.name != "loop" or self._loop is not self._messages_loop or self._loop is None)
            case nodes.Filter(name="random"):
                raise _NotProved
            case nodes.For():
                for one in (node.target, node.iter, *node.else_):
                    self._visit(one)
                with self._inside(node):
                    for one in [*node.body, *([node.test] if node.test else [])]:
                        self._visit(one)
            case nodes.Macro():
                with self._inside(nodes.For()):  # it has a loop of its own, or none
                    self._visit_children(node)
            case _:
                self._visit_children(node)

    def _visit_children(self, node: nodes.Node) -> None:
        for child in node.iter_child_nodes():
            self._visit(child)

    def _is_known(self, node: nodes.Node) -> bool:
        """Is this an expression over messages or the loop that is the same after the middle was taken out?"""
        match node:
            case nodes.Getitem(node=of, arg=nodes.Const(value=int(at))) if self._is_list(of):
                return 0 <= at < HEAD - self._num_skipped
            case nodes.Getitem(node=of, arg=nodes.Neg(node=nodes.Const(value=1))) if self._is_list(of):
                return self._messages_loop is not None and self._loop is None  # in the end
            case nodes.Getitem(node=of, arg=at) if self._is_list(of):
                return self._distance(at) <= REACH - self._num_skipped
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                return self._is_in_messages_loop and attr in LOOP_FACTS
            case nodes.Mod(left=left, right=nodes.Const(value=2)):
                return self._is_place(left)
            case nodes.Compare(expr=counted, ops=[nodes.Operand(expr=nodes.Const(value=int(count)))]):
                is_small = 0 <= count < HEAD - self._num_skipped
                return is_small and (self._is_place(counted) or self._is_length(counted))
            case _:
                return False

    @property
    def _is_in_messages_loop(self) -> bool:
        return self._loop is not None and self._loop is self._messages_loop

    def _is_place(self, node: nodes.Node) -> bool:
        """Is this the number of the message that the loop is at?"""
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                return self._is_in_messages_loop and attr in PLACES
            case _:
                return False

    def _is_length(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Filter) and node.name in ("length", "count") and self._is_list(node.node)

    def _distance(self, at: nodes.Node) -> int:
        """How far from the message that the loop is at, at most; too far, if that is not known."""
        match at:
            case nodes.Getattr(attr=attr) if self._is_place(at):
                return PLACES.index(attr)
            case (
                nodes.Add(left=left, right=nodes.Const(value=int(by)))
                | nodes.Sub(left=left, right=nodes.Const(value=int(by)))
            ):
                return self._distance(left) + abs(by)
            case _:
                return REACH + 1

    def _is_list(self, node: nodes.Node | None) -> bool:
        """Is this the list of all messages, or of all but the first ones?"""
        match node:
            case nodes.Name(name=name):
                return name in self._lists
            case nodes.Getitem(node=of, arg=nodes.Slice(start=nodes.Const(value=int(start)), stop=None, step=None)):
                return start == 1 and self._is_list(of)
            case _:
                return False
