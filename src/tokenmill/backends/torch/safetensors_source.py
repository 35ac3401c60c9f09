"""A Hugging Face directory as a `TensorSource`: one or several safetensors files, mapped, not read at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenmill.backends.torch.families.names import Shape
from tokenmill.backends.torch.native.library import INT8
from tokenmill.errors import ModelLoadError
from tokenmill.files import Settings, read_json

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

    is_quantised = False

    def bits_of(self, name: str) -> int:  # noqa: ARG002
        """In how many bits a matrix is held if nothing else is asked for."""
        return INT8

    def load_quantised(self, name: str) -> None:
        """Hugging Face checkpoints hold numbers as they are."""

    def load(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file_of[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{self.where}: {name} can't be read: {error}") from None
        return tensor


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model; an error says what is there instead."""
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    # Other weights may lie beside: `consolidated.safetensors` is the same model once more, under other names.
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if found:
            return found
    if list(folder.glob("*.bin")):
        raise ModelLoadError(
            f"{folder} has its weights only as .bin files, which can run code when they are opened; "
            "convert them to safetensors"
        )
    raise ModelLoadError(f"{folder} has no weights: no .safetensors and no .gguf file")


def _indexed_files(folder: Path) -> list[Path]:
    """The files that the index names."""
    index = folder / INDEX
    named = Settings(read_json(index), str(index)).mapping("weight_map").values()
    wrong = [name for name in named if not isinstance(name, str)]
    if wrong or not named:
        raise ModelLoadError(f"{index} is no index of weights: weight_map names {wrong[0] if wrong else 'no file'}")
    names = sorted(set(named))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder} has no {missing[0]}, which {INDEX} names")
    return [folder / name for name in names]
