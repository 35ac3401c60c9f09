"""Answers with tool calls, from token ids to parts: markers may be special tokens, and others of them are not shown."""

from __future__ import annotations

import json

import pytest

from tests.text.families import byte_level
from tokenmill.engine.request import Hints
from tokenmill.outputs import End, FinishReason, OutputDelta, joined
from tokenmill.params import SamplingParams
from tokenmill.pipeline.output import Generation
from tokenmill.text.grammar import GrammarCompiler
from tokenmill.text.template import ChatTemplate
from tokenmill.text.tool_grammar import Tool, ToolUse, plan_turn
from tokenmill.text.turn_parser import ParsedTurn

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|user|>{{ c.function.name }}[INST]"
    "{{ c.function.arguments | tojson }}[/INST]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = Tool("hello", {"type": "object", "properties": {"there": {"type": "string"}}, "required": ["there"]})
ANSWER = '<think>\nwhat is this\n</think>\n\ngood <|user|>hello[INST]{"there": "é [INST]"}[/INST]'
PLACES = [(ANSWER.index("<|user|>"), ANSWER.index("hello[")), (ANSWER.index("[INST]"), ANSWER.index("{")),
          (ANSWER.index("[/INST]"), len(ANSWER))]  # fmt: skip
"""Of the special tokens in it: the argument only spells one."""


def _deltas(generation: Generation, ids: list[int], end: int) -> list[OutputDelta]:
    found: list[OutputDelta] = []
    generation.on_delta = found.append
    (choice,) = generation.choices
    for token in ids:
        choice.push(token, None, None)
    choice.push(end, End(FinishReason.STOP), None)
    return found


@pytest.mark.parametrize("skips", [True, False])
def test_markers_that_are_special_tokens_reach_the_parser(skips: bool) -> None:
    tokenizer = byte_level()
    template = ChatTemplate(TEMPLATE, tokenizer)
    params = SamplingParams(max_tokens=100, skip_special_tokens=skips)
    prompt = template.encode([{"role": "user", "content": "hello"}])
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    form, use = template.turn_format, ToolUse((TOOL,))
    params, plan = plan_turn(form, tokenizer, prompt, params, use, markers=compiler.markers)
    ids = tokenizer.encode_template(ANSWER, PLACES)
    assert params.structured_outputs is not None
    state = compiler.compile(params.structured_outputs).start()
    assert state.advance(ids), state.error

    other = tokenizer.special_tokens["<|end|>"]
    generation = Generation(
        "a", None, prompt, params, tokenizer, engine_id="a", vocab_size=tokenizer.vocab_size, max_model_len=1000,
        seed=1, hints=Hints(), timeout_s=None, plan=plan,
    )  # fmt: skip
    at = ids.index(tokenizer.special_tokens["<|user|>"])
    whole = joined(_deltas(generation, [*ids[:at], other, *ids[at:]], min(tokenizer.eos_ids)))
    assert whole.finish_reason == "tool_calls"
    turn = ParsedTurn.of(whole.parts or ())
    assert turn.reasoning == "what is this"
    assert turn.content == ("good" if skips else "good <|end|>")
    (call,) = turn.calls
    assert (call.name, json.loads(call.arguments)) == ("hello", {"there": "é [INST]"})
    num_thinking = ids.index(tokenizer.encode_template("</think>")[0]) + 1
    assert whole.usage is not None
    assert whole.usage.reasoning_tokens in (num_thinking, num_thinking - 1), "its markers count"
