"""An engine on the card, a step ahead: crowds, preemption, forks, conversations. In float32, to compare ids."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch

from tests.gpu.card import needs_card
from tests.parity.checkpoints import LIMITS, reference, save
from tokenmill import open_model
from tokenmill.backends.torch.model import BaseTorchModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine.core import DraftModel, EngineCore
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.params import SamplingParams

pytestmark = needs_card()

SMALL = BackendLimits(num_cells=256, max_seqs=16)


def opened(folder: Path, variant: str = "qwen3", **options: object) -> BaseTorchModel:
    model = open_model(str(save(variant, folder)), device="cuda", dtype="float32", **options)
    assert isinstance(model, BaseTorchModel)
    return model


def engine_of(model: BaseTorchModel, limits: BackendLimits = LIMITS, **config: object) -> EngineCore:
    settings = {"max_num_seqs": 8, "prefill_chunk": 16, "depth": 1, **config}
    return EngineCore(model.new_backend(limits), model.info, EngineConfig(**settings))  # type: ignore[arg-type]


def request(name: str, prompt: list[int], new: int = 40, seed: int | None = None, hints: Hints = Hints()) -> Request:
    params = SamplingParams(temperature=0) if seed is None else SamplingParams(temperature=0.8)
    return Request(name, prompt, Limits(max_new_tokens=new), hints, Draw(params=params, seed=seed or 0))


def run(engine: EngineCore, *requests: Request) -> list[list[int]]:
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    return [one.output for one in requests]


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(160) for _ in range(length)] for length in lengths]


def test_greedy_ids_are_those_of_transformers(tmp_path: Path) -> None:
    for number, variant in enumerate(("llama", "qwen2", "qwen3", "mistral, window")):
        engine = engine_of(opened(tmp_path / str(number), variant), prefix_caching=False)
        asked = prompts(1, 3, 7, 12, 20, 33, 50, 64)
        found = run(engine, *(request(f"r{i}", prompt, 64) for i, prompt in enumerate(asked)))
        engine.close()
        for prompt, ids in zip(asked, found, strict=True):
            with torch.no_grad():
                wanted = reference(variant).generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0]
            assert prompt + ids == wanted.tolist()


def test_a_seeded_request_says_the_same_alone_and_in_a_crowd(tmp_path: Path) -> None:
    model = opened(tmp_path)
    asked = prompts(5, 12, 19, 26, 33, 40, 47, 54)
    crowd = engine_of(model, prefix_caching=False)
    together = run(crowd, *(request(f"r{i}", prompt, seed=i + 1) for i, prompt in enumerate(asked)))
    crowd.close()
    alone = engine_of(model, prefix_caching=False)
    one_by_one = [run(alone, request(f"r{i}", prompt, seed=i + 1))[0] for i, prompt in enumerate(asked)]
    alone.close()
    same = sum(a == b for one, two in zip(together, one_by_one, strict=True) for a, b in zip(one, two, strict=True))
    assert same >= 0.995 * sum(map(len, together))


def test_preempted_requests_say_what_they_would_have_said(tmp_path: Path) -> None:
    model = opened(tmp_path, block_size=16)
    asked = prompts(20, 24, 28, 32, 36, 40)
    roomy = engine_of(model)
    wanted = run(roomy, *(request(f"r{i}", prompt, 60) for i, prompt in enumerate(asked)))
    roomy.close()
    tight = engine_of(model, SMALL)
    requests = [request(f"r{i}", prompt, 60) for i, prompt in enumerate(asked)]
    assert run(tight, *requests) == wanted
    assert sum(one.num_preemptions for one in requests) > 0
    tight.close()


def test_a_fork_goes_on_from_shared_kv(tmp_path: Path) -> None:
    model = opened(tmp_path)
    engine = engine_of(model)
    parent = request("parent", prompts(30)[0], 50)
    engine.add(parent)
    while len(parent.output) < 10:
        engine.step()
    child = engine.fork("parent", "child", Limits(max_new_tokens=20))
    shared = len(child.tokens) - 30
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    assert child.num_cached > 30
    assert child.output == parent.output[shared : shared + 20]
    engine.close()


def test_a_conversation_goes_on_from_parked_kv(tmp_path: Path) -> None:
    model = opened(tmp_path)
    engine = engine_of(model)
    first = request("first", prompts(30)[0], 20, hints=Hints(owner="session"))
    run(engine, first)
    longer = list(first.tokens) + prompts(40)[0]
    second = request("second", longer, 20, hints=Hints(owner="session"))
    continued = run(engine, second)[0]
    engine.close()
    assert second.num_cached >= 48
    fresh = engine_of(model, prefix_caching=False)
    assert run(fresh, request("fresh", longer, 20)) == [continued]
    fresh.close()


def test_many_sequences_decode_as_one_alone_does(tmp_path: Path) -> None:
    """Every padded size of graph on the way down from 60 sequences."""
    model = opened(tmp_path)
    limits = BackendLimits(num_cells=16_384, max_seqs=128)
    asked = prompts(*range(3, 63))
    crowd = engine_of(model, limits, max_num_seqs=60, prefix_caching=False)
    together = run(crowd, *(request(f"r{i}", prompt, 5 + i) for i, prompt in enumerate(asked)))
    crowd.close()
    alone = engine_of(model, prefix_caching=False)
    for i in (0, 7, 31, 59):
        assert run(alone, request(f"r{i}", asked[i], 5 + i)) == [together[i]]
    alone.close()


def test_requests_that_speculate_say_what_they_would_have_said(tmp_path: Path) -> None:
    """Verified tokens in decode graphs, beside requests that do not speculate, and beside chunks of prompts."""
    model = opened(tmp_path)
    asked = prompts(20, 5, 40, 70, 90, 3)

    def answers(predicted: list[list[int]] | None) -> list[Request]:
        engine = engine_of(model, prefix_caching=False, prefill_chunk=24, max_num_seqs=6)
        requests = [request(f"r{i}", prompt, 60, seed=i % 3 or None) for i, prompt in enumerate(asked)]
        for one, ids in zip(requests[::2], (predicted or [])[::2], strict=False):
            wrong = [(token + 1) % 160 if i % 9 == 8 else token for i, token in enumerate(ids)]
            params = replace(one.draw.params, speculation="lookup", prediction_token_ids=tuple(wrong))
            one.draw = replace(one.draw, params=params)
        run(engine, *requests)
        engine.close()
        return requests

    plain = answers(None)
    speculating = answers([one.output for one in plain])
    assert [one.output for one in speculating] == [one.output for one in plain]
    assert sum(one.num_agreed for one in speculating) > 30
    assert sum(one.num_proposed - one.num_agreed for one in speculating) > 3


def test_drafts_that_the_host_has_not_seen_are_verified(tmp_path: Path) -> None:
    """The draft model is the model itself, so most drafts are right; they go from token table to token table."""
    model = opened(tmp_path)
    asked = prompts(20, 5, 40, 3)

    def answers(mode: str, draft: DraftModel | None) -> list[Request]:
        settings = EngineConfig(max_num_seqs=8, prefill_chunk=16, depth=1, prefix_caching=False)
        engine = EngineCore(model.new_backend(LIMITS), model.info, settings, draft=draft)
        speculation = engine.scheduler.speculation
        if draft is not None:  # whatever they cost
            speculation._worth_drafting = lambda _, some, *__: (some, [speculation._most(one) for one in some])  # type: ignore[method-assign]
            speculation.allot = lambda found, *_: {row: len(one.proposal.tokens) for row, one in found.items()}  # type: ignore[method-assign]
        requests = [request(f"r{i}", prompt, 60, seed=i % 3 or None) for i, prompt in enumerate(asked)]
        for one in requests[:3]:
            one.draw = replace(one.draw, params=replace(one.draw.params, speculation=mode))
        run(engine, *requests)
        if engine._drafter is not None:
            assert engine._drafter._ahead is not None
            assert engine._drafter.took_since(0.0) > 0
        engine.close()
        return requests

    plain = answers("off", None)
    speculating = answers("draft", DraftModel(model, LIMITS))
    assert [one.output for one in speculating] == [one.output for one in plain]
    assert sum(one.num_agreed for one in speculating) > 100
    assert all(one.num_agreed > one.num_proposed // 2 for one in speculating[:3])


def test_prompt_steps_say_the_same_as_graphs_and_kernel_by_kernel(tmp_path: Path) -> None:
    """Chunks of prompts beside decodes, padded to a graph's shape."""
    from tokenmill.backends.torch.cuda.layers import Switches

    model = opened(tmp_path)
    asked = prompts(5, 70, 33, 120, 45, 12, 64, 99)
    found = []
    for switches in (Switches(), Switches(graphs=False)):
        model.decoder.switches = switches  # type: ignore[union-attr]
        engine = engine_of(model, prefix_caching=False, prefill_chunk=24, max_num_batched_tokens=60)
        found.append(run(engine, *(request(f"r{i}", prompt, 20 + i) for i, prompt in enumerate(asked))))
        engine.close()
    assert found[0] == found[1]


