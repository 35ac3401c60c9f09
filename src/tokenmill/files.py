"""Reading the small files of a model: JSON objects, and settings of which nothing is taken on trust."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise ModelLoadError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must contain a JSON object, not {reprlib.repr(content)}")
    return content


class Settings:
    """The values of a model's file, each read as the type it is meant to be.

    An error names the key, what was wanted and what was found. A null counts as absent. A value that is absent and has
    no default is an error, too.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix
        """What the file puts before every name."""

    def given(self, name: str) -> Any:
        """A value as it is; None where there is none."""
        return self._values.get(self._prefix + name)

    def mentions(self, name: str) -> bool:
        """Whether the file has the key, be it with a null."""
        return self._prefix + name in self._values

    def names_under(self, start: str) -> list[str]:
        """What follows `start` in the keys that begin with it."""
        whole = self._prefix + start
        return [key.removeprefix(whole) for key in self._values if key.startswith(whole)]

    def number(self, name: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        """A whole number. 2.0 is one, "2" is not."""
        value = self._or_default(name, default)
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if not _is_int(whole) or whole < least or (most is not None and whole > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise self.wrong(name, f"an integer {bounds}", value)
        return int(whole)

    def real(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number larger than `above`."""
        value = self._or_default(name, default)
        try:
            real = float(value) if _is_int(value) or isinstance(value, float) else math.nan
        except OverflowError:  # an integer that no float can hold
            real = math.inf
        if not math.isfinite(real) or real <= above:
            raise self.wrong(name, "a number" if above == -math.inf else f"a number above {above:g}", value)
        return real

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._or_default(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str) -> str:
        """A text."""
        value = self._or_default(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, empty if there is none."""
        value = self._or_default(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value

    def wrong(self, name: str, wanted: str, found: Any) -> ModelLoadError:
        """The error for a value that is not what it should be."""
        return ModelLoadError(f"{self._where}: {self._prefix}{name} must be {wanted}, not {reprlib.repr(found)}")

    def _or_default(self, name: str, default: Any) -> Any:
        value = self.given(name)
        if value is None and default is None:
            raise ModelLoadError(f"{self._where} has no {self._prefix}{name}")
        return default if value is None else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
