"""`ChatTemplate`: messages to ids.

A template is a program by the model's authors; it runs in jinja2's immutable sandbox. Special tokens that it writes are
meant; those that a caller types, in any string of messages or options, are text. So it runs twice: once as it is, which
gives the text, and once with the caller's strings guarded (`guard.py`), which tells the special tokens that it wrote
itself. If these are all that the text holds, it is encoded as it is, else with only these as tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2 import Template

from tokenmill.errors import InvalidRequest, TooManyTokens
from tokenmill.text.environment import compile_template, run_template
from tokenmill.text.guard import Guard, raw_of
from tokenmill.text.messages import (
    PROBE_CALL,
    QUESTION,
    ROLES,
    GivenList,
    Message,
    ToolCallForm,
    check_messages,
    tool_call_form,
    with_strings,
)
from tokenmill.text.separable import is_separable
from tokenmill.text.tokenizer import Places, Tokenizer, check_text
from tokenmill.text.tool_format import (
    NAMED,
    TurnFormat,
    calls_in_content,
    generic_messages,
    turn_format,
    with_short_ids,
)

__all__ = ["PLAIN_TEMPLATE", "ChatTemplate", "Message", "Rendered", "check_messages"]

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""For models without special tokens."""
LEADS = ("a", ".", "\n", "1")
"""Texts to put before one that follows other text: one that does not merge with it is found among them."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as a template writes it."""

    text: str
    special: Places
    """Where the special tokens are that the template wrote itself."""

    def after(self, start: int) -> Rendered:
        """What follows the first characters."""
        return Rendered(self.text[start:], [(at - start, end - start) for at, end in self.special if at >= start])

    def behind(self, lead: str) -> Rendered:
        """With some text before it."""
        return Rendered(lead + self.text, [(at + len(lead), end + len(lead)) for at, end in self.special])


@dataclass(frozen=True)
class _Input:
    """What a template is run on, with the caller's part of it checked."""

    variables: Mapping[str, Any]
    options: Mapping[str, Any]
    """Those of the variables that are the caller's; the messages are, too."""

    def guarded(self, guard: Guard) -> dict[str, Any]:
        """The variables with the caller's strings guarded. A role that templates know stays as it is."""
        messages = GivenList(
            {**with_strings(message, guard.text), **({"role": message["role"]} if message["role"] in ROLES else {})}
            for message in self.variables["messages"]
        )
        options = {name: with_strings(value, guard.text) for name, value in self.options.items()}
        return {**self.variables, **options, "messages": messages}

    def strings(self) -> list[str]:
        """Every string of the caller's."""
        found: list[str] = []

        def note(text: str) -> str:
            found.append(text)
            return text

        for value in (*self.variables["messages"], *self.options.values()):
            with_strings(value, note)
        return found


