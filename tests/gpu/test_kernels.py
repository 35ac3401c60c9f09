"""Each kernel against float32 arithmetic in plain torch, on random shapes, lengths and block tables.

On a card, or anywhere with TRITON_INTERPRET=1 (and triton).
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.gpu.card import DEVICE, HAS_CARD, needs_kernels
from tests.gpu.paged import Shape, attended, error, paged
from tokenmill.backends.torch.footprint import FP8

pytestmark = needs_kernels()

HALF = torch.bfloat16 if HAS_CARD else torch.float32
"""The interpreter multiplies no bfloat16."""
SHAPES = [
    Shape(28, 4, 128, dtype=HALF),
    Shape(16, 8, 128, dtype=HALF),
    Shape(9, 3, 64, dtype=HALF),
    Shape(6, 2, 80, dtype=HALF),
    Shape(28, 4, 128, block_size=64, dtype=HALF),
    Shape(9, 3, 64, block_size=64, dtype=HALF),
    Shape(4, 2, 128, block_size=64, window=100, dtype=HALF),
    Shape(4, 2, 8, block_size=4),
    Shape(6, 1, 16, block_size=1),
    Shape(4, 4, 96, window=70),
    Shape(8, 4, 256, block_size=64, window=100, dtype=HALF, scale=0.07, softcap=2.0),
    Shape(4, 1, 256, block_size=64, scale=0.05),
    Shape(6, 2, 16, block_size=4, softcap=1.5),
    Shape(6, 2, 64, window=70, scale=0.3, softcap=50.0),
]
if HAS_CARD:
    SHAPES += [
        Shape(28, 4, 128, block_size=64, dtype=HALF, kv_dtype=FP8),
        Shape(9, 3, 64, block_size=64, dtype=HALF, kv_dtype=FP8),
        Shape(6, 2, 80, window=70, dtype=HALF, kv_dtype=FP8),
    ]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def test_decode_attention() -> None:
    from tokenmill.backends.torch.kernels.paged_attention import decode_attention

    for seed, shape in enumerate(SHAPES):
        rng = random.Random(seed)
        first = [0, 0, rng.randrange(shape.block_size), 0]
        length = [rng.randrange(60, 700), 1, rng.randrange(70, 300), rng.choice([64, 128, 65])]
        memory = paged(shape, length, first, DEVICE, seed)
        row_of, unused = [3, 0, 4, 1], 5
        q = torch.randn(6, shape.num_heads + 2, shape.dim, device=DEVICE).to(shape.dtype)[:, : shape.num_heads]
        for num_splits in (1, 3, 8):
            out = torch.full((6, shape.num_heads, shape.dim), torch.nan, device=DEVICE, dtype=shape.dtype)
            last = [*(one - 1 for one in length), -1, -1]  # and two runs that only fill the batch up
            decode_attention(
                q, memory.keys, memory.values, out, ints(*row_of, 2, -1), ints(*last), ints(*first, 0, 0),
                memory.tables, ints(memory.tables.shape[1]),
                block_size=shape.block_size, window=shape.window, num_splits=num_splits,
                scale=shape.scale, softcap=shape.softcap,
            )  # fmt: skip
            for seq, row in enumerate(row_of):
                wanted = attended(memory, seq, q[row : row + 1], length[seq] - 1)
                assert error(out[row : row + 1], wanted) < TOLERANCE[shape.dtype], (shape, num_splits, seq)
            assert not out[2].any()
            assert bool(out[unused].isnan().all())


def test_prefill_attention() -> None:
    from tokenmill.backends.torch.kernels.paged_attention import QUERIES, by_block, prefill_attention

    for seed, shape in enumerate(SHAPES):
        rng = random.Random(seed)
        count = [rng.randrange(2, 400), rng.randrange(130, 260), 2]
        before = [0, rng.randrange(1, 300), rng.randrange(70, 100)]
        first = [0, 0, rng.randrange(1, shape.block_size + 1) - 1]
        length = [a + b for a, b in zip(count, before, strict=True)]
        memory = paged(shape, length, first, DEVICE, seed)
        num_tokens = sum(count)
        order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
        q = torch.randn(num_tokens, shape.num_heads + 1, shape.dim, device=DEVICE).to(shape.dtype)[:, 1:]
        out = torch.full((num_tokens, shape.num_heads, shape.dim), torch.nan, device=DEVICE, dtype=shape.dtype)
        begin = [0, count[0], count[0] + count[1]]
        tiles = [(run, at) for run in range(3) for at in range(0, count[run], QUERIES)]
        tiles += [(3, 0)] * 2  # of a run without tokens: they only fill the grid up
        rng.shuffle(tiles)
        blocks = by_block(memory.keys, shape.block_size), by_block(memory.values, shape.block_size)
        prefill_attention(
            q, memory.keys, memory.values, None if blocks[0] is None else blocks, out, order.to(DEVICE, torch.int32),
            ints(*begin, 0), ints(*count, 0), ints(*before, 0), ints(*first, 0),
            ints(*(run for run, _ in tiles)), ints(*(at for _, at in tiles)),
            memory.tables, ints(memory.tables.shape[1]), block_size=shape.block_size, window=shape.window,
            scale=shape.scale, softcap=shape.softcap,
        )  # fmt: skip
        for run in range(3):
            rows = order[begin[run] : begin[run] + count[run]].to(DEVICE)
            wanted = attended(memory, run, q[rows], before[run])
            assert error(out[rows], wanted) < TOLERANCE[shape.dtype], (shape, run)


def test_far_attention() -> None:
    """What lies far behind a chunk, read apart, adds up with the rest: with one piece, with two sizes of pieces."""
    if not HAS_CARD:
        return  # cuDNN's
    from tokenmill.backends.torch.kernels.paged_attention import add_far_attention, by_block, prefill_attention

    for (num_heads, num_kv, dim), before, far in (
        ((28, 4, 128), 300, 256),
        ((16, 8, 128), 500, 384),
        ((4, 2, 64), 200, 128),
    ):
        shape = Shape(num_heads, num_kv, dim, block_size=64, dtype=torch.bfloat16)
        memory = paged(shape, [before + 192], [0], DEVICE, seed=before)
        q = torch.randn(192, num_heads + 2, dim, device=DEVICE).to(torch.bfloat16)[:, :num_heads]  # rows are apart
        out, sums = (
            torch.empty_like(q, memory_format=torch.contiguous_format),
            torch.empty(192, num_heads, device=DEVICE),
        )
        blocks = by_block(memory.keys, 64), by_block(memory.values, 64)
        tiles = ints(128, 64, 0)
        prefill_attention(
            q, memory.keys, memory.values, blocks, out, torch.arange(192, dtype=torch.int32, device=DEVICE), ints(0),
            ints(192), ints(before), ints(far), ints(0, 0, 0), tiles, memory.tables, ints(memory.tables.shape[1]),
            block_size=64, window=None, sums=sums,
        )  # fmt: skip
        add_far_attention(
            q, memory.keys, memory.values, out, sums, memory.tables[0, : far // 64], block_size=64, sizes=(256, 128)
        )
        wanted = attended(memory, 0, q, before)
        assert error(out, wanted) < TOLERANCE[shape.dtype], (shape, before)


def test_store() -> None:
    from tokenmill.backends.torch.kernels.islands import store

    for num_kv, dim in ((4, 128), (3, 80)):
        key, value = (torch.randn(num_kv, 4, dim, device=DEVICE).transpose(0, 1) for _ in range(2))
        keys, values = (torch.full((12, num_kv, dim), 5.0, device=DEVICE) for _ in range(2))
        store(key, value, ints(9, 2, -1, 0), keys, values)
        kept = torch.tensor([0, 1, 3], device=DEVICE)
        assert torch.equal(keys[[9, 2, 0]], key[kept])
        assert torch.equal(values[[9, 2, 0]], value[kept])
        others = [place for place in range(12) if place not in (9, 2, 0)]
        assert bool((keys[others] == 5.0).all())
        assert bool((values[others] == 5.0).all())


def test_norm_and_gate() -> None:
    from tokenmill.backends.torch.kernels.islands import gate, norm

    for width in (48, 1024, 3584):
        x, weight = torch.randn(5, width, device=DEVICE), torch.randn(width, device=DEVICE)
        wanted = torch.nn.functional.rms_norm(x, (width,), weight, 1e-6)
        assert error(norm(x, weight, 1e-6), wanted) < 1e-6
        first, second = x.chunk(2, dim=1)
        found = torch.full_like(first, torch.nan).contiguous()
        gate(x, found)
        assert error(found, torch.nn.functional.silu(first) * second) < 1e-6
        gate(x, found, "gelu_tanh")
        assert error(found, torch.nn.functional.gelu(first, approximate="tanh") * second) < 1e-6


def test_norm_in_place_of_rows_that_are_apart() -> None:
    from tokenmill.backends.torch.kernels.islands import norm

    rows, weight = torch.randn(5, 100, device=DEVICE), torch.randn(48, device=DEVICE)
    wanted = rows.clone()
    wanted[:, 20:68] = torch.nn.functional.rms_norm(rows[:, 20:68], (48,), weight, 1e-6)
    norm(rows[:, 20:68], weight, 1e-6, in_place=True)
    assert error(rows, wanted) < 1e-6


def test_adding_normed_rows() -> None:
    from tokenmill.backends.torch.kernels.islands import add

    for width in (48, 2304):
        y, x = torch.randn(5, width, device=DEVICE), torch.randn(5, width, device=DEVICE)
        weight = torch.randn(width, device=DEVICE)
        for gain in (None, weight):
            normed = y if gain is None else torch.nn.functional.rms_norm(y, (width,), gain, 1e-6)
            total = x.clone()
            add(y, gain, 1e-6, 0.3, total)
            assert error(total, x + 0.3 * normed) < 1e-6


def test_logits_are_scaled_and_capped() -> None:
    from tokenmill.backends.torch.kernels.islands import scale_logits

    logits = 40 * torch.randn(3, 1501, device=DEVICE)
    assert error(scale_logits(logits.clone(), 0.25, None), logits * 0.25) < 1e-6
    assert error(scale_logits(logits.clone(), 0.5, 30.0), torch.tanh(logits * 0.5 / 30.0) * 30.0) < 1e-6


def test_embedding_of_known_and_of_sampled_tokens() -> None:
    from tokenmill.backends.torch.kernels.islands import embed

    table = torch.randn(30, 1500, device=DEVICE)
    out = torch.full((4, 1500), torch.nan, device=DEVICE)
    embed(ints(3, -1, 29, -3), ints(7, 8, 9), table, out)
    assert torch.equal(out, table[[3, 7, 29, 9]])
    embed(ints(3, -1, 29, -3), ints(7, 8, 9), table, out, 5.0)
    assert error(out, 5.0 * table[[3, 7, 29, 9]]) < 1e-6


def test_turn_and_store() -> None:
    from tokenmill.backends.torch.kernels.islands import turn_and_store
    from tokenmill.backends.torch.rotations import rotate, rotations

    for num_heads, num_kv, dim, normed in ((28, 4, 128, False), (16, 8, 128, True), (6, 2, 8, True), (5, 1, 80, False)):
        qkv = torch.randn(4, num_heads + 2 * num_kv, dim, device=DEVICE)
        pos, slot = ints(0, 5, 63, 17), ints(9, 2, -1, 0)
        inv_freq = 1.0 / (100.0 ** (torch.arange(0, dim, 2, device=DEVICE) / dim))
        cos, sin = (one[:, 0] for one in rotations(torch.arange(64, device=DEVICE), inv_freq, 1.1))
        gains = (torch.randn(dim, device=DEVICE), torch.randn(dim, device=DEVICE)) if normed else (None, None)
        keys, values = (torch.full((12, num_kv, dim), 5.0, device=DEVICE) for _ in range(2))
        q, k, v = qkv.clone().split([num_heads, num_kv, num_kv], dim=1)
        if normed:
            q, k = (torch.nn.functional.rms_norm(x, (dim,), gain, 1e-6) for x, gain in zip((q, k), gains, strict=True))
        turn = rotations(pos, inv_freq, 1.1)
        turn_and_store(qkv.view(4, -1), pos, slot, (cos, sin), *gains, 1e-6, keys, values, num_heads)
        assert error(qkv[:, :num_heads], rotate(q, *turn)) < 1e-6
        kept = [0, 1, 3]
        assert error(keys[slot[kept].long()], rotate(k, *turn)[kept]) < 1e-6
        assert torch.equal(values[slot[kept].long()], v[kept])
        others = [place for place in range(12) if place not in (9, 2, 0)]
        assert bool((keys[others] == 5.0).all())
        assert bool((values[others] == 5.0).all())


def test_turning_of_some_dimensions_or_of_none() -> None:
    from tokenmill.backends.torch.kernels.islands import turn_and_store
    from tokenmill.backends.torch.rotations import rotate, rotations

    for dim, turned, normed in ((16, 12, False), (96, 48, True), (128, 96, False), (64, 0, False), (64, 0, True)):
        qkv = torch.randn(3, 8, dim, device=DEVICE)
        pos, slot = ints(0, 5, 63), ints(4, 2, 0)
        inv_freq = 1.0 / (100.0 ** (torch.arange(0, turned, 2, device=DEVICE) / max(turned, 1)))
        cos, sin = (one[:, 0] for one in rotations(torch.arange(64, device=DEVICE), inv_freq, 1.1))
        gains = (torch.randn(dim, device=DEVICE), torch.randn(dim, device=DEVICE)) if normed else (None, None)
        keys, values = (torch.zeros(5, 2, dim, device=DEVICE) for _ in range(2))
        q, k, v = qkv.clone().split([4, 2, 2], dim=1)
        if normed:
            q, k = (torch.nn.functional.rms_norm(x, (dim,), gain, 1e-6) for x, gain in zip((q, k), gains, strict=True))
        turns = rotations(pos, inv_freq, 1.1)
        turn_and_store(
            qkv.view(3, -1), pos, slot, (cos, sin) if turned else None, *gains, 1e-6, keys, values, num_heads=4
        )
        assert error(qkv[:, :4], rotate(q, *turns)) < 1e-6
        assert error(keys[slot.long()], rotate(k, *turns)) < 1e-6
        assert torch.equal(values[slot.long()], v)


def test_product_with_one_row_and_with_two() -> None:
    from tokenmill.backends.torch.kernels.islands import few_rows_product

    for num_rows, width, num_out in ((1, 48, 20), (1, 1024, 66), (1, 3584, 12), (2, 48, 20), (2, 1024, 70)):
        sizes = (num_rows, width), (num_out, width), (num_out,)
        x, weight, bias = (torch.randn(*size, device=DEVICE) for size in sizes)
        gain, base = torch.randn(width, device=DEVICE), torch.randn(num_rows, num_out, device=DEVICE)
        normed = torch.nn.functional.rms_norm(x, (width,), gain, 1e-6)
        assert error(few_rows_product(x, weight, bias), x @ weight.T + bias) < 1e-5
        assert error(few_rows_product(x, weight, gain=gain, eps=1e-6), normed @ weight.T) < 1e-5
        gate, up = (normed @ weight.T + bias).chunk(2, dim=1)
        found = few_rows_product(x, weight, bias, gain=gain, eps=1e-6, gates=True)
        assert error(found, torch.nn.functional.silu(gate) * up) < 1e-5
        found = few_rows_product(x, weight, bias, gain=gain, eps=1e-6, gates=True, activation="gelu_tanh")
        assert error(found, torch.nn.functional.gelu(gate, approximate="tanh") * up) < 1e-5
        total = base.clone()
        few_rows_product(x, weight, add_to=total)
        assert error(total, base + x @ weight.T) < 1e-5


def test_the_largest_logit_is_the_first_of_equal_ones() -> None:
    from tokenmill.backends.torch.kernels.drawing import largest

    logits = torch.randn(4, 9001, device=DEVICE).to(torch.bfloat16)
    logits[0, [77, 5000, 8999]] = 50.0
    logits[1, 4096] = torch.nan
    logits[2] = -torch.inf
    values, ids = largest(logits)
    assert ids[0] == 77
    assert values[0] == 50.0
    assert ids[3] == logits[3].float().argmax()
    assert not bool(values[1:3].isfinite().any())


def draw_fields(keys: Tensor, temperature: Tensor, top_k: Tensor, *others: Tensor) -> Tensor:
    """`tensor_sampler.DRAW_FIELDS` of each row: `others` are top-p, min-p, typical-p and XTC, as far as given."""
    rows = len(keys)
    defaults = (torch.ones(rows), torch.zeros(rows), torch.ones(rows), torch.zeros(rows), torch.zeros(rows))
    floats = [values.view(torch.int32)[:, None] for values in (temperature, *others, *defaults[len(others) :])]
    return torch.cat([keys, floats[0], top_k[:, None], *floats[1:]], dim=1)


def test_masked_logits() -> None:
    """The bits of each row rule out its own logits; a NaN stays wherever it is, so that its row fails."""
    from tokenmill.backends.torch.kernels.drawing import masked
    from tokenmill.contract import pack_mask

    for dtype, vocab in ((HALF, 131_072 if HAS_CARD else 9000), (torch.float32, 4099), (torch.float32, 33)):
        torch.manual_seed(vocab)
        logits = torch.randn(5, vocab + 3, device=DEVICE).to(dtype)[:, :vocab]
        logits[3, vocab // 2] = torch.nan
        allowed = torch.rand(5, vocab) < 0.3
        allowed[1], allowed[2], allowed[3, vocab // 2] = False, True, False
        words = torch.from_numpy(pack_mask(allowed.numpy()).view("int32")).to(DEVICE)
        wanted = logits.masked_fill(~allowed.to(DEVICE) & ~logits.isnan(), float("-inf"))
        assert torch.equal(masked(logits, words).nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_drawing() -> None:
    from tokenmill.backends.torch import tensor_sampler as sampler
    from tokenmill.backends.torch.kernels.drawing import draw
    from tokenmill.contract.draws import uniforms

    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(64, 9001, generator=generator)
    logits[5, 17] = torch.nan
    logits[6, 100:] = -torch.inf
    temperature = torch.rand(64, generator=generator) + 0.3
    temperature[::7] = 0
    keys = torch.randint(0, 1 << 31, (64, 4), generator=generator)
    keys[:, 0] = torch.randint(0, 1 << 62, (64,), generator=generator)
    told = draw_fields(keys, temperature, torch.full((64,), 9001))
    found = draw(logits.to(DEVICE), told.to(DEVICE), -1).cpu().long()
    uniform = uniforms(*keys.T)[0]
    wanted = sampler.draw(sampler.cooled(logits, temperature.clamp(min=0.1)), uniform)
    wanted = torch.where(temperature == 0, logits.argmax(dim=-1), wanted)
    wanted[5] = -1
    assert torch.equal(found, wanted)


def test_drawing_in_order_of_likelihood() -> None:
    """Top-k, top-p and min-p against a full sort: the same ids, also among equal logits."""
    from tokenmill.backends.torch import tensor_sampler as sampler
    from tokenmill.backends.torch.kernels.drawing import draw
    from tokenmill.contract.draws import uniforms

    rows, vocab = 48, 5003
    generator = torch.Generator().manual_seed(4)
    for dtype, spread in ((torch.bfloat16, 0.05), (torch.bfloat16, 3.0), (torch.float32, 1.0), (torch.float32, 6.0)):
        logits = (spread * torch.randn(rows, vocab, generator=generator)).to(dtype)
        logits[6, 100:] = -torch.inf
        logits[7, ::2] = 0.0
        logits[7, 1::2] = -0.0
        temperature = torch.rand(rows, generator=generator) + 0.4
        top_k = torch.where(torch.arange(rows) % 3 == 0, vocab, torch.randint(1, 400, (rows,), generator=generator))
        top_p = torch.where(torch.arange(rows) % 4 == 0, 1.0, torch.rand(rows, generator=generator) * 0.98 + 0.01)
        min_p = torch.where(torch.arange(rows) % 5 == 0, torch.rand(rows, generator=generator) * 0.3, 0.0)
        keys = torch.randint(0, 1 << 31, (rows, 4), generator=generator)
        told = draw_fields(keys, temperature, top_k, top_p, min_p)
        found = draw(logits.to(DEVICE), told.to(DEVICE), -1, is_filtered=True).cpu().long()
        cooled = sampler.cooled(logits.float(), temperature)
        values, order = sampler.in_order(cooled)
        kept = sampler.keep_likely(values, top_k, top_p, min_p)
        uniform = uniforms(*keys.T)[0]
        wanted = order.gather(-1, sampler.draw(kept, uniform)[:, None])[:, 0]
        by_id = (top_k == vocab) & (top_p >= 1)
        unlikely = cooled < min_p[:, None].log()
        wanted = torch.where(by_id, sampler.draw(cooled.masked_fill(unlikely, -torch.inf), uniform), wanted)
        assert torch.equal(found, wanted), (dtype, spread, (found != wanted).nonzero())


def filtered(
    logits: Tensor, temperature: Tensor, top_p: Tensor, typical_p: Tensor, threshold: Tensor, struck: Tensor
) -> tuple[Tensor, Tensor]:
    """What the filters leave of each row, in order of likelihood, and the tokens in that order: by sorting."""
    from tokenmill.backends.torch import tensor_sampler as sampler

    rows, vocab = logits.shape
    cooled = sampler.cooled(logits.float(), temperature)
    cooled = torch.where(typical_p[:, None] < 1, sampler.keep_typical(cooled, typical_p), cooled)
    values, order = sampler.in_order(cooled)
    kept = sampler.keep_likely(values, torch.full((rows,), vocab), top_p, torch.zeros(rows))
    return sampler.exclude_top_choices(kept, threshold, struck), order


def test_drawing_with_typical_p_and_xtc() -> None:
    """Against a full sort: the same ids, also among equal logits.

    Of nearly equal logits, one above and one below the typical one may be equally far from it but for rounding.
    """
    from tokenmill.backends.torch import tensor_sampler as sampler
    from tokenmill.backends.torch.kernels.drawing import draw
    from tokenmill.contract.draws import uniforms

    rows, vocab = 48, 5003 if HAS_CARD else 2503
    generator = torch.Generator().manual_seed(6)
    for dtype, spread in ((torch.bfloat16, 0.05), (torch.bfloat16, 3.0), (torch.float32, 1.0), (torch.float32, 6.0)):
        logits = (spread * torch.randn(rows, vocab, generator=generator)).to(dtype)
        logits[6, 100:] = -torch.inf
        temperature = torch.rand(rows, generator=generator) + 0.4
        top_p = torch.where(torch.arange(rows) % 3 == 0, 1.0, torch.rand(rows, generator=generator) * 0.98 + 0.01)
        typical_p = torch.where(torch.arange(rows) % 4 == 0, 1.0, torch.rand(rows, generator=generator) * 0.98 + 0.01)
        probability = torch.where(torch.arange(rows) % 5 == 0, 0.0, 0.6)
        threshold = torch.rand(rows, generator=generator) * (0.2 if spread > 1 else 0.0005)
        keys = torch.randint(0, 1 << 31, (rows, 4), generator=generator)
        told = draw_fields(
            keys, temperature, torch.full((rows,), vocab), top_p, torch.zeros(rows), typical_p, probability, threshold
        )
        found = draw(logits.to(DEVICE), told.to(DEVICE), -1, is_filtered=True, is_typical=True).cpu().long()
        first, second = uniforms(*keys.T)
        kept, order = filtered(logits, temperature, top_p, typical_p, threshold, second < probability)
        wanted = order.gather(-1, sampler.draw(kept, first)[:, None])[:, 0]
        by_id = (top_p >= 1) & (typical_p >= 1) & (probability == 0)
        wanted = torch.where(by_id, sampler.draw(sampler.cooled(logits.float(), temperature), first), wanted)
        other = (found != wanted).nonzero()[:, 0]
        assert len(other) <= (2 if spread < 1 else 0), (dtype, spread, other)
        assert bool((typical_p[other] < 1).all())


def test_filtered_draws_have_the_right_frequencies() -> None:
    """100,000 draws from one row with each filter: chi-squared of what it keeps."""
    from tokenmill.backends.torch.kernels.drawing import draw

    vocab, num_draws = 1000, 100_000 if HAS_CARD else 500
    logits = 2 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(5))
    keys = torch.stack([torch.full((num_draws,), 11), *(torch.arange(num_draws) * 0 for _ in range(2)),
                        torch.arange(num_draws)], dim=1)  # fmt: skip
    for top_p, typical_p, probability, threshold in (
        (0.9, 1.0, 0.0, 0.0),
        (1.0, 0.7, 0.0, 0.0),
        (0.95, 1.0, 0.5, 0.05),
    ):
        values = (0.7, top_p, 0.0, typical_p, probability, threshold)
        temperature, *others = (torch.full((num_draws,), value) for value in values)
        told = draw_fields(keys, temperature, torch.full((num_draws,), vocab), *others)
        found = [
            draw(logits.to(DEVICE).repeat(len(part), 1), part, -1, is_filtered=True, is_typical=True).cpu()
            for part in told.to(DEVICE).split(10_000)
        ]
        counts = torch.bincount(torch.cat(found).long(), minlength=vocab).double()
        expected = torch.zeros(vocab, dtype=torch.float64)
        for is_struck, share in ((True, probability), (False, 1 - probability)):
            one_row = (torch.tensor([value]) for value in (0.7, top_p, typical_p, threshold))
            kept, order = filtered(logits, *one_row, torch.tensor([is_struck]))
            expected += num_draws * share * torch.zeros(vocab).scatter(0, order[0], kept[0].softmax(-1)).double()
        inside = expected > 0
        assert counts[~inside].sum() == 0
        chi_squared = float(((counts - expected)[inside] ** 2 / expected[inside]).sum())
        degrees = int(inside.sum()) - 1
        assert abs(chi_squared - degrees) < 5 * (2 * degrees) ** 0.5, (top_p, typical_p, probability)
