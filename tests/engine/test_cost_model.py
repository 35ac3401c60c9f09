"""`CostModel`: what it learns of steps, and what it does not believe."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass

import numpy as np
import pytest

from tokenmill.engine.cost_model import FEW_PROPOSED, FEW_TIMES, LONG_AGO, MOST_FACTOR, CostLine, CostModel, LineFit
from tokenmill.engine.plan import Draft

NUM_DECODES = 8
TARGET_S = 0.1


def seconds(num_tokens: int, attention: float, slowness: float = 1.0) -> float:
    return slowness * (0.008 + 0.0006 * num_tokens + 4e-9 * attention)


def live(model: CostModel, num_steps: int, slowness: float = 1.0) -> None:
    """Steps of 8 decodes, every other one with a chunk of a prompt."""
    for step in range(num_steps):
        num_prefill = (step % 2) * (20 + step % 7 * 10)
        tokens, attention = NUM_DECODES + num_prefill, 1e4 * NUM_DECODES + 3e3 * num_prefill
        model.observe(tokens, attention, seconds(tokens, attention, slowness), num_prefill)


def chunk(model: CostModel) -> int:
    """The largest one beside 8 decodes."""
    draft = Draft(2048)
    draft.give_decodes(np.arange(NUM_DECODES, dtype=np.int32), NUM_DECODES, 1e4 * NUM_DECODES)
    return model.largest_chunk(draft, 1000, TARGET_S)


def test_it_learns_what_steps_take() -> None:
    model = CostModel()
    live(model, 100)
    assert model.predict(68, 2.6e5, 60) == pytest.approx(seconds(68, 2.6e5), rel=0.05)
    size = chunk(model)
    assert seconds(NUM_DECODES + size, 1e4 * NUM_DECODES + 1e3 * size) == pytest.approx(TARGET_S, rel=0.1)


def test_it_predicts_prompts_of_any_length() -> None:
    """Attention included: a token at position n reads n cells."""
    model = CostModel()
    assert model.prompt_s(100) is None
    for num_tokens in 40 * (16, 64, 256, 512):
        attention = num_tokens * num_tokens / 2
        model.observe(num_tokens, attention, 0.0006 * num_tokens + 1e-6 * attention, num_tokens)
    for num_tokens in (100, 1000, 4000):
        assert model.prompt_s(num_tokens) == pytest.approx(0.0006 * num_tokens + 5e-7 * num_tokens**2, rel=0.05)


def test_a_process_that_was_stopped_does_not_believe_its_steps_slow() -> None:
    model = CostModel()
    live(model, 100)
    model.observe(NUM_DECODES, 1e4 * NUM_DECODES, 20.0, 0)
    alone = model.predict(NUM_DECODES, 1e4 * NUM_DECODES)
    assert alone is not None
    assert alone < 2 * seconds(NUM_DECODES, 1e4 * NUM_DECODES)
    size = chunk(model)
    assert seconds(NUM_DECODES + size, 1e4 * NUM_DECODES + 1e3 * size) < 1.3 * TARGET_S


@pytest.mark.parametrize("slowness", [4.0, 30.0])
def test_a_machine_that_has_become_slower_is_believed(slowness: float) -> None:
    model = CostModel()
    live(model, 100)
    live(model, 100, slowness)
    assert model.predict(68, 2.6e5, 60) == pytest.approx(seconds(68, 2.6e5, slowness), rel=0.3)


# -- simulated devices of known cost ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """Seconds of a step: decoding alone costs one thing, a step with prompt tokens at least its launches."""

    decode_fixed: float
    launch: float
    per_token: float
    per_cell: float = 0.0

    def step(self, num_decode: int, num_prefill: int) -> float:
        work = self.decode_fixed + self.per_token * (num_decode + num_prefill)
        work += self.per_cell * (CONTEXT * num_decode + num_prefill * (CONTEXT + num_prefill / 2))
        return max(work, self.launch) if num_prefill else work

    def right_chunk(self, num_decode: int, target_s: float, min_chunk: int) -> int:
        """The largest chunk within the target, a share of decoding, or twice what the prompt's launches add."""
        decoding = self.step(num_decode, 0)
        allowed = max(target_s, 1.5 * decoding, decoding + 2 * max(0.0, self.launch - decoding))
        fits = [n for n in range(MOST + 1) if self.step(num_decode, n) <= allowed]
        return max(min_chunk, fits[-1])


CONTEXT, MOST = 600, 8192
CPU = Device(0.004, 0.0, 0.0012, 1e-9)
SLOW_CPU = Device(0.08, 0.0, 0.03)
SMALL_ON_GPU = Device(0.002, 0.009, 2.4e-6)
LARGE_ON_GPU = Device(0.005, 0.010, 2.1e-5, 1e-10)
LAUNCH_BOUND = Device(0.003, 0.040, 1e-5)
DEVICES = [(CPU, 0.1, 8), (SLOW_CPU, 0.1, 8), (SMALL_ON_GPU, 0.025, 256), (LARGE_ON_GPU, 0.05, 256),
           (LAUNCH_BOUND, 0.025, 256)]  # fmt: skip


