"""`tokenmill fit`: the plan is what is allocated, and what it says fits is what the engine starts with."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.parity.checkpoints import save
from tests.parity.gguf_files import write
from tokenmill import LLM, open_model
from tokenmill.backends.checkpoints import StoredTensor
from tokenmill.backends.cpu.bindings import INT4, INT8, library
from tokenmill.backends.cpu.model import ROUNDED_BYTES, CPUModel
from tokenmill.backends.cpu.packing import _floats, as_kind
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.backends.families.config import OTHER_BYTES
from tokenmill.backends.families.names import shapes
from tokenmill.backends.loading import describe_model
from tokenmill.backends.torch.model import TorchModel
from tokenmill.cli.main import app
from tokenmill.config import EngineConfig
from tokenmill.contract.backend import cells_for
from tokenmill.entrypoints import options
from tokenmill.entrypoints.fit import limits_for, plan_fit
from tokenmill.entrypoints.options import choose_limits, load_for_engine
from tokenmill.errors import ConfigError, ModelNotFound
from tokenmill.params import SamplingParams
from tokenmill.text.tokenizer import ByteTokenizer

MIB = 1 << 20


def forms() -> list[str]:
    return ["float32", "bfloat16", *(["int8", "int4"] if library() is not None else [])]


@pytest.mark.req("B9")
@pytest.mark.parametrize("dtype", forms())
@pytest.mark.parametrize("variant", ["qwen3", "llama, heads of their own size"])
def test_the_plan_is_what_is_allocated(variant: str, dtype: str, tmp_path: Path) -> None:
    path = str(save(variant, tmp_path))
    planned = plan_fit(path, 3, 100, free_bytes=None, dtype=dtype, device="cpu")
    model = open_model(path, dtype=dtype, device="cpu")
    assert isinstance(model, CPUModel if dtype.startswith("int") else TorchModel)
    limits = limits_for(3, 100, 16)
    assert model.memory(limits, 3) == planned.plan
    assert planned.plan.weights == model.decoder.weights.num_bytes
    with model.new_backend(limits) as backend:
        assert planned.plan.kv == backend._storage.num_bytes  # type: ignore[attr-defined]
        assert backend.kv.stats().num_cells == limits.num_cells == cells_for(3, 100, 16)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_a_file_is_planned_as_it_will_be_held(kind: str, tmp_path: Path) -> None:
    path = str(write("qwen3", tmp_path / "model.gguf", "qwen3", gguf.GGMLQuantizationType[kind]))
    planned = plan_fit(path, 1, 64, free_bytes=None, device="cpu")
    model: Any = open_model(path, device="cpu")
    assert planned.plan.weights == model.decoder.weights.num_bytes


class LargeMatrix:
    """A checkpoint of one matrix."""

    where, is_quantised = "here", False

    def __init__(self, dtype: str, raw: np.ndarray) -> None:
        self.tensor = StoredTensor(dtype, raw.shape, raw)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"matrix": self.tensor.shape}

    def dtype_of(self, _: str) -> str:
        return self.tensor.dtype

    def load(self, _: str) -> StoredTensor:
        return self.tensor


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_matrix_that_is_rounded_takes_what_is_planned_for_it(dtype: str, kind: int) -> None:
    raw = np.full((4096, 4096), 0x3F80 if dtype == "BF16" else 1, dtype=np.uint16 if dtype == "BF16" else np.float16)
    source = LargeMatrix(dtype, raw)
    tracemalloc.start()
    try:
        values = _floats(source, "matrix")
        assert tracemalloc.get_traced_memory()[1] < 5.5 * raw.size, "as float32, and which of them are finite"
        as_kind(values, kind)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.8 * ROUNDED_BYTES * raw.size < taken <= ROUNDED_BYTES * raw.size + OTHER_BYTES


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_loading_a_file_of_floats_is_planned_with_rounding_them(dtype: str, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("the CPU kernels are not built")
    path = str(write("phi3", tmp_path / "model.gguf", "phi3", gguf.GGMLQuantizationType.F16))
    options: Any = {"device": "cpu", "backend": "cpu", "dtype": dtype}
    planned, limits = describe_model(path, **options), limits_for(1, 64, 16)
    model = open_model(path, **options)
    assert isinstance(model, CPUModel)
    largest = max(math.prod(shape) for shape in shapes(model.decoder.config).values())
    plan = model.memory(limits, 1)
    assert plan == planned.memory(limits, 1)
    assert plan.loading == OTHER_BYTES + ROUNDED_BYTES * largest


@pytest.mark.req("B9")
def test_the_most_that_fits_fits_and_one_more_does_not(tmp_path: Path) -> None:
    path = str(save("qwen3", tmp_path))

    def planned(sessions: int, context: int, free: int) -> Any:
        return plan_fit(path, sessions, context, free_bytes=free, dtype="float32", device="cpu")

    least = planned(1, 2, 1 << 40).plan.total
    for free in (least - 1, least, least + MIB // 4, 2 * least):
        found = planned(4, 200, free)
        assert found.fits == (found.plan.total <= free)
        if found.most_sessions:
            assert planned(found.most_sessions, 200, free).fits
        assert not planned(found.most_sessions + 1, 200, free).fits
        if found.longest_context:
            assert planned(4, found.longest_context, free).fits
        if found.longest_context < 512:
            assert not planned(4, found.longest_context + 1, free).fits


@pytest.mark.req("B9")
def test_as_many_requests_as_were_planned_for_run_together(tmp_path: Path) -> None:
    """With the planned KV no request is ever put back."""
    path = str(save("qwen3", tmp_path))
    model = open_model(path, dtype="float32", device="cpu")
    cells = limits_for(5, 60, 16).num_cells
    with LLM(model, tokenizer=ByteTokenizer(160), max_num_seqs=5, max_model_len=60, kv_cache_tokens=cells) as llm:
        preempted: list[Any] = []
        llm.engine.events.subscribe(lambda event: preempted.append(event) if "preempt" in repr(event).lower() else None)
        prompts = [[i + 1] * 30 for i in range(5)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        assert all(len(one.outputs[0].token_ids) == 30 for one in outputs)
        assert not preempted


@pytest.mark.fault("L11")
def test_what_does_not_fit_is_refused_before_it_is_tried(tmp_path: Path) -> None:
    model = open_model(str(save("qwen3", tmp_path)), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match=r"are needed .* but only .* are free: .* `tokenmill fit` shows"):
        LLM(model, tokenizer=ByteTokenizer(160), kv_cache_tokens=1 << 40)


def test_the_command(tmp_path: Path) -> None:
    path = str(save("qwen3", tmp_path))
    run = CliRunner().invoke
    shown = run(app, ["fit", path, "--sessions", "2", "--context", "100", "--dtype", "float32"])
    assert shown.exit_code == 0
    for words in ("as float32, 2 sessions of 100 tokens", "weights", "KV (", "activations", "fits", "maximum sessions"):
        assert words in shown.output
    small = run(app, ["fit", path, "--memory-gb", "0.001", "--json"])
    assert small.exit_code == 1
    found = json.loads(small.output)
    assert found["fits"] is False
    assert found["most_sessions"] == found["longest_context"] == 0
    with pytest.raises(ModelNotFound):
        plan_fit("no-such-model", 1, None, free_bytes=None)


def test_a_draft_model_is_planned_for(tmp_path: Path) -> None:
    path = str(save("qwen3", tmp_path))
    alone = plan_fit(path, 3, 100, free_bytes=None, device="cpu")
    both = plan_fit(path, 3, 100, free_bytes=None, device="cpu", draft_model=path)
    assert (both.plan.weights, both.plan.kv) == (2 * alone.plan.weights, 2 * alone.plan.kv)
    tight = alone.plan.total + alone.plan.weights // 2
    assert plan_fit(path, 3, 100, free_bytes=tight, device="cpu").fits
    assert not plan_fit(path, 3, 100, free_bytes=tight, device="cpu", draft_model=path).fits


def test_a_draft_model_shares_the_budget_of_kv_and_keeps_its_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = FakeModel(FakeConfig(max_context=4096)), EngineConfig(max_num_seqs=64)
    each = model.info.kv_bytes_per_token
    monkeypatch.setattr(FakeModel, "kv_budget_bytes", 1024 * each)
    assert choose_limits(model, config, None).num_cells == 1024
    assert choose_limits(model, config, None, 1, each).num_cells == 512
    draft = FakeModel(FakeConfig(max_context=128))
    monkeypatch.setattr(options, "_load_draft", lambda *_: draft)
    loaded = load_for_engine(model, {"draft_model": "small"})
    assert loaded.draft is not None
    assert loaded.draft.limits.max_context == 128
    assert loaded.limits.max_context == 4096
