"""The sampler in C draws the ids of `sampling.definition`, to the last bit of each log-probability."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.sampling.steps import Step, assert_same, steps
from tokenmill.backends.cpu.bindings import Pool, SamplingStruct
from tokenmill.backends.cpu.build import FOLDER
from tokenmill.contract.draws import DRAW, Draws, TokenLists
from tokenmill.params import SamplingParams
from tokenmill.sampling import definition
from tokenmill.sampling.sampler import HostSampler
from tokenmill.sampling.state import SamplingState

KEEPS_FIXTURES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.req("R29", "G12")
@settings(KEEPS_FIXTURES, max_examples=50)
@given(step=steps())
def test_sampled_rows_are_those_of_the_definition(step: Step, lib: Any, pool: Pool) -> None:
    sampled = HostSampler(lib)(step.draws, step.logits, step.mask, pool)
    assert_same(step, sampled, definition.sample(step.draws, step.logits, step.mask))


def large_step(vocab: int, params: list[SamplingParams]) -> Step:
    """As many rows with each of the parameters as there are logits of different spreads."""
    rng = np.random.default_rng(vocab)
    state = SamplingState(3 * len(params), vocab)
    for row in range(3 * len(params)):
        log = rng.integers(0, vocab, 40).tolist()
        state.attach(row, params[row // 3], log, 10, seed=row)
    rows = np.arange(3 * len(params), dtype=np.int32)
    spread = np.tile([0.3, 2.0, 4.0], len(params))[:, None]
    logits = (rng.normal(0, 1, (len(rows), vocab)) * spread).astype(np.float32)
    return Step(state.draws(rows, rows, {}), logits, None)


@pytest.mark.req("R29")
def test_sampled_rows_of_a_large_vocabulary(lib: Any, pool: Pool) -> None:
    """Blocks, likely tokens in few of them, sorts of few and of many: what small vocabularies do not need."""
    step = large_step(
        20011,
        [
            SamplingParams(temperature=0.8),
            SamplingParams(temperature=0.7, top_p=0.9, logprobs=20),
            SamplingParams(top_k=50),
            SamplingParams(top_k=5000, top_p=0.99),
            SamplingParams(min_p=0.05),
            SamplingParams(typical_p=0.8),
            SamplingParams(xtc_probability=0.5),
            SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, top_p=0.5),
        ],
    )
    sampled = HostSampler(lib)(step.draws, step.logits, None, pool)
    assert_same(step, sampled, definition.sample(step.draws, step.logits, None))


def test_sizes_of_a_draw_and_a_sampling(lib: Any) -> None:
    assert lib.tm_size_of(b"draw") == DRAW.itemsize
    assert lib.tm_size_of(b"sampling") == ctypes.sizeof(SamplingStruct)


def test_tokens_outside_the_vocabulary_are_refused(lib: Any) -> None:
    """The library would write where they point."""
    table = np.zeros(1, dtype=DRAW)
    for token in (-1, 8):
        lists = TokenLists(np.array([0, 1]), np.array([token], dtype=np.int32), np.ones(1, dtype=np.float32))
        with pytest.raises(ValueError, match="from 0 to 7"):
            HostSampler(lib)(Draws(table, edits=lists), np.zeros((1, 8), dtype=np.float32), None)


# -- planted bugs -----------------------------------------------------------------------------------------------------

PLANTED = {
    "one row's mask is applied to another": (
        "step->mask + (size_t)row * step->mask_words",
        "step->mask + (size_t)(row ? row - 1 : row) * step->mask_words",
    ),
    "a counter of Philox without the choice": ("c1 = (uint32_t)draw->choice", "c1 = 0"),
    "a round of Philox too few": ("for (int i = 0; i < 10; i++)", "for (int i = 0; i < 9; i++)"),
    "a token too many for top-k": (
        "if (has_top_k && draw->top_k < n) n = (int32_t)draw->top_k;",
        "if (has_top_k && draw->top_k + 1 < n) n = (int32_t)draw->top_k + 1;",
    ),
    "top-p stops a token early": (
        "if (i > 0 && before >= mass) return i;",
        "if (before >= mass) return i - (i > 1);",
    ),
    "the prompt counts as output": ("int64_t i = draw->num_prompt; i < length", "int64_t i = 0; i < length"),
}
NO_OPTIMIZATION = "-O1 -std=gnu11 -fPIC -shared -Wno-psabi -ffp-contract=off -DTM_VARIANT=plain"


class PlainSampler(HostSampler):
    """The sampler of a library that has nothing else."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        lib.tm_sample_bytes, lib.tm_sample = lib.tm_sample_bytes_plain, lib.tm_sample_plain
        lib.tm_sample_bytes.restype = ctypes.c_size_t
        lib.tm_sample.argtypes = [ctypes.POINTER(SamplingStruct), ctypes.c_void_p, ctypes.c_void_p]
        super().__init__(lib)


def build_sampler(folder: Path, correct: str = "", faulty: str = "") -> PlainSampler:
    source = (FOLDER / "sampler.c").read_text()
    assert not correct or source.count(correct) >= 1, f"sampler.c does not have {correct}"
    (folder / "sampler.c").write_text(source.replace(correct, faulty) if correct else source)
    target = folder / "sampler.so"
    sources = [str(folder / "sampler.c"), str(FOLDER / "pool.c")]
    command = ["cc", *NO_OPTIMIZATION.split(), f"-I{FOLDER}", *sources, "-o", str(target), "-lm", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True)
    return PlainSampler(target)


def find_a_difference(sampler: HostSampler) -> None:
    @settings(max_examples=400, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(step=steps())
    def property_holds(step: Step) -> None:
        sampled = sampler(step.draws, step.logits, step.mask)
        assert_same(step, sampled, definition.sample(step.draws, step.logits, step.mask))

    property_holds()


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    sampler = build_sampler(tmp_path, *PLANTED[bug])
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        find_a_difference(sampler)
