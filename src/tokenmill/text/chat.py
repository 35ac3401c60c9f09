"""Chat templates: messages to ids, whole or turn by turn.

A template is a program by the model's authors; it runs in jinja2's immutable sandbox. Special tokens that it writes are
meant; those that a user types are text. So contents are rendered with their special tokens broken by a marker
character, the result is cut at the special tokens that are left, and the text between them is encoded as text.

Turn by turn, only what is new is rendered. What a template writes around a turn is found by rendering a probe
conversation. Where the probe does not hold together (templates that drop or rewrite past turns), everything is rendered
anew, and what differs from the log takes the place of its end: `Continuation`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.errors import InvalidRequest
from tokenmill.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

MARKERS = [chr(code) for code in range(0xE000, 0xE010)]
"""Private-use characters: one that no content holds is used to break special tokens."""
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""For models without special tokens."""
PROBE_USER, PROBE_ASSISTANT = "probe of a question", "probe of an answer"


logger = logging.getLogger(__name__)


class ChatTemplate:
    """A jinja2 template over messages."""

    def __init__(self, source: str, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template is no valid template: {error}") from None
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any) -> list[int]:
        """Ids of the whole conversation."""
        broken, marker = self.broken(check_messages(messages))
        return self.encode_rendered(self.render(broken, add_generation_prompt, **options), marker)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: Any) -> str:
        """The text of the conversation as the template writes it."""
        try:
            return self._template.render(
                {
                    **self._variables,
                    **options,
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from None

    def encode_rendered(self, text: str, marker: str) -> list[int]:
        """Ids of rendered text: its special tokens by id, the text between them as text without the marker."""
        ids: list[int] = []
        at = 0
        for found in self._special.finditer(text) if self._special else ():
            ids += self._encode_text(text[at : found.start()], marker)
            ids.append(self._tokenizer.special_tokens[found.group()])
            at = found.end()
        return ids + self._encode_text(text[at:], marker)

    def _encode_text(self, text: str, marker: str) -> list[int]:
        plain = text.replace(marker, "")
        return self._tokenizer.encode(plain, add_special=False) if plain else []

    def broken(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """The messages with the special tokens in their contents broken, and the marker that breaks them."""
        marker = self._marker(messages)
        return [self._broken(message, marker) for message in messages], marker

    def _broken(self, message: Message, marker: str) -> Message:
        content = message.get("content")
        if self._special is None or not isinstance(content, str):
            return message
        broken = self._special.sub(lambda found: found.group()[0] + marker + found.group()[1:], content)
        return {**message, "content": broken}

    def _marker(self, messages: Sequence[Message]) -> str:
        contents = "".join(str(message.get("content")) for message in messages)
        return next((marker for marker in MARKERS if marker not in contents), MARKERS[0])


@dataclass(frozen=True)
class Continuation:
    """What new messages do to a conversation's log: so many of its ids are kept, and these follow."""

    keep: int
    ids: list[int]


class DeltaRenderer:
    """Renders a conversation turn by turn: the first turn whole, then what each new turn adds to the log."""

    def __init__(self, template: ChatTemplate, **options: Any) -> None:
        self._template = template
        self._options = options
        self.is_consistent = self._probe()
        """Does a new turn only add to what was there? If not, conversations are rendered whole."""
        self._warned = False

    def first_turn(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to where the model answers, default system prompt and BOS included."""
        return self._template.encode(messages, **self._options)

    def extend(
        self, log: Sequence[int], past: Sequence[Message], new: Sequence[Message], ended_with: int | None
    ) -> Continuation:
        """The log of a conversation after new messages. `past` are the messages that the log holds, answers included.

        Templates that rewrite the past make the log differ from what they would write now: it is cut where it begins
        to differ, and the rest is computed anew.
        """
        if not log:
            return Continuation(0, self.first_turn([*past, *new]))
        if self.is_consistent:
            return Continuation(len(log), self.next_turn(new, ended_with))
        if not self._warned:
            self._warned = True
            logger.warning("this chat template rewrites past turns: part of each turn is computed again")
        whole = self._template.encode([*past, *new], **self._options)
        keep = _common_length(log, whole)
        return Continuation(keep, whole[keep:])

    def next_turn(self, messages: Sequence[Message], ended_with: int | None) -> list[int]:
        """Ids that follow an answer: its end, the new messages, up to where the model answers again.

        `ended_with` is the stop token that the answer's log ends with; a turn that was cut short has none, and gets the
        template's own end.
        """
        broken, marker = self._template.broken(check_messages(messages))
        text = self._template.render([*PROBE, *broken], **self._options)
        ids = self._template.encode_rendered(text[_end_of(text, PROBE_ASSISTANT) :], marker)
        return ids[1:] if ended_with is not None and ids[:1] == [ended_with] else ids

    def _probe(self) -> bool:
        """An answer must stand right after the generation prompt, unchanged, and later turns must not change that."""
        question = [PROBE[0]]
        try:
            prompt = self._template.render(question, **self._options)
            once = self._template.render([*PROBE, PROBE[0]], **self._options)
            twice = self._template.render([*PROBE, *PROBE, PROBE[0]], **self._options)
        except InvalidRequest:
            return False
        answered = prompt + PROBE_ASSISTANT
        added = once[len(answered) :]
        return once.startswith(answered) and twice == once + PROBE_ASSISTANT + added


PROBE: tuple[Message, ...] = (
    {"role": "user", "content": PROBE_USER},
    {"role": "assistant", "content": PROBE_ASSISTANT},
)


def check_messages(messages: Any) -> list[Message]:
    """Messages as templates expect them: a role and a text each. Lists of text parts are joined to one text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list of at least one message")
    return [_check_message(message) for message in messages]


def _check_message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"a message is an object with a role and a content, not {message!r:.80}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return {**message, "content": "".join(map(str, texts))}
    raise InvalidRequest("the content of a message must be a text or a list of text parts")


def _common_length(log: Sequence[int], whole: Sequence[int]) -> int:
    """How far two lists of ids are the same."""
    pairs = enumerate(zip(log, whole, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(log), len(whole)))


def _end_of(text: str, part: str) -> int:
    return text.index(part) + len(part)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As in transformers: plain JSON, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
