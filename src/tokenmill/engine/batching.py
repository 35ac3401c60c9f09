"""From a draft to a `StepPlan`: the arrays of a step, built from the running rows without Python per decode token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.contract import Batch, IntArray, Output
from tokenmill.engine.plan import Draft, PromptRows, StepPlan
from tokenmill.engine.rows import RunningRows
from tokenmill.errors import IntegrityError
from tokenmill.params import Pooling


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
    counts, logits_rows = rows.ones[: len(decodes)], rows.in_order[: len(decodes)]
    scores: tuple[PromptRows, ...] = ()
    pools: tuple[PromptRows, ...] = ()
    batch = decode_batch(rows, decodes) if len(decodes) else None
    if batch is None or draft.chunks:
        chunks = [_chunk(rows, row, count) for row, count in draft.chunks.items()]
        batch = _join(batch, chunks)
        all_rows = np.concatenate([decodes, np.fromiter(draft.chunks, np.int32)])
        counts = np.concatenate([counts, np.fromiter(draft.chunks.values(), np.int32)])
        completed, completed_logits, scores = _logits_of(rows, chunks, len(decodes))
        pools = _hidden_of(rows, chunks)
        sampled = np.concatenate([decodes, np.array(completed, dtype=np.int32)])
        logits_rows = np.concatenate([logits_rows, np.array(completed_logits, dtype=np.int32)])
    leases = rows.lease[all_rows]
    return StepPlan(
        tick=tick,
        batch=batch,
        rows=all_rows,
        leases=leases,
        counts=counts,
        sampled_rows=sampled,
        logits_rows=logits_rows,
        sampled_leases=leases if sampled is all_rows else rows.lease[sampled],
        positions=rows.num_tokens[sampled] + rows.pending[sampled],
        num_decode=len(decodes),
        scores=scores,
        pools=pools,
        attention=draft.attention,
        decode_attention=draft.decode_attention,
    )


@dataclass(frozen=True)
class _Chunk:
    """Consecutive tokens of one row, and what is wanted of them."""

    row: int
    begin: int
    batch: Batch
    num_scored: int
    """The first so many keep their logits, to score the prompt."""
    num_pooled: int
    """The last so many keep their hidden states, for the prompt's embedding."""
    draws: bool
    """Its last token is the last one known, and a new one is drawn."""


def _chunk(rows: RunningRows, row: int, count: int) -> _Chunk:
    request, begin = rows.requests[row], int(rows.num_computed[row])
    if request is None:
        raise IntegrityError(f"row {row} has a chunk but no request")
    is_last = begin + count == int(rows.num_tokens[row])
    num_scored = max(min(count, request.num_prompt - 1 - begin), 0) if request.wants_scores else 0
    num_pooled = count if request.pooling is Pooling.MEAN else int(is_last and request.pooling is Pooling.LAST)
    draws = is_last and request.pooling is None
    output = np.zeros(count, dtype=np.uint8)
    output[:num_scored] = Output.LOGITS
    output[count - num_pooled :] = Output.HIDDEN
    if draws:
        output[-1] = Output.LOGITS
    batch = Batch(
        token=np.array(request.tokens[begin : begin + count], dtype=np.int32),
        pos=np.arange(begin, begin + count, dtype=np.int32),
        seq_ids=np.full((count, 1), rows.seq[row], dtype=np.int32),
        output=output,
    )
    return _Chunk(row, begin, batch, num_scored, num_pooled, draws)


def _logits_of(
    rows: RunningRows, chunks: list[_Chunk], first_logits: int
) -> tuple[list[int], list[int], tuple[PromptRows, ...]]:
    """Where the logits of the chunks lie: rows that get a token, the logits rows they draw from, and the scores."""
    completed, logits_rows, scores, at = [], [], [], first_logits
    for chunk in chunks:
        if chunk.num_scored:
            logits = slice(at, at + chunk.num_scored)
            scores.append(PromptRows(chunk.row, int(rows.lease[chunk.row]), chunk.begin, logits))
        at += int(np.count_nonzero(chunk.batch.output == Output.LOGITS))
        if chunk.draws:
            completed.append(chunk.row)
            logits_rows.append(at - 1)
    return completed, logits_rows, tuple(scores)


def _hidden_of(rows: RunningRows, chunks: list[_Chunk]) -> tuple[PromptRows, ...]:
    """Where the hidden states of the chunks lie, for those whose embeddings are wanted."""
    pools, at = [], 0
    for chunk in chunks:
        if chunk.num_pooled:
            position = chunk.begin + len(chunk.batch) - chunk.num_pooled
            hidden = slice(at, at + chunk.num_pooled)
            pools.append(PromptRows(chunk.row, int(rows.lease[chunk.row]), position, hidden))
            at += chunk.num_pooled
    return tuple(pools)


def _join(decodes: Batch | None, chunks: list[_Chunk]) -> Batch:
    parts = [*([decodes] if decodes is not None else []), *(chunk.batch for chunk in chunks)]
    return Batch(
        token=np.concatenate([part.token for part in parts]),
        pos=np.concatenate([part.pos for part in parts]),
        seq_ids=np.concatenate([part.seq_ids for part in parts]),
        output=np.concatenate([part.output for part in parts]),
    )
