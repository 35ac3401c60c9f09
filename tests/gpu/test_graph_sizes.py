"""Which sizes steps are padded to. Needs no card."""

from __future__ import annotations

import numpy as np

from tokenmill.backends.torch.attention import runs_of
from tokenmill.backends.torch.cuda.graphs import PromptShapes, decode_sizes
from tokenmill.backends.torch.cuda.inputs import FAR_CELLS, FAR_ROWS, MOST_LONG_RUNS, PromptShape, cut_far
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
