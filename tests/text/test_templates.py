"""What templates may use, and what comes of those that fail: one clear line, always an `InvalidRequest`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.text.families import CHATML, byte_level
from tokenmill.errors import InvalidRequest, TokenizeFailed
from tokenmill.text.template import ChatTemplate
from tokenmill.text.tokenizer import ByteTokenizer

TOKENIZER = byte_level()
HI = [{"role": "user", "content": "hi"}]


def render(source: str, **options: Any) -> str:
    template = ChatTemplate(source, TOKENIZER)
    text = template.render(HI, **options)
    assert TOKENIZER.decode(template.encode(HI, **options), skip_special=False) == text
    return text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "02"),
        ("{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}", "hi!"),
        ("{{ {'b': x, 'a': 'é'} | tojson }}", '{"b": "<é>", "a": "é"}'),
        ("{{ {'b': x, 'a': 1} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":1,"b":"<é>"}'),
        ("{{ [x] | tojson(ensure_ascii=true) }}", '["<\\u00e9>"]'),
        ("{{ [x] | tojson(indent=1) }}", '[\n "<é>"\n]'),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% macro m(a) %}<{{ a }}>{% endmacro %}{% if m(x) == '<<é>>' %}{{ m(x) | trim }}{% endif %}", "<<é>>"),
        ("{% set a %}{{ x }}-{% endset %}{% if (a ~ x).endswith('é>') %}{{ a.split('-')[0] }}{% endif %}", "<é>"),
        ("{% if x in ['<é>'] and {'<é>': 1}[x] and x is string and x != 'y' and x %}{{ x[1] }}{% endif %}", "é"),
    ],
)  # fmt: skip
def test_what_templates_may_use(source: str, text: str) -> None:
    assert render(source, x="<é>") == text


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


FAILING: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "division by zero": ("{{ 1 / 0 }}", HI, {}, "the chat template failed: ZeroDivisionError: division by zero"),
    "type": ("{{ 1 + 'a' }}", HI, {}, "the chat template failed: TypeError"),
    "strftime": ("{{ strftime_now(5) }}", HI, {}, "TypeError"),
    "tojson of odd objects": ("{{ range | tojson }}", HI, {}, "not JSON serializable"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", HI, {}, "RecursionError"),
    "lines": ("{{ raise_exception('a\n\nb') }}", HI, {}, "rejected the messages: a b$"),
    "undefined": ("{{ x.y.z }}", HI, {}, "'x' is undefined"),
    "sandbox": ("{{ ''.__class__.__mro__ }}", HI, {}, "rejected"),
    "escape by a filter": ("{{ (''|attr('__class__')).mro() }}", HI, {}, "rejected|undefined"),
    "escape by format": ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", HI, {}, "rejected|unsafe"),
    "escape by a function": ("{{ raise_exception.__globals__['os'].system('true') }}", HI, {}, "rejected|undefined"),
    "escape by cycler": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", HI, {}, "rejected|undefined"),
    "a text of gigabytes": ("{{ 'a' * 10**9 }}", HI, {}, "too large"),
    "a list of gigabytes": ("{{ (10**9 * [1]) | length }}", HI, {}, "too large"),
    "a number of gigabytes": ("{{ 2 ** (10**10) }}", HI, {}, "too large"),
    "a range of gigabytes": ("{{ range(10**9) | length }}", HI, {}, "Range too big"),
    "messages as an option": ("{{ messages }}", HI, {"messages": 1}, "cannot set 'messages'"),
    "option of an odd type": ("x", HI, {"tools": [print]}, "must be JSON values, not builtin_function_or_method"),
    "message with an odd value": (
        "x",
        [{"role": "user", "content": "x", "when": b""}],
        {},
        "must be JSON values, not bytes",
    ),
    "depth": ("x", HI, {"tools": nested(100_000)}, "nested deeper than 100 levels"),
    "no compiling": ("{% for %}", HI, {}, "invalid chat template: Expected"),
    "unknown tag": ("{% foo %}", HI, {}, "invalid chat template: Encountered unknown tag 'foo'"),
    "deep source": ("{{ " + "(" * 5000 + " }}", HI, {}, "invalid chat template"),
    "surrogate": ("x", [{"role": "user", "content": "a\ud800"}], {}, "not valid Unicode"),
    "surrogate in an option": ("x", HI, {"tools": [{"name": "\udfff"}]}, "not valid Unicode"),
    "surrogate in a role": ("x", [{"role": "\udfff", "content": ""}], {}, "not valid Unicode"),
}


@pytest.mark.fault("T06")
@pytest.mark.parametrize("case", FAILING)
def test_whatever_goes_wrong_is_an_invalid_request(case: str) -> None:
    source, messages, options, saying = FAILING[case]
    for tokenizer in (TOKENIZER, ByteTokenizer()):
        with pytest.raises(InvalidRequest, match=saying) as found:
            ChatTemplate(source, tokenizer).encode(messages, **options)
        assert "\n" not in str(found.value)
        assert isinstance(found.value, TokenizeFailed) == ("Unicode" in saying)


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops in loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a filtered loop": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 30 }}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
    "a long loop of slow calls": "{% set x = 'ab' * 10**5 %}{% for a in range(99999) %}{{ x.upper()[:1] }}{% endfor %}",
}


@pytest.mark.fault("T06")
@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_would_run_for_ages_is_stopped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.text.environment.MOST_CPU_S", 0.05)
    with pytest.raises(InvalidRequest, match=r"rejected the messages: it takes more than 0.05 s"):
        ChatTemplate(ENDLESS[case], TOKENIZER).encode(HI)


GROWING = {
    "by ~": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "by +": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a list": "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "by writing": "{% set x = 'ab' * 10**5 %}{% for a in range(9999) %}{{ x }}{% endfor %}",
    "in a block": "{% set x %}{% for a in range(9999) %}{{ 'ab' * 10**5 }}{% endfor %}{% endset %}",
}


@pytest.mark.fault("T06")
@pytest.mark.parametrize("case", GROWING)
def test_a_template_that_would_write_gigabytes_is_stopped(case: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is too large|writes more than 67,108,864 characters"):
        ChatTemplate(GROWING[case], TOKENIZER).encode(HI)


def test_loops_know_where_they_are() -> None:
    """`loop` is what it is without the clock, for lists and for what has no length."""
    inside = "{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last }}{{ loop.nextitem }} "
    source = "{% for a in items %}" + inside + "{% endfor %}"
    text = ChatTemplate(source, TOKENIZER).render(HI, items=["a", "b", "c"])
    assert text == "1/3b 2/3c 3/3. "
    mapped = source.replace("items", "items | map('upper')")
    assert ChatTemplate(mapped, TOKENIZER).render(HI, items=["a", "b", "c"]) == "1/3B 2/3C 3/3. "
    nothing = "{% for a in unknown %}x{% else %}none{% endfor %}{% for a in [] %}x{% endfor %}"
    assert ChatTemplate(nothing, TOKENIZER).render(HI) == "none"


CALL = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Tokyo"}'}}
CALLING = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TOOL_CALLS = "{% for call in m.tool_calls %}CALL{% endfor %}"
WRITTEN_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Tokyo"}}\n</tool_call>'
CALLING_TEMPLATES: dict[str, tuple[str, str]] = {
    # what it makes of the message with the call, what it writes
    "SmolLM2, which knows no calls": ("{{ 'A:' + m['content'] + '.' }}", f"A:{WRITTEN_CALL}."),
    "one that would write None": ("A:{{ m.content }}.{% if m.tool_calls %}{% endif %}", "A:."),
    "Qwen3": ("{% if '</think>' in m.content %}T{% endif %}A:{{ m.content }}" + TOOL_CALLS, "A:CALL"),
    "DeepSeek R1": ("{% if m.content is none %}A:" + TOOL_CALLS + "{% else %}A:{{ m.content }}.{% endif %}", "A:CALL"),
    "arguments that it encodes": ("{{ m.tool_calls[0].function.arguments | tojson }}", '{"city": "Tokyo"}'),
    "arguments that it goes through": (
        "{% for name, value in m.tool_calls[0].function.arguments | items %}{{ name }}={{ value }}{% endfor %}",
        "city=Tokyo",
    ),
    "arguments as they are": ("{{ m.tool_calls[0].function.arguments }}", '{"city": "Tokyo"}'),
    "arguments that are added": ("{{ 'A:' + m.tool_calls[0].function.arguments }}", 'A:{"city": "Tokyo"}'),
}


@pytest.mark.parametrize("name", CALLING_TEMPLATES)
@pytest.mark.parametrize("form", ["null", "left out"])
def test_21_8_an_assistants_message_with_tool_calls_and_no_content(name: str, form: str) -> None:
    source, text = CALLING_TEMPLATES[name]
    messages = [dict(message) for message in CALLING]
    if form == "left out":
        del messages[-1]["content"]
    whole = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}|{% else %}"
        + source
        + "{% endif %}{% endfor %}"
    )
    for tokenizer in (TOKENIZER, ByteTokenizer()):
        template = ChatTemplate(whole, tokenizer)
        assert template.render(messages) == f"hi|{text}"
        assert tokenizer.decode(template.encode(messages), skip_special=False) == f"hi|{text}"


def test_21_8_arguments_that_are_no_json_object_stay_as_they_are() -> None:
    template = ChatTemplate("{{ messages[-1].tool_calls[0].function.arguments | tojson }}", TOKENIZER)
    for arguments in ("{", "[1]", "5", "", "[" * 100_000, "{" + '"a":{' * 5000):
        call = {**CALL, "function": {"name": "look_up", "arguments": arguments}}
        assert json.loads(template.render([*HI, {**CALLING[-1], "tool_calls": [call]}])) == arguments
    for calls in ([5], [{}], [{"function": 5}], "calls", {"a": 1}):
        ChatTemplate("x", TOKENIZER).render([*HI, {**CALLING[-1], "tool_calls": calls}])


def test_a_source_that_is_no_text() -> None:
    with pytest.raises(InvalidRequest, match="a chat template must be a string, not int"):
        ChatTemplate(5, TOKENIZER)  # type: ignore[arg-type]


def test_the_first_users_do_not_race() -> None:
    template = ChatTemplate(CHATML, TOKENIZER)
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: tuple(template.encode(HI)), range(50)))
    assert found == {tuple(ChatTemplate(CHATML, TOKENIZER).encode(HI))}
