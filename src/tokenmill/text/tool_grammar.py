"""Grammars of answers with tool calls and reasoning, in llguidance's Lark dialect.

Text is free up to the marker that opens a call; from there on, the format and the tool's JSON schema decide. If a call
is required, nothing else can be generated. Markers that are special tokens are written as token ids (`<[5]>`), which no
text can spell; others are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.contract import IntArray
from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams, StructuredOutputs
from tokenmill.text.grammar import audit_schema
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.tool_format import (
    ID_SLOT,
    INDEX_SLOT,
    CallFormat,
    JsonArguments,
    NamedArguments,
    Reasoning,
    TurnFormat,
    write_value,
)
from tokenmill.text.turn_parser import TurnPlan

MAX_REFERENCES = 16
"""From one reference to the next, in formats that spell values in their own way."""
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TEXT_BOUNDS = ("minLength", "maxLength", "pattern", "format")
UNSPELLED = ("allOf", "prefixItems", "additionalItems", "maxProperties", "patternProperties")
"""Keywords that are not enforced in formats that spell values in their own way."""
TAIL_TOKENS = 16
"""Of a prompt, in which the markers of thinking are looked for."""
REMARKS = frozenset({"title", "description", "examples", "default", "$comment", "$schema", "$id"})
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
CHARS_PER_TOKEN, MAX_THINKING_CHARS = 4, 20_000
"""For thinking budgets where tokens can't be counted; llguidance counts characters up to about this many."""


@dataclass(frozen=True)
class Tool:
    """A function that may be called."""

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)
    """Of its arguments."""

    @property
    def closed_schema(self) -> dict[str, Any]:
        """Its schema without remarks; what is not declared is not allowed, unless the schema says otherwise."""
        schema = {"type": "object", **_without_remarks(self.schema)}
        return {"additionalProperties": False, **schema} if "properties" in schema else schema


