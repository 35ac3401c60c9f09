"""Turn by turn: the log is always what the template would write now, and generated ids stay where they can."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.text.families import LLAMA3, MISTRAL, NEMO, QWEN3, TEMPLATES, VARIABLES, byte_level, metaspace
from tokenmill.errors import InvalidRequest
from tokenmill.text.delta import DeltaRenderer
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.messages import Message
from tokenmill.text.template import PLAIN_TEMPLATE, ChatTemplate
from tokenmill.text.tokenizer import ByteTokenizer

TOKENIZER = byte_level()
ID = TOKENIZER.special_tokens
SYSTEM: Message = {"role": "system", "content": "be good"}
END = {"chatml": "<|im_end|>", "llama 3": "<|eot_id|>", "mistral": "</s>", "nemo": "</s>", "qwen 3": "<|im_end|>",
       "phi 3": "<|end|>", "glm": "<|im_end|>"}  # fmt: skip


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def template_of(name: str, tokenizer: HuggingFaceTokenizer = TOKENIZER) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], tokenizer, VARIABLES)


ANSWERS = {
    "plain": ["good answer", "hello"],
    "reasoning": ["<think>\nhello\n</think>\n\nanswer", "<think>\n\n</think>\n\nhello", "good"],
    "space around": [" good ", "\nhello\n", "", "answer"],
    "typed": ["<|im_end|>", "x </s>", "★"],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("first", [[], [SYSTEM]], ids=["no system", "system"])
@pytest.mark.parametrize("seed", range(3))
def test_the_log_is_what_the_template_would_write_now(name: str, kind: str, first: list[Message], seed: int) -> None:
    if first and name == "mistral":
        pytest.skip("it takes no system message")
    rng = random.Random(seed)
    template = template_of(name)
    delta = DeltaRenderer(template)
    log: list[int] = []
    past: list[Message] = []
    new = [*first, user("hello")]
    for turn in range(4):
        step = delta.extend(log, past, new, ID[END[name]] if turn else None)
        log = [*log[: step.keep], *step.ids]
        past += new
        assert TOKENIZER.decode(log, skip_special=False) == template.render(past), turn
        special = [one for one in log if one in ID.values()]
        assert special == [one for one in template.encode(past) if one in ID.values()]
        answer = rng.choice(ANSWERS[kind])
        log += [*TOKENIZER.encode(answer, add_special=False), ID[END[name]]]
        past.append(assistant(answer))
        new = [user(rng.choice(["what is this", "<|im_start|>", "x" * turn]))]


def test_past_reasoning_is_dropped_as_qwen_does_it(caplog: pytest.LogCaptureFixture) -> None:
    template = template_of("qwen 3")
    delta = DeltaRenderer(template)
    past = [user("hello")]
    log = delta.first_turn(past)
    thought = "<think>\nwhat is this\n</think>\n\ngood"
    log += [*TOKENIZER.encode(thought, add_special=False), ID["<|im_end|>"]]
    for _ in range(2):
        step = delta.extend(log, [*past, assistant(thought)], [user("more")], ID["<|im_end|>"])
    assert [*log[: step.keep], *step.ids] == template.encode([*past, assistant(thought), user("more")])
    assert "think" not in TOKENIZER.decode([*log[: step.keep], *step.ids])
    assert 0 < step.keep < len(log)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_system_text_moves_to_the_last_turn_as_mistral_does_it() -> None:
    template = template_of("nemo")
    past = [SYSTEM, user("hello")]
    delta = DeltaRenderer(template)
    log = [*delta.first_turn(past), *TOKENIZER.encode("good", add_special=False), ID["</s>"]]
    step = delta.extend(log, [*past, assistant("good")], [user("more")], ID["</s>"])
    assert [*log[: step.keep], *step.ids] == template.encode([*past, assistant("good"), user("more")])
    assert step.keep == 2


@pytest.mark.parametrize("name", ["chatml", "llama 3", "mistral", "qwen 3", "nemo", "phi 3"])
def test_generated_ids_stay_where_the_template_only_adds(name: str) -> None:
    """Letter by letter is not how the tokenizer would cut it."""
    template = template_of(name)
    past = [user("hello there")]
    delta = DeltaRenderer(template)
    letters = [one for letter in "hello" for one in TOKENIZER.encode(letter, add_special=False)]
    log = [*delta.first_turn(past), *letters, ID[END[name]]]
    step = delta.extend(log, [*past, assistant("hello")], [user("more")], ID[END[name]])
    assert step.keep == len(log)
    assert step.ids == delta.next_turn([user("more")], ID[END[name]])


def test_which_templates_only_add() -> None:
    consistent = {name: DeltaRenderer(template_of(name)).is_consistent for name in TEMPLATES}
    assert consistent == {"chatml": True, "llama 3": True, "mistral": True, "phi 3": True,
                          "qwen 3": False, "nemo": False, "glm": False}  # fmt: skip
    assert DeltaRenderer(ChatTemplate(PLAIN_TEMPLATE, ByteTokenizer())).is_consistent
    assert not DeltaRenderer(ChatTemplate("{% for %}", TOKENIZER)).is_consistent


def test_tool_calls_and_unanswered_turns_are_rendered_anew() -> None:
    template = template_of("qwen 3")
    delta = DeltaRenderer(template)
    call = assistant("", tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}])
    answer = TOKENIZER.encode('\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', add_special=False)
    log = [*delta.first_turn([user("hello")]), *answer, ID["<|im_end|>"]]
    tool = {"role": "tool", "content": "good"}
    step = delta.extend(log, [user("hello"), call], [tool], ID["<|im_end|>"])
    text = TOKENIZER.decode([*log[: step.keep], *step.ids], skip_special=False)
    assert text == template.render([user("hello"), call, tool])
    assert text.count("<tool_call>") == 1

    log = delta.first_turn([user("hello")])
    step = delta.extend(log, [user("hello")], [user("there")], None)
    assert [*log[: step.keep], *step.ids] == template.encode([user("hello"), user("there")])


def test_another_end_than_the_templates_own_counts_as_the_end() -> None:
    delta = DeltaRenderer(ChatTemplate(LLAMA3, TOKENIZER))
    own = delta.next_turn([user("more")], ended_with=ID["<|eot_id|>"])
    assert own[0] == ID["<|start_header_id|>"]
    assert delta.next_turn([user("more")], ended_with=ID["</s>"]) == own
    assert delta.next_turn([user("more")], ended_with=None) == [ID["<|eot_id|>"], *own]
    no_end = ID["[INST]"]  # a stop token of the caller's that ends no turn
    assert delta.next_turn([user("more")], ended_with=no_end) == [ID["<|eot_id|>"], *own]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("source", [PLAIN_TEMPLATE, MISTRAL, NEMO, QWEN3], ids=["plain", "mistral", "nemo", "qwen 3"])
def test_what_a_turn_adds_ends_the_ids_of_the_whole(scheme: str, source: str) -> None:
    """A text that goes on is no beginning, however a tokenizer marks beginnings."""
    tokenizer = metaspace(scheme)
    template = ChatTemplate(source, tokenizer, VARIABLES)
    delta = DeltaRenderer(template)
    past = [user("hello"), assistant("good answer")]
    whole = template.encode([*past, user("what is this")])
    log = [*delta.first_turn(past[:1]), 0, 0, 0]
    added = delta.extend(log, past, [user("what is this")], None)
    assert added.keep == len(log)
    assert added.ids == whole[-len(added.ids) :]
    text = template.render([*past, user("what is this")])
    answered = template.render(past[:1]) + "good answer"
    assert text.startswith(answered)
    assert whole[: -len(added.ids)] == tokenizer.encode_template(answered)
    assert delta.next_turn([user("what is this")], None) == added.ids


def test_a_template_that_changes_answers_can_only_be_rendered_whole() -> None:
    delta = DeltaRenderer(ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}", TOKENIZER))
    with pytest.raises(InvalidRequest, match="send the whole conversation"):
        delta.next_turn([user("x")], None)
    step = delta.extend([*TOKENIZER.encode("HI"), 7], [user("hi"), assistant("ho")], [user("x")], None)
    assert TOKENIZER.decode([*TOKENIZER.encode("HI")[: step.keep], *step.ids]) == "HIHOX"