def serve(model: CostModel, device: Device, target_s: float, num_steps: int, seed: int) -> list[int]:
    """Steps of a server under load, noisy and now and then held up; the chunks it was allowed."""
    rng, chunks = random.Random(seed), []
    for step in range(num_steps):
        num_decode = rng.randint(12, 20)
        draft = Draft(MOST)
        draft.give_decodes(np.arange(num_decode, dtype=np.int32), num_decode, CONTEXT * num_decode)
        prefill = min(model.largest_chunk(draft, CONTEXT, target_s), MOST) if step % 4 else 0
        if prefill:
            chunks.append(prefill)
            prefill = prefill if rng.random() < 0.8 else rng.randint(1, prefill)  # the end of a prompt
        attention = CONTEXT * num_decode + prefill * (CONTEXT + prefill / 2)
        seconds = device.step(num_decode, prefill) * rng.uniform(0.95, 1.05)
        held_up = rng.random() < 0.03
        model.observe(num_decode + prefill, attention, seconds * (20 if held_up else 1), prefill)
    return chunks


def assert_right(chunks: list[int], device: Device, target_s: float, min_chunk: int) -> None:
    right = device.right_chunk(16, target_s, min_chunk)
    settled = sorted(chunks[-40:])[20]
    assert 0.65 * right <= settled <= max(1.25 * right, min_chunk), (settled, right)  # a line through a kink


@pytest.mark.req("R13")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("device", "target_s", "min_chunk"), DEVICES)
def test_chunks_find_the_right_size_from_any_start(device: Device, target_s: float, min_chunk: int, seed: int) -> None:
    model, rng = CostModel(min_chunk), random.Random(seed)
    for _ in range(rng.randint(0, 80)):  # a past that says nothing of this device: compilation, other settings
        prefill = rng.choice((0, rng.randint(1, 600)))
        model.observe(8 + prefill, 600.0 * prefill, rng.uniform(0.001, 3.0), prefill)
    assert_right(serve(model, device, target_s, 300, seed), device, target_s, min_chunk)


@pytest.mark.req("R13")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slowness", [0.25, 4.0])
@pytest.mark.parametrize(("device", "target_s", "min_chunk"), DEVICES)
def test_chunks_follow_a_change_of_load(
    device: Device, target_s: float, min_chunk: int, slowness: float, seed: int
) -> None:
    model = CostModel(min_chunk)
    serve(model, device, target_s, 200, seed)
    other = Device(*(slowness * cost for cost in astuple(device)))
    assert_right(serve(model, other, target_s, 300, seed + 100), other, target_s, min_chunk)


@pytest.mark.req("R13")
@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
def test_chunks_leave_the_floor_on_a_noisy_host(noise: float) -> None:
    """Prompts of one size and a past of small chunks show nothing of the slope: they must not pile up for good."""
    for seed in range(12):
        model, rng, waiting = CostModel(256), random.Random(seed), 0
        for step in range(40):
            prefill = 256 * (step % 2)
            model.observe(8 + prefill, 256.0 * prefill, 0.02 + 6e-5 * prefill if prefill else 0.003, prefill)
        for _ in range(600):
            num_decode = rng.randint(50, 64)
            draft = Draft(MOST)
            draft.give_decodes(np.arange(num_decode, dtype=np.int32), num_decode, CONTEXT * num_decode)
            waiting += 512 * rng.choice((0, 0, 1, 2))
            prefill = min(model.largest_chunk(draft, 0, 0.025), waiting)
            waiting -= prefill
            seconds = LAUNCH_BOUND.step(num_decode, prefill) * rng.lognormvariate(0, noise)
            model.observe(num_decode + prefill, CONTEXT * num_decode + prefill * prefill / 2, seconds, prefill)
        assert waiting < 4096, seed


def test_a_fixed_cost_is_not_charged_to_each_token() -> None:
    fit = LineFit()
    for count in (1, 4, 2, 4, 1, 7):
        fit.observe(count, 1.5 + 0.25 * count)
    assert fit.line.entry == pytest.approx(1.5)
    assert fit.line.each == pytest.approx(0.25)


def test_while_one_count_was_seen_larger_ones_look_cheap_enough_to_be_tried() -> None:
    fit = LineFit()
    fit.observe(1, 2.0)
    assert fit.line.entry + fit.line.each == pytest.approx(2.0)
    assert fit.line.each < 1.0
    fit.observe(4, 8.0)
    assert fit.line == CostLine(0.0, pytest.approx(2.0))


def test_single_outliers_do_not_move_the_line() -> None:
    fit = LineFit()
    for i in range(FEW_TIMES):
        fit.observe(1, 9.0 if i == 3 else 1.0)
        fit.observe(3, 2.0)
    assert fit.line == CostLine(pytest.approx(0.5), pytest.approx(0.5))


def test_neither_part_of_a_cost_is_negative() -> None:
    falling, steep = LineFit(), LineFit()
    for count in (1, 2, 3):
        falling.observe(count, 4.0 - count)
        steep.observe(count, 2.0 * count - 1.5)
    assert falling.line == CostLine(pytest.approx(2.0), 0.0)
    assert steep.line.entry == 0.0
    assert steep.line.each == pytest.approx(1.25)
    assert LineFit().line == CostLine()


