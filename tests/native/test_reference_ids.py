"""The default model says what it has always said: ids recorded when its backend still ran on torch.

They were recorded with the cosines and sines of rotary positions that are used now, rounded once from double precision.
Floats are added in another order by each variant of the kernels, so that each has ids of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.backends.cpu.model import CPUModel

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "reference_ids.json").read_text())


def test_greedy_and_seeded_ids_are_the_recorded_ones(lib: Any) -> None:
    wanted = RECORDED["ids"].get(lib.tm_variant().decode())
    if wanted is None:
        pytest.skip("too slow to be recorded")
    params = [
        SamplingParams(max_tokens=len(ids), seed=1000 + i, ignore_eos=True, **settings)
        for case, settings in RECORDED["cases"].items()
        for i, ids in enumerate(wanted[case])
    ]
    with LLM("smollm2-135m", device="cpu", max_num_seqs=8, kv_cache_tokens=4096) as llm:
        assert isinstance(llm.opened.model, CPUModel)
        outputs = llm.generate(RECORDED["prompts"] * len(RECORDED["cases"]), params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        ids for case in RECORDED["cases"] for ids in wanted[case]
    ]
