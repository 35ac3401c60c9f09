"""What is wrong with a body, in our own words: from pydantic's errors to the one that a client is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.server.errors import ApiError

WORDS = {
    "missing": "is missing",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "string_unicode": "must be a valid text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "value_error": "{error}",
}


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong."""
    first = errors[0]
    inside, *where = first["loc"]
    if not where:
        words = "a JSON body is needed" if first["type"] == "missing" else "the body must be a JSON object"
        return ApiError(400, words)
    words = WORDS.get(first["type"], "is not valid").format(**first.get("ctx", {}))
    path = f"{'.'.join(str(part) for part in where):.200}"
    return ApiError(400, f"{path} {words}", param=f"{where[0]!s:.200}" if inside == "body" else path)
