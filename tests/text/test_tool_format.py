"""Tool calls and reasoning: derived from templates, parsed at every split, accepted by the grammar."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.tool_templates import HARMONY, PLAIN, WRITTEN, stored_templates
from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams, StructuredOutputs
from tokenmill.text.delta import DeltaRenderer
from tokenmill.text.grammar import grammar_source
from tokenmill.text.template import ChatTemplate
from tokenmill.text.tokenizer import ByteTokenizer
from tokenmill.text.tool_format import ID_SLOT, NAMED, CallFormat, JsonArguments, NamedArguments, TurnFormat
from tokenmill.text.tool_grammar import Tool, ToolUse, plan_turn, turn_grammar
from tokenmill.text.turn_parser import ParsedTurn, open_parser

STORED = stored_templates()
EXPECTED = {"gpt-oss": "harmony", "LFM2": "lfm2", "SmolLM3": "generic"}
"""Of the stored templates, those that are not derived."""
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "options": {
                "type": "object",
                "properties": {
                    "hours": {"type": "array", "items": {"type": "number"}},
                    "unit": {"type": "string"},
                },
                "required": ["hours"],
            },
            "verbose": {"type": "boolean"},
        },
        "required": ["city"],
    },
)
PING = Tool("ping", {"type": "object", "properties": {}})
TOOLS = [WEATHER, PING]
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
Calls = Sequence[tuple[str, dict[str, Any]]]
NESTED: Calls = [
    (
        "get_weather",
        {"city": 'Zürich "東京" 😀', "days": -3, "options": {"hours": [1, 2.5], "unit": "a, }b"}, "verbose": True},
    )
]
CASES: dict[str, Calls] = {
    "nested": NESTED,
    "no arguments": [("ping", {})],
    "several": [*NESTED, ("ping", {}), ("get_weather", {"city": "two\nlines"})],
}


def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source, ByteTokenizer(), {"bos_token": "<s>", "eos_token": "</s>"})


@cache
def _format_of(name: str) -> tuple[ChatTemplate, TurnFormat]:
    template = _template({**WRITTEN, **STORED, "harmony": HARMONY, "no tools": PLAIN}[name])
    return template, template.turn_format


def _message(calls: Calls, content: str | None = None) -> dict[str, Any]:
    made = [
        {
            "id": f"call{place:05d}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


DECLARED = [
    {"type": "function", "function": {"name": tool.name, "description": "a tool", "parameters": dict(tool.schema)}}
    for tool in TOOLS
]
for _field in ("city", "days", "options", "verbose"):  # some templates need them
    DECLARED[0]["function"]["parameters"]["properties"][_field]["description"] = "a field"  # type: ignore[index]


def _rendered_turn(template: ChatTemplate, calls: Calls, content: str | None = None) -> str:
    """What the template writes for a past turn, from where the model's part of it begins."""
    question = {"role": "user", "content": "hello"}
    options = {"tools": DECLARED, "add_generation_prompt": False}
    before = template.render([question], **options)
    text = template.render([question, _message(calls, content)], **options)
    assert text.startswith(before)
    return text[len(before) :]


def _parsed(form: TurnFormat, pieces: Iterator[str] | Sequence[str]) -> ParsedTurn:
    parser = open_parser(form, SCHEMAS, new_id=lambda: "id")
    parts = [part for piece in pieces for part in parser.push(piece)]
    return ParsedTurn.of([*parts, *parser.close()])


def _calls_of(turn: ParsedTurn) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


