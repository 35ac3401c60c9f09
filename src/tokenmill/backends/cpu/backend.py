"""The contract on the C library: `CPUDecoder`, its KV memory and its backend. Numpy holds everything in between."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.backends.cpu.bindings import Matrix, Pool, StepStruct, address
from tokenmill.backends.cpu.packing import LARGE_PAGE, NativeWeights, zeros
from tokenmill.backends.families.config import DecoderConfig
from tokenmill.backends.families.rope import frequencies
from tokenmill.contract import Batch, DecodeOutput, IntArray, LayerKV, Mask, Output, Sampled
from tokenmill.contract.backend import FloatArray, SampleRows, greedy
from tokenmill.errors import ForwardFailed, InvalidOperation
from tokenmill.kv.paged import PagedKV, Segment
from tokenmill.kv.paged_backend import PagedBackend, PagedStep, WeightsGate
from tokenmill.kv.tables import BlockTables

FEW_TOKENS, FEW_BYTES = 32, 1 << 22
"""Tokens looked up, and bytes of blocks copied, with the GIL held."""


class CPUDecoder:
    """Weights and what is done with them. Shared by all backends of a model; keeps no state of its own."""

    def __init__(self, lib: Any, config: DecoderConfig, weights: NativeWeights) -> None:
        self.lib = lib
        self.config = config
        self.weights = weights
        self._frequencies = [frequencies(rope) for rope in config.ropes]
        half = config.ropes[0].dim // 2 if config.ropes else 0
        self.inv_freq: FloatArray = np.zeros((config.num_layers, half), dtype=np.float32)
        """[layers, rotated dims / 2]: angle a position by which keys are rotated; 0 where a layer has no rotation."""
        for i, layer in enumerate(config.layers):
            if layer.rope is not None:
                self.inv_freq[i] = self._frequencies[config.ropes.index(layer.rope)][0]

    @property
    def about(self) -> str:
        """How the weights are held, for people."""
        variant = self.lib.tm_variant().decode()
        kinds = " and ".join(self.weights.kinds[:2])
        return f"weights in {kinds} ({self.weights.num_bytes / 1e6:.0f} MB), kernels for {variant}"

    def embedded(self, token: NDArray[np.int64]) -> FloatArray:
        """[tokens, hidden]"""
        x = np.empty((len(token), self.config.hidden_size), dtype=np.float32)
        rows = self.lib.rows_held if len(token) <= FEW_TOKENS else self.lib.tm_rows
        rows(ctypes.byref(self.weights.embed), address(token), len(token), address(x))
        if self.config.embed_scale != 1.0:
            x *= np.float32(self.config.embed_scale)
        return x

    def rotations(self, pos: IntArray) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines, [different rotations, tokens, rotated dims / 2]."""
        turns = [rotations(pos, inv_freq, scale) for inv_freq, scale in self._frequencies]
        if len(turns) == 1:
            return turns[0]
        cos, sin = ([turn[i] for turn in turns] for i in range(2))
        return (np.stack(cos), np.stack(sin)) if turns else (np.zeros(0, np.float32), np.zeros(0, np.float32))

    def normed(self, hidden: FloatArray) -> FloatArray:
        """The last norm: what embeddings are made of."""
        out = np.empty(hidden.shape, dtype=np.float32)
        weight, width = self.weights.norm, self.config.hidden_size
        self.lib.tm_norm(address(hidden), address(weight), self.config.rms_eps, len(hidden), width, address(out))
        return out

    def logits(self, normed: FloatArray, pool: Pool) -> FloatArray:
        """[rows, vocab]"""
        logits, config = self.product(self.weights.head, normed, pool), self.config
        if config.logit_scale != 1.0:
            logits *= np.float32(config.logit_scale)
        if config.logit_softcap is not None:
            logits = np.tanh(logits / np.float32(config.logit_softcap)) * np.float32(config.logit_softcap)
        return logits

    def product(self, matrix: Matrix, x: FloatArray, pool: Pool) -> FloatArray:
        """[rows, outputs]"""
        y = np.empty((len(x), matrix.rows), dtype=np.float32)
        scratch = np.empty(self.lib.tm_product_bytes(matrix, len(x)), dtype=np.uint8)
        self.lib.tm_product(matrix, address(x), len(x), address(y), address(scratch), pool.handle)
        return y


