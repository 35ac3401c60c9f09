"""`TorchBackend`: the contract on torch tensors. The rules are `PagedBackend`'s; this is the computing.

It is generic in its decoder and in what it keeps of a step. `EagerBackend` runs a step when it is submitted:
`DenseBackend` here, and `transformers_adapter.py` on the models of transformers. `cuda/backend.py` has what a card
adds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.families.config import DecoderSizes
from tokenmill.backends.torch.attention import ROWS, AttentionMaker, GatherAttention, TiledAttention
from tokenmill.backends.torch.decoder import Decoder
from tokenmill.backends.torch.kernels.device import largest, largest_allowed, upload
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.contract import BAD_ROW, Batch, DecodeOutput, IntArray, Mask, Output, Sampled, Sampler
from tokenmill.contract.backend import SampleRows
from tokenmill.errors import ForwardFailed
from tokenmill.kv.paged import PagedKV, Segment
from tokenmill.kv.paged_backend import PagedBackend, PagedStep, WeightsGate


class TorchStep(PagedStep):
    """A submitted step."""

    def __init__(self, owner: TorchBackend[Any, Any], batch: Batch, number: int) -> None:
        super().__init__(owner, batch, number)
        self.logits_parts: list[Tensor] = []
        self.hidden_parts: list[Tensor] = []


@dataclass(frozen=True)
class Ubatch:
    """Tokens that are computed together: part of a segment."""

    tokens: slice
    """Of the batch."""
    inside: slice
    """Of the segment."""


class AnyDecoder(Protocol):
    """What a backend must know of its decoder."""

    @property
    def config(self) -> DecoderSizes: ...

    @property
    def device(self) -> torch.device: ...


class LayeredDecoder(AnyDecoder, Protocol):
    """A decoder whose last norm and head are steps of their own."""

    def normed(self, hidden: Tensor) -> Tensor: ...


D = TypeVar("D", bound=AnyDecoder)
L = TypeVar("L", bound=LayeredDecoder)
S = TypeVar("S", bound=TorchStep)


class TorchBackend(PagedBackend[S], Generic[D, S]):
    """One KV memory over shared weights."""

    def __init__(
        self,
        decoder: D,
        kv: PagedKV,
        storage: TorchKV,
        gate: WeightsGate,
        *,
        ubatch_size: int,
        num_threads: int,
    ) -> None:
        super().__init__(kv, decoder.config.vocab_size, gate)
        self._decoder = decoder
        self._storage = storage
        self._device = decoder.device
        self._num_threads = num_threads
        self._ubatch_size = ubatch_size
        self._last_sampled = torch.zeros(kv.capabilities.max_seqs, dtype=torch.int64, device=self._device)

    # -- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: Batch) -> S:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)  # every backend sets its own: it is the process's, in part
        return super().forward(batch)

    def _run(self, step: S, batch: Batch, segment: Segment, slots: IntArray) -> None:
        try:
            for ubatch in self._ubatches(segment.tokens):
                self._compute(step, batch, segment, slots, ubatch)
        except (RuntimeError, MemoryError) as error:
            raise ForwardFailed(f"{type(error).__name__}: {error}", fatal=self._is_lost(error)) from error

    @abstractmethod
    def _compute(self, step: S, batch: Batch, segment: Segment, slots: IntArray, ubatch: Ubatch) -> None:
        """Compute some tokens, and keep the logits and hidden rows that they ask for."""

    def _is_lost(self, error: Exception) -> bool:  # noqa: ARG002
        """Is the backend of no use after such an error?"""
        return False

    def _ubatches(self, tokens: slice) -> Iterator[Ubatch]:
        for begin in range(tokens.start, tokens.stop, self._ubatch_size):
            end = min(begin + self._ubatch_size, tokens.stop)
            yield Ubatch(slice(begin, end), slice(begin - tokens.start, end - tokens.start))

    # -- sampling and waiting -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _sample(self, step: S, rows: SampleRows, mask: Mask | None) -> Sampled:
        logits = self._all_logits(step)
        if len(rows.logits_row) != len(logits) or (rows.logits_row != np.arange(len(logits))).any():
            logits = logits[self._to_device(rows.logits_row)]
        sampled = greedy(logits, mask) if rows.sampler is None else self._draw(rows.sampler, logits, mask)
        # A bad row's request is over; at depth 1 its next token is in flight already and must be some valid id.
        kept = self._ids(sampled.ids)[: len(rows.table_row)]
        self._last_sampled[self._to_device(rows.table_row)] = kept.clamp(0, self._vocab_size - 1)
        return sampled

    def _reaches(self, table: Any) -> bool:
        return isinstance(table, Tensor) and table.device == self._last_sampled.device

    @torch.inference_mode()
    def _take_ids(self, table: Tensor, table_row: IntArray, own_row: IntArray) -> None:
        theirs, own = self._to_device(np.stack([table_row, own_row]))
        ids = table[theirs].clamp_(0, self._vocab_size - 1)
        self._last_sampled.index_copy_(0, own, ids.to(self._last_sampled.dtype))

    def _draw(self, sampler: Sampler, logits: Tensor, mask: Mask | None) -> Sampled:
        """On the host in numpy, whose sampler is faster than torch's there."""
        return sampler(logits.float().numpy() if logits.device.type == "cpu" else logits, mask)

    def _ids(self, ids: Any) -> Tensor:
        """Ids on the device, from a sampler that worked there or on the host."""
        return torch.as_tensor(ids, dtype=torch.int64, device=self._device)

    def _output(self, step: S) -> DecodeOutput:
        hidden = _joined(step.hidden_parts, self._decoder.config.hidden_size)
        return DecodeOutput(
            self._all_logits(step).float().cpu().numpy(), step.output_ids, hidden.cpu().numpy(), step.hidden_ids
        )

    def _on_host(self, sampled: Sampled) -> Sampled:
        extras = {name: _to_host(value) for name, value in sampled.extras.items()}
        return Sampled(_to_host(sampled.ids).astype(np.int32), extras)

    def _free(self) -> None:
        self._storage.keys.clear()
        self._storage.values.clear()

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _all_logits(self, step: S) -> Tensor:
        if len(step.logits_parts) != 1:
            step.logits_parts = [_joined(step.logits_parts, self._vocab_size)]
        return step.logits_parts[0]

    def _tokens(self, token: IntArray) -> Tensor:
        """The tokens on the device, those named by a row of the token table looked up there."""
        tokens = self._to_device(token)
        if (token < 0).any():
            return torch.where(tokens < 0, self._last_sampled[(-1 - tokens).clamp(min=0)], tokens)
        return tokens

    def _to_device(self, numbers: np.ndarray) -> Tensor:
        return upload(numbers.astype(np.int64), self._device)