def _check_every_split(form: TurnFormat, text: str) -> ParsedTurn:
    """The same, cut once at any place and cut everywhere."""
    whole = _parsed(form, [text])
    assert _parsed(form, iter(text)) == whole
    for at in range(1, len(text)):
        assert _parsed(form, [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    return whole


class _Bytes:
    """A vocabulary of bytes, with some special tokens."""

    bos_token_id = None

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.tokens = [*(bytes([i]) for i in range(256)), *(text.encode() for text in special), b"<eos>"]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


BYTES = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def _accepts(grammar: str, text: str | Sequence[int], tokenizer: llguidance.LLTokenizer = BYTES) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, grammar_source(StructuredOutputs(grammar=grammar)))
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode()) if isinstance(text, str) else list(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


DERIVED = [*WRITTEN, *(name for name in STORED if not any(part in name for part in EXPECTED))]


def _calls_format(name: str) -> CallFormat:
    calls = _format_of(name)[1].calls
    assert calls is not None
    return calls


def _allows(name: str, case: str) -> bool:
    """Some templates allow one call in a turn."""
    return len(CASES[case]) == 1 or _calls_format(name).separator is not None


IN_TEXT = [name for name in DERIVED if _calls_format(name).trigger is not None]
"""Where calls may follow text."""
BY_THEMSELVES = [name for name in IN_TEXT if not _calls_format(name).is_list]
"""Where text may stand between two of them."""


@pytest.mark.parametrize("name", DERIVED)
def test_the_format_is_derived(name: str) -> None:
    assert _format_of(name)[1].name == "derived"


def test_at_least_11_of_16_stored_templates_are_derived_and_the_others_have_a_name() -> None:
    names = {name: _format_of(name)[1].name for name in STORED}
    assert sum(one == "derived" for one in names.values()) >= len(STORED) * 11 // 16
    others = {name: form for name, form in names.items() if form != "derived"}
    assert all(EXPECTED[next(part for part in EXPECTED if part in name)] == form for name, form in others.items())


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in DERIVED for case in CASES if _allows(name, case)])
def test_a_past_call_and_a_generated_one_parse_to_the_same_at_every_split(name: str, case: str) -> None:
    template, form = _format_of(name)
    calls = CASES[case]
    assert form.calls is not None
    rendered, written = _rendered_turn(template, calls), form.calls.write(calls)
    assert written in rendered or "dictsort" in template.source or "compact" in name
    for text in (rendered[rendered.index(form.calls.opening + form.calls.head) :], written):
        assert _calls_of(_check_every_split(form, text)) == list(calls)
    for is_required in (True, False):
        assert _accepts(turn_grammar(form, {}, TOOLS, required=is_required), written)


@pytest.mark.parametrize("name", IN_TEXT)
def test_text_before_a_call_is_content(name: str) -> None:
    _, form = _format_of(name)
    assert form.calls is not None
    text = "Let me see <b>now</b>.\n" + form.calls.write(CASES["nested"])
    turn = _check_every_split(form, text)
    assert (turn.content, _calls_of(turn)) == ("Let me see <b>now</b>.", list(NESTED))
    assert _accepts(turn_grammar(form, {}, TOOLS), text)


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_text_between_calls_is_content_too(name: str) -> None:
    _, form = _format_of(name)
    calls = _calls_format(name)
    text = f"First.\n{calls.write(CASES['nested'])}\nSecond. {calls.write(CASES['no arguments'])}\n"
    turn = _check_every_split(form, text)
    assert (turn.content, _calls_of(turn)) == ("First.\nSecond.", [*NESTED, ("ping", {})])
    assert _accepts(turn_grammar(form, {}, TOOLS), text)


@pytest.mark.parametrize("name", [*DERIVED, *NAMED])
def test_an_answer_that_is_cut_has_no_markup_in_its_content(name: str) -> None:
    """Wherever it ends: half an opening, of the first call or another, is neither content nor a call."""
    form = NAMED[name] if name in NAMED else _format_of(name)[1]
    said, several = "Let me see.", list(CASES["several"])
    if form.calls is None:
        end, head = "<|end|><|start|>assistant", "<|channel|>commentary to=functions"
        text = f"<|channel|>final<|message|>{said}{end}"
        text += end.join(f"{head}.{one}<|message|>{json.dumps(given)}" for one, given in several)
    else:
        said = said if form.calls.trigger is not None else ""
        text = said + form.calls.write(several if form.calls.separator is not None else several[:1])
    for count in range(1, len(text) + 1):
        parser = open_parser(form, SCHEMAS)
        turn = ParsedTurn.of([*parser.push(text[:count]), *parser.close(is_cut=True)])
        assert said.startswith(turn.content), text[:count]
        assert all(call.name in SCHEMAS for call in turn.calls)
    assert turn.content == said
    assert _calls_of(turn) == several[: len(turn.calls)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9999, 9999) | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