def _without_remarks(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without what is only for its readers."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in REMARKS:
            continue
        if key in NAMED_SCHEMAS and isinstance(value, Mapping):
            value = {name: _without_remarks(one) if isinstance(one, Mapping) else one for name, one in value.items()}
        elif isinstance(value, Mapping) and key not in ("const", "default"):
            value = _without_remarks(value)
        elif isinstance(value, list) and key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            value = [_without_remarks(one) if isinstance(one, Mapping) else one for one in value]
        found[key] = value
    return found


@dataclass(frozen=True)
class ToolUse:
    """The functions that a request may call."""

    tools: tuple[Tool, ...] = ()
    required: bool = False
    """Must the answer be a call?"""
    parallel: bool = True
    """May it be several?"""


def plan_turn(
    form: TurnFormat,
    tokenizer: Tokenizer,
    prompt: Sequence[int] | IntArray,
    params: SamplingParams,
    use: ToolUse,
    thinking_budget: int | None = None,
    markers: Callable[[Iterable[str]], Mapping[str, int]] = lambda _: {},
) -> tuple[SamplingParams, TurnPlan]:
    """The parameters with the grammar of the turn, and how the turn is read.

    The end of the prompt tells whether the model is to think first. A constraint that the parameters have already
    applies to the answer, after the thinking. `markers` tells which markers are tokens to a grammar, beyond the
    tokenizer's special tokens.
    """
    reasoning = form.reasoning
    tail = tokenizer.decode(list(prompt[-TAIL_TOKENS:]), skip_special=False).rstrip() if reasoning is not None else ""
    is_open = reasoning is not None and tail.endswith(reasoning.opening)
    reasons = form.is_harmony or (reasoning is not None and not tail.endswith(reasoning.closing))
    plan = TurnPlan(form, {tool.name: tool.schema for tool in use.tools}, starts_in_reasoning=is_open)
    outputs = params.structured_outputs
    budget = thinking_budget if reasons else None
    if not use.tools and budget is None and (outputs is None or not reasons):
        return params, plan
    for tool in use.tools:
        _audit(tool)
    closing = () if reasoning is None else tokenizer.encode_template(reasoning.closing)
    grammar = turn_grammar(
        form,
        {**tokenizer.special_tokens, **markers(form.markers)},
        use.tools,
        required=use.required,
        parallel=use.parallel,
        starts_in_reasoning=is_open,
        reasons=reasons,
        thinking_budget=budget,
        closing_id=closing[0] if len(closing) == 1 else None,
        answer=None if outputs is None else _as_rule(outputs),
    )
    flexible = outputs is not None and outputs.any_whitespace
    return replace(params, structured_outputs=StructuredOutputs(grammar=grammar, any_whitespace=flexible)), plan


def _audit(tool: Tool) -> None:
    """Raise `InvalidRequest` if a tool's schema says what a grammar can't enforce."""
    try:
        audit_schema("grammar", tool.closed_schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"tools: {tool.name}: {str(error).split(': ', 1)[-1]}", param="tools") from None


def _as_rule(outputs: StructuredOutputs) -> str:
    """A constraint on the answer as the right side of a Lark rule."""
    if outputs.json is not None:
        return f"%json {outputs.json}"
    if outputs.json_object:
        return '%json {"type": "object"}'
    if outputs.choice is not None:
        return " | ".join(map(_quoted, outputs.choice))
    if outputs.regex is not None:
        return f"/{_slashed(outputs.regex)}/"
    what = f"structured_outputs.{outputs.kind} cannot be combined with tools or reasoning"
    raise InvalidRequest(f"{what}; use json, regex or choice", param="structured_outputs")


def turn_grammar(
    form: TurnFormat,
    special: Mapping[str, int],
    tools: Sequence[Tool] = (),
    *,
    required: bool = False,
    parallel: bool = True,
    starts_in_reasoning: bool = False,
    reasons: bool = True,
    thinking_budget: int | None = None,
    closing_id: int | None = None,
    answer: str | None = None,
) -> str:
    """The grammar of a turn. `special`: ids of special tokens by their text.

    `answer`: what the answer must be instead of free text, as the right side of a Lark rule. `reasons`: may the model
    think before it answers? `thinking_budget`: for how many tokens at most. They are counted if the marker that ends
    reasoning is one token, `closing_id`; else a token counts as four characters.
    """
    return _Grammar(special).turn(
        form,
        tools,
        required=required,
        parallel=parallel,
        starts_in_reasoning=starts_in_reasoning,
        reasons=reasons,
        thinking_budget=thinking_budget,
        closing_id=closing_id,
        answer=answer,
    )


class _Grammar:
    """Rules as they are found to be needed."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if special else None
        self._rules: dict[str, str] = {}

    def turn(
        self,
        form: TurnFormat,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        starts_in_reasoning: bool,
        reasons: bool,
        thinking_budget: int | None,
        closing_id: int | None,
        answer: str | None,
    ) -> str:
        if form.calls is None:
            start = self._harmony(tools, required=required, budget=thinking_budget, answer=answer)
        else:
            body = self._body(form.calls, tools, required=required, parallel=parallel, answer=answer)
            thinking = ""
            if form.reasoning is not None and reasons:
                thinking = self._thinking(form.reasoning, thinking_budget, closing_id, is_open=starts_in_reasoning)
            start = f"{thinking} {body}".strip()
        rules = "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())
        return f"%llguidance {{}}\nstart: {start}\n{rules}\n"

    # -- texts --------------------------------------------------------------------------------------------------------

    def _literal(self, text: str) -> str:
        """A text that must come as it is; special tokens in it are tokens, and slots are what may fill them."""
        pieces: list[str] = []
        at = 0
        for found in self._pattern.finditer(text) if self._pattern is not None else ():
            pieces += self._plain(text[at : found.start()])
            pieces.append(f"<[{self._special[found.group()]}]>")
            at = found.end()
        return " ".join([*pieces, *self._plain(text[at:])])

    @staticmethod
    def _plain(text: str) -> list[str]:
        slots = {ID_SLOT: "/[a-zA-Z0-9]{9}/", INDEX_SLOT: "/[0-9]+/"}
        pieces = re.split(f"([{ID_SLOT}{INDEX_SLOT}])", text)
        return [slots.get(piece, _quoted(piece)) for piece in pieces if piece]

    def _text(self) -> str:
        return self._rule("TEXT", r"/(.|\n)*/")

    def _rule(self, name: str, rule: str) -> str:
        self._rules[name] = rule
        return name.split("[")[0]

    def _bounded_text(self, name: str, marker: str, bounds: Sequence[str]) -> str:
        """Text that ends with a marker and matches all of these regular expressions."""
        token = None if self._pattern is None else self._pattern.search(marker)
        if token is not None:
            value = self._rule(f"{name.upper()}_VALUE", " & ".join(bounds))
            if token.start():  # one terminal: two would not know where the first ends
                value = self._rule(name.upper(), f"{value} {_quoted(marker[: token.start()])}")
            return f"{value} {self._literal(marker[token.start() :])}"
        # It can't contain the marker, not even where it would be too short without.
        without = "~/" + _slashed(f"(?s:.*){_regex_of(marker)}(?s:.*)") + "/"
        value = self._rule(f"{name.upper()}_VALUE", " & ".join((*bounds, without)))
        return self._rule(f"{name}[lazy]", f"{value} {_quoted(marker)}")

    def _text_up_to(self, name: str, marker: str) -> str:
        """Free text that ends with a marker."""
        text = self._text()
        token = None if self._pattern is None else self._pattern.search(marker)
        if token is not None:  # what is before it is part of the text
            return f"{text} {self._literal(marker[token.start() :])}"
        return self._rule(f"{name}[lazy]", f"{text} {_quoted(marker)}")

    # -- turns --------------------------------------------------------------------------------------------------------

    def _thinking(self, reasoning: Reasoning, budget: int | None, closing_id: int | None, *, is_open: bool) -> str:
        if budget is None:
            thought = self._text_up_to("thinking", reasoning.closing)
        elif closing_id is not None:
            others = ",".join(map(str, sorted({*self._special.values(), closing_id})))
            thought = f"<[^{others}]>{{0,{budget}}} <[{closing_id}]>"
        else:
            most = min(CHARS_PER_TOKEN * budget, MAX_THINKING_CHARS)
            thought = self._rule("thinking[lazy]", rf"/(.|\n){{0,{most}}}/ {_quoted(reasoning.closing)}")
        space = r"/[ \n]{0,4}/"
        if is_open:
            return f"{thought} {space}"
        return f"({self._literal(reasoning.opening)} {thought} {space})?"

    def _body(
        self, calls: CallFormat, tools: Sequence[Tool], *, required: bool, parallel: bool, answer: str | None
    ) -> str:
        """What follows the reasoning."""
        free = self._text() if answer is None else self._rule("answer", answer)
        if not tools:
            return free
        more = parallel and calls.separator is not None
        call = self._rule("call", " | ".join(self._call(calls, tool, place) for place, tool in enumerate(tools)))
        head, separator = self._literal(calls.head), self._literal(calls.separator or "")
        several = f"{call} ({separator} {head} {call})*" if more else call
        closing = self._literal(calls.closing)
        trigger = calls.trigger
        if required:
            return f"{self._literal(calls.opening + calls.head)} {several} {closing}"
        section = self._literal((calls.opening + calls.head)[len(trigger or "") :])
        if answer is not None:
            return f"({free} | {self._literal(trigger or '')} {section} {several} {closing})"
        if trigger is None:
            first = (calls.opening + calls.head)[0]
            text = self._rule("PLAIN", rf"/([^{re.escape(first)}](.|\n)*)?/")
            return f"({text} | {self._literal(first)} {self._rest(calls, first)} {several} {closing})"
        opened = self._text_up_to("opened", trigger)
        # Where calls are listed within a section, the section has all of them; else each may follow some text.
        if not more or calls.is_list:
            return f"({opened} {section} {several} {closing} | {free})"
        return f"({opened} {section} {call} {closing})* {free}"

    def _rest(self, calls: CallFormat, first: str) -> str:
        return self._literal((calls.opening + calls.head)[len(first) :])

    def _call(self, calls: CallFormat, tool: Tool, place: int) -> str:
        """A call from the name on."""
        arguments = self._arguments(calls.arguments, tool, place)
        rule = f"{self._literal(tool.name + calls.name_end)} {arguments} {self._literal(calls.tail)}"
        return self._rule(f"call_{place}", rule)

    def _arguments(self, style: JsonArguments | NamedArguments, tool: Tool, place: int) -> str:
        if isinstance(style, JsonArguments):
            return _json(tool.closed_schema, style)
        return _Values(self, style, tool, place).arguments()

    def _harmony(self, tools: Sequence[Tool], *, required: bool, budget: int | None, answer: str | None) -> str:
        """Messages: analysis any number of times, then a call or the final answer."""
        text = self._text()
        message, end = self._literal("<|message|>"), self._literal("<|end|><|start|>assistant")
        channel = self._literal("<|channel|>")
        thought = text if budget is None else self._rule(f"thinking[max_tokens={budget}]", "TEXT")
        analysis = self._rule("analysis", f'{channel} "analysis" {message} {thought} {end}')
        said = text if answer is None else self._rule("answer", answer)
        final = self._rule("final", f'{channel} "final" {message} {said}')
        if not tools:
            return f"{analysis}* {final}"
        constrain = self._literal("<|constrain|>")
        kind = f'({constrain} "json" | " json")' if constrain.startswith("<") else '" json"'
        calls = []
        for place, tool in enumerate(tools):
            to = _quoted(f"to=functions.{tool.name}")
            body = f"{message} {_json(tool.closed_schema, JsonArguments())}"
            head = f'(" " {to} {channel} "commentary" {kind}? | {channel} "commentary " {to} (" " {kind})?)'
            calls.append(self._rule(f"call_{place}", f"{head} {body}"))
        call = self._rule("call", " | ".join(calls))
        preamble = self._rule("preamble", f'{channel} "commentary" {message} {text} {end}')
        return f"({analysis} | {preamble})* {call if required else f'({call} | {final})'}"


class _Values:
    """Arguments one by one, each spelled in the way of the format."""

    def __init__(self, grammar: _Grammar, style: NamedArguments, tool: Tool, place: int) -> None:
        self._grammar = grammar
        self._style = style
        self._tool = tool
        self._schema = tool.closed_schema
        self._prefix = f"v{place}"
        self._count = 0
        self._references: dict[str, str] = {}
        """Rules of what the schema refers to, which may refer to itself."""

    def arguments(self) -> str:
        """Declared ones in their order, optional ones or not; without any declared, all are allowed."""
        declared = self._schema.get("properties")
        if not isinstance(declared, Mapping):
            declared = {}
        if not declared and self._schema.get("additionalProperties", True) is False:
            return ""
        if not declared:
            key, others = "/[a-zA-Z_][a-zA-Z0-9_]*/", self._schema.get("additionalProperties", {})
            self._check(self._schema)
            one = self._rule(f"{self._around(key)} {self._top(others)}")
            return self._joined([(one, False)], repeat=True)
        required = set(self._schema.get("required") or ())
        pairs = [
            (self._rule(f"{self._around(self._literal(name))} {self._top(schema)}"), name in required)
            for name, schema in declared.items()
        ]
        return self._joined(pairs)

    def _around(self, key: str) -> str:
        return f"{self._literal(self._style.head)} {key} {self._literal(self._style.key_end)}".strip()

    def _joined(self, pairs: Sequence[tuple[str, bool]], *, repeat: bool = False) -> str:
        """Members in their order with separators between those that are there."""
        separator = self._literal(self._style.separator)
        if repeat:
            one = pairs[0][0]
            return f"({one} ({separator} {one})*)?"
        if not separator:
            return " ".join(one if is_required else f"{one}?" for one, is_required in pairs)
        return self._members(pairs, separator)

    def _members(self, pairs: Sequence[tuple[str, bool]], separator: str) -> str:
        """`rest` after a member begins with a separator; before the first member there is none."""
        after = ""
        for one, is_required in reversed(pairs[1:]):
            member = f"{separator} {one}"
            after = self._rule(f"{member} {after}" if is_required else f"({member})? {after}")
        options = []
        rest = after
        for place, (one, is_required) in enumerate(pairs):
            if place:
                rest = self._after(pairs[place + 1 :], separator)
            options.append(f"{one} {rest}".strip())
            if is_required:
                return self._rule(" | ".join(options))
        return f"({self._rule(' | '.join(options))})?"

    def _after(self, pairs: Sequence[tuple[str, bool]], separator: str) -> str:
        return " ".join(f"{separator} {one}" if needed else f"({separator} {one})?" for one, needed in pairs)

    def _top(self, schema: Any) -> str:
        """The value of an argument and what ends it."""
        style = self._style
        tail = self._literal(style.tail)
        if not style.is_verbatim:
            return f"{self._value(schema)} {tail}".strip()
        schema = self._resolved(schema)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return f"({' | '.join(self._literal(write_value(style, value)) for value in values)}) {tail}"
        kinds = _types(schema)
        if kinds == {"boolean"}:
            return f"({self._words(style.true, style.false)}) {tail}"
        if not kinds or "string" in kinds:
            self._check(schema)
            if kinds != {"string"}:  # without quotes, a text looks like any other value
                self._reject(schema, (*TEXT_BOUNDS, *NUMBER_BOUNDS))
            return self._text(schema, style.tail)
        shared: dict[str, Any] = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        return f"{_json({**schema, **shared}, JsonArguments())} {tail}"

    def _words(self, *words: str) -> str:
        return " | ".join(map(_quoted, words))

    def _text(self, schema: Mapping[str, Any], marker: str) -> str:
        """A text without quotes and escapes, up to a marker."""
        self._reject(schema, ("format",))
        self._count += 1
        name, bounds = f"{self._prefix}_{self._count}", []
        if "minLength" in schema or "maxLength" in schema:
            bounds.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
        if isinstance(schema.get("pattern"), str):
            pattern = schema["pattern"]
            before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if pattern.endswith("$") else "(?s:.*)"
            bounds.append(f"/{before}(?:{_slashed(pattern.removeprefix('^').removesuffix('$'))}){after}/")
        if not bounds:
            return self._grammar._text_up_to(name, marker)
        return self._grammar._bounded_text(name, marker, bounds)

    def _check(self, schema: Mapping[str, Any]) -> None:
        self._reject(schema, UNSPELLED)

    def _reject(self, schema: Mapping[str, Any], keywords: Iterable[str]) -> None:
        found = next((keyword for keyword in keywords if keyword in schema), None)
        if found is not None:
            what = f"the keyword {found} is not supported where a model writes arguments one by one, as this one does"
            raise InvalidRequest(f"tools: {self._tool.name}: {what}", param="tools")

    def _value(self, schema: Any) -> str:
        """A value with quotes and brackets of the format's own."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str) and reference.startswith("#/"):
            if reference not in self._references:
                self._count += 1
                name = self._references[reference] = f"{self._prefix}_{self._count}"
                self._grammar._rule(name, self._value_of(self._resolved(schema)))
            return self._references[reference]
        return self._value_of(schema if isinstance(schema, Mapping) else {})

    def _value_of(self, schema: Mapping[str, Any]) -> str:
        self._check(schema)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return f"({' | '.join(self._literal(write_value(self._style, value, nested=True)) for value in values)})"
        several = schema.get("anyOf") or schema.get("oneOf")
        if several:
            return f"({' | '.join(self._value(one) for one in several)})"
        kinds = _types(schema)
        if not kinds:
            self._reject(schema, (*TEXT_BOUNDS, *NUMBER_BOUNDS, "items", "minItems", "maxItems"))
            return self._any()
        return f"({' | '.join(self._of_kind(kind, schema) for kind in sorted(kinds))})"

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        style = self._style
        comma = "," if style.bare_keys else ", "
        match kind:
            case "string":
                return self._string(schema)
            case "boolean":
                return self._words(style.true, style.false)
            case "null":
                return _quoted(style.null)
            case "integer" | "number":
                bounds = {keyword: schema[keyword] for keyword in NUMBER_BOUNDS if keyword in schema}
                if bounds:
                    return _json({"type": kind, **bounds}, JsonArguments())
                if kind == "integer":
                    return self._grammar._rule("INTEGER", "/-?(0|[1-9][0-9]*)/")
                return self._grammar._rule("NUMBER", r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/")
            case "array":
                return self._array(schema, _quoted(comma))
            case "object" if isinstance(schema.get("properties"), Mapping) and schema["properties"]:
                colon = ":" if style.bare_keys else ": "
                needed = set(schema.get("required") or ())
                pairs = [
                    (self._rule(f"{self._key(name)} {_quoted(colon)} {self._value(one)}"), name in needed)
                    for name, one in schema["properties"].items()
                ]
                return f'"{{" {self._members(pairs, _quoted(comma))} "}}"'
            case _:
                if isinstance(schema.get("additionalProperties"), Mapping):
                    self._reject(schema, ("additionalProperties",))
                return self._any_object()

    def _array(self, schema: Mapping[str, Any], comma: str) -> str:
        item = self._rule(self._value(schema.get("items", {})))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = "" if most is None else most - 1
        items = f"{item} ({comma} {item}){{{max(least - 1, 0)},{more}}}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _key(self, name: str) -> str:
        return self._literal(name if self._style.bare_keys else write_value(self._style, name, nested=True))

    def _string(self, schema: Mapping[str, Any] | None = None) -> str:
        style = self._style
        bounds = {keyword: schema[keyword] for keyword in TEXT_BOUNDS if keyword in schema} if schema else {}
        if bounds and style.is_escaped:
            return _json({"type": "string", **bounds}, JsonArguments())
        if bounds:
            return f"{self._literal(style.string_open)} {self._text(bounds, style.string_close)}"
        if style.is_escaped:
            return self._grammar._rule("STRING", r'/"([^"\\\n]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"/')
        return f"{self._literal(style.string_open)} {self._grammar._text_up_to('string', style.string_close)}"

    def _any(self) -> str:
        """Any value."""
        rule = self._grammar._rule
        if "value" not in self._grammar._rules:
            self._grammar._rules["value"] = ""
            style = self._style
            comma = _quoted("," if style.bare_keys else ", ")
            words = self._words(style.true, style.false, style.null)
            number = rule("NUMBER", r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/")
            items = f'"[" (value ({comma} value)*)? "]"'
            self._grammar._rules["value"] = f"{self._string()} | {number} | {words} | {items} | {self._any_object()}"
        return "value"

    def _any_object(self) -> str:
        style = self._style
        comma, colon = (",", ":") if style.bare_keys else (", ", ": ")
        key = "/[a-zA-Z_][a-zA-Z0-9_]*/" if style.bare_keys else self._string()
        pair = f"{key} {_quoted(colon)} {self._any()}"
        return f'"{{" ({pair} ({_quoted(comma)} {pair})*)? "}}"'

    def _resolved(self, schema: Any, depth: int = 0) -> Mapping[str, Any]:
        """The schema that a reference stands for."""
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/") or depth > MAX_REFERENCES:
            return schema
        found: Any = self._schema
        for name in reference[2:].split("/"):
            found = found.get(name, {}) if isinstance(found, Mapping) else {}
        return self._resolved(found, depth + 1)

    def _literal(self, text: str) -> str:
        return self._grammar._literal(text)

    def _rule(self, rule: str) -> str:
        self._count += 1
        return self._grammar._rule(f"{self._prefix}_{self._count}", rule)


def _types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return set(kind)
    several = schema.get("anyOf") or schema.get("oneOf")
    if several and all(isinstance(one, Mapping) and "type" in one for one in several):
        return set().union(*map(_types, several))
    return {"object"} if "properties" in schema else set()


def _json(schema: Mapping[str, Any], style: JsonArguments) -> str:
    """A JSON value, with the separators that the template writes."""
    guidance = {"item_separator": style.item_separator, "key_separator": style.key_separator}
    return "%json " + json.dumps({**schema, "x-guidance": guidance})


def _slashed(expression: str) -> str:
    """A regular expression as Lark has it between slashes."""
    return re.sub(r"(?<!\\)/", r"\/", expression)


def _regex_of(text: str) -> str:
    """A regular expression that matches this text alone."""
    return re.sub(r"[^\w\s<>]", r"\\\g<0>", text).replace("\n", r"\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
