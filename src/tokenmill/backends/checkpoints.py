"""Checkpoints: the tensors of a Hugging Face directory or a GGUF file, as they are stored. Numpy only.

Files are mapped, not read at once. A GGUF file's metadata are its `DecoderConfig`, too.
"""

from __future__ import annotations

import json
import math
import mmap
import reprlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from tokenmill.backends.families import choose_family
from tokenmill.backends.families.config import (
    MOST_CONTEXT,
    MOST_LAYERS,
    DecoderConfig,
    LayerConfig,
    layers_of,
    limited_context,
)
from tokenmill.backends.families.names import (
    GGUF_NAMES,
    ROPE_FACTORS_SHORT,
    ROPE_FREQS,
    SETTINGS,
    Shape,
    in_file,
    is_norm,
    shapes,
)
from tokenmill.backends.families.rope import Rope
from tokenmill.backends.gguf_file import OWN_ARCHITECTURES, GGUFFile, GGUFLayout, GGUFTensor
from tokenmill.errors import ModelLoadError
from tokenmill.files import Settings, indexed_files, read_json, safetensors_files

Floats = NDArray[np.float32]
NUMPY_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
"""Types of tensors that numpy has, too."""
RAW_TYPES = {
    "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "C64": np.complex64,
}  # fmt: skip
"""Others of safetensors, 16-bit and 8-bit floats by their bits."""
NOT_FLOATS = frozenset(RAW_TYPES) - {"BF16", "F8_E4M3", "F8_E5M2"}
RANDOM_RANGE = 0.02 * math.sqrt(3)
"""Of random weights: a standard deviation of 0.02, as of a model before training."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file has it."""

    dtype: str
    """As the file's format names it: `F32`, `BF16`, `Q4_1`."""
    shape: Shape
    raw: NDArray[Any]
    """Numbers of this shape; of types that numpy lacks their bits, of quantized ones rows of bytes."""
    order: NDArray[np.intp] | None = None
    """Which of the file's rows each row is; None: they are in order."""

    @property
    def is_floating_point(self) -> bool:
        return self.dtype not in NOT_FLOATS

    def values(self, where: str, name: str) -> Floats:
        """As float32, row-major; `where` and `name` say in an error what cannot be converted."""
        if not self.is_floating_point:
            raise ModelLoadError(f"{where}: {name} has the type {self.dtype}, which is not a floating point type")
        if self.dtype in NUMPY_TYPES:
            with np.errstate(over="ignore"):  # loading rejects values that are not finite
                found = self.raw.astype(np.float32, copy=False)
        elif self.dtype == "BF16":
            bits = self.raw.view(np.uint16).reshape(self.shape).astype(np.uint32)
            bits <<= 16  # in place: the largest tensor makes the peak of loading
            found = bits.view(np.float32)
        else:
            found = _dequantised(self, where, name)
        return np.ascontiguousarray(found if self.order is None else found[self.order])


def _dequantised(tensor: StoredTensor, where: str, name: str) -> Floats:
    try:
        import gguf  # takes longer to import than most models to load
    except ImportError:
        raise ModelLoadError(
            f"{where}: {name} has the type {tensor.dtype}; to dequantize it, pip install 'tokenmill[torch]'"
        ) from None
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            values = gguf.quants.dequantize(tensor.raw, gguf.GGMLQuantizationType[tensor.dtype])
    except (NotImplementedError, KeyError):
        raise ModelLoadError(f"{where}: {name} has the unsupported type {tensor.dtype}") from None
    return np.asarray(values, dtype=np.float32).reshape(tensor.shape)


class TensorSource(Protocol):
    """A checkpoint: tensors by the names it gives them."""

    @property
    def where(self) -> str:
        """What an error calls it."""
        ...

    @property
    def is_quantised(self) -> bool:
        """Are its large matrices stored in fewer bits than numbers usually have?"""
        ...

    def shapes(self) -> Mapping[str, Shape]: ...

    def dtype_of(self, name: str) -> str: ...

    def load(self, name: str) -> StoredTensor: ...


