"""`LlamaBackend`: the contract on a context of llama.cpp, which computes; the rules are `PagedBackend`'s."""

from __future__ import annotations

import numpy as np

from tokenmill.backends.llamacpp.mirror import LlamaMemory
from tokenmill.backends.llamacpp.native import NO_ROWS
from tokenmill.backends.llamacpp.streams import AnyContext, StreamedContext
from tokenmill.contract import BAD_ROW, Batch, DecodeOutput, IntArray, Mask, Sampled, SampleRows
from tokenmill.contract.backend import FloatArray, greedy
from tokenmill.errors import ForwardFailed, InvalidOperation
from tokenmill.kv.paged import Segment
from tokenmill.kv.paged_backend import PagedBackend, PagedStep, WeightsGate

LOST = "llama.cpp's memory cannot be restored to its state before the failed step"


class LlamaStep(PagedStep):
    """A step that was computed. Its logits may be llama.cpp's own memory, which the next call writes over."""

    def __init__(self, owner: LlamaBackend, batch: Batch, number: int) -> None:
        super().__init__(owner, batch, number)
        self.batch: Batch | None = batch
        """Until it is computed."""
        self.logits = self.hidden = NO_ROWS
        self.call: int | None = None
        """The call of llama.cpp whose memory the logits are; None where they are the step's own."""


class LlamaBackend(PagedBackend[LlamaStep]):
    """One context. A step is computed while it is submitted: depth 0."""

    def __init__(self, context: AnyContext, kv: LlamaMemory, vocab_size: int) -> None:
        super().__init__(kv, vocab_size, WeightsGate())
        self._context = context
        self._memory = kv
        self._had_nan = False
        """Had the last step that was sampled rows that are no numbers?"""
        self._last_sampled: IntArray = np.zeros(kv.capabilities.max_seqs, dtype=np.int32)

    # -- a step -------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> LlamaStep:
        self._check_usable()
        self._steps.check_room()
        self._check_tokens(batch)
        try:
            return self._submit(batch)  # weights are never replaced, so there is no gate to pass
        except BaseException as error:
            if self._memory.is_lost and self._lost is None:
                self._lost = ForwardFailed(f"{LOST}: {error}", fatal=True)
                raise self._lost from error
            raise

    def _begin(self, batch: Batch, number: int) -> LlamaStep:
        return LlamaStep(self, batch, number)

    def _run(self, step: LlamaStep, batch: Batch, segment: Segment, slots: IntArray) -> None:
        """Batches are cut where blocks must be copied; of one cell, none ever is, so all is computed at the end."""

    def _launched(self, step: LlamaStep) -> None:
        batch, step.batch = step.batch, None
        assert batch is not None, "a step is launched once"
        gives_hidden = step.num_hidden > 0
        self._context.give_hidden(gives_hidden)
        if gives_hidden or len(batch) > self._context.n_batch:
            self._compute_in_parts(step, batch, gives_hidden)
            return
        self._context.decode(self._tokens(batch), batch.pos, batch.seq_ids, batch.output)
        step.logits, step.call = self._context.logits(step.num_logits), self._context.num_calls

    def _compute_in_parts(self, step: LlamaStep, batch: Batch, gives_hidden: bool) -> None:
        """Batches that are larger than a call, or give hidden rows: all rows are kept."""
        token, wanted = self._tokens(batch), batch.output
        if gives_hidden:  # llama.cpp then gives both kinds of row for every token, whether it is wanted or not
            wanted = np.ones_like(batch.output)
        logits, hidden = [], []
        for begin in range(0, len(batch), self._context.n_batch):
            part = slice(begin, begin + self._context.n_batch)
            self._context.decode(token[part], batch.pos[part], batch.seq_ids[part], wanted[part])
            num_rows = int(np.count_nonzero(wanted[part]))
            logits.append(self._context.logits(num_rows).copy())  # the next call writes over it
            if gives_hidden:
                hidden.append(self._context.hidden(num_rows).copy())
        step.logits = np.concatenate(logits)
        if gives_hidden:
            step.logits, step.hidden = step.logits[step.output_ids], np.concatenate(hidden)[step.hidden_ids]

    def _tokens(self, batch: Batch) -> IntArray:
        """The batch's tokens, those from the token table filled in."""
        if batch.token.min() >= 0:
            return batch.token
        token, pending = batch.token.copy(), batch.token < 0
        token[pending] = self._last_sampled[-1 - batch.token[pending]]
        return token

    # -- sampling and waiting -----------------------------------------------------------------------------------------

    def _sample(self, step: LlamaStep, rows: SampleRows, mask: Mask | None) -> Sampled:
        logits = step.logits
        if len(rows.logits_row) != len(logits) or (rows.logits_row != np.arange(len(logits))).any():
            logits = logits[rows.logits_row]
        sampled = (rows.sampler or greedy)(logits, mask)
        self._note_nan(logits, np.asarray(sampled.ids))
        # A bad row's request is over; whoever names its token all the same must get some valid id.
        kept = sampled.ids[: len(rows.table_row)]
        self._last_sampled[rows.table_row] = np.minimum(np.maximum(kept, 0), self._vocab_size - 1)
        return sampled

    def _note_nan(self, logits: FloatArray, ids: IntArray) -> None:
        """Without flash attention llama.cpp multiplies what a token must not see by 0, and 0 times NaN is NaN.

        So keys and values that are no numbers spoil every later step. One step with such rows may be one bad request;
        two in a row are a memory that is of no more use. In a stream they would only spoil the next that gets it.
        """
        bad = ids == BAD_ROW
        has_nan = bool(bad.any()) and bool(np.isnan(logits[bad]).any())
        if has_nan and isinstance(self._context, StreamedContext):
            self._context.cleanse()
        elif has_nan and self._had_nan:
            self._lost = ForwardFailed("llama.cpp's KV contains NaN", fatal=True)
        self._had_nan = has_nan

    def _wait(self, step: LlamaStep) -> None:
        """It was computed when it was submitted."""

    def _output(self, step: LlamaStep) -> DecodeOutput:
        if step.call is not None:
            if step.call != self._context.num_calls:
                raise InvalidOperation("the rows of a step must be requested before the next forward")
            step.logits, step.call = step.logits.copy(), None
        return DecodeOutput(step.logits, step.output_ids, step.hidden, step.hidden_ids)

    def _on_host(self, sampled: Sampled) -> Sampled:
        extras = {name: np.asarray(value) for name, value in sampled.extras.items()}
        return Sampled(np.asarray(sampled.ids).astype(np.int32), extras)

    def _free(self) -> None:
        self._context.close()