def rotations(pos: IntArray, inv_freq: FloatArray, scale: float) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines of positions, [tokens, rotated dims / 2].

    Angles are single precision, as models are trained with; their cosines are rounded once, from double precision, so
    that they are the same on every machine: a last digit that differs is enough to change what a model says.
    """
    angle = (pos.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    factor = np.float32(scale)
    return np.cos(angle).astype(np.float32) * factor, np.sin(angle).astype(np.float32) * factor


KV_DTYPES: dict[str, np.dtype[Any]] = {"auto": np.dtype(np.float16), "int8": np.dtype(np.int8)}
"""Of keys and values, by the names of `kv_cache_dtype`; each with its number in the library."""
KV_DTYPE_NUMBERS = {np.dtype(np.float16): 0, np.dtype(np.int8): 1}
SCALE_BYTES = 4
"""After the bytes of a head: what they are multiplied by, a float32."""


def layer_kv(config: DecoderConfig, dtype: np.dtype[Any]) -> tuple[LayerKV, ...]:
    """What each layer keeps per token: items of this type."""
    layers = config.layer_kv(dtype.itemsize)
    if dtype != np.int8:
        return layers
    return tuple(
        replace(one, key_dim=one.key_dim + SCALE_BYTES, value_dim=one.value_dim + SCALE_BYTES) for one in layers
    )


def _unscaled(heads: NDArray[np.int8]) -> FloatArray:
    scale = np.ascontiguousarray(heads[..., -SCALE_BYTES:]).view(np.float32)
    return heads[..., :-SCALE_BYTES] * scale


def _scaled(values: FloatArray) -> NDArray[np.int8]:
    """Heads as bytes, the largest number of each 127, and their scales, as the library rounds them."""
    scale = np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    return np.concatenate([np.rint(values * inverse).astype(np.int8), scale.view(np.int8)], axis=-1)


class CPUKV:
    """A `KVStorage`: keys and values of every layer over slots. Keys are stored rotated to their positions.

    They are in half precision, or in 8 bits: a head of a token as bytes and a scale.
    """

    def __init__(
        self,
        lib: Any,
        layers: Sequence[LayerKV],
        num_blocks: int,
        block_size: int,
        inv_freq: FloatArray,
        dtype: np.dtype[Any] = KV_DTYPES["auto"],
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        slots = num_blocks * block_size
        # A token touches every one of these arrays. In large pages from the start, the first token of a server would
        # take 4 MiB a layer: 120 MiB beside 97 MB of weights.
        self.keys = [zeros((slots, one.num_heads, one.key_dim), dtype, small_bytes=LARGE_PAGE) for one in layers]
        self.values = [zeros((slots, one.num_heads, one.value_dim), dtype, small_bytes=LARGE_PAGE) for one in layers]
        self.places = np.array([address(cells) for cells in self._all()], dtype=np.uintp)
        """Where the arrays are: keys of all layers, then values."""
        self._block_bytes = np.array([block_size * cells[:1].nbytes for cells in self._all()], dtype=np.uintp)
        self._lib = lib
        self.holds_bad_numbers = False
        """Has a sequence ever computed keys or values that are not finite? Its own request fails by them."""
        self._inv_freq = inv_freq

    @property
    def num_bytes(self) -> int:
        return sum(cells.nbytes for cells in self._all())

    def hand_out(self, blocks: IntArray) -> None:
        """Blocks get a new owner. What a former one left in them is masked, which only helps if it is a number."""
        if self.holds_bad_numbers:
            for cells in self._all():
                self._blocks(cells)[blocks] = 0

    def copy_blocks(self, src: IntArray, dst: IntArray) -> None:
        from_, to = (np.ascontiguousarray(blocks, dtype=np.int32) for blocks in (src, dst))
        where, sizes = address(self.places), address(self._block_bytes)
        is_short = len(to) * self._block_bytes.sum() <= FEW_BYTES
        copy = self._lib.copy_blocks_held if is_short else self._lib.tm_copy_blocks
        copy(where, sizes, len(self.places), address(from_), address(to), len(to))

    def shift(self, slots: IntArray, delta: int) -> None:
        """Turn keys on by `delta` positions: rotations add up."""
        by = np.array([delta])
        for keys, inv_freq in zip(self.keys, self._inv_freq, strict=True):
            cos, sin = rotations(by, inv_freq, 1.0)
            half = cos.shape[1]
            moved = _unscaled(keys[slots]) if self._is_scaled else keys[slots].astype(np.float32)
            first, second = moved[..., :half].copy(), moved[..., half : 2 * half].copy()
            moved[..., :half] = first * cos - second * sin
            moved[..., half : 2 * half] = second * cos + first * sin
            keys[slots] = _scaled(moved) if self._is_scaled else moved

    def read(self, slots: IntArray) -> bytes:
        return b"".join(cells[slots].tobytes() for cells in self._all())

    def write(self, slots: IntArray, data: memoryview) -> None:
        sizes = [len(slots) * math.prod(cells.shape[1:]) * cells.itemsize for cells in self._all()]
        if len(data) != sum(sizes):
            raise InvalidOperation(f"{len(data)} bytes for {len(slots)} cells of {sum(sizes) // len(slots)} bytes")
        at = 0
        for cells, size in zip(self._all(), sizes, strict=True):
            new = np.frombuffer(data[at : at + size], dtype=cells.dtype).reshape(len(slots), *cells.shape[1:])
            numbers = np.ascontiguousarray(new[..., -SCALE_BYTES:]).view(np.float32) if self._is_scaled else new
            if not np.isfinite(numbers).all():
                raise InvalidOperation("the data contains non-finite keys or values")
            cells[slots] = new
            at += size

    def free(self) -> None:
        """Give the memory back."""
        self.keys.clear()
        self.values.clear()
        self.places = self.places[:0]

    @property
    def _is_scaled(self) -> bool:
        return self.dtype == np.int8

    def _all(self) -> list[NDArray[Any]]:
        return [*self.keys, *self.values]

    def _blocks(self, cells: NDArray[Any]) -> NDArray[Any]:
        return cells.reshape(-1, self.block_size, *cells.shape[1:])


class CPUStep(PagedStep):
    """A submitted step."""

    def __init__(self, owner: CPUBackend, batch: Batch, number: int) -> None:
        super().__init__(owner, batch, number)
        self.logits_parts: list[FloatArray] = []
        self.hidden_parts: list[FloatArray] = []


class CPUBackend(PagedBackend[CPUStep]):
    """One KV memory over shared weights. A step's layers are one call of the library, done when it is submitted."""

    def __init__(
        self,
        decoder: CPUDecoder,
        kv: PagedKV,
        storage: CPUKV,
        gate: WeightsGate,
        *,
        ubatch_size: int,
        num_threads: int,
    ) -> None:
        super().__init__(kv, decoder.config.vocab_size, gate)
        self._decoder = decoder
        self._storage = storage
        self._ubatch_size = ubatch_size
        self._last_sampled = np.zeros(kv.capabilities.max_seqs, dtype=np.int64)
        self._pool = Pool(decoder.lib, num_threads)
        self._scratch = np.empty(0, dtype=np.uint8)

    # -- a step -------------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch, number: int) -> CPUStep:
        return CPUStep(self, batch, number)

    def _run(self, step: CPUStep, batch: Batch, segment: Segment, slots: IntArray) -> None:
        first, stop = segment.tokens.start, segment.tokens.stop
        try:
            for begin in range(first, stop, self._ubatch_size):
                tokens = slice(begin, min(begin + self._ubatch_size, stop))
                inside = slice(tokens.start - first, tokens.stop - first)
                self._compute(step, batch, tokens, segment.token_lead[inside], slots[inside])
        except MemoryError as error:
            raise ForwardFailed(f"{type(error).__name__}: {error}") from error

    def _compute(self, step: CPUStep, batch: Batch, tokens: slice, lead: IntArray, slots: IntArray) -> None:
        """Compute some tokens, and keep the logits and hidden rows that they ask for."""
        x = self._decoder.embedded(self._tokens(batch.token[tokens]))
        pos = np.ascontiguousarray(batch.pos[tokens], dtype=np.int32)
        self._run_layers(x, pos, lead, slots.astype(np.int64), self._kv.tables)
        if not self._storage.holds_bad_numbers:
            # A token whose hidden state is not finite has written such keys and values.
            with np.errstate(all="ignore"):
                self._storage.holds_bad_numbers = not np.isfinite(x.sum())
        self._keep_outputs(step, x, batch.output[tokens])

    def _run_layers(
        self, x: FloatArray, pos: IntArray, lead: IntArray, slot: NDArray[np.int64], tables: BlockTables
    ) -> None:
        decoder, count = self._decoder, len(x)
        # The tokens of each sequence, wherever they stand in the batch, in order of position.
        first = np.concatenate([[0], (lead[1:] != lead[:-1]).nonzero()[0] + 1])
        seq, order = lead[first], np.arange(count)
        if len(set(seq.tolist())) < len(seq):  # some stand apart from each other
            order = np.lexsort((pos, lead))
            seq, first = np.unique(lead[order], return_index=True)
        begin = np.append(first, count).astype(np.int32)
        cos, sin = decoder.rotations(pos)
        keys, values = np.split(self._storage.places, 2)
        arrays: list[NDArray[Any]] = [
            order.astype(np.int32), begin, seq.astype(np.int32), pos, slot, cos, sin,
            tables.table, tables.base, tables.start,
        ]  # fmt: skip
        sizes = (tables.table.shape[1], tables.block_size)
        dtype = KV_DTYPE_NUMBERS[self._storage.dtype]
        step = StepStruct(count, len(seq), *map(address, arrays), *sizes, address(keys), address(values), dtype)
        needed = decoder.lib.tm_scratch_bytes(decoder.weights.decoder, count)
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, dtype=np.uint8)
        decoder.lib.tm_run(decoder.weights.decoder, step, address(x), address(self._scratch), self._pool.handle)

    def _keep_outputs(self, step: CPUStep, hidden: FloatArray, output: NDArray[np.uint8]) -> None:
        """Logits and hidden rows of the tokens that ask for them; the others are not even normed."""
        wanted = np.flatnonzero(output)
        if not len(wanted):
            return
        flags = output[wanted]
        normed = self._decoder.normed(hidden if len(wanted) == len(hidden) else hidden[wanted])
        for flag, parts in ((Output.LOGITS, step.logits_parts), (Output.HIDDEN, step.hidden_parts)):
            chosen = np.flatnonzero(flags & np.uint8(flag))
            if not len(chosen):
                continue
            part = normed if len(chosen) == len(wanted) else normed[chosen]
            parts.append(self._decoder.logits(part, self._pool) if flag is Output.LOGITS else part)

    def _tokens(self, token: IntArray) -> NDArray[np.int64]:
        """The tokens, those named by a row of the token table looked up there."""
        tokens = token.astype(np.int64)
        pending = tokens < 0
        if pending.any():
            tokens[pending] = self._last_sampled[-1 - tokens[pending]]
        return tokens

    def _launched(self, step: CPUStep) -> None:
        """What is launched here is done."""

    def _wait(self, step: CPUStep) -> None:
        """What is launched here is done."""

    # -- results ------------------------------------------------------------------------------------------------------

    def _sample(self, step: CPUStep, rows: SampleRows, mask: Mask | None) -> Sampled:
        logits = self._logits(step)
        if len(rows.logits_row) != len(logits) or (rows.logits_row != np.arange(len(logits))).any():
            logits = logits[rows.logits_row]
        sampled = greedy(logits, mask) if rows.sampler is None else rows.sampler(logits, mask, self._pool)
        # A bad row's request is over; at depth 1 its next token is in flight already and must be some valid id.
        self._last_sampled[rows.table_row] = np.clip(sampled.ids[: len(rows.table_row)], 0, self._vocab_size - 1)
        return sampled

    def _output(self, step: CPUStep) -> DecodeOutput:
        hidden = _joined(step.hidden_parts, self._decoder.config.hidden_size)
        return DecodeOutput(self._logits(step), step.output_ids, hidden, step.hidden_ids)

    def _on_host(self, sampled: Sampled) -> Sampled:
        return sampled

    def _logits(self, step: CPUStep) -> FloatArray:
        if len(step.logits_parts) != 1:
            step.logits_parts = [_joined(step.logits_parts, self._vocab_size)]
        return step.logits_parts[0]

    def _free(self) -> None:
        self._storage.free()
        self._pool.close()


def _joined(parts: list[FloatArray], width: int) -> FloatArray:
    if not parts:
        return np.zeros((0, width), dtype=np.float32)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