def test_no_request_waits_for_a_capture_or_a_compilation(tmp_path: Path) -> None:
    """Prompts in small and in large steps, decodes and draws of all kinds: everything was there before them."""
    from triton import knobs

    from tokenmill.backends.torch.cuda.backend import CudaBackend

    model = opened(tmp_path)
    limits = BackendLimits(num_cells=16_384, max_seqs=128, num_running=64)
    engine = engine_of(
        model, limits, max_num_seqs=64, prefix_caching=False, max_num_batched_tokens=4096, prefill_chunk=4096,
        target_tick_ms=1000.0,
    )  # fmt: skip
    kinds = [
        SamplingParams(temperature=0), SamplingParams(temperature=0.6),
        SamplingParams(top_p=0.8), SamplingParams(top_k=9),
        SamplingParams(typical_p=0.7, xtc_probability=0.5, xtc_threshold=0.05), SamplingParams(repetition_penalty=1.2),
    ]  # fmt: skip
    backend = engine._executor.backend
    assert isinstance(backend, CudaBackend)
    assert backend._graphs is not None
    late: list[object] = []
    backend._graphs._captured = late.append  # type: ignore[method-assign, assignment]
    knobs.runtime.jit_cache_hook = lambda **told: late.append(told["repr"])
    try:
        for count, length in ((1, 7), (3, 40), (64, 60)):
            asked = [
                Request(f"r{count}-{i}", prompt, Limits(max_new_tokens=5 + i), draw=Draw(params=kinds[i % 6], seed=i))
                for i, prompt in enumerate(prompts(*[length] * count))
            ]
            run(engine, *asked)
    finally:
        knobs.runtime.jit_cache_hook = None
        engine.close()
    assert not late


def test_nothing_waits_but_collect(tmp_path: Path) -> None:
    """Prompts, decodes and draws of several kinds, a step ahead: no copy or look at a number holds the host up."""
    model = opened(tmp_path)
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0.6), SamplingParams(top_k=20, top_p=0.8)]
    engine = engine_of(model)
    requests = []
    for i, prompt in enumerate(prompts(5, 70, 33, 20, 45, 12)):
        draw = Draw(params=params[i % 3], seed=i)
        requests.append(Request(f"r{i}", prompt, Limits(max_new_tokens=30 + i), draw=draw))
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert [len(ids) for ids in run(engine, *requests)] == [30, 31, 32, 33, 34, 35]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()