def check_tensors(source: TensorSource, config: DecoderConfig, names: Mapping[str, str]) -> None:
    """Compare a checkpoint's tensors with those of a decoder; `ModelLoadError` names what is missing, unexpected or
    misshapen. Nothing is allocated: sizes are believed only after this.
    """
    there, expected = source.shapes(), shapes(config)
    wanted = {in_file(own, names): own for own in expected}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise ModelLoadError(f"{source.where}: {some_names(missing)} missing")
    head = names["head"]  # a tied one may be there, too
    unexpected = [name for name in there if name not in wanted and name != head and not _is_a_setting(name)]
    if unexpected:
        raise ModelLoadError(f"{source.where}: {some_names(unexpected)} not expected")
    for name, own in wanted.items():
        if there[name] != expected[own]:
            raise ModelLoadError(f"{source.where}: {name} has shape {there[name]}, not {expected[own]}")


def _is_a_setting(name: str) -> bool:
    """Tensors that follow from the configuration, or that it was made from."""
    return name in SETTINGS or name.endswith("rotary_emb.inv_freq")


def some_names(names: list[str]) -> str:
    few = ", ".join(name if name.isprintable() else repr(name) for name in sorted(names)[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{few}{more} {'is' if len(names) == 1 else 'are'}"


@dataclass(frozen=True)
class Checkpoint:
    """A model of one of our own families: what is read of its files before its weights."""

    config: DecoderConfig
    source: TensorSource
    names: Mapping[str, str]
    """The decoder's name of each tensor -> the files'."""


def open_checkpoint(path: Path, *, impl: str = "auto", is_dummy: bool = False) -> Checkpoint | None:
    """The model in a directory or GGUF file; None if it is not of our families, and transformers is to run it.

    `impl` is a `model_impl`; `is_dummy`: random weights, from the configuration alone.
    """
    if path.is_file():
        return gguf_checkpoint(GGUFFile(path))
    given = read_config(path)
    family = choose_family(given, impl).family
    if family is None:
        return None
    config = family.read(given)
    source = RandomSource(path, config, family.names) if is_dummy else SafetensorsSource(path, family.ignored)
    return Checkpoint(config, source, family.names)


def gguf_checkpoint(file: GGUFFile) -> Checkpoint:
    """The model in a GGUF file of one of our own architectures."""
    config = config_of(file)
    return Checkpoint(config, GGUFSource(file, config), GGUF_NAMES)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a directory whose weights can be read."""
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json")
    config = read_json(folder / "config.json")
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else reprlib.repr(quantised)
        raise ModelLoadError(f"{folder} is quantized with {method!r}, which is not supported; use a GGUF file")
    return config


class SafetensorsSource:
    """The tensors of a directory's safetensors files, but those whose names begin with one of `ignored`."""

    is_quantised = False

    def __init__(self, folder: Path, ignored: tuple[str, ...] = ()) -> None:
        self.where = str(folder)
        self._places: dict[str, tuple[mmap.mmap, int, Mapping[str, Any]]] = {}
        """Name -> its file, where tensors begin in it, and what its header says."""
        for path in weight_files(folder):
            content, begin, header = _read_safetensors(path)
            for name, entry in header.items():
                if name in self._places:
                    raise ModelLoadError(f"{folder}: {name} is in two files")
                if not name.startswith(ignored):
                    self._places[name] = content, begin, entry

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(entry["shape"]) for name, (_, _, entry) in self._places.items()}

    def dtype_of(self, name: str) -> str:
        return str(self._places[name][2]["dtype"])

    def load(self, name: str) -> StoredTensor:
        content, begin, entry = self._places[name]
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        kind = NUMPY_TYPES.get(dtype) or RAW_TYPES.get(dtype)
        if kind is None:
            raise ModelLoadError(f"{self.where}: {name} cannot be read: unknown type {dtype}")
        raw = np.frombuffer(content, dtype=np.uint8, count=last - first, offset=begin + first)
        if raw.ctypes.data % np.dtype(kind).itemsize:  # the format does not promise that numbers are aligned
            raw = raw.copy()
        return StoredTensor(dtype, shape, raw.view(kind).reshape(shape))


def _read_safetensors(path: Path) -> tuple[mmap.mmap, int, Mapping[str, Any]]:
    """A file, mapped; where its tensors begin; name -> type, shape and place of each. The package checks the file."""
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            # Copy-on-write, though nothing writes: torch takes writable memory only.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is corrupt or truncated: {error}") from None
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    return content, begin, {name: entry for name, entry in header.items() if name != "__metadata__"}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model; an error says what is there instead."""
    names = {path.name for path in folder.iterdir()}
    found = safetensors_files(names, lambda: indexed_files(folder))
    if found:
        missing = [name for name in found if name not in names]
        if missing:
            raise ModelLoadError(f"{folder} has no {missing[0]}, which is a part of the model; download it again")
        return [folder / name for name in found]
    if any(name.endswith(".bin") for name in names):
        raise ModelLoadError(
            f"{folder} has only pickled weights (.bin), which can execute code; convert them to safetensors"
        )
    raise ModelLoadError(f"{folder} has no weights: no .safetensors and no .gguf file")


class RandomSource:
    """Random weights for a configuration. The same name has the same values each time."""

    is_quantised = False

    def __init__(self, folder: Path, config: DecoderConfig, names: Mapping[str, str]) -> None:
        self.where = str(folder)
        self._norm_weight = 1.0 - config.norm_offset
        self._own = {in_file(own, names): own for own in shapes(config)}
        self._shapes = {in_file(own, names): shape for own, shape in shapes(config).items()}

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def dtype_of(self, name: str) -> str:  # noqa: ARG002
        return "F32"

    def load(self, name: str) -> StoredTensor:
        """Norms are 1, biases 0. Each row of a matrix is the one above, moved on by a value: large models are ready as
        fast as memory can be written.
        """
        shape, kind = self._shapes[name], self._own[name].partition(".")[0]
        if len(shape) != 2:
            values = np.full(shape, self._norm_weight if is_norm(kind) else 0.0, dtype=np.float32)
            return StoredTensor("F32", shape, values)
        height, width = shape
        values = np.random.default_rng(zlib.crc32(name.encode())).random(height + width - 1, dtype=np.float32)
        values = (2 * values - 1) * np.float32(RANDOM_RANGE)
        return StoredTensor("F32", shape, np.lib.stride_tricks.sliding_window_view(values, width, writeable=True))


PERMUTED = ("granite", "llama", "smollm3")
"""Architectures whose queries and keys are stored for rotation of neighbouring dimensions."""


class GGUFSource:
    """The tensors of a GGUF file."""

    def __init__(self, file: GGUFFile, config: DecoderConfig) -> None:
        self.where = str(file.path)
        self._file = file
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._permuted = heads if file.get("general.architecture") in PERMUTED else {}

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tensor.shape for name, tensor in self._file.tensors.items()}

    def dtype_of(self, name: str) -> str:
        return _layout(self._file, self._file.tensors[name]).kind

    def load(self, name: str) -> StoredTensor:
        return replace(stored(self._file, self._file.tensors[name]), order=self._order(name))

    @property
    def is_quantised(self) -> bool:
        """Are its large matrices stored in fewer bits than numbers usually have?"""
        kinds = {_layout(self._file, one).kind for one in self._file.tensors.values() if len(one.shape) == 2}
        return any(kind.startswith(("Q", "IQ")) for kind in kinds)

    def _order(self, name: str) -> NDArray[np.intp] | None:
        """The order of rows in which dimension i turns with dimension i + dim / 2, where the file has another one."""
        num_heads = self._permuted.get(name.split(".")[-2])
        if num_heads is None:
            return None
        rows = np.arange(self._file.tensors[name].shape[0])
        return rows.reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()


def _layout(file: GGUFFile, tensor: GGUFTensor) -> GGUFLayout:
    layout = file.layout(tensor)
    if layout is None:
        raise ModelLoadError(f"{file.path}: {tensor.name} has an unknown type {tensor.type}")
    return layout


def stored(file: GGUFFile, tensor: GGUFTensor) -> StoredTensor:
    """A tensor of a GGUF file."""
    layout = _layout(file, tensor)
    raw = file.bytes_of(tensor, layout.num_bytes).reshape(layout.rows)
    if layout.kind in NUMPY_TYPES:
        raw = raw.view(NUMPY_TYPES[layout.kind]).reshape(tensor.shape)
    return StoredTensor(layout.kind, tensor.shape, raw)


class Metadata(Settings):
    """The metadata of a GGUF file under its architecture's name."""

    def per_layer(self, name: str, num_layers: int, default: int | None = None) -> int:
        """A number that a file may give once or for each layer; layers that differ are refused."""
        value = self.given(name)
        if not isinstance(value, list):
            return self.number(name, default)
        if len(value) != num_layers or any(one != value[0] for one in value):
            raise self.wrong(name, f"an integer, or a list with the same one for each of {num_layers} layers", value)
        return Settings({name: value[0]}, self._where).number(name)

    def scale(self, name: str) -> float | None:
        """A number above 0; to llama.cpp, 0 is none."""
        return None if self.given(name) in (None, 0) else self.real(name)

    def factor(self, name: str, arch: str) -> float:
        """A number that Granite multiplies or divides by; other architectures do not know it."""
        return (self.scale(name) if arch == "granite" else None) or 1.0

    def cap(self, name: str, default: float) -> float | None:
        """A soft cap; 0 is none."""
        return (default if self.given(name) is None else self.scale(name)) or None


def config_of(file: GGUFFile) -> DecoderConfig:
    """The decoder that a GGUF file holds."""
    arch = file.get("general.architecture")
    if arch not in OWN_ARCHITECTURES:
        supported = ", ".join(OWN_ARCHITECTURES)
        raise ModelLoadError(
            f"{file.path} has the architecture {arch!r}, which is not supported; supported: {supported}"
        )
    metadata = Metadata(file.metadata, str(file.path), f"{arch}.")
    num_layers = metadata.number("block_count", most=MOST_LAYERS)
    num_heads = metadata.per_layer("attention.head_count", num_layers)
    hidden_size = metadata.number("embedding_length")
    max_context = metadata.number("context_length", least=2, most=MOST_CONTEXT)
    hidden_share = max(1, hidden_size // num_heads)  # sizes that do not go together are refused with the tensors
    head_dim = metadata.number("attention.key_length", hidden_share)
    embed = file.tensors.get(GGUF_NAMES["embed"])
    if embed is None or len(embed.shape) != 2:
        raise ModelLoadError(f"{file.path} has no embedding: {GGUF_NAMES['embed']} is missing")
    layer, windows = _layer(file, metadata, arch), _windows(metadata, arch, num_layers)
    if arch in GEMMA:
        layer = replace(layer, attention_scale=_gemma_scale(arch, num_layers, hidden_share, head_dim))
    ropes = _ropes(arch, _rope(file, metadata, head_dim, max_context), metadata, windows)
    max_context = limited_context(max_context, ropes)
    return DecoderConfig(
        family=arch,
        vocab_size=embed.shape[0],
        hidden_size=hidden_size,
        intermediate_size=metadata.per_layer("feed_forward_length", num_layers),
        num_heads=num_heads,
        num_kv_heads=metadata.per_layer("attention.head_count_kv", num_layers, num_heads),
        head_dim=head_dim,
        max_context=max_context,
        rms_eps=metadata.real("attention.layer_norm_rms_epsilon"),
        layers=layers_of(layer, windows, ropes, max_context),
        embed_scale=math.sqrt(hidden_size) if arch in GEMMA else metadata.factor("embedding_scale", arch),
        logit_scale=1.0 / metadata.factor("logit_scale", arch),
        logit_softcap=metadata.cap("final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0),
        wide_norms=arch in GEMMA,
        tied=GGUF_NAMES["head"] not in file.tensors,
    )


# -- layers -----------------------------------------------------------------------------------------------------------

GEMMA = ("gemma2", "gemma3")
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the one whose attention scale goes by the hidden size: GGUF files do not have it."""
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "olmo2": 4}
"""Layers of which all but the last one have a window."""
NOPE_PERIOD = 4
"""Of SmolLM3: layers of which the last one is not rotated."""


def _layer(file: GGUFFile, metadata: Metadata, arch: str) -> LayerConfig:
    """What all layers have in common: by their tensors, where llama.cpp goes by them, else by the architecture."""
    norms = {"olmo2": "projection", "gemma3": "head"}
    return LayerConfig(
        attention_scale=metadata.scale("attention.scale") if arch == "granite" else None,
        attention_softcap=metadata.cap("attn_logit_softcapping", 50.0) if arch == "gemma2" else None,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=norms.get(arch, "head" if "blk.0.attn_q_norm.weight" in file.tensors else None),
        norm_before=arch != "olmo2",
        norm_after=arch in ("gemma2", "gemma3", "olmo2"),
        residual_scale=metadata.factor("residual_scale", arch),
        activation="gelu_tanh" if arch in GEMMA else "silu",
        fused="blk.0.attn_qkv.weight" in file.tensors,
    )


def _gemma_scale(arch: str, num_layers: int, hidden_share: int, head_dim: int) -> float:
    """As llama.cpp has it, too."""
    return 1.0 / math.sqrt(hidden_share if num_layers == LARGEST_GEMMA[arch] else head_dim)


def _windows(metadata: Metadata, arch: str, num_layers: int) -> list[int | None]:
    """Of each layer: of all of them, or by a period. To llama.cpp, 0 is none."""
    window = metadata.number("attention.sliding_window", 4096 if arch == "gemma2" else 0, least=0) or None
    if arch not in WINDOW_PERIODS:
        return [window] * num_layers
    slides = metadata.given("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        period = metadata.number("attention.sliding_window_pattern", WINDOW_PERIODS[arch])
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if len(slides) != num_layers or not all(isinstance(one, bool) for one in slides):
        raise metadata.wrong("attention.sliding_window_pattern", f"a list of {num_layers} flags", slides)
    return [window if one else None for one in slides]


def _ropes(arch: str, rope: Rope, metadata: Metadata, windows: list[int | None]) -> list[Rope | None]:
    """Of each layer, from what the file says of all of them."""
    if arch == "granite" and not metadata.flag("rope.scaling.finetuned", True):  # llama.cpp's switch for that
        return [None] * len(windows)
    if arch == "smollm3":
        return [rope if (layer + 1) % NOPE_PERIOD else None for layer in range(len(windows))]
    local = rope
    if arch == "gemma3":
        local = Rope(dim=rope.dim, theta=metadata.real("rope.freq_base_swa", 10_000.0, above=1.0))
    if arch == "olmo2":  # OLMo 3 files: layers with a window are not stretched
        local = Rope(dim=rope.dim, theta=rope.theta)
    return [rope if window is None else local for window in windows]


# -- rotary positions -------------------------------------------------------------------------------------------------


def _rope(file: GGUFFile, metadata: Metadata, head_dim: int, max_context: int) -> Rope:
    """As llama.cpp reads it: scaling without a type is linear, and its older name is `rope.scale_linear`."""
    dim = metadata.number("rope.dimension_count", head_dim)
    kind = metadata.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelLoadError(f"{file.path}: rope scaling of type {kind!r} is not supported")
    _refuse_other_scaling(metadata, kind)
    rope = Rope(
        dim=dim,
        theta=metadata.real("rope.freq_base", 10_000.0, above=1.0),
        kind="default" if kind in ("none", "longrope") else kind,
        factor=metadata.real("rope.scaling.factor", metadata.real("rope.scale_linear", 1.0)),
        original_context=metadata.number("rope.scaling.original_context_length", 0, least=0) or max_context,
        beta_fast=metadata.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.real("rope.scaling.yarn_beta_slow", 1.0),
        divisors=_divisors(file, ROPE_FREQS, dim),
        scale=metadata.real("rope.scaling.attn_factor", 1.0),
    )
    if short := _divisors(file, ROPE_FACTORS_SHORT, dim):
        return replace(rope, kind="longrope", factor=1.0, divisors=short)  # the file has the attention factor
    return rope


READ_OR_HARMLESS = frozenset(
    {"type", "factor", "attn_factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow", "finetuned"}
)


def _refuse_other_scaling(metadata: Metadata, kind: str) -> None:
    """Settings of `rope.scaling` that would change the numbers if they were followed."""
    neutral = {
        "yarn_ext_factor": (-1.0, 1.0 if kind == "yarn" else 0.0),  # -1 is unset
        "yarn_attn_factor": (1.0,),
        "yarn_log_multiplier": (0.0,),
    }
    for name in sorted(set(metadata.names_under("rope.scaling.")) - READ_OR_HARMLESS):
        if name not in neutral:
            raise ModelLoadError(f"rope.scaling.{name} is not supported")
        value = metadata.given(f"rope.scaling.{name}")
        if value not in neutral[name]:
            raise metadata.wrong(f"rope.scaling.{name}", " or ".join(f"{one:g}" for one in neutral[name]), value)


def _divisors(file: GGUFFile, name: str, dim: int) -> tuple[float, ...]:
    """What each frequency is divided by, where the file has a tensor of that."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.shape != (dim // 2,):
        raise ModelLoadError(f"{file.path}: {name} has shape {tensor.shape}, not {(dim // 2,)}")
    values = stored(file, tensor).values(str(file.path), name)
    if not bool((np.isfinite(values) & (values > 0)).all()):
        raise ModelLoadError(f"{file.path}: {name} must be positive")
    return tuple(values.tolist())