class ChatTemplate:
    """A jinja2 template over messages. It is compiled when it is first used, and safe to share between threads."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
        tool_format: str | None = None,
    ) -> None:
        """`tool_format`: the name of a format of tool calls, in place of the one that is derived from the template."""
        if not isinstance(source, str):
            raise InvalidRequest(f"a chat template must be a string, not {type(source).__name__}")
        self.source = source
        self.tokenizer = tokenizer
        self._tool_format = None if tool_format is None else NAMED[tool_format]
        self._variables = dict(variables or {})
        self._own_characters = frozenset(self.source + "".join(map(str, self._variables.values())))
        self._ids = frozenset(tokenizer.special_tokens.values())
        # Longest first: where several match, tokenizers take the longest.
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    @cached_property
    def _template(self) -> Template:
        return compile_template(self.source)

    @cached_property
    def turn_format(self) -> TurnFormat:
        """How the model writes tool calls and reasoning."""

        def render(messages: Sequence[Message], options: Mapping[str, Any]) -> str | None:
            try:
                return run_template(self._template, {**self._variables, **options, "messages": list(messages)})
            except InvalidRequest:
                return None

        derived = turn_format(render, self.source)
        return derived if self._tool_format is None else replace(self._tool_format, reasoning=derived.reasoning)

    @cached_property
    def is_separable(self) -> bool:
        """Does it write each message on its own, so that the middle of a conversation may be left out?"""
        return is_separable(self.source)

    def encode(
        self,
        messages: Sequence[Message],
        limit: int | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[int]:
        """Ids of the whole conversation; with `continue_final_message` they end where the last message's text does.

        `TooManyTokens` if there are more than `limit`, as soon as that is known.
        """
        if continue_final_message:
            return self._encode(self._rendered_open(messages, **options), limit)
        rendered = self.rendered(messages, limit, add_generation_prompt=add_generation_prompt, **options)
        return self._encode(rendered, limit)

    def render(self, messages: Sequence[Message], /, add_generation_prompt: bool = True, **options: Any) -> str:
        """The text of the conversation as the template writes it."""
        return run_template(self._template, self._checked(messages, options, add_generation_prompt).variables)

    def rendered(
        self,
        messages: Sequence[Message],
        limit: int | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> Rendered:
        """The conversation, and which special tokens in it are the template's own.

        `TooManyTokens` if its length alone tells that it has more than `limit`.
        """
        given = self._checked(messages, options, add_generation_prompt)
        text = run_template(self._template, given.variables)
        if self._special is None:
            return Rendered(text, [])
        if limit is not None and (least := self.tokenizer.min_num_tokens(text)) > limit:
            raise TooManyTokens(least, limit)
        try:
            own = self._rendered_guarded(given)
        except InvalidRequest:
            own = None  # a filter that can't do with guarded strings
        if own is not None and own.text == text:
            return own
        # The template has seen the guard. What it writes without is right, where callers have typed no special token.
        if not any(self._special.search(one) for one in given.strings()):
            return Rendered(text, self._places(text))
        if own is None:
            raise InvalidRequest("this chat template does not support messages that contain special tokens as text")
        return own

    def encode_rendered(self, rendered: Rendered, start: int = 0, limit: int | None = None) -> list[int]:
        """Ids of what a template wrote, from a character on: as they end the ids of the whole."""
        if start == 0:
            return self._encode(rendered, limit)
        tail = rendered.after(start)
        if any(at == 0 for at, _ in tail.special):
            return self._encode(tail, limit)
        # Tokenizers treat the beginning of a text in their own way; but this is no beginning, so something goes before.
        for lead in LEADS:
            before = self.tokenizer.encode_template(lead)
            ids = self._encode(tail.behind(lead), None if limit is None else limit + len(before))
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._encode(tail, limit)

    def _rendered_open(self, messages: Sequence[Message], /, **options: Any) -> Rendered:
        """The conversation up to the last character of its last message, which is an answer's beginning."""
        *past, last = check_messages(messages)
        if last["role"] != "assistant" or not last.get("content"):
            raise InvalidRequest(
                "the message to continue must be an assistant message with text content", param="messages"
            )
        mark = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(4))
        whole = self.rendered(
            [*past, {**last, "content": last["content"] + mark}], add_generation_prompt=False, **options
        )
        end = whole.text.rfind(mark)
        if end < 0:
            raise InvalidRequest("this chat template does not render the last message verbatim", param="messages")
        return Rendered(whole.text[:end], [(at, until) for at, until in whole.special if until <= end])

    def _encode(self, rendered: Rendered, limit: int | None) -> list[int]:
        text, special = rendered.text, rendered.special
        if not text:
            return []
        if self._special is None:
            return self.tokenizer.encode_template(text, limit=limit)
        if special == self._places(text):
            ids = self.tokenizer.encode_template(text, limit=limit)
            meant = [self.tokenizer.special_tokens[text[at:end]] for at, end in special]
            # Tokenizers that normalise may see more special tokens than are spelt out.
            if [one for one in ids if one in self._ids] == meant:
                return ids
        return self.tokenizer.encode_template(text, special, limit=limit)

    def _checked(self, messages: Sequence[Message], options: Mapping[str, Any], add_generation_prompt: bool) -> _Input:
        if "messages" in options:
            raise InvalidRequest("chat template options cannot set 'messages'")
        checked: GivenList = GivenList()
        own = {name: with_strings(value, check_text) for name, value in options.items()}
        all_messages = check_messages(messages)
        if own.get("tools") or any(one["role"] == "tool" or one.get("tool_calls") for one in all_messages):
            all_messages, own = self._with_tools(all_messages, own)
        for message in all_messages:
            # OpenAI's form of messages is newer than most templates.
            if message["role"] == "developer" and "developer" not in self.source:
                message = {**message, "role": "system"}
            elif message.get("tool_calls"):
                message = self._tool_call_form.of(message)
            checked.append(with_strings(message, check_text))
            role = checked[-1]["role"]
            if role not in ROLES and self._special is not None and self._special.search(role):
                raise InvalidRequest(f"role {role!r:.80} contains a special token")
        given = {"messages": checked, "add_generation_prompt": bool(add_generation_prompt)}
        return _Input({**self._variables, **own, **given}, own)

    def _with_tools(self, messages: list[Message], options: dict[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """Messages about tools in the form that the template takes."""
        form, tools = self.turn_format, options.get("tools")
        if form.is_generic and (tools or "tool_calls" not in self.source):
            others = {name: value for name, value in options.items() if name != "tools"}
            return generic_messages(messages, tools if isinstance(tools, list) else ()), others
        if form.calls is not None and "tool_calls" not in self.source:  # tools are listed, but past calls are not shown
            messages = calls_in_content(messages, form.calls)
        return messages if form.long_ids else [with_short_ids(message) for message in messages], options

    @cached_property
    def _tool_call_form(self) -> ToolCallForm:
        def text_of(form: ToolCallForm) -> str | None:
            messages = [QUESTION, form.of(PROBE_CALL)]
            try:
                return run_template(
                    self._template, {**self._variables, "messages": messages, "add_generation_prompt": False}
                )
            except InvalidRequest:
                return None

        return tool_call_form(text_of)

    def _rendered_guarded(self, given: _Input) -> Rendered:
        guard = Guard(taken=self._own_characters)
        raw = raw_of(run_template(self._template, given.guarded(guard)))
        return Rendered(guard.plain(raw), self._places(raw))

    def _places(self, text: str) -> Places:
        return [found.span() for found in self._special.finditer(text)] if self._special else []
