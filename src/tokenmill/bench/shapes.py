"""Random checkpoints of typical sizes, for `tokenmill bench compare --shape`.

A checkpoint has Llama's architecture, the default model's vocabulary and random weights; llama.cpp's own quantizer
makes the file, so its mix of types is that of real files. Files are kept in the cache folder.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.backends.library import cache_folder, pull
from tokenmill.config import DEFAULT_MODEL
from tokenmill.errors import ConfigError

CONTEXT = 8192
DEVIATION = 0.02
"""Of random weights: those of a model before training."""
RANDOM_VALUES = (1 << 24) + 12_345
"""Values that are drawn; tensors are cut out of them, each from its own place on."""


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama-style decoder whose head is not tied to its embedding."""

    hidden: int
    layers: int
    feed_forward: int
    heads: int
    kv_heads: int

    def tensors(self, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor, in the order in which llama.cpp's converter writes them."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "token_embd.weight", (vocab_size, self.hidden)
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm.weight", (self.hidden,)
            yield f"blk.{i}.attn_q.weight", (self.hidden, self.hidden)
            yield f"blk.{i}.attn_k.weight", (kv, self.hidden)
            yield f"blk.{i}.attn_v.weight", (kv, self.hidden)
            yield f"blk.{i}.attn_output.weight", (self.hidden, self.hidden)
            yield f"blk.{i}.ffn_norm.weight", (self.hidden,)
            yield f"blk.{i}.ffn_gate.weight", (self.feed_forward, self.hidden)
            yield f"blk.{i}.ffn_up.weight", (self.feed_forward, self.hidden)
            yield f"blk.{i}.ffn_down.weight", (self.hidden, self.feed_forward)
        yield "output_norm.weight", (self.hidden,)
        yield "output.weight", (vocab_size, self.hidden)


SHAPES = {
    "1b": LlamaShape(2048, 22, 5632, 32, 4),
    "3b": LlamaShape(3072, 28, 8192, 24, 8),
}


def checkpoint(shape: str, quantization: str) -> Path:
    """The file of a shape in one of llama.cpp's quantizations (Q4_K_M, Q8_0, ...), made on first use."""
    folder = cache_folder() / "shapes"
    target = folder / f"{shape}-{quantization}.gguf"
    if target.exists():
        return target
    file_type(quantization)  # a wrong name is refused before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{shape}-F16.gguf"
    if not source.exists():
        partial = source.with_suffix(".partial")
        write_random(SHAPES[shape], partial)
        partial.replace(source)
    quantize(source, target, quantization)
    return target


def file_type(quantization: str) -> int:
    """llama.cpp's number of a quantization."""
    import llama_cpp

    found = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quantization}", None)
    if not isinstance(found, int):
        prefix = "LLAMA_FTYPE_MOSTLY_"
        known = sorted(name.removeprefix(prefix) for name in dir(llama_cpp) if name.startswith(prefix))
        raise ConfigError(f"llama.cpp has no quantization {quantization!r}; it has {', '.join(known)}")
    return found


def quantize(source: Path, target: Path, quantization: str) -> None:
    """Have llama.cpp quantize a file; one that is quantized already, once more."""
    import llama_cpp as llama

    llama.llama_backend_init()
    llama.llama_log_set(_silence(), ctypes.c_void_p(0))
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = file_type(quantization), True
    partial = target.with_suffix(".partial")
    if llama.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)) != 0:
        raise ConfigError(f"llama.cpp can't quantize {source} to {quantization}")
    partial.replace(target)


@cache
def _silence() -> Any:
    """A log callback; llama.cpp keeps calling it, so it must outlive the call that sets it."""
    import llama_cpp as llama

    return llama.llama_log_callback(lambda *_: None)


def write_random(shape: LlamaShape, path: Path) -> None:
    """A GGUF file of the shape in half precision, with the default model's tokenizer."""
    import gguf

    reader: Any = gguf.GGUFReader(pull(DEFAULT_MODEL))
    writer: Any = gguf.GGUFWriter(path, "llama")
    vocab_size = len(reader.get_field("tokenizer.ggml.tokens").data)
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    todo = list(shape.tensors(vocab_size))
    for name, size in todo:
        dtype = np.dtype(np.float32 if len(size) == 1 else np.float16)
        writer.add_tensor_info(name, size, dtype, int(np.prod(size)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    drawn = np.random.default_rng(0).normal(0, DEVIATION, RANDOM_VALUES).astype(np.float16)
    for number, (_, size) in enumerate(todo):
        writer.write_tensor_data(np.ones(size, np.float32) if len(size) == 1 else _cut(drawn, number, size))
    writer.close()


def _cut(drawn: NDArray[np.float16], number: int, size: tuple[int, ...]) -> NDArray[np.float16]:
    """So many of the drawn values, from a place on that is this tensor's own; over and over if there are too few."""
    return np.resize(np.roll(drawn, 7_919 * (number + 1)), size)