class EagerBackend(TorchBackend[D, TorchStep]):
    """Runs a step when it is submitted: there is nothing to wait for but its results."""

    def _begin(self, batch: Batch, number: int) -> TorchStep:
        return TorchStep(self, batch, number)

    def _launched(self, step: TorchStep) -> None:
        """What is launched here is done."""

    def _wait(self, step: TorchStep) -> None:
        """What is launched here is done."""


class HostBackend(EagerBackend[L]):
    """On the CPU, layer by layer up to the last norm."""

    def _compute(self, step: TorchStep, batch: Batch, segment: Segment, slots: IntArray, ubatch: Ubatch) -> None:
        hidden = self._hidden(batch, segment, slots, ubatch)
        self._note_bad_numbers(hidden)
        self._keep_outputs(step, hidden, batch.output[ubatch.tokens])

    @abstractmethod
    def _hidden(self, batch: Batch, segment: Segment, slots: IntArray, ubatch: Ubatch) -> Tensor:
        """[tokens, hidden]: the last layer's output, still to be normed."""

    @abstractmethod
    def _logits(self, normed: Tensor) -> Tensor:
        """[rows, vocab] in float32."""

    def _note_bad_numbers(self, hidden: Tensor) -> None:
        """A token whose hidden state is not finite has written such keys and values."""
        if not self._storage.holds_bad_numbers:
            self._storage.holds_bad_numbers = not bool(hidden.sum().isfinite())

    def _keep_outputs(self, step: TorchStep, hidden: Tensor, output: NDArray[np.uint8]) -> None:
        """Logits and hidden rows of the tokens that ask for them; the others are not even normed."""
        wanted = np.flatnonzero(output)
        if not len(wanted):
            return
        flags = output[wanted]
        rows = hidden if len(wanted) == len(hidden) else hidden[self._to_device(wanted)]
        normed = self._decoder.normed(rows)
        for flag, parts in ((Output.LOGITS, step.logits_parts), (Output.HIDDEN, step.hidden_parts)):
            chosen = np.flatnonzero(flags & np.uint8(flag))
            if not len(chosen):
                continue
            part = normed if len(chosen) == len(wanted) else normed[self._to_device(chosen)]
            parts.append(self._logits(part) if flag is Output.LOGITS else part.float())


class DenseBackend(HostBackend[Decoder]):
    """Dense weights on torch; where a row's result must not depend on its batch, in tiles of one shape."""

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        storage: TorchKV,
        gate: WeightsGate,
        *,
        ubatch_size: int,
        num_threads: int,
    ) -> None:
        self._deterministic = kv.capabilities.deterministic
        ubatch_size = ROWS if self._deterministic else ubatch_size
        super().__init__(decoder, kv, storage, gate, ubatch_size=ubatch_size, num_threads=num_threads)
        make = TiledAttention if self._deterministic else GatherAttention
        self._attention: AttentionMaker = partial(make, windows=decoder.config.windows)

    def _hidden(self, batch: Batch, segment: Segment, slots: IntArray, ubatch: Ubatch) -> Tensor:
        token, pos = batch.token[ubatch.tokens], batch.pos[ubatch.tokens]
        lead, slot = segment.token_lead[ubatch.inside], slots[ubatch.inside]
        count = len(token)
        if self._deterministic:
            # The tile is filled up with its last token, computed and stored once more where it is.
            token, pos, lead, slot = (np.pad(one, (0, ROWS - count), mode="edge") for one in (token, pos, lead, slot))
        attention = self._attention(self._storage, self._kv.tables, lead, pos)
        hidden = self._decoder.hidden(
            self._tokens(token), self._to_device(pos), self._to_device(slot), self._storage, attention
        )
        return hidden[:count]

    def _logits(self, normed: Tensor) -> Tensor:
        count, rows = len(normed), normed
        if self._deterministic:
            rows = normed.new_zeros(ROWS, normed.shape[1])
            rows[:count] = normed
        return self._decoder.logits(rows)[:count]


def greedy(logits: Tensor, mask: Mask | None) -> Sampled:
    """The largest logit of each row, `BAD_ROW` where that is no number."""
    best, ids = largest(logits) if mask is None else largest_allowed(logits, mask)
    return Sampled(torch.where(best.isfinite(), ids, BAD_ROW).to(torch.int32))


def _to_host(value: Any) -> NDArray[Any]:
    return value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _joined(parts: list[Tensor], width: int) -> Tensor:
    if not parts:
        return torch.zeros(0, width)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
