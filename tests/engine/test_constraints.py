"""Grammars in the engine: whatever happens around it, a constrained request says what it says alone."""
# ruff: noqa: ARG002 (a tokenizer has options)

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.conformance.operations import RandomChooser, one_in
from tests.engine.helpers import VOCAB, SimulatedClock, Transcript, assert_clean, backend_of, make_engine, run
from tests.engine.speculating import Oracle, draft_model, speculate
from tests.engine.workload import Workload, workload
from tokenmill import LLM, AsyncLLM
from tokenmill.backends.fake import FakeBackend, FakeConfig
from tokenmill.contract import BatchBuilder, unpack_mask
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Event, ProposalEvent, VerifiedEvent
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.engine.view import CoreView
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import FinishReason
from tokenmill.params import SamplingParams, StructuredOutputs
from tokenmill.text.grammar import Grammar, GrammarCompiler, MaskWriter
from tokenmill.text.tokenizer import Places

pytestmark = pytest.mark.req("R29", "R51", "G11")

CLOSED = {"additionalProperties": False}
EOS = VOCAB - 1
PIECES = [*'abcdefghxyz0123456789{}[]:,"', '{"', '":', '",', "ab", "abc", "xy", "name", "na", "na", "me", '":"', "cd"]
TOKENS = [piece.encode() for piece in PIECES]


class Pieces:
    """A vocabulary of 64 tokens, some of several characters; the longest that fits goes first."""

    vocab_size = VOCAB
    eos_ids = frozenset({EOS})
    special_tokens: Mapping[str, int] = {}

    def min_num_tokens(self, text: str) -> int:
        return 0

    def encode(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:
        ids, data = [], text.encode()
        while data:
            best = max(range(len(TOKENS)), key=lambda i: len(TOKENS[i]) if data.startswith(TOKENS[i]) else 0)
            if not data.startswith(TOKENS[best]):
                raise AssertionError(f"{data!r} has no token")
            ids.append(best)
            data = data[len(TOKENS[best]) :]
        return ids

    def encode_template(self, text: str, special: Places | None = None, *, limit: int | None = None) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(token) for token in ids if token != EOS).decode()

    def inner_texts(self, *, skip_special: bool = True) -> Mapping[int, str]:
        return {}

    def token_bytes(self, token: int) -> bytes:
        return TOKENS[token] if token < len(TOKENS) else b"<end>" if token == EOS else b""


COMPILER = GrammarCompiler(Pieces(), VOCAB)
NAMES = {
    "type": "object",
    "properties": {"name": {"enum": ["abc", "xyz"]}, "a": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "a"],
    "additionalProperties": False,
}
OUTPUTS = [
    StructuredOutputs(json=NAMES),
    StructuredOutputs(regex="(ab|cd)+x"),
    StructuredOutputs(choice=["abcdef", "xyz", "name"]),
    StructuredOutputs(json={"type": "array", "items": {"enum": ["ab", 12]}, "maxItems": 4}),
]


def compiled(outputs: StructuredOutputs | None) -> Grammar | None:
    return None if outputs is None else COMPILER.compile(outputs)


def constrained(name: str, prompt: Sequence[int], outputs: StructuredOutputs | None, **more: Any) -> Request:
    limits = Limits(
        **{"max_new_tokens": 40, "stop_ids": frozenset({EOS})}
        | {key: more.pop(key) for key in ("max_new_tokens", "max_tokens_per_step", "timeout_s") if key in more}
    )
    draw = Draw(params=SamplingParams(temperature=0, structured_outputs=outputs), seed=0)
    grammar = compiled(outputs)
    return Request(name, prompt, limits, Hints(**more), draw, grammar=None if grammar is None else grammar.start())


