"""Templates that write each message on its own: the middle of a conversation may be left out, and nothing changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.text.families import TEMPLATES, VARIABLES, byte_level
from tests.text.test_delta import END, ID
from tokenmill.errors import InvalidRequest
from tokenmill.text.delta import DeltaRenderer
from tokenmill.text.messages import Message
from tokenmill.text.separable import HEAD, TAIL, is_separable, shortened
from tokenmill.text.template import PLAIN_TEMPLATE, ChatTemplate

TOKENIZER = byte_level()
LOOP = "{% for m in messages %}#{% endfor %}"

SEPARABLE = {
    "plain": PLAIN_TEMPLATE,
    "generation prompt in the loop": "{% for m in messages %}{{ m.role }}:{{ m.content }};"
    "{% if loop.last and add_generation_prompt %}A:{% endif %}{% endfor %}",
    "all but the system message": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0].content %}{% else %}{% set rest = messages %}{% endif %}{{ system }}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}A:",
    "neighbors": "{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != m.role %}<{{ m.role }}>"
    "{% endif %}{{ m.content }}{% if not loop.last and messages[loop.index0 + 1].role != m.role %};{% endif %}"
    "{% endfor %}A:",
    "repeats neighbors": "{% for m in messages %}{% if m.role != 'assistant' and loop.index0 > 1 %}"
    "[{{ messages[loop.index0 - 2].content }}, {{ loop.previtem.content }}]{% endif %}{{ m.content }};{% endfor %}",
    "the last message after the loop": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if messages[-1].role == 'user' %}A:{% endif %}",
    "tools in a loop of their own": "{% for t in tools %}{{ loop.index }}{% endfor %}"
    "{% for m in messages %}{% for c in m.tool_calls %}{{ loop.length }}{% endfor %}{{ m.content }};{% endfor %}A:",
    "a macro": "{% macro piece(m) %}{{ m.role }}:{{ m.content }};{% endmacro %}"
    "{% for m in messages %}{{ piece(m) }}{% endfor %}A:",
    "today": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}A:",
}
NOT_SEPARABLE = {
    "counts": "{% for m in messages %}{{ loop.index }}:{{ m.content }};{% endfor %}",
    "counts down": "{% for m in messages %}{{ loop.revindex }}:{{ m.content }};{% endfor %}",
    "length": "{{ messages | length }}" + LOOP,
    "length in the loop": "{% for m in messages %}{% if loop.length > 7 %}x{% endif %}{% endfor %}",
    "two loops": LOOP + LOOP,
    "a loop in a loop": "{% for t in tools %}" + LOOP + "{% endfor %}",
    "the last message in the loop": "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
    "the last message before the loop": "{{ messages[-1].content }}" + LOOP,
    "a far neighbor": "{% for m in messages %}{{ messages[loop.index0 - 3].role }}{% endfor %}",
    "a far message": "{{ messages[4].role }}" + LOOP,
    "state": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{{ n.i }}{% endfor %}",
    "a cycler": "{% set c = cycler('a', 'b', 'c') %}{% for m in messages %}{{ c.next() }}{% endfor %}",
    "cycle": "{% for m in messages %}{{ loop.cycle('a', 'b', 'c') }}{% endfor %}",
    "thirds": "{% for m in messages %}{{ loop.index0 % 3 }}{% endfor %}",
    "reversed": "{% for m in messages[::-1] %}#{% endfor %}",
    "some messages": "{% for m in messages | selectattr('role', 'equalto', 'user') %}#{% endfor %}",
    "a condition on the loop": "{% for m in messages if m.role == 'user' %}{{ loop.index0 % 2 }}{% endfor %}",
    "ends early": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}#{% endfor %}",
    "the output as a value": "{% set x %}" + LOOP + "{% endset %}{{ x | length }}",
    "a filter on the output": "{% filter upper %}" + LOOP + "{% endfilter %}",
    "the list as a value": "{{ messages | tojson }}" + LOOP,
    "another list": "{% set rest = messages %}{% if x %}{% set rest = [] %}{% endif %}{% for m in rest %}#{% endfor %}",
    "the loop as a value": "{% for m in messages %}{% set l = loop %}{{ l.index }}{% endfor %}",
    "no template": "{% for %}",
}  # fmt: skip


@pytest.mark.parametrize("name", SEPARABLE)
def test_a_template_that_writes_each_message_on_its_own_is_found(name: str) -> None:
    assert is_separable(SEPARABLE[name])


@pytest.mark.parametrize("name", NOT_SEPARABLE)
def test_a_template_that_may_look_farther_is_not(name: str) -> None:
    assert not is_separable(NOT_SEPARABLE[name])


def test_which_families_are_separable() -> None:
    found = {name for name, source in TEMPLATES.items() if is_separable(source)}
    assert found == {"chatml", "llama 3", "mistral", "nemo", "phi 3", "glm"}


@pytest.mark.parametrize("count", range(30))
def test_an_even_number_of_messages_is_left_out(count: int) -> None:
    kept = shortened(range(count))
    assert (count - len(kept)) % 2 == 0
    assert len(kept) <= HEAD + TAIL + 1
    if count <= HEAD + TAIL:
        assert list(kept) == list(range(count))
    else:
        assert list(kept[:HEAD]) == list(range(HEAD))
        assert list(kept[-TAIL:]) == list(range(count - TAIL, count))


class Whole(DeltaRenderer):
    """Renders the whole conversation each turn."""

    def shown(self, past: Any) -> Any:
        return past


@pytest.mark.parametrize("name", [*SEPARABLE, *TEMPLATES])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_conversation_gets_the_same_ids_without_its_middle(name: str, seed: int) -> None:
    """Turn by turn beside a renderer that renders everything, with answers that some templates rewrite."""
    rng = random.Random(seed)
    template = ChatTemplate({**SEPARABLE, **TEMPLATES}[name], TOKENIZER, VARIABLES)
    short, whole = DeltaRenderer(template), Whole(template)
    system: list[Message] = [{"role": "system", "content": "be good"}]
    past: list[Message] = []
    log: list[int] = []
    end = ID[END.get(name, "<|im_end|>")]
    new = [*(system if rng.random() < 0.5 and name != "mistral" else []), {"role": "user", "content": "hello"}]
    for turn in range(14):
        try:
            expected = whole.extend(log, past, new, end if turn else None)
        except InvalidRequest:
            with pytest.raises(InvalidRequest):
                short.extend(log, past, new, end if turn else None)
            return
        assert short.extend(log, past, new, end if turn else None) == expected, turn
        log = [*log[: expected.keep], *expected.ids]
        answer = rng.choice(["good", " hello ", "<think>\nx\n</think>\n\nthere", "<|im_end|>", ""])
        log += [*TOKENIZER.encode(answer, add_special=False), end]
        past += [*new, {"role": "assistant", "content": answer}]
        new = [{"role": "user", "content": rng.choice([f"what is {turn}", "<|im_start|>", " more "])}]
