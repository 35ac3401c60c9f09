"""`CudaBackend`: the contract on one card. Nothing it launches makes the host wait before `collect`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.attention import Attention, GatherAttention
from tokenmill.backends.torch.backend import TorchBackend, TorchStep, Ubatch, greedy
from tokenmill.backends.torch.cuda.attention import PagedAttention, PagedLayers
from tokenmill.backends.torch.cuda.decoder import CudaDecoder
from tokenmill.backends.torch.cuda.graphs import DecodeGraphs, DecodeShape
from tokenmill.backends.torch.cuda.inputs import DecodeInputs, StepInputs, capacity, mixed_inputs
from tokenmill.backends.torch.cuda.kernels import drawing
from tokenmill.backends.torch.cuda.kernels.prefill_attention import QUERIES
from tokenmill.backends.torch.cuda.transfer import InputBuffer, download
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.core import BAD_ROW, Batch, IntArray, Mask, Output, PagedKV, Sampled
from tokenmill.core.backend import SampleRows
from tokenmill.core.segments import Segment
from tokenmill.core.weights_gate import WeightsGate
from tokenmill.errors import ForwardFailed

LARGEST_GRAPH = 512
"""Decode steps of more sequences are launched kernel by kernel: the host keeps up with them."""


class CudaStep(TorchStep):
    """A submitted step; an event says when it is done."""

    def __init__(self, owner: CudaBackend, batch: Batch, number: int) -> None:
        super().__init__(owner, batch, number)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark_launched(self, stream: torch.cuda.Stream) -> None:
        """All that was launched so far belongs to this step."""
        self._done.record(stream)

    def wait(self) -> None:
        """Wait for this step alone: the next one may be running already."""
        self._done.synchronize()


class CudaBackend(TorchBackend):
    """One KV memory over shared weights."""

    _decoder: CudaDecoder

    def __init__(
        self,
        decoder: CudaDecoder,
        kv: PagedKV,
        storage: TorchKV,
        gate: WeightsGate,
        *,
        ubatch_size: int,
        num_threads: int,
    ) -> None:
        super().__init__(decoder, kv, storage, gate, ubatch_size=ubatch_size, num_threads=num_threads)
        self._switches = decoder.switches
        self._stream = torch.cuda.current_stream(self._device)
        """Everything is launched there. Asking for it anew each time takes longer than a launch."""
        self._last_sampled = torch.zeros(kv.capabilities.max_seqs, dtype=torch.int32, device=self._device)
        self._buffer = InputBuffer(capacity(ubatch_size, kv.tables), self._device)
        self._state = torch.empty(ubatch_size, decoder.config.hidden_size, dtype=decoder.kv_dtype, device=self._device)
        self._layers = PagedLayers(storage, decoder.config.windows)
        self._graphs: DecodeGraphs | None = None
        self._decodes: dict[DecodeShape, DecodeInputs] = {}
        self._table_rows: tuple[IntArray, Tensor] | None = None
        """The rows of the token table that were last written, here and on the card: mostly they are so again."""
        if self._switches.graphs and self._switches.attention and self._switches.islands:
            largest_graph = min(kv.capabilities.max_seqs, ubatch_size, LARGEST_GRAPH)
            self._graphs = DecodeGraphs(largest_graph, self._device)
        # Our attention loads nothing that a token does not see; what gathers whole blocks needs numbers in all of them.
        storage.holds_bad_numbers = not self._switches.attention

    @property
    def kv_bytes(self) -> int:
        """Of keys and values."""
        return self._storage.num_bytes

    # -- a step -------------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch, number: int) -> CudaStep:
        return CudaStep(self, batch, number)

    def _is_lost(self, error: Exception) -> bool:
        """After a failed kernel a CUDA context is lost; running out of memory leaves it as it was."""
        return not isinstance(error, torch.OutOfMemoryError)

    def _note_bad_numbers(self, hidden: Tensor) -> None:
        """Nobody waits to find out."""

    def _launched(self, step: TorchStep) -> None:
        assert isinstance(step, CudaStep)
        step.mark_launched(self._stream)

    def _wait(self, step: TorchStep) -> None:
        assert isinstance(step, CudaStep)
        try:
            step.wait()
        except RuntimeError as error:
            raise ForwardFailed(f"{type(error).__name__}: {error}", fatal=True) from error

    def _hidden(self, batch: Batch, segment: Segment, slots: IntArray, ubatch: Ubatch) -> Tensor:
        """Of the tokens that ask for anything."""
        wanted = np.flatnonzero(batch.output[ubatch.tokens])
        token, pos = batch.token[ubatch.tokens], batch.pos[ubatch.tokens]
        lead, slot = segment.token_lead[ubatch.inside], slots[ubatch.inside]
        tables, count = self._kv.tables, len(token)
        is_decode = len(segment.lead) == len(segment.token_lead)  # one token of each sequence
        shape = self._graphs.shape_for(count) if self._graphs and is_decode else None
        if self._graphs is not None and shape is not None:
            decode = self._decode_inputs(shape)
            decode.send(tables, token, pos, slot, lead)
            self._graphs.run(shape, lambda: self._launch(decode.on_card, self._paged(decode.on_card)))
            state = self._state[:count]
            return state if len(wanted) == count else state[self._to_device(wanted)]
        inputs = mixed_inputs(self._buffer, tables, token, pos, slot, lead, QUERIES)
        attention = self._paged(inputs) if self._switches.attention else self._gathering(lead, pos)
        return self._launch(inputs, attention, None if len(wanted) == count else self._to_device(wanted))

    def _decode_inputs(self, shape: DecodeShape) -> DecodeInputs:
        inputs = self._decodes.get(shape)
        if inputs is None:
            inputs = self._decodes[shape] = DecodeInputs(self._buffer, shape.num_tokens)
        return inputs

    def _launch(self, inputs: StepInputs, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        state = self._state[: len(inputs.token)]
        return self._decoder.run(inputs, self._last_sampled, state, self._storage, attention, wanted)

    def _paged(self, inputs: StepInputs) -> Attention:
        return PagedAttention(self._layers, inputs)

    def _gathering(self, lead: IntArray, pos: IntArray) -> Attention:
        return GatherAttention(self._storage, self._kv.tables, lead, pos, self._decoder.config.windows)

    def _keep_outputs(self, step: TorchStep, hidden: Tensor, output: NDArray[np.uint8]) -> None:
        """Logits and hidden rows; `hidden` has a row for each token that asks for one of them or both."""
        flags = output[output != 0]
        for flag, parts in ((Output.LOGITS, step.logits_parts), (Output.HIDDEN, step.hidden_parts)):
            chosen = np.flatnonzero(flags & np.uint8(flag))
            if not len(chosen):
                continue
            rows = hidden if len(chosen) == len(hidden) else hidden[self._to_device(chosen)]
            if flag is Output.LOGITS:
                parts.append(self._decoder.logits_of(rows))
            else:
                parts.append(self._decoder.normed(rows).float())

    # -- sampling -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _sample(self, step: TorchStep, rows: SampleRows, mask: Mask | None) -> Sampled:
        assert isinstance(step, CudaStep)
        logits = self._all_logits(step)
        if len(rows.logits_row) != len(logits) or (rows.logits_row != np.arange(len(logits))).any():
            logits = logits[self._to_device(rows.logits_row)]
        sampled = self._greedy(logits, mask) if rows.sampler is None else rows.sampler(logits, mask)
        ids = torch.as_tensor(sampled.ids, dtype=torch.int32, device=self._device)
        # A bad row's request is over; at depth 1 its next token is in flight already and must be some valid id.
        self._last_sampled.index_copy_(0, self._table_rows_on_card(rows.table_row), ids.clamp(min=0))
        on_host = Sampled(download(ids), {name: _downloaded(value) for name, value in sampled.extras.items()})
        step.mark_launched(self._stream)
        return on_host

    def _greedy(self, logits: Tensor, mask: Mask | None) -> Sampled:
        return Sampled(drawing.greedy(logits, BAD_ROW)) if mask is None else greedy(logits, mask)

    def _table_rows_on_card(self, rows: IntArray) -> Tensor:
        if self._table_rows is None or not np.array_equal(self._table_rows[0], rows):
            self._table_rows = rows.copy(), self._to_device(rows)
        return self._table_rows[1]

    def _free(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        self._layers.clear()
        super()._free()


def _downloaded(value: Any) -> Any:
    return download(value) if isinstance(value, Tensor) else value
