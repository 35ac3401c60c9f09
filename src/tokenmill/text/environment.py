"""The jinja2 environment of chat templates: sandboxed, with what templates are written for (as in transformers).

A template is a program of a stranger's. It reaches nothing outside; and what it takes is bounded: processor time, which
its loops and calls look at, and the length of what it writes.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.errors import InvalidRequest
from tokenmill.text.guard import MOST_CHARS, Guard, guard_of, joined, plain_of

MOST_PRODUCT = 1 << 20
"""Characters or items that `*` may give, and bits that `**` may."""
MOST_CPU_S = 5.0
"""Of one rendering, on its thread: a busy machine makes no template slow. They take milliseconds as a rule."""
STEPS_PER_LOOK = 64
"""Iterations and calls between two looks at the clock."""
_STEPS, _UNTIL = "its steps", "its end"
"""Variables that no template can name: an iterator that is true when it is time to look, and the time it may run to."""


def compile_template(source: str) -> Template:
    """The template, or `InvalidRequest` if it is none."""
    try:
        template = _Environment().from_string(source)
        template.globals = dict(template.globals)  # it is copied for each rendering, which takes long for a ChainMap
        return template
    except Exception as error:  # jinja2 lets some others than its own through, RecursionError for one
        raise InvalidRequest(f"invalid chat template: {_one_line(error)}") from None


def parse_template(source: str) -> nodes.Template:
    """The template as a tree, or `InvalidRequest` if it is none."""
    try:
        return _Environment().parse(source)
    except Exception as error:
        raise InvalidRequest(f"invalid chat template: {_one_line(error)}") from None


def run_template(template: Template, variables: Mapping[str, Any]) -> str:
    """What the template writes. A template is a program: whatever goes wrong in it is `InvalidRequest`."""
    try:
        steps = itertools.cycle((False,) * (STEPS_PER_LOOK - 1) + (True,))
        return template.render({**variables, _STEPS: steps, _UNTIL: time.thread_time() + MOST_CPU_S})
    except InvalidRequest:
        raise
    except TemplateError as error:
        raise InvalidRequest(f"the chat template rejected the messages: {_one_line(error)}") from None
    except Exception as error:
        name = type(error).__name__
        raise InvalidRequest(f"the chat template failed: {name}: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _CodeGenerator(CodeGenerator):
    def writeline(self, x: str, node: nodes.Node | None = None, extra: int = 0) -> None:
        """Lets each iteration of a loop look at the clock, if it is time."""
        super().writeline(x, node, extra)
        if x == "_loop_vars = {}":  # with which the body of every loop begins
            super().writeline(f"if next(context.parent[{_STEPS!r}]): environment.check_time(context)")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja2's name)
        """`a ~ b`: guarded, if one of them is."""
        self.write("environment.concat(map(str, (")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write(")))")


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks answers for training, writes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's form)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Templates keep queues in lists of their own (`GivenList`s are the caller's)."""
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    @staticmethod
    def check_time(context: Context) -> None:
        if time.thread_time() > context.parent[_UNTIL]:
            raise TemplateError(f"it takes more than {MOST_CPU_S:g} s")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja2)
        """A macro, a function, a method, or a recursive loop."""
        if next(__context.parent[_STEPS]):
            __self.check_time(__context)
        return super().call(__context, __obj, *args, **kwargs)

    intercepted_binops = frozenset({"*", "**", "+"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A few characters of a template can ask for gigabytes: `'a' * 10**9`."""
        if _size_of(operator, left, right) > (MOST_CHARS if operator == "+" else MOST_PRODUCT):
            raise TemplateError(f"the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)

    concat = staticmethod(joined)
    """What macros, blocks and the template itself have written, as one text."""


def _size_of(operator: str, left: Any, right: Any) -> int:
    """Of a sum, a product or a power: characters, items or bits."""
    if operator == "+":
        return len(left) + len(right) if isinstance(left, str | list) and isinstance(right, str | list) else 0
    if operator == "**":
        return abs(left).bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
    if isinstance(right, str | list | tuple):
        left, right = right, left
    return len(left) * right if isinstance(left, str | list | tuple) and isinstance(right, int) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: plain JSON, without escapes for HTML. Guarded whole, if there is guarded text in it."""
    guards: list[Guard] = []
    text = json.dumps(
        _unguarded(value, guards),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return guards[0].text(text) if guards else text


def _unguarded(value: Any, guards: list[Guard]) -> Any:
    """The value with plain texts; the guards of those that were guarded are added to the list."""
    guard = guard_of(value)
    if guard is not None:
        guards.append(guard)
        return plain_of(value)
    if isinstance(value, dict):
        return {_unguarded(key, guards): _unguarded(one, guards) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_unguarded(one, guards) for one in value]
    return value


def _raise(message: str) -> None:
    raise TemplateError(message)
