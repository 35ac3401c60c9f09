"""The files of a model: which belong together, and JSON objects and settings of which nothing is taken on trust."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tokenmill.errors import ModelLoadError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

MOST_JSON_BYTES = 64 << 20
"""Far more than any model's; a larger file would only fill the memory."""
WEIGHT_INDEX = "model.safetensors.index.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems without locks; there we go without."""
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")


def lock_file(descriptor: int, *, wait: bool) -> None:
    """Hold a file until it is closed or the process ends; `BlockingIOError` if another has it, unless told to wait."""
    if sys.platform == "win32":
        how = msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK
        while True:
            try:
                msvcrt.locking(descriptor, how, 1)
            except OSError as error:
                if not wait:
                    raise BlockingIOError(*error.args) from None
                continue  # LK_LOCK gives up after ten tries of a second
            return
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def exclusive(lock: Path, waiting: str) -> Iterator[None]:
    """Let one process at a time in; the others print `waiting`, and wait. The file stays: it is the lock."""
    with lock.open("w") as file:
        try:
            lock_file(file.fileno(), wait=False)
        except BlockingIOError:
            print(waiting, file=sys.stderr, flush=True)
            lock_file(file.fileno(), wait=True)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def split_parts(file: str) -> tuple[str, ...]:
    """All parts of a file that is split (`model-00001-of-00003.gguf`), in order, from any of them; else the file."""
    found = _SPLIT.fullmatch(file)
    if found is None or not 1 <= int(found["part"]) <= int(found["count"]):
        return (file,)
    count = int(found["count"])
    return tuple(f"{found['stem']}-{part:05}-of-{count:05}{found['suffix']}" for part in range(1, count + 1))


def safetensors_files(files: Collection[str], indexed: Callable[[], Sequence[str]]) -> list[str]:
    """The safetensors files that make up the model of a directory, from the names of its files; empty: it has none.

    `indexed` reads the index. Other weights may lie beside: `consolidated.safetensors` is the same model once more,
    under other names.
    """
    if WEIGHT_INDEX in files:
        return list(indexed())
    for pattern in (r"model\.safetensors", r"model-.*\.safetensors", r".*\.safetensors"):
        found = {part for file in files if re.fullmatch(pattern, file) for part in split_parts(file)}
        if found:
            return sorted(found)
    return []


def indexed_files(folder: Path) -> list[str]:
    """The files that a directory's weight index names."""
    index = folder / WEIGHT_INDEX
    named = set(map(_hashable, Settings(read_json(index), str(index)).mapping("weight_map").values()))
    if not named:
        raise ModelLoadError(f"{index} is not a weight index: weight_map names no file")
    for name in named:
        if not isinstance(name, str) or not name.endswith(".safetensors") or PurePosixPath(name).name != name:
            what = "is not a weight index: weight_map names"
            raise ModelLoadError(f"{index} {what} {reprlib.repr(name)}, which is not a .safetensors file beside it")
    return sorted(named)


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, (list, dict)) else value


def model_name(path: Path) -> str:
    """What logs call a model: ORGANIZATION/MODEL of a directory in the Hugging Face cache, else the file's name."""
    is_snapshot = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1) if is_snapshot else path.name


def has_tokenizer(folder: Path) -> bool:
    """Is one of the files there that a tokenizer is made from?"""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tekken.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ModelLoadError(f"{path} has {path.stat().st_size} bytes; the maximum is {MOST_JSON_BYTES}")
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
