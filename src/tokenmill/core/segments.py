"""Cuts a batch into segments inside which every sequence keeps one set of companions.

A token may belong to several sequences. While they stay together one block table serves them all; when one of them
goes on alone, the block they share must be copied, and it can only be copied after the shared token was computed. So
the batch is cut there. A batch whose tokens belong to one sequence each, the common case, is a single segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.core.batch import Batch, IntArray


@dataclass(frozen=True)
class Segment:
    """A run of a batch's tokens. A group of sequences is named by its smallest member, the lead."""

    tokens: slice
    token_lead: IntArray
    token_pos: IntArray
    token_rank: IntArray
    """How many tokens of the same group stand before this one in the segment."""
    lead: IntArray
    """Each group once, in order of its first token; the next two arrays go along with it."""
    count: IntArray
    """Tokens of the group in this segment."""
    holders: IntArray
    """Sequences in the group."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of more than one sequence, lead first."""

    @property
    def is_one_each(self) -> bool:
        """One token of each group, in the same order: a decode step."""
        return self.token_lead is self.lead


def cut_into_segments(batch: Batch) -> list[Segment]:
    """The batch's segments, in order."""
    if batch.seq_ids.shape[1] == 1:
        leads = batch.seq_ids[:, 0]
        if np.bincount(leads).max() == 1:
            return [_one_token_each(batch, leads)]
        return [_segment(batch, slice(0, len(batch)), leads, {})]
    segments: list[Segment] = []
    companions: dict[int, tuple[int, ...]] = {}
    group_leads: list[int] = []
    begin = 0
    for i in range(len(batch)):
        group = tuple(sorted(batch.sequences_of(i)))
        if any(companions.get(seq, group) != group for seq in group):
            segments.append(_segment(batch, slice(begin, i), np.array(group_leads, dtype=np.int32), companions))
            begin, companions, group_leads = i, {}, []
        companions.update(dict.fromkeys(group, group))
        group_leads.append(group[0])
    segments.append(_segment(batch, slice(begin, len(batch)), np.array(group_leads, dtype=np.int32), companions))
    return segments


def _one_token_each(batch: Batch, leads: IntArray) -> Segment:
    """A decode step: every sequence once, alone. The same as `_segment` would give, without its sorting."""
    ones = np.ones(len(leads), dtype=np.int32)
    return Segment(
        tokens=slice(0, len(leads)),
        token_lead=leads,
        token_pos=batch.pos,
        token_rank=np.zeros(len(leads), dtype=np.int32),
        lead=leads,
        count=ones,
        holders=ones,
        groups=(),
    )


def _segment(batch: Batch, tokens: slice, token_lead: IntArray, companions: dict[int, tuple[int, ...]]) -> Segment:
    lead, first, inverse, count = np.unique(token_lead, return_index=True, return_inverse=True, return_counts=True)
    # Sort the tokens by group, keeping their order inside it: a token's rank is its distance from the group's first.
    by_group = np.argsort(inverse, kind="stable")
    token_rank = np.empty(len(token_lead), dtype=np.int32)
    token_rank[by_group] = np.arange(len(token_lead)) - np.repeat(np.cumsum(count) - count, count)
    by_first = np.argsort(first)
    groups = sorted({group for group in companions.values() if len(group) > 1})
    holders = np.array([len(companions.get(int(seq), (seq,))) for seq in lead]) if groups else np.ones(len(lead))
    return Segment(
        tokens=tokens,
        token_lead=token_lead,
        token_pos=batch.pos[tokens],
        token_rank=token_rank,
        lead=lead[by_first],
        count=count[by_first].astype(np.int32),
        holders=holders[by_first].astype(np.int32),
        groups=tuple(groups),
    )