@cache
def alone(prompt: tuple[int, ...], outputs: StructuredOutputs | None, output: tuple[int, ...] = ()) -> list[int]:
    """What a request says on a fresh backend, token by token, after what it has said: no engine, no proposals."""
    grammar, tokens = compiled(outputs), [*prompt, *output]
    state = None if grammar is None else grammar.start()
    if state is not None:
        assert state.advance(output)
    config = FakeConfig(vocab_size=VOCAB, max_context=256, num_cells=256, block_size=1, max_seqs=1)
    writer = MaskWriter(VOCAB)
    with FakeBackend(config) as backend:
        batch = BatchBuilder().add_run(tokens, 0, 0)
        while len(tokens) < len(prompt) + 60:
            logits = backend.decode(batch.build()).logits[0]
            if state is not None:
                allowed = unpack_mask(writer.write([state], np.array([0]), 1), VOCAB)[0]
                forced = state.forced()
                token = forced[0] if forced else int(np.where(allowed, logits, -np.inf).argmax())
                assert state.advance([token])
            else:
                token = int(logits.argmax())
            tokens.append(token)
            if token == EOS:
                break
            batch = BatchBuilder().add_run([token], len(tokens) - 1, 0)
    return tokens[len(prompt) + len(output) :]


def play(load: Workload, seed: int, *, proposes: bool, speculation: str = "off") -> Counter[str]:
    """A workload of which most requests are constrained; what happened to them, to be sure that it did."""
    choose, clock = RandomChooser(seed), SimulatedClock()
    fake = load.fake | {"num_cells": load.fake["max_context"] + 2 * load.fake["block_size"]}  # the least
    options = load.engine | {"forced_tokens": proposes, "speculation": speculation}
    if speculation == "draft":
        options["draft"] = draft_model(depth=load.depth)
    engine = make_engine(depth=load.depth, fake=fake, clock=clock, **options)
    view, seen = CoreView(engine.snapshot()), Counter[str]()
    engine.events.subscribe(view)
    engine.events.subscribe(lambda event: seen.update(proposals=isinstance(event, ProposalEvent)))
    if load.fault is not None:
        backend_of(engine).faults.add(load.fault)
    transcript, sources = Transcript(), dict[str, tuple[Request, tuple[int, ...]]]()

    def known(request: Request) -> list[int]:
        one, output = sources[request.request_id]
        return alone(tuple(one.tokens[: one.num_prompt]), one.draw.params.structured_outputs, output)

    def note_verified(event: Event) -> None:
        if isinstance(event, VerifiedEvent):
            seen.update(accepted=sum(event.num_agreed), rejected=sum(event.num_proposed) - sum(event.num_agreed))

    if speculation != "off":
        speculate(engine, Oracle(known))
        engine.events.subscribe(note_verified)
    arrivals = sorted(load.requests, key=lambda arrival: arrival[0])
    for tick in range(1500):
        while arrivals and arrivals[0][0] <= tick:
            new = arrivals.pop(0)[1]
            kept = {name: new[name] for name in new if name not in ("stop_ids", "min_new_tokens", "max_new_tokens")}
            one = constrained(**kept, outputs=None if one_in(4, choose) else choose.one_of(OUTPUTS))
            sources[one.request_id] = one, ()
            engine.add(one)
        whole = [one for one in engine.scheduler.requests.values() if one.hints.fork_of is None]
        source = choose.one_of([None, *whole]) if one_in(8, choose) else None
        if source is not None and source.output and len(source.tokens) < engine.max_model_len:
            sources[f"fork{tick}"] = source, tuple(source.output)
            engine.fork(source.request_id, f"fork{tick}", Limits(max_new_tokens=6, stop_ids=source.stop_ids),
                        draw=source.draw)  # fmt: skip
            seen["forks"] += source.grammar is not None
        if tick in load.cancels and engine.cancel(load.cancels[tick]):
            seen["cancelled"] += 1
        if not engine.has_work and not arrivals:
            break
        clock.now += load.pauses[tick % len(load.pauses)]
        transcript.add(engine.step())
        if engine.failure is not None:
            raise engine.failure
        assert view.snapshot() == engine.snapshot()
        engine.kv.check_integrity()
    else:
        raise AssertionError(f"requests starve: {engine.scheduler.requests}")
    for name, (one, output) in sources.items():
        seen["preempted"] += one.num_preemptions > 0 and one.grammar is not None
        prompt = tuple(one.tokens[: one.num_prompt])
        got, expected = transcript.tokens[name], alone(prompt, one.draw.params.structured_outputs, output)
        assert got == expected[: len(got)], f"{name} says {got}, alone {expected}"
        if transcript.reasons[name] is FinishReason.STOP:
            assert got == expected
        elif transcript.reasons[name] is FinishReason.ERROR:
            assert getattr(load.fault, "token", None) is not None, transcript.errors[name]
    assert_clean(engine)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("proposes", [True, False])
