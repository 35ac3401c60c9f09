"""Which sizes steps are padded to. Needs no card."""

from __future__ import annotations

from tokenmill.backends.torch.cuda.graphs import PromptShapes, decode_sizes
from tokenmill.backends.torch.cuda.inputs import MOST_LONG_RUNS, PromptShape


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