JSON_FORMATS = [
    name for name in DERIVED if isinstance(getattr(_format_of(name)[1].calls, "arguments", None), JsonArguments)
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(JSON_FORMATS),
    arguments=st.lists(st.dictionaries(st.text(max_size=6), VALUES, max_size=3), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_any_arguments_cut_anywhere(name: str, arguments: list[dict[str, Any]], cuts: list[int]) -> None:
    _, form = _format_of(name)
    assert form.calls is not None
    if form.calls.separator is None:  # one call in a turn
        arguments = arguments[:1]
    calls = [("get_weather", one) for one in arguments]
    text = form.calls.write(calls)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    turn = _parsed(form, pieces)
    assert _calls_of(turn) == calls
    assert not turn.content


@pytest.mark.parametrize("name", ["harmony", *(name for name in STORED if "gpt-oss" in name)])
def test_harmony(name: str) -> None:
    template, form = _format_of(name)
    assert form.name == "harmony"
    rendered = _rendered_turn(template, CASES["nested"]).removeprefix("<|start|>assistant")
    thought = "<|channel|>analysis<|message|>hm, <b><|end|><|start|>assistant"
    for call in (rendered, rendered.removesuffix("<|call|>")):
        turn = _check_every_split(form, thought + call)
        assert (turn.content, turn.reasoning, _calls_of(turn)) == ("", "hm, <b>", list(NESTED))
    turn = _check_every_split(form, f"{thought}<|channel|>final<|message|>The <|answer<|return|>")
    assert turn == ParsedTurn("The <|answer", "hm, <b>")
    call = thought + rendered.removesuffix("<|call|>")
    for is_required in (True, False):
        grammar = turn_grammar(form, {}, TOOLS, required=is_required)
        assert _accepts(grammar, rendered.removesuffix("<|call|>"))
        assert not _accepts(grammar, rendered.removesuffix("<|call|>").replace("get_weather", "other"))
    special = sorted({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"})
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(special)))
    places = {text: 256 + place for place, text in enumerate(special)}
    assert _accepts(turn_grammar(form, places, TOOLS, required=True), _encoded(call, places), tokenizer)


def _encoded(text: str, special: dict[str, int]) -> list[int]:
    ids: list[int] = []
    while text:
        found = next((one for one in special if text.startswith(one)), None)
        ids += [special[found]] if found else text[0].encode()
        text = text[len(found or " ") :]
    return ids


@pytest.mark.parametrize("name", [name for name, form in NAMED.items() if not form.is_harmony])
def test_named_formats_read_what_they_write(name: str) -> None:
    form = NAMED[name]
    assert form.calls is not None
    for calls in CASES.values():
        text = form.calls.write(calls)
        assert _calls_of(_check_every_split(form, text)) == list(calls)
        assert _accepts(turn_grammar(form, {}, TOOLS, required=True), text)


@pytest.mark.parametrize("name", [name for name in DERIVED if ID_SLOT in "".join(_calls_format(name).texts)])
def test_ids_that_the_model_writes_are_the_calls(name: str) -> None:
    _, form = _format_of(name)
    ids = ["a1b2c3d4e", "f6g7h8i9j"]
    text = _calls_format(name).write([("ping", {}), ("ping", {})], ids)
    assert [call.call_id for call in _check_every_split(form, text).calls] == ids


def test_markers_are_not_cut() -> None:
    """They may be special tokens."""
    arguments = _calls_format("tags around parameters").arguments
    assert isinstance(arguments, NamedArguments)
    assert (arguments.head, arguments.tail) == ("\n<parameter=", "\n</parameter>")


def test_whitespace_may_differ_from_the_template_s() -> None:
    _, form = _format_of("tagged JSON")
    turn = _check_every_split(form, '<tool_call>{"name":"ping","arguments":{ }}</tool_call>')
    assert _calls_of(turn) == [("ping", {})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call> is a tag",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        "a < b, <tool",
        "\n x ",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    _, form = _format_of("tagged JSON")
    assert _check_every_split(form, text) == ParsedTurn(text)


LONG_CHARS = 100_000
HOSTILE = {
    "braces": "{" * LONG_CHARS,
    "calls that begin": "<tool_call>" * (LONG_CHARS // 11),
    "a call that never ends": '<tool_call>\n{"name": "ping", "arguments": {"a": "' + "\\" * LONG_CHARS,
    "a call of braces": '<tool_call>\n{"name": "ping", "arguments": ' + '{"a":' * (LONG_CHARS // 5),
    "beginnings of markers": "<tool_cal" * (LONG_CHARS // 9),
    "quotes of other kinds": "<tool_call>\n{“name”: “ping”" * (LONG_CHARS // 26),
}


@pytest.mark.fault("T07")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_is_parsed_in_linear_time(case: str) -> None:
    """Token by token. Were the cost of a token in proportion to what came before, it would take many minutes."""
    _, form = _format_of("tagged JSON")
    text = HOSTILE[case]
    began = time.process_time()
    turn = _parsed(form, (text[at : at + 4] for at in range(0, len(text), 4)))
    assert time.process_time() - began < 20
    if "a call" not in case:
        assert turn == ParsedTurn(text)


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    _, form = _format_of("tagged JSON")
    turn = _check_every_split(form, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zür')
    assert [(call.name, call.arguments) for call in turn.calls] == [("get_weather", '{"city": "Zür')]


@pytest.mark.parametrize("name", DERIVED)
def test_the_grammar_holds_calls_to_their_schemas(name: str) -> None:
    _, form = _format_of(name)
    assert form.calls is not None
    required = turn_grammar(form, {}, TOOLS, required=True)
    assert not _accepts(required, "Hello")
    for calls in ([("other", {})], [("get_weather", {"days": 1})], [("ping", {"x": 1})]):
        assert not _accepts(required, form.calls.write(calls)), calls
    assert not _accepts(turn_grammar(form, {}, [PING], required=True), form.calls.write(NESTED))
    several = form.calls.write([("ping", {}), ("ping", {})])
    assert _accepts(required, several) == (form.calls.separator is not None)
    assert not _accepts(turn_grammar(form, {}, TOOLS, required=True, parallel=False), several)
    assert not _accepts(turn_grammar(form, {}, TOOLS, parallel=False), several)
    assert _accepts(turn_grammar(form, {}, TOOLS), "Hello there")


def test_markers_that_are_special_tokens_are_tokens_in_the_grammar() -> None:
    _, form = _format_of("a section")
    assert form.calls is not None
    special = {"<|calls|>": 256, "<|call|>": 257, "<|sep|>": 258, "<|/call|>": 259, "<|/calls|>": 260}
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes([*special])))
    text = "Well. " + form.calls.write(CASES["several"])
    grammar = turn_grammar(form, special, TOOLS)
    assert "<[256]>" in grammar
    assert _accepts(grammar, _encoded(text, special), tokenizer)
    assert _accepts(grammar, "<|calls|> as text", tokenizer)


FORGETS = ("DeepSeek-R1", "gemma-4")
"""Stored templates that write a past turn differently from the prompt that it answered."""
ADDS = ("GLM-4.6",)
"""One that writes empty thinking into a past turn."""


@pytest.mark.parametrize("name", [*WRITTEN, "no tools", "harmony", *STORED])
def test_the_log_keeps_a_call_as_it_was_generated_and_only_the_result_is_added(name: str) -> None:
    template, form = _format_of(name)
    question = {"role": "user", "content": "hello"}
    result = {"role": "tool", "tool_call_id": "call00000", "name": "get_weather", "content": "sunny"}
    call = (
        f" to=functions.get_weather<|channel|>commentary json<|message|>{json.dumps(NESTED[0][1], ensure_ascii=False)}"
    )
    answer = call if form.calls is None else form.calls.write(NESTED)
    log = [*template.encode([question], tools=DECLARED), *answer.encode()]
    past = [question, _message(NESTED)]
    step = DeltaRenderer(template, tools=DECLARED).extend(log, past, [result], None)
    assert (step.keep == len(log)) == (not any(part in name for part in FORGETS))
    if not any(part in name for part in ADDS):
        assert [*log[: step.keep], *step.ids] == template.encode([*past, result], tools=DECLARED)


# -- reasoning --------------------------------------------------------------------------------------------------------

THINKERS = ["tagged JSON", "a section", "keys and values in tags"]


@pytest.mark.parametrize("name", THINKERS)
def test_reasoning_is_told_from_the_answer(name: str) -> None:
    _, form = _format_of(name)
    assert form.calls is not None
    text = f"<think>\nhm, <b>\n</think>\n\nYes.{form.calls.write(CASES['nested'])}"
    turn = _check_every_split(form, text)
    assert (turn.content, turn.reasoning, _calls_of(turn)) == ("Yes.", "hm, <b>", list(NESTED))
    assert _accepts(turn_grammar(form, {}, TOOLS), text)


def test_reasoning_that_the_prompt_has_opened() -> None:
    source = WRITTEN["tagged JSON"].replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    template = _template(source)
    asked, params = [{"role": "user", "content": "hello <think>"}], SamplingParams()
    for one, is_open in ((template, True), (_format_of("tagged JSON")[0], False)):
        prompt = one.encode(asked)
        planned, plan = plan_turn(one.turn_format, one.tokenizer, prompt, params, ToolUse())
        assert (plan.starts_in_reasoning, planned) == (is_open, params)
    parser = open_parser(template.turn_format, SCHEMAS, starts_in_reasoning=True)
    assert parser.in_reasoning
    parts = [part for one in "I think.\n</think>\n\nYes." for part in parser.push(one)]
    assert ParsedTurn.of([*parts, *parser.close()]) == ParsedTurn("Yes.", "I think.")
    grammar = turn_grammar(template.turn_format, {}, TOOLS, required=True, starts_in_reasoning=True)
    assert _accepts(grammar, 'I think.\n</think>\n\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')
    assert not _accepts(grammar, "I think.\n</think>\n\nYes.")


@pytest.mark.parametrize("drops", [False, True])
def test_a_log_keeps_past_thinking_unless_the_template_drops_it(drops: bool) -> None:
    """Either way it is what the template would write now."""
    source = WRITTEN["tagged JSON"]
    if drops:  # thinking is shown in the last turn alone
        source = source.replace("think(m)", "think(m, loop.last)").replace(
            "{% macro think(m, loop.last) %}{% if m.reasoning_content %}",
            "{% macro think(m, is_last) %}{% if m.reasoning_content and is_last %}",
        )
    template = _template(source)
    assert template.turn_format.reasoning is not None
    question = {"role": "user", "content": "hello"}
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    log = [*template.encode([question]), *b"<think>\nhm\n</think>\n\nYes."]
    step = DeltaRenderer(template).extend(log, [question, answer], [question], None)
    assert (step.keep == len(log)) == (not drops)
    assert [*log[: step.keep], *step.ids] == template.encode([question, answer, question])


def test_reasoning_without_an_end_is_reasoning() -> None:
    _, form = _format_of("tagged JSON")
    assert _check_every_split(form, "<think>\nwhat if </thi") == ParsedTurn("", "what if </thi")


@pytest.mark.parametrize("closing", [None, 256])
def test_a_thinking_budget_forces_the_end_of_the_reasoning(closing: int | None) -> None:
    """Then the answer follows; structured output applies to it alone."""
    _, form = _format_of("tagged JSON")
    special = {} if closing is None else {"</think>": closing}
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes([*special])))
    grammar = turn_grammar(
        form,
        special,
        starts_in_reasoning=True,
        thinking_budget=12,
        closing_id=closing,
        answer='%json {"type": "boolean"}',
    )
    end, most = ([256], 12) if closing else (list(b"</think>"), 48)
    for text in ("short", "x" * most):
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert matcher.try_consume_tokens(list(text.encode())) == len(text), matcher.get_error()
        if len(text) == most:
            assert matcher.compute_ff_tokens()[: len(end)] == end
        assert matcher.try_consume_tokens([*end, *b"\ntrue"]) == len(end) + 5
        assert matcher.is_accepting()


# -- templates without tools ------------------------------------------------------------------------------------------


def test_a_template_without_tools_gets_them_in_its_system_message() -> None:
    template, form = _format_of("no tools")
    assert form.is_generic
    messages = [
        {"role": "user", "content": "hi"},
        _message(CASES["nested"], "Well."),
        {"role": "tool", "tool_call_id": "call00000", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call00001", "content": "rainy"},
    ]
    text = template.render(messages, tools=DECLARED)
    assert form.calls is not None
    assert "get_weather" in text.split("<|im_start|>user")[0]
    assert f"assistant\nWell.\n{form.calls.write(NESTED)}<|im_end|>" in text
    result = "<tool_response>\n{}\n</tool_response>"
    assert f"user\n{result.format('sunny')}\n{result.format('rainy')}<|im_end|>" in text


def test_ids_of_other_servers_are_shortened_for_templates_that_take_nine_characters() -> None:
    template, form = _format_of("an array with ids")
    assert not form.long_ids
    message = _message(CASES["nested"])
    message["tool_calls"][0]["id"] = "call_0123456789abcdef"
    text = template.render([{"role": "user", "content": "hi"}, message], tools=DECLARED)
    assert "call_" not in text


# -- bounds of arguments ----------------------------------------------------------------------------------------------

BOUNDED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "minimum": ({"type": "integer", "minimum": 3, "maximum": 12}, [3, 12], [2, 13, -3]),
    "numbers": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, [0.25, 1.5], [0, 1.75]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "a\nbc"], ["a", "abcde"]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", "a c"]),
    "part": ({"type": "string", "pattern": "b/c"}, ["ab/cd"], ["abcd"]),
    "enum": ({"enum": ["red", 5]}, ["red", 5], ["green", 6]),
    "items": ({"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 1, "maxItems": 2},
              [[1], [1, 9]], [[], [1, 2, 3], [10]]),
    "nested": ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 5}}, "required": ["a"],
                "additionalProperties": False}, [{"a": 5}], [{"a": 4}, {}]),
    "tree": ({"$ref": "#/$defs/tree"}, [{"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}],
             [{"v": -1}, {"v": 1, "next": {"v": 2, "next": {"v": -3}}}]),
}  # fmt: skip
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer", "minimum": 0}, "next": {"$ref": "#/$defs/tree"}},
    "required": ["v"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", [*DERIVED, *(name for name, form in NAMED.items() if not form.is_harmony)])
def test_bounds_of_arguments_are_enforced_in_every_format(name: str) -> None:
    form = NAMED[name] if name in NAMED else _format_of(name)[1]
    assert form.calls is not None
    for what, (schema, good, bad) in BOUNDED.items():
        declared = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"tree": TREE}}
        special = {marker: 256 + place for place, marker in enumerate(sorted(form.markers))}
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes([*special])))
        for value in (*good, *bad):
            text = form.calls.write([("f", {"a": value})])
            for known in ({}, special):  # markers are text, or tokens
                grammar = turn_grammar(form, known, [Tool("f", declared)], required=True)
                assert _accepts(grammar, _encoded(text, known), tokenizer) == (value in good), (what, value)


@pytest.mark.parametrize("keyword", ["allOf", "prefixItems", "maxProperties", "format"])
@pytest.mark.parametrize("name", ["qwen3-coder", "quotes of its own", "pythonic"])
def test_keywords_that_a_format_cannot_enforce_are_named(name: str, keyword: str) -> None:
    values = {"allOf": [{"type": "string"}], "prefixItems": [{"type": "string"}], "maxProperties": 1, "format": "date"}
    kinds = {"prefixItems": "array", "maxProperties": "object"}
    schema = {"type": kinds.get(keyword, "string"), keyword: values[keyword]}
    tool = Tool("f", {"type": "object", "properties": {"a": schema}})
    form = NAMED[name] if name in NAMED else _format_of(name)[1]
    # Where a value is spelled as in JSON, its schema is part of the grammar.
    if (name, keyword) in (("pythonic", "format"), ("qwen3-coder", "prefixItems"), ("qwen3-coder", "maxProperties")):
        assert f'"{keyword}"' in turn_grammar(form, {}, [tool])
    else:
        with pytest.raises(InvalidRequest, match=f"tools: f: the keyword {keyword} is not supported"):
            turn_grammar(form, {}, [tool])
