"""From a draft to a `StepPlan`: the arrays of a step, built from the running rows without Python per decode token."""

from __future__ import annotations

import numpy as np

from tokenmill.core import Batch, IntArray, Output
from tokenmill.engine.plan import Draft, StepPlan
from tokenmill.engine.rows import RunningRows
from tokenmill.errors import IntegrityError


def decode_batch(rows: RunningRows, index: IntArray) -> Batch:
    """One token for each of these rows."""
    return Batch(
        token=rows.input_tokens(index),
        pos=rows.num_computed[index],
        seq_ids=rows.seq[index][:, None],
        output=np.ones(len(index), dtype=np.uint8),
    )


def make_plan(rows: RunningRows, draft: Draft, tick: int) -> StepPlan:
    """The draft as arrays: decode tokens first, then the chunks. The draft must not be empty."""
    decodes = draft.decodes
    all_rows = sampled = decodes
    counts = np.ones_like(decodes)
    batch = decode_batch(rows, decodes) if len(decodes) else None
    if batch is None or draft.chunks:
        batch, completed = _with_chunks(rows, batch, draft.chunks)
        all_rows = np.concatenate([decodes, np.fromiter(draft.chunks, np.int32)])
        counts = np.concatenate([counts, np.fromiter(draft.chunks.values(), np.int32)])
        sampled = np.concatenate([decodes, np.array(completed, dtype=np.int32)])
    return StepPlan(
        tick=tick,
        batch=batch,
        rows=all_rows,
        leases=rows.lease[all_rows],
        counts=counts,
        sampled_rows=sampled,
        sampled_leases=rows.lease[sampled],
        positions=rows.num_tokens[sampled] + rows.pending[sampled],
        num_decode=len(decodes),
        attention=draft.attention,
    )


def _with_chunks(rows: RunningRows, decodes: Batch | None, chunks: dict[int, int]) -> tuple[Batch, list[int]]:
    """The decode tokens, then the chunks; and the rows whose last known token is among them: they get a new one."""
    tokens, pos, seqs, output = [], [], [], []
    completed = []
    if decodes is not None:
        tokens, pos, seqs, output = [decodes.token], [decodes.pos], [decodes.seq_ids], [decodes.output]
    for row, count in chunks.items():
        request, begin = rows.requests[row], int(rows.num_computed[row])
        if request is None:
            raise IntegrityError(f"row {row} has a chunk but no request")
        tokens.append(np.array(request.tokens[begin : begin + count], dtype=np.int32))
        pos.append(np.arange(begin, begin + count, dtype=np.int32))
        seqs.append(np.full((count, 1), rows.seq[row], dtype=np.int32))
        flags = np.zeros(count, dtype=np.uint8)
        if begin + count == rows.num_tokens[row]:
            flags[-1] = Output.LOGITS
            completed.append(row)
        output.append(flags)
    batch = Batch(
        token=np.concatenate(tokens),
        pos=np.concatenate(pos),
        seq_ids=np.concatenate(seqs),
        output=np.concatenate(output),
    )
    return batch, completed
