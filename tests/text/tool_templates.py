"""Chat templates with every kind of tool calls, for the tests. `TOKENMILL_TEMPLATES` may name a folder of more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenmill.text.model_text import ModelText
from tokenmill.text.template import ChatTemplate
from tokenmill.text.tokenizer import ByteTokenizer

HEAD = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ think(m) }}{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ calls(m) }}{% endif %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_THINKING = "{% macro think(m) %}{% endmacro %}"
THINKING = (
    "{% macro think(m) %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{% endmacro %}"
)


def _template(calls: str, thinking: str = NO_THINKING) -> str:
    return f"{{% macro calls(m) %}}{calls}{{% endmacro %}}{thinking}{HEAD}"


def _each(call: str, between: str = "") -> str:
    return (
        f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}"
        f"{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}"
    )


WRITTEN = {
    "tagged JSON": _template(
        _each('\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'),
        THINKING,
    ),
    "compact JSON": _template(_each("<call>{{ f.name }}|{{ f.arguments | tojson(separators=(',', ':')) }}</call>")),
    "a section": _template(
        "<|calls|>"
        + _each("<|call|>function<|sep|>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<|/call|>", "\n")
        + "<|/calls|>",
        THINKING,
    ),
    "numbered": _template(
        "<|calls|>"
        + "{% for c in m.tool_calls %}<|call|>functions.{{ c.function.name }}:{{ loop.index0 }}<|args|>"
        + "{{ c.function.arguments | tojson }}<|/call|>{% endfor %}<|/calls|>"
    ),
    "an array with ids": _template(
        "[TOOL_CALLS]["
        + _each(
            '{% if c.id | length != 9 %}{{ raise_exception("bad id") }}{% endif %}'
            '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}',
            ", ",
        )
        + "]"
    ),
    "ids before arguments": _template(
        _each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}")
    ),
    "bare JSON": _template(
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
        + _each('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}')
    ),
    "tags around parameters": _template(
        _each(
            "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
            "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
            "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        )
    ),
    "keys and values in tags": _template(
        _each(
            "\n<tool_call>{{ f.name }}{% for k, v in f.arguments | items %}\n<arg_key>{{ k }}</arg_key>\n"
            "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>"
        ),
        THINKING,
    ),
    "quotes of its own": (
        "{% macro value(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is boolean %}{{ 'true' if v else 'false' }}"
        "{% elif v is mapping %}{{ '{' }}{% for k, one in v | items %}{{ k }}:{{ value(one) }}"
        "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is iterable %}[{% for one in v %}"
        "{{ value(one) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
        + _template(
            _each(
                "<|call|>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | items %}{{ k }}:{{ value(v) }}"
                "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<|/call|>"
            )
        )
    ),
    "Python calls": _template(
        "<|calls|>["
        + _each(
            "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}"
            "{% if not loop.last %}, {% endif %}{% endfor %})",
            ", ",
        )
        + "]<|/calls|>"
    ),
}
"""Each is derived."""
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows nothing of tools."""
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}"
    "<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def stored_templates() -> dict[str, str]:
    """Templates of real models, where a folder of them is named."""
    folder = os.environ.get("TOKENMILL_TEMPLATES")
    return {} if folder is None else {path.stem: path.read_text() for path in sorted(Path(folder).glob("*.jinja"))}


def use_template(llm: Any, source: str) -> None:
    """Let an `LLM` or `AsyncLLM` over the fake model write its chats with another template."""
    tokenizer = ByteTokenizer(258)
    text = ModelText(tokenizer, ChatTemplate(source, tokenizer))
    object.__setattr__(llm.opened, "text", text)
    llm._intake.text = text
