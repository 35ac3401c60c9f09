"""Which sizes steps are padded to. Needs no card."""

from __future__ import annotations

import numpy as np

from tokenmill.backends.torch.attention import runs_of
from tokenmill.backends.torch.cuda.graphs import SPECULATIVE_GRAPH, PromptShapes, decode_sizes, largest_decode
from tokenmill.backends.torch.cuda.inputs import (
    FAR_CELLS,
    FAR_ROWS,
    MOST_LONG_RUNS,
    SHORT_RUN,
    PromptShape,
    StepRuns,
    cut_far,
)
from tokenmill.kv.tables import BlockPool, BlockTables


def test_a_decode_step_is_padded_by_a_quarter_at_most() -> None:
    for largest in (1, 3, 60, 256, 512):
        sizes = decode_sizes(largest)
        assert sizes.largest == largest
        for count in range(1, largest + 1):
            assert count <= sizes.size_for(count) <= max(count + 7, 1.25 * count)


def test_sizes_captured_so_far_are_spread_over_all() -> None:
    sizes = decode_sizes(256)
    order = sizes.coarse_first
    assert order[0] == 256
    assert sorted(order) == sizes.sizes
    for count in range(2, len(order)):
        places = sorted(sizes.sizes.index(size) for size in order[:count])
        gaps = [b - a for a, b in zip([-1, *places], places, strict=False)]
        assert max(gaps) <= 2 * len(order) / (count // 2 + 1)


def test_steps_that_were_not_captured_are_padded_to_a_larger_size() -> None:
    sizes = decode_sizes(256)
    sizes.keep([256, 64])
    assert [sizes.size_for(count) for count in (1, 64, 65)] == [64, 64, 256]


def test_a_prompt_step_finds_its_shape_unless_it_is_too_large() -> None:
    shapes = PromptShapes(8192, 256)
    assert shapes.shape_for(528, 16, 1) == PromptShape(576, 16)
    assert shapes.shape_for(576, 0, 1) == PromptShape(576, 16)
    assert shapes.shape_for(1921, 100, MOST_LONG_RUNS) == PromptShape(2048, 256)
    assert shapes.shape_for(2049, 0, 1) is None
    assert shapes.shape_for(600, 257, 1) is None
    assert shapes.shape_for(600, 0, MOST_LONG_RUNS + 1) is None


def test_a_lone_sequence_has_a_graph_for_as_many_tokens_as_are_proposed() -> None:
    assert largest_decode(1, 8192) == SHORT_RUN
    assert largest_decode(32, 8192) == SPECULATIVE_GRAPH
    assert largest_decode(256, 8192) == 256
    assert largest_decode(1024, 8192) == 512
    assert largest_decode(16, 4) == 4


def test_short_runs_are_read_token_by_token() -> None:
    lead = np.array([2, 0, 0, 0, 1, *[3] * (SHORT_RUN + 1)], dtype=np.int32)
    pos = np.array([7, 10, 11, 12, 0, *range(SHORT_RUN + 1)], dtype=np.int32)
    runs = StepRuns.of(lead, pos)
    tokens = runs.singles.tokens[runs.singles.begin]
    assert (runs.singles.count == 1).all()
    assert sorted(zip(runs.singles.seq.tolist(), pos[tokens].tolist(), strict=True)) == [
        (0, 10), (0, 11), (0, 12), (1, 0), (2, 7),
    ]  # fmt: skip
    assert (lead[tokens] == runs.singles.seq).all()
    assert runs.longs.seq.tolist() == [3]
    assert runs.longs.count.tolist() == [SHORT_RUN + 1]


def test_short_runs_stay_whole_where_there_is_no_room_for_their_tokens() -> None:
    lead = np.array([0, 0, 0, 1], dtype=np.int32)
    runs = StepRuns.of(lead, np.array([5, 6, 7, 0], dtype=np.int32), most_singles=3)
    assert runs.singles.seq.tolist() == [1]
    assert runs.longs.seq.tolist() == [0]


def test_long_runs_are_cut_so_that_what_lies_far_behind_them_is_read_apart() -> None:
    tables = BlockTables(BlockPool(8), 64, max_seqs=5, max_context=1 << 16)
    before = np.array([2 * FAR_CELLS[-1] + 70, FAR_CELLS[-1] - 1, 3 * FAR_CELLS[-1], 3 * FAR_CELLS[-1]])
    count = np.array([2 * FAR_ROWS + 9, 2 * FAR_ROWS, FAR_ROWS - 1, FAR_ROWS])
    tables.start[3] = 64  # it has lost its beginning
    lead = np.repeat(np.arange(4), count).astype(np.int32)
    pos = np.concatenate([np.arange(b, b + n) for b, n in zip(before, count, strict=True)]).astype(np.int32)
    cut = cut_far(runs_of(lead, pos), pos, tables)
    assert cut.runs.seq.tolist() == [0, 0, 1, 2, 3]
    assert cut.runs.count.tolist() == [2 * FAR_ROWS, 9, *count[1:]]
    assert cut.runs.begin.tolist() == [0, 2 * FAR_ROWS, *np.cumsum(count)[:3]]
    assert cut.far.tolist() == [2 * FAR_CELLS[-1], 0, 0, 0, 0]


def test_runs_whose_tokens_are_scattered_are_not_cut() -> None:
    tables = BlockTables(BlockPool(8), 64, max_seqs=2, max_context=1 << 16)
    lead = np.tile(np.array([0, 1], dtype=np.int32), FAR_ROWS)
    pos = np.repeat(np.arange(FAR_CELLS[-1], FAR_CELLS[-1] + FAR_ROWS), 2).astype(np.int32)
    assert not cut_far(runs_of(lead, pos), pos, tables).far.any()
