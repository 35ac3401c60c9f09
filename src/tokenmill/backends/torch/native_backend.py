"""`NativeDecoder` and its backend: the contract's steps on the C library."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.attention import runs_of
from tokenmill.backends.torch.backend import HostBackend, Ubatch
from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.decoder import scaled_logits
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.native.bindings import Matrix, Pool, StepStruct, address
from tokenmill.backends.torch.native.packing import KV_DTYPE, NativeWeights
from tokenmill.backends.torch.rope import Rotations
from tokenmill.contract import Batch, IntArray
from tokenmill.kv.paged import PagedKV, Segment
from tokenmill.kv.paged_backend import WeightsGate
from tokenmill.kv.tables import BlockTables


class NativeDecoder:
    """Weights and what is done with them. Shared by all backends of a model; keeps no state of its own."""

    device = torch.device("cpu")
    kv_dtype = KV_DTYPE

    def __init__(self, lib: Any, config: DecoderConfig, weights: NativeWeights) -> None:
        self.lib = lib
        self.config = config
        self.weights = weights
        self._rotations = Rotations([layer.rope for layer in config.layers], self.device)

    @property
    def inv_freq(self) -> Tensor:
        """[layers, rotated dims / 2]: what keys are rotated by, for each position."""
        return self._rotations.inv_freq

    @property
    def about(self) -> str:
        """How the weights are held, for people."""
        variant = self.lib.tm_variant().decode()
        return f"weights in {self.weights.bits} bits ({self.weights.num_bytes / 1e6:.0f} MB), kernels for {variant}"

    @property
    def names(self) -> list[str]:
        return self.weights.names

    def replace(self, own: str, value: Tensor) -> None:
        self.weights.replace(own, value)

    def embedded(self, token: NDArray[np.int64]) -> NDArray[np.float32]:
        """[tokens, hidden]"""
        x = np.empty((len(token), self.config.hidden_size), dtype=np.float32)
        self.lib.tm_rows(ctypes.byref(self.weights.embed), address(token), len(token), address(x))
        if self.config.embed_scale != 1.0:
            x *= np.float32(self.config.embed_scale)
        return x

    def rotations(self, pos: IntArray) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, [different rotations, tokens, rotated dims / 2]."""
        turns = self._rotations.of(torch.from_numpy(pos))
        if len(turns) == 1:
            return turns[0][0].numpy(), turns[0][1].numpy()
        cos, sin = ([turn[i].numpy()[:, 0] for turn in turns] for i in range(2))
        return (np.stack(cos), np.stack(sin)) if turns else (np.zeros(0, np.float32), np.zeros(0, np.float32))

    def normed(self, hidden: Tensor) -> Tensor:
        """The last norm: what embeddings are made of."""
        x, out = hidden.numpy(), np.empty(hidden.shape, dtype=np.float32)
        weight, width = self.weights.norm, self.config.hidden_size
        self.lib.tm_norm(address(x), address(weight), self.config.rms_eps, len(x), width, address(out))
        return torch.from_numpy(out)

    def product(self, matrix: Matrix, x: NDArray[np.float32], pool: Pool) -> NDArray[np.float32]:
        """[rows, outputs]"""
        y = np.empty((len(x), matrix.rows), dtype=np.float32)
        scratch = np.empty(self.lib.tm_product_bytes(matrix, len(x)), dtype=np.uint8)
        self.lib.tm_product(matrix, address(x), len(x), address(y), address(scratch), pool.handle)
        return y


class NativeBackend(HostBackend[NativeDecoder]):
    """One KV memory over shared weights. A step's layers are one call of the library."""

    def __init__(
        self,
        decoder: NativeDecoder,
        kv: PagedKV,
        storage: TorchKV,
        gate: WeightsGate,
        *,
        ubatch_size: int,
        num_threads: int,
    ) -> None:
        # What torch still does here is small: threads of its own would only be in the way.
        super().__init__(decoder, kv, storage, gate, ubatch_size=ubatch_size, num_threads=1)
        self._pool = Pool(decoder.lib, num_threads)
        self._scratch = np.empty(0, dtype=np.uint8)
        self._cells = [np.array([one.data_ptr() for one in tensors], dtype=np.uintp)
                       for tensors in (storage.keys, storage.values)]  # fmt: skip

    def _hidden(self, batch: Batch, segment: Segment, slots: IntArray, ubatch: Ubatch) -> Tensor:
        token = self._tokens(batch.token[ubatch.tokens]).numpy()
        pos = np.ascontiguousarray(batch.pos[ubatch.tokens], dtype=np.int32)
        x = self._decoder.embedded(token)
        lead, slot = segment.token_lead[ubatch.inside], slots[ubatch.inside].astype(np.int64)
        self._run_layers(x, pos, lead, slot, self._kv.tables)
        return torch.from_numpy(x)

    def _run_layers(
        self, x: NDArray[np.float32], pos: IntArray, lead: IntArray, slot: NDArray[np.int64], tables: BlockTables
    ) -> None:
        decoder, count = self._decoder, len(x)
        runs = runs_of(lead, pos)
        order = runs.tokens.astype(np.int32)
        begin = np.append(runs.begin, count).astype(np.int32)
        seq = runs.seq.astype(np.int32)
        cos, sin = decoder.rotations(pos)
        keys, values = self._cells
        arrays: list[NDArray[Any]] = [order, begin, seq, pos, slot, cos, sin, tables.table, tables.base, tables.start]
        sizes = (tables.table.shape[1], tables.block_size)
        step = StepStruct(count, len(seq), *map(address, arrays), *sizes, address(keys), address(values))
        needed = decoder.lib.tm_scratch_bytes(decoder.weights.decoder, count)
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, dtype=np.uint8)
        decoder.lib.tm_run(decoder.weights.decoder, step, address(x), address(self._scratch), self._pool.handle)

    def _logits(self, normed: Tensor) -> Tensor:
        x = np.ascontiguousarray(normed.numpy())
        logits = torch.from_numpy(self._decoder.product(self._decoder.weights.head, x, self._pool))
        return scaled_logits(self._decoder.config, logits)

    def _free(self) -> None:
        super()._free()
        self._pool.close()
