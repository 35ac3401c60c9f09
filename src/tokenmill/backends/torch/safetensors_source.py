"""A Hugging Face directory as a `TensorSource`: one or several safetensors files, mapped, not read at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenmill.backends.torch.families.names import Shape
from tokenmill.errors import ModelLoadError

INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    """The tensors of a directory's safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._file_of: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path} is damaged or cut short: {error}") from None
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 (it is no dict)
                if name in self._file_of:
                    raise ModelLoadError(f"{folder}: {name} is in two files")
                self._file_of[name] = file

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def load(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model; an error says what is there instead."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is no index of weights: {error}") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(f"{folder} has no {missing[0]}, which {INDEX} names")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    if list(folder.glob("*.bin")):
        raise ModelLoadError(
            f"{folder} has its weights only as .bin files, which can run code when they are opened; "
            "convert them to safetensors"
        )
    raise ModelLoadError(f"{folder} has no weights: no .safetensors and no .gguf file")
