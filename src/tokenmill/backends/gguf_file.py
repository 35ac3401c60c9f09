"""`GGUFFile`: the metadata and tensor table of a GGUF file, all parts if it is split; tensor bytes stay mapped.

The format: magic, version, counts, metadata (typed key-value pairs), tensor table, padding, tensor data. Little-endian,
versions 2 and 3. Nothing in the file is trusted: every length is checked against the file and against a limit before
memory is taken for it, and every tensor lies within the file, apart from the others. llama.cpp reads a file only after
this has accepted it: its own reader divides by dimensions that are 0, for one.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import ModelLoadError
from tokenmill.files import split_parts

T = TypeVar("T")

OWN_ARCHITECTURES = ("gemma2", "gemma3", "granite", "llama", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Architectures of our own families: the cpu and the torch backend run them."""
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml's number of a type: its name, the values of a block and their bytes. Those of the gguf package, whose import
takes longer than loading a small model.
"""
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
MOST_HEADER_BYTES = 1 << 28
MOST_ENTRIES = 1 << 16
"""Metadata pairs, and tensors."""
MOST_ITEMS = 1 << 22
"""Of all arrays together; a vocabulary of 262,144 tokens has 1.3 million."""
MOST_DIMS = 4
MOST_NAME_BYTES = 64
MOST_VALUES = (1 << 63) - 1
"""Of a tensor, and of its bytes: more do not fit into the integers that C code has for them."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in row-major order: the file's, turned around."""

    name: str
    shape: tuple[int, ...]
    type: int
    """ggml's number of the type."""
    offset: int
    """From the beginning of the file."""
    part: int = 0
    """Of a split file."""