def test_what_proposed_tokens_cost_long_ago_is_doubted() -> None:
    """Else one expensive spell would end speculation for good: nothing is proposed, so nothing is learnt."""
    model, draft = CostModel(), Draft(2048)
    draft.give_decodes(np.arange(2, dtype=np.int32), 2, 100.0)
    for _ in range(10):
        model.observe(2, 100.0, 0.01, 0)
    for _ in range(FEW_TIMES):
        model.observe(10, 500.0, 0.5, 0, 8)
    price = model.price(draft)
    assert price is not None
    assert price.proposed.entry + 8 * price.proposed.each > 0.3
    for _ in range(LONG_AGO + 1):
        model.observe(2, 100.0, 0.01, 0)
    price = model.price(draft)
    assert price is not None
    assert price.proposed.entry + price.proposed.each < 0.01
    assert price.most == FEW_PROPOSED


# -- background requests ----------------------------------------------------------------------------------------------


def test_background_time_is_a_share_of_the_steps_that_were_observed_without_it() -> None:
    cost = CostModel()
    assert cost.background.alone_s(8) is None
    for seconds in (0.010, 0.011, 0.010, 0.090, 0.009):  # one was swapped out
        cost.background.observe(8, seconds, 0.0)
    assert cost.alone_s(8, 1000.0) == pytest.approx(0.010)
    assert cost.alone_s(2, 1000.0) == pytest.approx(0.0025), "fewer rows are not slower"
    assert cost.alone_s(20, 1000.0) == pytest.approx(0.010), "more rows have not been observed"
    assert cost.background.budget_s(0.010, 1.5) == pytest.approx(0.005)


def test_what_background_requests_get_does_not_follow_the_noise_of_single_steps() -> None:
    """Steps of 20 to 40 tokens, of which every other one takes up to twice as long: one fit gives 6 to 44 tokens."""
    cost, rng = CostModel(), np.random.default_rng(0)
    cells, given = np.zeros(200, dtype=np.int32), list[int]()
    for _ in range(5):
        cost.observe(8, 0.0, 0.0104, 0)
    for i in range(500):
        size = int(rng.integers(20, 41))
        noise = rng.random() if rng.random() < 0.5 else rng.normal(0, 0.05)
        cost.observe(size, 0.0, (0.008 + 0.0003 * size) * (1 + noise), size - 8)
        if i >= 100:
            given.append(cost.decodes_in(0.006, cells))
    assert max(given) <= 3 * min(given)
    assert 10 < np.median(given) < 20


def test_background_time_is_left_where_fits_extrapolate_below_zero() -> None:
    """Beside background requests most steps are of one size, and noise can turn the fit through them."""
    cost = CostModel()
    for i in range(40):
        size = 20 + i % 20
        cost.observe(size, 0.0, 0.030 + 0.004 * (size - 20), 0)
        cost.observe(size, 0.0, 0.030 + 0.004 * (size - 20), 4)
        cost.predict(size, 0.0)
    assert cost.predict(8, 0.0) < 0
    for _ in range(3):
        cost.background.observe(8, 0.020, 0.0)
    assert cost.alone_s(8, 0.0) == pytest.approx(0.020)


def test_background_time_shrinks_while_its_tokens_take_longer_than_predicted() -> None:
    background = CostModel().background
    for _ in range(5):
        background.observe(8, 0.010, 0.0)
    for _ in range(5):
        background.observe(8, 0.017, 0.005)  # 2 ms more than predicted
    assert background.budget_s(0.010, 1.5) == pytest.approx(0.003)
    for _ in range(15):
        background.observe(8, 0.050, 0.003)
    assert background.budget_s(0.010, 1.5) == pytest.approx(0.25 * 0.005), "never none: its cost would be unknown"
    for _ in range(15):
        background.observe(8, 0.011, 0.005)
    assert background.budget_s(0.010, 1.5) == pytest.approx(0.005), "less than predicted adds nothing"


def budget_after(noise_s: float, added_s: float) -> float:
    """Of steps of 10 ms, one in ten of which takes longer by itself; background tokens add as much to each."""
    background = CostModel().background
    for number in range(200):
        own = 0.010 + (noise_s if number % 10 == 0 else 0.0)
        background.observe(8, own, 0.0)
        background.observe(8, own + added_s, added_s)
        budget_s = background.budget_s(0.010, 1.5)
    return budget_s


def test_background_time_grows_where_steps_vary_more_by_themselves() -> None:
    """Ones of 20 ms may take 30: there is room for 10 ms, not 5. But a step is never much longer than it may be."""
    assert budget_after(0.010, 0.005) == pytest.approx(MOST_FACTOR * 0.005)
    assert budget_after(0.0, 0.0049) == pytest.approx(MOST_FACTOR * 0.005)
    assert budget_after(0.0, 0.0051) == pytest.approx(0.005), "they do not vary"
    assert budget_after(0.010, 0.016) == pytest.approx(0.005), "the tail is too long"
