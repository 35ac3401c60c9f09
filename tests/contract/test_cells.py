"""The specification by itself: small enough to be checked against the sentences of docs/contract.md."""

import numpy as np
import pytest

from tokenmill.contract import BatchBuilder, Capabilities, CellTable
from tokenmill.errors import ConfigError, OutOfKV


def table(num_cells: int = 16, block_size: int = 4) -> CellTable:
    return CellTable(num_cells, 16, block_size, Capabilities(max_seqs=4))


def write(cells: CellTable, seqs: int | tuple[int, ...], count: int) -> None:
    first = seqs if isinstance(seqs, int) else seqs[0]
    batch = BatchBuilder().add_run([1] * count, cells.seq_pos_max(first) + 1, seqs).build()
    cells.apply(cells.prepare(batch))


@pytest.mark.req("R23")
def test_visibility_is_sets_intersect_and_pos_causal() -> None:
    cells = table()
    write(cells, 0, 3)
    write(cells, 1, 2)
    assert cells.pos[cells.visible([0], 1)].tolist() == [0, 1]
    assert len(cells.visible([1], 9)) == 2
    assert not set(cells.visible([0], 9)) & set(cells.visible([1], 9))
    cells.seq_cp(0, 2, 0, 2)
    assert set(cells.visible([2], 9)) == set(cells.visible([0], 1))
    assert cells.pos[cells.visible([0], 2, window=2)].tolist() == [1, 2]


@pytest.mark.req("R24")
def test_prepare_changes_nothing_and_rollback_undoes_apply() -> None:
    cells = table()
    write(cells, 0, 6)
    cells.seq_cp(0, 1)
    before = (cells.pos.copy(), cells.held.copy())
    batch = BatchBuilder().add(1, 6, 0).add(1, 6, 1).build()
    plan = cells.prepare(batch)
    assert (cells.pos == before[0]).all()
    assert (cells.held == before[1]).all()
    cells.apply(plan)
    assert cells.seq_pos_max(0) == cells.seq_pos_max(1) == 6
    cells.rollback()
    assert (cells.pos == before[0]).all()
    assert (cells.held == before[1]).all()


@pytest.mark.req("R25")
def test_a_write_into_a_shared_block_copies_it_once() -> None:
    cells = table()
    write(cells, 0, 6)
    cells.seq_cp(0, 1)
    batch = BatchBuilder().add(1, 6, 0).add(1, 6, 1).build()
    plan = cells.prepare(batch)
    assert plan.needed == cells.needed(batch) == 4
    assert [(copy.token, copy.copy % 4) for copy in plan.copies] == [(0, 0), (0, 1)]
    cells.apply(plan)
    assert cells.free() == 4


@pytest.mark.req("R25")
def test_needed_is_told_also_when_there_is_not_enough() -> None:
    cells = table(num_cells=8)
    batch = BatchBuilder().add_run([1] * 9, 0, 0).build()
    assert cells.needed(batch) == 12
    with pytest.raises(OutOfKV, match="12 cells needed, 8 free"):
        cells.prepare(batch)
    assert cells.free() == 8


@pytest.mark.req("R22")
def test_shifts_wait_for_update() -> None:
    cells = table()
    write(cells, 0, 6)
    cells.seq_rm(0, -1, 2)
    cells.seq_add(0, -1, -1, -2)
    assert (cells.seq_pos_min(0), cells.seq_pos_max(0)) == (0, 3)
    assert sorted(cells.update().values()) == [-2, -2, -2, -2]
    assert cells.update() == {}


def test_integers_in_results_are_plain() -> None:
    cells = table()
    write(cells, 0, 3)
    for value in (cells.free(), cells.seq_pos_max(0), cells.seq_pos_min(0), cells.stats().held_cells):
        assert not isinstance(value, np.integer)


@pytest.mark.parametrize(("num_cells", "block_size"), [(0, 1), (3, 4), (8, 0)])
def test_a_table_that_holds_nothing_is_rejected(num_cells: int, block_size: int) -> None:
    with pytest.raises(ConfigError):
        CellTable(num_cells, 16, block_size, Capabilities(max_seqs=4))
