"""`StepSampler`: the `Sampler` of one step. It samples where the logits are.

Numpy logits go to the C library, or through `definition` where there is none; tensors stay on their device and go to
the sampler of the torch backend. A row's draw depends on its own parameters, log and key alone, so a seeded request
draws the same token alone and in any crowd.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tokenmill.backends.cpu.bindings import Pool, SamplingStruct, TokensStruct, address, library
from tokenmill.contract import BAD_ROW, IntArray, Mask, Sampled
from tokenmill.contract.backend import FloatArray
from tokenmill.contract.draws import DRAW, Draws, TokenLists
from tokenmill.sampling import definition
from tokenmill.sampling.state import SamplingState


class HostSampler:
    """Samples numpy logits: in the C library, or by the definition where there is none.

    For one thread at a time: each engine core has its own, which keeps the library's memory from step to step.
    """

    def __init__(self, lib: Any | None = None) -> None:
        """Without a library, the one that is installed is looked for when it is needed."""
        self._given = lib
        self._memory = np.empty(0, dtype=np.uint8)

    @cached_property
    def _lib(self) -> Any | None:
        return library() if self._given is None else self._given

    def __call__(self, draws: Draws, logits: FloatArray, mask: Mask | None, pool: Pool | None = None) -> Sampled:
        """An id for each row, on the pool's threads."""
        if self._lib is None:
            return definition.sample(draws, logits, mask)
        logits = np.ascontiguousarray(logits, dtype=np.float32)
        table = np.ascontiguousarray(draws.table, dtype=DRAW)
        mask = None if mask is None else np.ascontiguousarray(mask, dtype=np.uint32)
        num_rows, vocab = logits.shape
        count = min(draws.num_logprobs, vocab)
        ids = np.full(num_rows, BAD_ROW, dtype=np.int32)
        logprob = np.full(num_rows, np.nan, dtype=np.float32)
        num_top = max(count, 0)
        top_logprobs = np.full((num_rows, num_top), np.nan, dtype=np.float32)
        top_ids = np.full((num_rows, num_top), BAD_ROW, dtype=np.int32)
        lists = [_tokens(one, vocab) for one in (draws.allowed, draws.edits, draws.history, draws.taxes)]
        step = SamplingStruct(
            address(logits), address(table), None if mask is None else address(mask), *lists,
            address(ids), address(logprob), address(top_logprobs), address(top_ids),
            num_rows, vocab, 0 if mask is None else mask.shape[1], num_top,
        )  # fmt: skip
        handle = None if pool is None else pool.handle
        needed = self._lib.tm_sample_bytes(vocab, handle)
        if len(self._memory) < needed:
            self._memory = np.empty(needed, dtype=np.uint8)
        self._lib.tm_sample(ctypes.byref(step), address(self._memory), handle)
        if count < 0:
            return Sampled(ids)
        return Sampled(ids, {"logprob": logprob, "top_logprobs": top_logprobs, "top_ids": top_ids})


@dataclass(frozen=True)
class StepSampler:
    """Samples logits row i for row `rows[i]` of the state; the new token will stand at `positions[i]`."""

    state: SamplingState
    rows: IntArray
    """A row may occur several times: its draws after proposed tokens."""
    positions: IntArray
    proposed: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Place in `rows` -> tokens between the row's log and this draw, which no draw has confirmed yet."""
    host: HostSampler = field(default_factory=HostSampler)

    def __call__(self, logits: Any, mask: Mask | None, threads: Any | None = None) -> Sampled:
        draws = self.state.draws(self.rows, self.positions, self.proposed)
        if isinstance(logits, np.ndarray):
            return self.host(draws, _resized(logits, self.state.vocab_size), mask, threads)
        from tokenmill.backends.torch.tensor_sampler import resized, sample  # only where torch is in use anyway

        return sample(draws, resized(logits, self.state.vocab_size), mask)


def _resized(logits: FloatArray, vocab_size: int) -> FloatArray:
    """Logits of a draft model, whose vocabulary may be padded to another size."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return np.pad(logits, ((0, 0), (0, missing)), constant_values=definition.NEVER)
    return logits[:, :vocab_size]


def _tokens(lists: TokenLists | None, vocab: int) -> TokensStruct:
    """Where lists are; the caller keeps them. The library does not check tokens before it writes to their logits."""
    if lists is None:
        return TokensStruct(None, None, None)
    token, value = lists.token, lists.value
    if len(token) and not 0 <= token.min() <= token.max() < vocab:
        raise ValueError(f"tokens must be from 0 to {vocab - 1}, not {token.min()} to {token.max()}")
    return TokensStruct(address(lists.begin), address(token), None if value is None else address(value))
