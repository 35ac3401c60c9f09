"""Types of fields: what they may hold, what is said of anything else, and how the OpenAPI document describes them.

Each complains once, whatever a value holds: a million wrong items are one mistake.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, WithJsonSchema

Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Flag = StrictBool | None


MOST_ITEMS = 1 << 18
"""Of lists that have no other limit: more tokens than a vocabulary has."""
MOST_IDS = 1 << 20
"""In all prompts of a request."""


def at_most(count: int) -> BeforeValidator:
    """Looked at before the items are: a million wrong ones are one mistake."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > count:
            raise ValueError(f"must have at most {count} items")
        return value

    return BeforeValidator(check)


def list_of(kind: type, words: str) -> AfterValidator:
    """A list of one kind of things, with one complaint for all that are not."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > MOST_ITEMS:
            raise ValueError(f"must have at most {MOST_ITEMS} items")
        if value is None or (isinstance(value, list) and all(type(one) is kind for one in value)):
            return value
        raise ValueError(f"must be a list of {words}")

    return AfterValidator(check)


def _array(items: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": items}}, {"type": "null"}]})


Ids = Annotated[Any, list_of(int, "token ids"), _array("integer")]
Texts = Annotated[Any, list_of(str, "texts"), _array("string")]


def _stop(value: Any) -> Any:
    texts = value if isinstance(value, list) else [] if value is None else [value]
    if all(isinstance(one, str) for one in texts):
        return value
    raise ValueError("must be a text or a list of texts")


Stop = Annotated[
    Any,
    AfterValidator(_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]

TEXTS_OR_IDS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}


def _texts_or_ids(value: Any) -> Any:
    """One prompt or several, as texts or as ids."""
    several = value if isinstance(value, list) else [value]
    if len(several) + sum(len(one) for one in several if isinstance(one, list)) > MOST_IDS:
        raise ValueError(f"must have at most {MOST_IDS} token ids")
    kinds = {type(one) for one in several}
    if kinds == {list}:
        kinds = {type(number) for one in several for number in one}
        if kinds == {int}:
            return value
    elif kinds == {str} or (kinds == {int} and isinstance(value, list)):
        return value
    raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")


TextsOrIds = Annotated[Any, AfterValidator(_texts_or_ids), WithJsonSchema(TEXTS_OR_IDS)]


CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a text or a list of text parts")
    other = next((part for part in value if part.get("type") != "text" or not isinstance(part.get("text"), str)), None)
    if other is not None:
        raise ValueError(f"parts of type {other.get('type')!r:.40} are not supported: only text is")
    return value


Content = Annotated[Any, AfterValidator(_content), WithJsonSchema(CONTENT)]