def test_a_constrained_request_says_what_it_says_alone(depth: int, proposes: bool) -> None:
    seen = Counter[str]()
    for seed in range(25):
        try:
            seen += play(workload(RandomChooser(seed), depth), seed, proposes=proposes)
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error
    assert seen["preempted"] > 2
    assert seen["forks"] > 5
    assert seen["cancelled"] > 2
    assert (seen["proposals"] > 50) == proposes


@pytest.mark.req("R33")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("proposes", [True, False])
@pytest.mark.parametrize("speculation", ["lookup", "draft"])
def test_a_constrained_request_that_speculates_says_what_it_says_alone(
    depth: int, proposes: bool, speculation: str
) -> None:
    """Its draft model knows nothing of the grammar, so what that rules out is cut off."""
    seen = Counter[str]()
    for seed in range(12):
        seen += play(workload(RandomChooser(seed), depth), seed, proposes=proposes, speculation=speculation)
    assert seen["preempted"] > 0
    assert seen["accepted"] > (40 if speculation == "lookup" else 10)
    assert seen["rejected"] > 8 or speculation == "draft", "the draft model is the model itself"


def rows_of(engine: EngineCore) -> Transcript:
    for i, outputs in enumerate([OUTPUTS[2], None, OUTPUTS[1], OUTPUTS[0]]):
        engine.add(constrained(f"r{i}", [i, 2, 3], outputs, max_new_tokens=12))
    return run(engine)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_mask_belongs_to_its_own_row(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the masks of two rows exchanged, what is drawn is not allowed, and the engine notices."""
    transcript = rows_of(make_engine(depth=depth))
    texts = {name: Pieces().decode(tokens) for name, tokens in transcript.tokens.items() if name != "r1"}
    assert texts["r0"] in ("abcdef", "xyz", "name")
    assert transcript.tokens["r1"] == alone((1, 2, 3), None)[:12]
    assert set(transcript.reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}
    write = MaskWriter.write
    monkeypatch.setattr(MaskWriter, "write", lambda *given: np.roll(write(*given), 1, axis=0))
    assert FinishReason.ERROR in rows_of(make_engine(depth=depth)).reasons.values()


@pytest.mark.parametrize("depth", [0, 1])
def test_forced_tokens_save_steps(depth: int) -> None:
    ticks = []
    for proposes in (True, False):
        engine = make_engine(depth=depth, forced_tokens=proposes)
        engine.add(constrained("r", [1, 2, 3], OUTPUTS[0]))
        assert run(engine).tokens["r"] == alone((1, 2, 3), OUTPUTS[0])
        ticks.append(engine.scheduler.tick)
    assert ticks[0] < ticks[1]


def test_an_output_that_is_forced_from_its_first_token() -> None:
    engine = make_engine()
    engine.add(constrained("r", [1, 2], StructuredOutputs(choice=["abcdef"])))
    transcript = run(engine)
    assert engine.scheduler.tick == 1, "one step computes the prompt and all of it, and draws its end"
    assert Pieces().decode(transcript.tokens["r"]) == "abcdef"
    assert transcript.tokens["r"][-1] == EOS
    assert transcript.reasons == {"r": FinishReason.STOP}


@pytest.mark.parametrize("max_new_tokens", range(1, 8))
@pytest.mark.parametrize("depth", [0, 1])
def test_an_output_is_cut_inside_a_forced_run(depth: int, max_new_tokens: int) -> None:
    engine = make_engine(depth=depth)
    engine.add(constrained("r", [1, 2], OUTPUTS[0], max_new_tokens=max_new_tokens))
    transcript = run(engine)
    assert transcript.tokens["r"] == alone((1, 2), OUTPUTS[0])[:max_new_tokens]
    assert transcript.reasons == {"r": FinishReason.LENGTH}


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_constrained_output_resumes_after_any_part_of_it(outputs: StructuredOutputs) -> None:
    """After its end, too: the last token is drawn again, since only a draw ends an output."""
    whole = alone((1, 2), outputs)[:40]
    for count in range(1, len(whole) + 1):
        engine, request = make_engine(), constrained("r", [1, 2], outputs)
        request.draw = replace(request.draw, prefix=tuple(whole[:count]))
        engine.add(request)
        assert run(engine).tokens["r"] == whole


def test_a_prefix_is_kept_as_far_as_the_grammar_allows() -> None:
    engine, request = make_engine(), constrained("r", [1, 2], OUTPUTS[2])
    request.draw = replace(request.draw, prefix=(*Pieces().encode("x"), *Pieces().encode("yb")))
    engine.add(request)
    assert Pieces().decode(run(engine).tokens["r"]) == "xyz"


def test_a_complete_output_ends_although_its_end_token_is_ignored() -> None:
    engine = make_engine()
    request = constrained("r", [1, 2], OUTPUTS[2])
    request.stop_ids = frozenset()
    engine.add(request)
    transcript = run(engine)
    assert Pieces().decode(transcript.tokens["r"]) in ("abcdef", "xyz", "name")
    assert transcript.reasons == {"r": FinishReason.STOP}


def test_log_probabilities_of_forced_tokens_are_the_models_own() -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, logprobs=0, structured_outputs=OUTPUTS[2])
    grammar = COMPILER.compile(OUTPUTS[2])
    engine.add(Request("r", [1, 2], Limits(stop_ids=frozenset({EOS})), draw=Draw(params=params, seed=0),
                       grammar=grammar.start()))  # fmt: skip
    rows = []
    while engine.has_work:
        rows += list(engine.step())
    assert [row.token_id for row in rows] == alone((1, 2), OUTPUTS[2])
    assert all(row.logprobs is not None and row.logprobs.logprob < 0 for row in rows)


def test_bans_that_leave_nothing_fail_their_own_request() -> None:
    engine = make_engine()
    banned = SamplingParams(temperature=0, structured_outputs=OUTPUTS[2], allowed_token_ids=(60,))
    grammar = COMPILER.compile(OUTPUTS[2])
    engine.add(Request("bad", [1], Limits(), draw=Draw(params=banned, seed=0), grammar=grammar.start()))
    engine.add(constrained("good", [1, 2], OUTPUTS[2]))
    transcript = run(engine)
    assert transcript.reasons == {"bad": FinishReason.CONFLICT, "good": FinishReason.STOP}
    assert "grammar" in str(transcript.errors["bad"])


@pytest.mark.slow
def test_an_engine_process_says_the_same_and_so_does_its_successor() -> None:
    """Only parameters cross the wire: the grammar is compiled there, and again after a kill during an answer."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=60, structured_outputs=StructuredOutputs(json={**schema, **CLOSED})
    )
    with LLM("fake", extra={"vocab_size": 258}) as llm:
        expected = llm.generate("hi", params)[0].outputs[0]
    assert expected.finish_reason == "stop"

    async def in_a_process() -> None:
        long = replace(params, max_tokens=3000, structured_outputs=StructuredOutputs(regex="(ab|cd){300}x"))
        async with AsyncLLM("fake", engine="process", extra={"vocab_size": 258}) as llm:
            assert [one async for one in llm.generate("hi", params)][-1].outputs[0] == expected
            stream = llm.generate("hi", long)
            begun = (await anext(stream)).outputs[0].text
            process: Any = llm.client
            process.process.kill()
            cut = [one async for one in stream][-1]
            assert "exit code -9" in str(cut.error)
            while not process.cores_alive:
                await asyncio.sleep(0.02)
            again = [one async for one in llm.generate("hi", long)][-1].outputs[0]
            assert again.finish_reason == "stop"
            assert again.text.startswith(begun)
            assert re.fullmatch("(ab|cd){300}x", again.text)
            assert [one async for one in llm.generate("hi", params)][-1].outputs[0] == expected

    asyncio.run(in_a_process())


def test_a_constraint_that_nobody_compiled_is_refused() -> None:
    draw = Draw(params=SamplingParams(structured_outputs=OUTPUTS[0]), seed=0)
    with pytest.raises(InvalidRequest, match="compiled"):
        make_engine().add(Request("r", [1], Limits(), draw=draw))
