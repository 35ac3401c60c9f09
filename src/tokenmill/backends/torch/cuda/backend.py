"""`CudaBackend`: the contract on one card. Nothing it launches makes the host wait before `collect`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.attention import PLAIN, Attention, GatherAttention, Scoring
from tokenmill.backends.torch.backend import TorchBackend, TorchStep, Ubatch
from tokenmill.backends.torch.cuda.graphs import (
    DecodeShape,
    GraphOutputs,
    OutputTurns,
    PromptShapes,
    StepGraphs,
    decode_sizes,
    largest_decode,
)
from tokenmill.backends.torch.cuda.inputs import (
    FAR_CELLS,
    FAR_ROWS,
    SHORT_RUN,
    DecodeInputs,
    InputBuffer,
    PromptShape,
    StepInputs,
    StepRuns,
    capacity,
    download,
    mixed_inputs,
    most_singles,
)
from tokenmill.backends.torch.cuda.layers import AnyCudaDecoder
from tokenmill.backends.torch.footprint import GRAPH_TOKENS
from tokenmill.backends.torch.kernels import drawing
from tokenmill.backends.torch.kernels.device import masked
from tokenmill.backends.torch.kernels.paged_attention import (
    QUERIES,
    add_far_attention,
    by_block,
    decode_attention,
    num_splits_for,
    prefill_attention,
)
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.contract import BAD_ROW, Batch, IntArray, Mask, Output, Sampled
from tokenmill.contract.backend import SampleRows, pack_mask
from tokenmill.errors import ForwardFailed
from tokenmill.kv.paged import PagedKV, Segment
from tokenmill.kv.paged_backend import WeightsGate

log = logging.getLogger(__name__)


class PagedLayers:
    """What attention reads in each layer, worked out once for a KV memory."""

    def __init__(self, kv: TorchKV, windows: Sequence[int | None], *, is_capped: bool) -> None:
        self.keys, self.values = kv.keys, kv.values
        self.block_size = kv.block_size
        self.windows = windows
        self.blocks = [_blocks(*cells, kv.block_size) for cells in zip(kv.keys, kv.values, strict=True)]
        device = kv.keys[0].device
        is_plain = all(window is None for window in windows) and not is_capped
        self.reads_far = is_plain and kv.keys[0].itemsize == 2 and None not in self.blocks
        """May cuDNN read what lies far behind a chunk? It knows neither windows nor soft caps."""
        self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def warm_up_far(self, query_size: int) -> None:
        """Load cuDNN, which takes a second; where that fails, kernels of ours read everything."""
        keys, values = self.keys[0], self.values[0]
        q = torch.zeros(FAR_ROWS, query_size // keys.shape[2], keys.shape[2], dtype=keys.dtype, device=keys.device)
        sums = torch.zeros(q.shape[:2], dtype=torch.float32, device=keys.device)
        blocks = torch.zeros(FAR_CELLS[-1] // self.block_size, dtype=torch.int32, device=keys.device)
        try:
            add_far_attention(q, keys, values, q.clone(), sums, blocks, block_size=self.block_size, sizes=FAR_CELLS)
        except RuntimeError as error:
            log.info("cuDNN's attention is not available: %s", error)
            self.reads_far = False

    def clear(self) -> None:
        """Let go of the memory."""
        self.keys, self.values = [], []
        self.blocks.clear()


def _blocks(keys: Tensor, values: Tensor, block_size: int) -> tuple[Any, Any] | None:
    blocks = by_block(keys, block_size), by_block(values, block_size)
    return None if blocks[0] is None else blocks


class PagedAttention:
    """An `Attention`. What it launches depends on the step's shapes alone, so a graph can hold it."""

    def __init__(self, layers: PagedLayers, inputs: StepInputs) -> None:
        self._layers = layers
        self._inputs = inputs
        self._num_splits = 1
        if inputs.singles is not None:
            num_kv = layers.keys[0].shape[1]
            self._num_splits = num_splits_for(len(inputs.singles.row), num_kv, layers.num_processors)

    def __call__(self, layer: int, q: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        layers = self._layers
        keys, values = layers.keys[layer], layers.values[layer]
        block_size, window = layers.block_size, layers.windows[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        singles, longs = self._inputs.singles, self._inputs.longs
        if longs is not None:
            sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            prefill_attention(
                q, keys, values, layers.blocks[layer], out,
                longs.order, longs.begin, longs.count, longs.index, longs.first,
                longs.tile_run, longs.tile_offset, longs.tables, longs.width,
                block_size=block_size, window=window, scale=scoring.scale, softcap=scoring.softcap,
                sums=sums if longs.far else None,
            )  # fmt: skip
            for part in longs.far:
                rows = part.tokens
                add_far_attention(
                    q[rows], keys, values, out[rows], sums[rows], part.blocks,
                    block_size=block_size, sizes=FAR_CELLS, scale=scoring.scale,
                )  # fmt: skip
        if singles is not None:
            decode_attention(
                q, keys, values, out,
                singles.row, singles.last, singles.first, singles.tables, singles.width,
                block_size=block_size, window=window, num_splits=self._num_splits,
                scale=scoring.scale, softcap=scoring.softcap,
            )  # fmt: skip
        return out


WARM_UP_S = 10.0
"""For the capture of graphs at start-up, which takes 2 to 5 s."""
NO_TOKENS: IntArray = np.zeros(0, dtype=np.int32)


class CudaStep(TorchStep):
    """A submitted step; an event says when it is done."""

    def __init__(self, owner: CudaBackend, batch: Batch, number: int) -> None:
        super().__init__(owner, batch, number)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.largest: GraphOutputs | None = None
        """Its logits and where the largest ones are, if a graph has found that out already."""

    def mark_launched(self, stream: torch.cuda.Stream) -> None:
        """All that was launched so far belongs to this step."""
        self._done.record(stream)

    def wait(self) -> None:
        """Wait for this step alone: the next one may be running already."""
        self._done.synchronize()


class CudaBackend(TorchBackend[AnyCudaDecoder, CudaStep]):
    """One KV memory over shared weights."""

    def __init__(
        self,
        decoder: AnyCudaDecoder,
        kv: PagedKV,
        storage: TorchKV,
        gate: WeightsGate,
        *,
        ubatch_size: int,
        num_threads: int,
        num_running: int | None = None,
    ) -> None:
        super().__init__(decoder, kv, storage, gate, ubatch_size=ubatch_size, num_threads=num_threads)
        self._switches = decoder.switches
        self._stream = torch.cuda.current_stream(self._device)
        """Everything is launched there. Asking for it anew each time takes longer than a launch."""
        self._last_sampled = torch.zeros(kv.capabilities.max_seqs, dtype=torch.int32, device=self._device)
        self._buffer = InputBuffer(capacity(ubatch_size, kv.tables, num_running, QUERIES, GRAPH_TOKENS), self._device)
        self._state = torch.empty(ubatch_size, decoder.config.hidden_size, dtype=decoder.kv_dtype, device=self._device)
        self._layers = PagedLayers(storage, decoder.config.windows, is_capped=decoder.is_capped)
        self._graphs: StepGraphs | None = None
        self._decodes: dict[int, DecodeInputs] = {}
        self._in_order = np.arange(kv.capabilities.max_seqs, dtype=np.int32)
        self._table_rows: tuple[IntArray, Tensor] | None = None
        """The rows of the token table that were last written, here and on the card: mostly they are so again."""
        most_seqs = num_running or kv.capabilities.max_seqs
        self._most_singles = most_singles(ubatch_size, most_seqs)
        largest_graph = largest_decode(most_seqs, ubatch_size)
        if self._switches.graphs and self._switches.attention and self._switches.islands:
            self._graphs = StepGraphs(self._device)
            self._turns = OutputTurns(largest_graph, self._vocab_size, decoder.kv_dtype, self._device)
        self._decode_sizes = decode_sizes(largest_graph)
        self._prompt_shapes = PromptShapes(ubatch_size, max(most_seqs, largest_graph))
        # Our attention loads nothing that a token does not see; what gathers whole blocks needs numbers in all of them.
        storage.holds_bad_numbers = not self._switches.attention

    @property
    def kv_bytes(self) -> int:
        """Of keys and values."""
        return self._storage.num_bytes

    # -- before the first step ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, seconds: float = WARM_UP_S) -> None:
        """Compile the kernels and capture the graphs, so that no request waits for that.

        Sizes are captured coarse ones first. What is not captured in this time never is: such steps are padded to the
        next larger size. Compilation, which happens once on a machine, does not count.
        """
        self._warm_up_sampling()
        if self._layers.reads_far:
            self._layers.warm_up_far(self._decoder.config.query_size)
        graphs = self._graphs
        if graphs is not None:
            for sizes, capture in (
                (self._decode_sizes, self._capture_decode),
                (self._prompt_shapes.tokens, self._capture_prompts),
            ):
                sizes.keep(_capture_for(seconds / 2, sizes.coarse_first, partial(capture, graphs)))
            self._run_largest()
        torch.cuda.synchronize(self._device)

    def _warm_up_sampling(self) -> None:
        """From logits as they are, and from edited ones, which are float32."""
        key, one = (0, 0, 0, 0), int(np.float32(1).view(np.int32))
        # Temperature 1, top-k 1, top-p 1, min-p 0, typical-p 0.
        told = torch.tensor([[*key, one, 1, one, 0, 0, 0, 0]], device=self._device)
        for dtype in {self._decoder.kv_dtype, torch.float32}:
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
            drawing.largest(logits)
            drawing.greedy(masked(logits, pack_mask(np.ones((1, self._vocab_size), dtype=bool))), BAD_ROW)
            drawing.draw(logits, told, BAD_ROW, is_filtered=True, is_typical=True)
        self._take_ids(self._last_sampled, self._in_order[:1], self._in_order[:1])

    def _capture_decode(self, graphs: StepGraphs, size: int) -> None:
        """Graphs of decode steps of this size, run on padding."""
        inputs, (first, *others) = self._decode_inputs(size), self._turns.outputs
        inputs.send(self._kv.tables, NO_TOKENS, NO_TOKENS, NO_TOKENS, NO_TOKENS)
        self._run_decode(graphs, size, first)
        for outputs in others:
            graphs.capture(DecodeShape(size, outputs.turn), self._decode_launch(size, outputs))
        for outputs in (first, *others):  # the first replay uploads a graph
            self._run_decode(graphs, size, outputs)

    def _capture_prompts(self, graphs: StepGraphs, num_tokens: int) -> None:
        """Graphs of steps with prompt tokens, for any number of decodes, run on padding."""
        runs = StepRuns.of(NO_TOKENS, NO_TOKENS)
        for num_singles in self._prompt_shapes.singles.sizes:
            shape = PromptShape(num_tokens, num_singles)
            inputs = mixed_inputs(
                self._buffer, self._kv.tables, NO_TOKENS, NO_TOKENS, NO_TOKENS, runs, QUERIES, shape
            )  # fmt: skip
            self._run_prompts(graphs, shape, inputs)
            self._run_prompts(graphs, shape, inputs)  # the first replay uploads a graph

    def _run_largest(self) -> None:
        """The largest step, kernel by kernel, on padding: torch keeps the memory that it takes."""
        shape = PromptShape(self._ubatch_size, self._prompt_shapes.singles.largest)
        runs = StepRuns.of(NO_TOKENS, NO_TOKENS)
        inputs = mixed_inputs(self._buffer, self._kv.tables, NO_TOKENS, NO_TOKENS, NO_TOKENS, runs, QUERIES, shape)
        rows = torch.arange(min(self._decode_sizes.largest, self._ubatch_size), device=self._device)
        self._decoder.logits_of(self._launch(inputs, self._paged(inputs), rows))

    # -- a step -------------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch, number: int) -> CudaStep:
        return CudaStep(self, batch, number)

    def _is_lost(self, error: Exception) -> bool:
        """After a failed kernel a CUDA context is lost; running out of memory leaves it as it was."""
        return not isinstance(error, torch.OutOfMemoryError)

    def _launched(self, step: CudaStep) -> None:
        step.mark_launched(self._stream)

    def _wait(self, step: CudaStep) -> None:
        try:
            step.wait()
        except RuntimeError as error:
            raise ForwardFailed(f"{type(error).__name__}: {error}", fatal=True) from error

    def _compute(self, step: CudaStep, batch: Batch, segment: Segment, slots: IntArray, ubatch: Ubatch) -> None:
        token, pos = batch.token[ubatch.tokens], batch.pos[ubatch.tokens]
        lead, slot = segment.token_lead[ubatch.inside], slots[ubatch.inside]
        output = batch.output[ubatch.tokens]
        is_decode = len(segment.lead) == len(segment.token_lead)  # one token of each sequence
        if self._graphs is not None and len(token) <= self._decode_sizes.largest and _are_short(segment):
            self._decode(step, self._graphs, token, pos, slot, lead, output)
            return
        wanted, runs = np.flatnonzero(output), StepRuns.of(lead, pos, self._most_singles)
        on_card = None if len(wanted) == len(token) else self._to_device(wanted)
        shape = None
        if self._graphs is not None and not is_decode:
            shape = self._prompt_shapes.shape_for(len(token), runs.num_singles, runs.num_longs)
        reads_far = shape is None and self._switches.attention and self._layers.reads_far
        inputs = mixed_inputs(
            self._buffer, self._kv.tables, token, pos, slot, runs, QUERIES, shape, reads_far=reads_far
        )
        if self._graphs is not None and shape is not None:
            self._run_prompts(self._graphs, shape, inputs)
            hidden = self._state[: len(token)] if on_card is None else self._state[on_card]
        else:
            attention = self._paged(inputs) if self._switches.attention else self._gathering(lead, pos)
            hidden = self._launch(inputs, attention, on_card)
        self._keep_outputs(step, hidden, output)

    def _run_prompts(self, graphs: StepGraphs, shape: PromptShape, inputs: StepInputs) -> None:
        """All layers of a step with prompt tokens. What they ask for differs from step to step: no graph holds that."""
        graphs.run(shape, lambda: self._launch(inputs, self._paged(inputs)))

    def _decode(
        self, step: CudaStep, graphs: StepGraphs, token: IntArray, pos: IntArray, slot: IntArray, lead: IntArray,
        output: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """Decodes, and proposed tokens behind them: all that is done to them is one graph, logits and the largest ones
        too.
        """
        size = self._decode_sizes.size_for(len(token))
        inputs, outputs = self._decode_inputs(size), self._turns.begin(step)
        inputs.send(self._kv.tables, token, pos, slot, lead)
        self._run_decode(graphs, size, outputs)
        logits, hidden = (np.flatnonzero(output & np.uint8(flag)) for flag in (Output.LOGITS, Output.HIDDEN))
        if len(logits):
            step.largest = outputs.of(lambda some: self._rows_of(some, logits))
            step.logits_parts.append(step.largest.logits)
        if len(hidden):
            step.hidden_parts.append(self._decoder.normed(self._rows_of(self._state, hidden)).float())

    def _rows_of(self, tensor: Tensor, rows: NDArray[np.integer]) -> Tensor:
        """A view where they follow one another, which is nearly always so; else a copy."""
        first, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        if end - first == len(rows) and (len(rows) < 3 or (np.diff(rows) == 1).all()):
            return tensor[first:end]
        return tensor[self._to_device(rows)]

    def _run_decode(self, graphs: StepGraphs, size: int, outputs: GraphOutputs) -> None:
        """A decode step of this padded size, whose inputs were sent."""
        graphs.run(DecodeShape(size, outputs.turn), self._decode_launch(size, outputs))

    def _decode_launch(self, size: int, outputs: GraphOutputs) -> Callable[[], None]:
        inputs = self._decode_inputs(size).on_card
        return lambda: self._launch_decode(inputs, outputs.first(size))

    def _decode_inputs(self, size: int) -> DecodeInputs:
        inputs = self._decodes.get(size)
        if inputs is None:
            inputs = self._decodes[size] = DecodeInputs(self._buffer, size)
        return inputs

    def _launch_decode(self, inputs: StepInputs, outputs: GraphOutputs) -> None:
        state = self._launch(inputs, self._paged(inputs))
        self._decoder.logits_of(state, out=outputs.logits)
        drawing.greedy(outputs.logits, BAD_ROW, out=outputs.ids)

    def _launch(self, inputs: StepInputs, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        state = self._state[: len(inputs.token)]
        return self._decoder.run(inputs, self._last_sampled, state, self._storage, attention, wanted)

    def _paged(self, inputs: StepInputs) -> Attention:
        return PagedAttention(self._layers, inputs)

    def _gathering(self, lead: IntArray, pos: IntArray) -> Attention:
        return GatherAttention(self._storage, self._kv.tables, lead, pos, self._decoder.config.windows)

    def _keep_outputs(self, step: CudaStep, hidden: Tensor, output: NDArray[np.uint8]) -> None:
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
    def _sample(self, step: CudaStep, rows: SampleRows, mask: Mask | None) -> Sampled:
        logits, wanted = self._all_logits(step), rows.logits_row
        largest = step.largest if step.largest is not None and step.largest.logits is logits else None
        if rows.sampler is not None:
            sampled = rows.sampler(self._rows_of(logits, wanted), mask)
        elif mask is not None:
            sampled = Sampled(drawing.greedy(masked(self._rows_of(logits, wanted), mask), BAD_ROW))
        elif largest is not None:
            sampled = Sampled(self._rows_of(largest.ids, wanted))
        else:
            sampled = Sampled(drawing.greedy(self._rows_of(logits, wanted), BAD_ROW))
        ids = torch.as_tensor(sampled.ids, dtype=torch.int32, device=self._device)
        kept = ids[: len(rows.table_row)]
        self._last_sampled.index_copy_(0, self._table_rows_on_card(rows.table_row), kept)
        on_host = Sampled(download(ids), {name: _downloaded(value) for name, value in sampled.extras.items()})
        step.mark_launched(self._stream)
        return on_host

    def _table_rows_on_card(self, rows: IntArray) -> Tensor:
        if self._table_rows is None or not _are_equal(self._table_rows[0], rows):
            self._table_rows = rows.copy(), self._to_device(rows)
        return self._table_rows[1]

    def _free(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
            self._turns.clear()
        self._decodes.clear()
        self._state = self._state[:0].clone()
        self._layers.clear()
        super()._free()


def _capture_for(seconds: float, sizes: Sequence[int], capture: Callable[[int], None]) -> list[int]:
    """Captures in order until the time is up; returns the captured sizes. The time starts after the first one, which
    compiles the kernels.
    """
    capture(sizes[0])
    done, until = [sizes[0]], time.monotonic() + seconds
    for size in sizes[1:]:
        if time.monotonic() > until:
            break
        capture(size)
        done.append(size)
    return done


def _are_short(segment: Segment) -> bool:
    """Are all runs of tokens short enough to attend one by one?"""
    return segment.is_one_each or int(segment.count.max()) <= SHORT_RUN


def _are_equal(some: IntArray, others: IntArray) -> bool:
    return len(some) == len(others) and bool((some == others).all())


def _downloaded(value: Any) -> Any:
    return download(value) if isinstance(value, Tensor) else value
