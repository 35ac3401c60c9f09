"""Speculation on the default model and the CPU kernels, whose bits do not depend on the batch (R33)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.speculating import Oracle, verify_all
from tokenmill import open_model
from tokenmill.backends.cpu.bindings import library
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, IntArray, ModelHandle, Sampled, Sampler
from tokenmill.engine.core import DraftModel, EngineCore
from tokenmill.engine.events import Event, VerifiedEvent
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.outputs import TokenLogprobs
from tokenmill.params import SamplingParams, StructuredOutputs
from tokenmill.text.model_text import open_text

pytestmark = [pytest.mark.req("R33"), pytest.mark.slow]

NUM_PROMPTS, NUM_NEW = 200, 6
SUBJECTS = ("mill", "river", "bridge", "market", "teacher", "harbour", "orchestra", "garden", "library", "storm")
PLACE = "In a small town by the sea, "
OPENINGS = ("the old {} was", "once upon a time, a {}", "{}, {}, and", "a recipe for {} soup:", "def {}(x):")
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 0, "structured_outputs": StructuredOutputs(regex="[a-z ]{1,40}")},
)


Said = dict[str, list[tuple[int, TokenLogprobs | None]]]


class Workload:
    """Prompts with parameters of all kinds. Some requests are cancelled, some forked, some continued otherwise."""

    cancelled = ("r5", "r9", "r15")

    def __init__(self, model: ModelHandle) -> None:
        self.text = open_text(model)
        self.grammars = self.text.grammars(model.info.vocab_size)
        self.num_preempted = 0

    def requests(self, modes: Sequence[str]) -> list[Request]:
        made = []
        for i in range(NUM_PROMPTS):
            opening, subject = OPENINGS[i % len(OPENINGS)], SUBJECTS[i // len(OPENINGS) % len(SUBJECTS)]
            prompt = self.text.tokenizer.encode(PLACE + opening.replace("{}", subject))
            params = SamplingParams(speculation=modes[i % len(modes)], **PARAMS[i % len(PARAMS)])
            outputs = params.structured_outputs
            grammar = None if outputs is None else self.grammars.compile(outputs).start()
            limits = Limits(max_new_tokens=NUM_NEW, stop_ids=self.text.tokenizer.eos_ids)
            draw = Draw(params=params, seed=i // 4, choice=i % 4)  # as n = 4 makes them
            made.append(Request(f"r{i}", prompt, limits, Hints(key=f"k{i % 3}"), draw, grammar=grammar))
        return made

    def run(self, engine: EngineCore, modes: Sequence[str]) -> Said:
        """What each request says; those that are cancelled are left out."""
        said, forks, requests = Said(), dict[str, int](), self.requests(modes)
        for one in requests:
            engine.add(one)
        while engine.has_work:
            self._step(engine, said)
            for name in self.cancelled:
                if len(said.get(name, ())) >= 2:
                    engine.cancel(name)
            source = requests[1]
            if "fork" not in forks and source.output and source.request_id in engine.scheduler.requests:
                forks["fork"] = len(source.output)
                engine.fork("r1", "fork", Limits(max_new_tokens=3), draw=source.draw)
        self.num_preempted = sum(one.num_preemptions for one in requests)
        for one in requests[:40:4]:  # a rewind: it goes on otherwise from the middle of what was said
            half = [*one.tokens[: one.num_prompt + len(one.output) // 2], 42]
            draw = replace(one.draw, params=replace(one.draw.params, structured_outputs=None))
            engine.add(Request(f"{one.request_id} again", half, one.limits, one.hints, draw))
        while engine.has_work:
            self._step(engine, said)
        engine.check_integrity()
        assert engine.failure is None
        point, together = forks["fork"], min(3, len(said["r1"]) - forks["fork"])
        assert said.pop("fork")[:together] == said["r1"][point : point + together], "the same key draws the same"
        return {name: tokens for name, tokens in said.items() if name not in self.cancelled}

    def _step(self, engine: EngineCore, said: Said) -> None:
        for token in engine.step():
            if token.token_id is not None:
                said.setdefault(token.request_id, []).append((token.token_id, token.logprobs))


def engine_of(model: ModelHandle, num_cells: int, draft: DraftModel | None = None) -> EngineCore:
    config = EngineConfig(max_num_seqs=32, max_queue=1000, target_tick_ms=1000.0, admission_margin=0)
    limits = BackendLimits(num_cells=num_cells, max_seqs=64)
    return EngineCore(model.new_backend(limits), model.info, config, draft=draft)


def let_err(engine: EngineCore, every: int) -> None:
    """Let the draft model, which is the model itself, say something else at some positions."""
    drafter = engine._drafter
    assert drafter is not None
    sampler_of = drafter._sampler_of

    def erring(rows: IntArray, positions: IntArray, proposed: Mapping[int, Sequence[int]]) -> Sampler:
        own = sampler_of(rows, positions, proposed)

        def sample(logits: Any, mask: Any, threads: Any = None) -> Sampled:
            ids = np.asarray(logits.argmax(-1) if own is None else own(logits, mask, threads).ids)
            return Sampled((ids + (positions % every == 0)).astype(np.int32))

        return sample

    drafter._sampler_of = erring


def test_200_prompts_say_the_same_with_each_proposer() -> None:
    """Right and wrong proposals, beside ordinary requests, in memory so small that requests are preempted."""
    if library() is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    model = open_model("smollm2-135m", device="cpu")
    load = Workload(model)
    expected = load.run(engine_of(model, 8192), ["off"])
    engine = engine_of(model, 800, DraftModel(model, BackendLimits(num_cells=2048, max_seqs=64)))
    known = {name: [token for token, _ in tokens] for name, tokens in expected.items()}
    engine.scheduler.speculation.use(Oracle(lambda request: known.get(request.request_id, ())))
    verify_all(engine)
    let_err(engine, every=5)
    num_right, num_wrong = Counter[str](), Counter[str]()

    def note(event: Event) -> None:
        if isinstance(event, VerifiedEvent):
            for name, proposed, agreed in zip(event.proposers, event.num_proposed, event.num_agreed, strict=True):
                num_right[name] += agreed
                num_wrong[name] += proposed - agreed

    engine.events.subscribe(note)
    assert load.run(engine, ["off", "lookup", "draft", "draft", "lookup"]) == expected
    assert load.num_preempted > 0
    for name in ("lookup", "draft"):
        assert num_right[name] > 20, (num_right, num_wrong)
        assert num_wrong[name] > 10, (num_right, num_wrong)
    engine.close()
    model.close()