@dataclass(frozen=True)
class GGUFLayout:
    """How a tensor's values are stored: in rows of blocks."""

    kind: str
    """Name of the type: one of `TYPES`."""
    rows: tuple[int, ...]
    """The tensor's shape, with bytes for the last dimension."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.rows)


class GGUFFile:
    """A GGUF file, mapped. It is unmapped when neither this nor an array of its bytes is in use any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps = [_mapped(path)]
        self.metadata, tensors = _read(self._maps[0], path)
        self.tensors = dict(tensors)
        self.paths = self._parts()
        """All parts, in order."""
        for part, other in enumerate(self.paths[1:], 1):
            self._add_part(part, other)
        named = self.metadata.get("split.tensors.count", len(self.tensors))
        if named != len(self.tensors):
            raise ModelLoadError(f"{path} and its other parts have {len(self.tensors)} tensors, not {named}")
        for part in range(len(self.paths)):
            self._check_places(part)

    def _parts(self) -> list[Path]:
        """The files that the model is split into; the first one, which has the metadata, is the one to open."""
        count = self.metadata.get("split.count", 1)
        names = split_parts(self.path.name)
        if count in (0, 1):
            return [self.path]
        if count != len(names):
            example = f"{self.path.stem}-00001-of-{count:05}.gguf" if isinstance(count, int) else "..."
            raise ModelLoadError(f"{self.path} is one of {count} parts, and must be named like one: {example}")
        if names[0] != self.path.name:
            raise ModelLoadError(f"{self.path} is one of {count} parts; open the first one, {names[0]}")
        missing = [name for name in names if not self.path.with_name(name).is_file()]
        if missing:
            raise ModelLoadError(f"{self.path.parent} has no {missing[0]}, which is a part of the model")
        return [self.path.with_name(name) for name in names]

    def _add_part(self, part: int, path: Path) -> None:
        self._maps.append(_mapped(path))
        metadata, tensors = _read(self._maps[-1], path)
        if metadata.get("split.no") != part:
            raise ModelLoadError(f"{path} is part {metadata.get('split.no')} of a split file, not {part}")
        for name, tensor in tensors.items():
            if name in self.tensors:
                raise ModelLoadError(f"{path} is corrupt: duplicate tensor {name!r}")
            self.tensors[name] = replace(tensor, part=part)

    def _check_places(self, part: int) -> None:
        """Every tensor of a part lies within its file, and none in another one."""
        end, before = 0, ""
        for tensor in sorted((one for one in self.tensors.values() if one.part == part), key=lambda one: one.offset):
            if tensor.offset < end:
                raise ModelLoadError(f"{self.paths[part]} is corrupt: {tensor.name} overlaps {before}")
            layout = self.layout(tensor)
            end, before = tensor.offset + (layout.num_bytes if layout else 1), tensor.name
            if end > len(self._maps[part]):
                raise ModelLoadError(
                    f"{self.paths[part]} is truncated: {tensor.name} needs bytes up to {end}, "
                    f"the file has {len(self._maps[part])}"
                )

    def layout(self, tensor: GGUFTensor) -> GGUFLayout | None:
        """None for a type that is not one of `TYPES`; llama.cpp may know it."""
        if tensor.type not in TYPES:
            return None
        kind, per_block, block_bytes = TYPES[tensor.type]
        if tensor.shape[-1] % per_block:
            raise ModelLoadError(
                f"{self.path}: {tensor.name} has shape {tensor.shape}, not a multiple of the block size {per_block}"
            )
        return GGUFLayout(kind, (*tensor.shape[:-1], tensor.shape[-1] // per_block * block_bytes))

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value."""
        return self.metadata.get(key, default)

    def bytes_of(self, tensor: GGUFTensor, num_bytes: int) -> NDArray[np.uint8]:
        """A tensor's bytes, mapped, not copied."""
        return np.frombuffer(self._maps[tensor.part], dtype=np.uint8, count=num_bytes, offset=tensor.offset)


def _read(content: mmap.mmap, path: Path) -> tuple[Mapping[str, Any], Mapping[str, GGUFTensor]]:
    try:
        return _Cursor(content, path).read_all()
    except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ModelLoadError(f"{path} is corrupt or truncated: {error}") from None


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise ModelLoadError(f"{path} is not a GGUF file: {size} bytes")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from None


class _Cursor:
    """A place in the file that moves on with everything read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0
        self._num_items = 0

    def read_all(self) -> tuple[Mapping[str, Any], Mapping[str, GGUFTensor]]:
        if self._data[:4] != MAGIC:
            raise ModelLoadError(f"{self._path} is not a GGUF file: it begins with {self._data[:4]!r}")
        self._at = 4
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise ModelLoadError(f"{self._path} has GGUF version {version}; supported: {VERSIONS}")
        num_tensors, num_pairs = self._count(MOST_ENTRIES), self._count(MOST_ENTRIES)
        metadata = self._once("key", [(self._name("key"), self._value(self._scalar("<I"))) for _ in range(num_pairs)])
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ModelLoadError(f"{self._path} has an invalid alignment {alignment!r}; it must be a power of 2")
        base = -(-self._at // alignment) * alignment
        for name, _, _, offset in table:
            if offset % alignment:
                raise ModelLoadError(f"{self._path} is corrupt: tensor {name!r} is not aligned to {alignment} bytes")
        tensors = [GGUFTensor(name, shape, kind, base + offset) for name, shape, kind, offset in table]
        return metadata, self._once("tensor", [(tensor.name, tensor) for tensor in tensors])

    def _once(self, what: str, pairs: Sequence[tuple[str, T]]) -> dict[str, T]:
        """Pairs as a dictionary; a name that is there twice would hide one of its values."""
        found: dict[str, T] = {}
        for name, value in pairs:
            if name in found:
                raise ModelLoadError(f"{self._path} is corrupt: duplicate {what} {name!r}")
            found[name] = value
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._name("tensor"), self._scalar("<I")
        if len(name.encode()) > MOST_NAME_BYTES:
            raise ModelLoadError(f"{self._path} is corrupt: a tensor's name has more than {MOST_NAME_BYTES} bytes")
        if not 1 <= num_dims <= MOST_DIMS:
            raise ModelLoadError(f"{self._path} is corrupt: tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dims))
        if not 1 <= math.prod(shape) <= MOST_VALUES:
            raise ModelLoadError(f"{self._path} is corrupt: tensor {name!r} has shape {shape[::-1]}")
        return name, shape[::-1], self._scalar("<I"), self._scalar("<Q")

    def _name(self, what: str) -> str:
        name = self._string()
        if not name:
            raise ModelLoadError(f"{self._path} is corrupt: a {what} has no name")
        return name

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("<I"), self._count())
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self._path} is corrupt: unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        self._num_items += count
        if self._num_items > MOST_ITEMS:
            raise ModelLoadError(f"{self._path}: more than {MOST_ITEMS} items in the arrays of its metadata")
        if kind in _SCALARS:
            item = np.dtype(_SCALARS[kind])
            self._check(count * item.itemsize)
            values = np.frombuffer(self._data, dtype=item, count=count, offset=self._at)
            self._at += count * item.itemsize
            return list(values.tolist())
        return self._strings(count) if kind == _STRING else [self._value(kind) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has 100,000 of them: as `_string`, without a call for each."""
        data, at, size, length_of = self._data, self._at, len(self._data), struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            (length,) = length_of(data, at)
            at += 8 + length
            if at > size or length > MOST_HEADER_BYTES:
                raise ModelLoadError(f"{self._path} is corrupt or truncated at byte {at - 8 - length}")
            found.append(data[at - length : at].decode("utf-8"))
        self._at = at
        self._check(0)
        return found

    def _string(self) -> str:
        length = self._count()
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8")

    def _count(self, most: int = MOST_HEADER_BYTES) -> int:
        """A number of things that follow; each takes at least a byte."""
        count = int(self._scalar("<Q"))
        if count > most:
            raise ModelLoadError(f"{self._path} is corrupt: {count} at byte {self._at - 8} is more than {most}")
        self._check(count)
        return count

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _check(self, num_bytes: int) -> None:
        if self._at + num_bytes > len(self._data):
            raise ModelLoadError(f"{self._path} is corrupt or truncated at byte {self._at}")
        if self._at + num_bytes > MOST_HEADER_BYTES:
            raise ModelLoadError(f"{self._path}: its header is larger than {MOST_HEADER_BYTES >> 20} MiB")
