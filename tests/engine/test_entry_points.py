"""What users touch: models by name, options, chat, defaults, seeds, and everything that is refused."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import tokenmill
from tests.parity.checkpoints import save
from tokenmill import LLM, AsyncLLM, SamplingParams, open_model
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.contract import StepSizes
from tokenmill.contract.backend import cells_for
from tokenmill.entrypoints.options import EngineOptions, open_for_engine
from tokenmill.errors import ConfigError, EngineDead, InvalidRequest, ModelNotFound, TokenmillError
from tokenmill.pipeline.prompts import Intake
from tokenmill.progress import ProgressLine
from tokenmill.text.model_text import ModelText, sampling_defaults
from tokenmill.text.tokenizer import ByteTokenizer

SHORT = SamplingParams(max_tokens=4, temperature=0)


@pytest.mark.req("R28")
def test_a_model_by_its_name() -> None:
    with LLM("fake", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_tokens=512) as llm:
        assert llm.engine.max_model_len == 128
        assert llm.engine.config.max_num_seqs == 4
        assert llm.engine.kv.num_cells == 512
        (out,) = llm.generate("hello", SHORT)
        assert out.prompt == "hello"
        assert out.prompt_token_ids == list(b"hello")
        assert out.usage.completion_tokens == len(out.outputs[0].token_ids) == 4
        engine = llm.engine
        engine.add_sequence([1, 2, 3], max_new_tokens=8, eos_token_id=2)
        assert len(engine.run_until_complete()) == 1


def test_an_open_model_is_shared_and_left_open() -> None:
    model = open_model("fake")
    with LLM(model) as one, LLM(model) as two:
        assert one.generate("x", SHORT)[0].outputs[0].text == two.generate("x", SHORT)[0].outputs[0].text
    with pytest.raises(ConfigError, match="dtype: the model is already loaded"):
        LLM(model, dtype="float32")


@pytest.mark.req("R33")
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"engine": "process"}])
def test_a_draft_model_by_its_name(options: Any) -> None:
    params = SamplingParams(max_tokens=40, temperature=0)
    with LLM("fake") as plain, LLM("fake", draft_model="fake", speculation="draft", **options) as drafting:
        prompts = ["one", "two", "three"]
        expected = [one.outputs[0].token_ids for one in plain.generate(prompts, params)]
        assert [one.outputs[0].token_ids for one in drafting.generate(prompts, params)] == expected


@pytest.mark.req("R33")
def test_a_draft_model_must_have_the_same_vocabulary(tmp_path: Path) -> None:
    other = FakeModel(FakeConfig(vocab_size=5000))
    with pytest.raises(ConfigError, match="draft_model has 256 tokens, the model 5000: they must share a vocabulary"):
        LLM(other, draft_model="fake", tokenizer=ByteTokenizer())
    folders = [save("llama", tmp_path / name) for name in ("one", "two")]
    for folder, words in zip(folders, ("The mill turns", "turns The mill"), strict=True):
        tokenizer = tokenizers.Tokenizer(WordLevel({word: i for i, word in enumerate(words.split())}, "mill"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="draft_model has another tokenizer than the model"):
        LLM(str(folders[0]), draft_model=str(folders[1]), device="cpu")
    with LLM(str(folders[0]), draft_model=str(folders[0]), device="cpu", speculation="draft") as llm:
        assert llm.generate([1, 2, 3], SHORT)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ({"backend": "tpu"}, "backend 'tpu' is not supported"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens must be at least 1"),
        ({"dtype": "float16"}, "the fake model does not support backend, dtype or device"),
        ({"colour": "red"}, "unknown option colour; known: "),
        ({"max_model_len": 10_000}, "max_model_len 10000 > 4096"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], saying: str) -> None:
    with pytest.raises(ConfigError, match=saying):
        LLM("fake", **options)


@pytest.mark.parametrize(
    ("options", "seqs", "tokens"),
    [
        ({}, 32, 2048),
        ({"max_num_batched_tokens": 8}, 8, 8),
        ({"max_num_seqs": 4096}, 4096, 4096),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 64}, 4, 64),
        ({"config": EngineConfig(max_num_seqs=3), "max_num_batched_tokens": 8}, 3, 8),
    ],
)
def test_what_nobody_has_given_goes_along_with_what_somebody_has(
    options: EngineOptions, seqs: int, tokens: int
) -> None:
    config = open_for_engine("fake", options)[0].config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)


def test_the_offline_step_target_applies_to_offline_engines_only() -> None:
    class Quick(FakeModel):
        step_sizes = StepSizes(target_tick_ms=50.0, offline_tick_ms=1000.0)

    def target_ms(*, offline: bool, **options: Any) -> float:
        return open_for_engine(Quick(), options, offline=offline)[0].config.target_tick_ms

    assert target_ms(offline=False) == 50.0
    assert target_ms(offline=True) == 1000.0
    assert target_ms(offline=True, target_tick_ms=20.0) == 20.0
    assert target_ms(offline=True, config=EngineConfig()) == EngineConfig().target_tick_ms


def test_an_idle_engine_keeps_no_request() -> None:
    with LLM("fake") as llm:
        llm.generate(["one", "two"], SamplingParams(max_tokens=3), use_tqdm=False)
        assert llm.engine.scheduler.results._crowd.requests == []


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelNotFound, match="no model 'nowhere'"):
        LLM("nowhere")


def test_kv_memory_follows_from_what_requests_can_fill_and_from_the_budget() -> None:
    model = open_model("fake")

    def cells(**options: Any) -> int:
        return open_for_engine(model, EngineOptions(**options))[0].limits.num_cells

    assert cells(max_num_seqs=2, max_model_len=100) == cells_for(2, 100, model.block_size)
    assert cells(kv_cache_tokens=77) == 77
    assert cells(config=EngineConfig(max_num_seqs=2048)) <= model.kv_budget_bytes // model.info.kv_bytes_per_token


# -- chat -------------------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]


def test_one_conversation_or_several() -> None:
    with LLM("fake") as llm:
        one = llm.chat(HI, SHORT)
        assert bytes(one[0].prompt_token_ids) == b"user: hi\nassistant: "
        assert one[0].outputs[0].text == llm.generate("user: hi\nassistant: ", SHORT)[0].outputs[0].text
        two = llm.chat([HI, [*HI, {"role": "assistant", "content": "ho"}, *HI]], SHORT)
        assert two[0].outputs[0].text == one[0].outputs[0].text
        assert bytes(two[1].prompt_token_ids) == b"user: hi\nassistant: ho\nuser: hi\nassistant: "
        parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
        assert llm.chat(parts, SHORT)[0].prompt_token_ids == one[0].prompt_token_ids
        own = llm.chat(
            HI, SHORT, chat_template="{{ messages[0].content }}{{ tail }}", chat_template_kwargs={"tail": "!"}
        )
        assert bytes(own[0].prompt_token_ids) == b"hi!"


def test_chat_online() -> None:
    async def scene() -> str:
        async with AsyncLLM("fake") as llm:
            async for output in llm.chat(HI, SHORT):
                last = output
            return last.outputs[0].text

    with LLM("fake") as llm:
        assert asyncio.run(scene()) == llm.chat(HI, SHORT)[0].outputs[0].text


@pytest.mark.parametrize(
    "messages", [[], "hi", [[]], [{"content": "hi"}], [{"role": "user"}], [{"role": "user", "content": 7}], ["hi"]]
)
def test_messages_that_are_none(messages: Any) -> None:
    with LLM("fake") as llm, pytest.raises(InvalidRequest, match="message"):
        llm.chat(messages, SHORT)


def test_a_model_without_a_template_says_so() -> None:
    with LLM("fake", tokenizer=ByteTokenizer()) as llm, pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat(HI)


# -- prompts, parameters, seeds ---------------------------------------------------------------------------------------


def test_every_form_of_a_prompt() -> None:
    with LLM("fake") as llm:
        forms = ["hi", [104, 105], {"prompt": "hi"}, {"prompt_token_ids": [104, 105]}]
        outs = llm.generate(forms, SamplingParams(temperature=0, max_tokens=4))
        assert len({tuple(out.outputs[0].token_ids) for out in outs}) == 1
        assert len(llm.generate({"prompt": "hi"}, SHORT)) == 1
        with pytest.raises(InvalidRequest, match="'prompt' and 'prompt_token_ids'"):
            llm.generate([{"text": "hi"}], SHORT)


def test_numbers_of_other_kinds_and_none_as_default() -> None:
    with LLM("fake") as llm:
        wanted = llm.generate([[1, 2]], SHORT)[0].outputs[0].token_ids
        forms: list[Any] = [
            [np.int64(1), np.int32(2)],
            np.array([1, 2]),
            (1, 2),
            {"prompt_token_ids": np.array([1, 2])},
        ]
        assert all(out.outputs[0].token_ids == wanted for out in llm.generate(forms, SHORT))
        assert llm.generate(np.array([1, 2]), SHORT)[0].outputs[0].token_ids == wanted
        assert len(llm.generate((f"prompt {i}" for i in range(3)), SHORT)) == 3
    none: Any = None
    params = SamplingParams(stop=none, stop_token_ids=none, banned_token_ids=none, logit_bias=none)
    assert params == SamplingParams()
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}  # type: ignore[dict-item]


# -- calls that meet --------------------------------------------------------------------------------------------------


def test_a_stream_leaves_room_for_other_calls() -> None:
    with LLM("fake") as llm:
        wanted = llm.generate("x", SHORT)[0].outputs[0].text
        long = SamplingParams(temperature=0, max_tokens=9)
        texts = [llm.generate("x", SHORT)[0].outputs[0].text for _ in llm.stream("a", long)]
        assert texts == [wanted] * len(texts)
        assert len(texts) > 1
        stream = llm.stream("a", SHORT)
        next(stream)
        llm.embed("x")
        stream.close()  # type: ignore[attr-defined]
        assert not llm.engine.has_work


def test_a_batch_that_is_interrupted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("fake") as llm:
        steps = iter(range(100))
        step = llm.engine.step

        def interrupted() -> Any:
            if next(steps) == 2:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=50))
        assert not llm.engine.has_work
        assert len(llm._client._sinks) == 0
        llm.engine.check_integrity()


@pytest.mark.parametrize("place", ["forward", "sample", "collect"])
def test_ctrl_c_takes_effect_between_steps(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real signal while a step is half-way: it is let finish, and the engine is as good as before."""
    with LLM("fake") as llm:
        wanted = llm.generate("x", SHORT)[0].outputs[0].text
        backend: Any = llm.engine._executor.backend
        original, calls = getattr(backend, place), []

        def interrupted(*arguments: Any) -> Any:
            result = original(*arguments)
            calls.append(1)
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(backend, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=50))
        assert not llm.engine.has_work
        llm.engine.check_integrity()
        assert llm.generate("x", SHORT)[0].outputs[0].text == wanted
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sequences_of_the_engines_own_and_requests_side_by_side() -> None:
    with LLM("fake") as llm:
        llm.engine.add_sequence([1, 2, 3], max_new_tokens=8)
        assert llm.generate("x", SHORT)[0].finished
        assert len(llm.engine.run_until_complete()[0]) == 8


def test_a_callers_name_can_be_used_twice_and_again() -> None:
    async def scene() -> None:
        async with AsyncLLM("fake") as llm:
            long = SamplingParams(max_tokens=3000, ignore_eos=True)
            one, two = llm.generate("x", long, "same"), llm.generate("y", long, "same")
            first, second = await anext(one), await anext(two)
            assert (first.request_id, second.request_id) == ("same", "same")
            assert first.error is None
            assert second.error is None
            for stream in (one, two):
                await stream.aclose()  # type: ignore[attr-defined]
            async for output in llm.generate("z", SHORT, "same"):
                last = output
            assert last.outputs[0].finish_reason == "length"
            while (await asyncio.to_thread(llm._client.stats))[0].num_running:  # type: ignore[union-attr]
                pass

    asyncio.run(scene())


def test_usage_grows_with_the_stream() -> None:
    with LLM("fake") as llm:
        counts = [out.usage.completion_tokens for out in llm.stream("a", SHORT)]
        assert counts == [1, 2, 3, 4]


@pytest.mark.req("G20")
def test_a_program_gives_the_same_texts_each_time_and_its_prompts_differ() -> None:
    def program(seed: int | None = 0) -> list[list[int]]:
        with LLM("fake", seed=seed) as llm:
            return [out.outputs[0].token_ids for out in llm.generate(["same"] * 3, SamplingParams(max_tokens=12))]

    first = program()
    assert first == program()
    assert len({tuple(tokens) for tokens in first}) == 3
    assert program(None) != program(None)


def test_the_models_own_sampling_parameters_are_used_where_none_are_given() -> None:
    defaults = sampling_defaults({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "eos_token_id": 2})
    assert defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert sampling_defaults({"do_sample": False}) == {"temperature": 0.0}
    assert sampling_defaults({}) == {}
    assert sampling_defaults({"temperature": -1}) == {}
    text = ModelText(ByteTokenizer(256), defaults=defaults)
    intake = Intake("x", text, open_model("fake").info, 100, seed=0)
    assert intake.generation("hi").choices[0].request.draw.params == SamplingParams(**defaults)
    assert intake.generation("hi", SHORT).choices[0].request.draw.params == SHORT
    with LLM("fake") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


BAD: dict[str, Callable[[], tuple[Any, SamplingParams]]] = {
    "empty prompt": lambda: ("", SHORT),
    "empty ids": lambda: ([], SHORT),
    "id out of range": lambda: ([256], SHORT),
    "negative id": lambda: ([-1], SHORT),
    "id that is no number": lambda: (["a"], SHORT),
    "prompt longer than the context": lambda: ("x" * 5000, SHORT),
    "lone surrogate": lambda: ("\ud800", SHORT),
    "max_tokens < 1": lambda: ("x", SamplingParams(max_tokens=0)),
    "temperature < 0": lambda: ("x", SamplingParams(temperature=-1)),
    "temperature NaN": lambda: ("x", SamplingParams(temperature=float("nan"))),
    "top_p 0": lambda: ("x", SamplingParams(top_p=0)),
    "top_p 2": lambda: ("x", SamplingParams(top_p=2)),
    "stop of a wrong type": lambda: ("x", SamplingParams(stop=[1])),  # type: ignore[arg-type]
    "10,000 stop strings": lambda: ("x", SamplingParams(stop=("s",) * 10_000)),
    "n too large": lambda: ("x", SamplingParams(n=1000)),
    "logprobs over the limit": lambda: ("x", SamplingParams(logprobs=1000)),
    "nested ids": lambda: ([[1, 2], [3, 4]], SHORT),
    "ids that are no whole numbers": lambda: ([1.5, 2.0], SHORT),
    "ids that are texts": lambda: ({"prompt_token_ids": ["5"]}, SHORT),
    "ids that are true or false": lambda: ([True, False], SHORT),
    "no prompt": lambda: (None, SHORT),
    "allowed token outside the vocabulary": lambda: ("x", SamplingParams(allowed_token_ids=(1, 100_000))),
    "banned token outside the vocabulary": lambda: ("x", SamplingParams(banned_token_ids=(256,))),
    "bias outside the vocabulary": lambda: ("x", SamplingParams(logit_bias={999: 1.0})),
    "negative bias id": lambda: ("x", SamplingParams(logit_bias={-1: 1.0})),
    "stop token outside the vocabulary": lambda: ("x", SamplingParams(stop_token_ids=(300,), min_tokens=1)),
    "stop string that is no Unicode": lambda: ("x", SamplingParams(stop=("\ud800",))),
    "params of a wrong type": lambda: ("x", {"temperature": 1}),  # type: ignore[dict-item,return-value]
}


def with_a_fine_one(prompt: Any, params: SamplingParams) -> tuple[list[Any], list[SamplingParams]]:
    return ["fine", prompt], [SHORT, params]


@pytest.mark.req("R49")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_runs(case: str) -> None:
    with LLM("fake") as llm:
        with pytest.raises(InvalidRequest) as found:
            llm.generate(*with_a_fine_one(*BAD[case]()))
        assert len(str(found.value)) > 10
        assert llm.engine.scheduler.tick == 0
        assert not llm.engine.has_work

    async def online() -> None:
        async with AsyncLLM("fake") as remote:
            with pytest.raises(InvalidRequest):
                await anext(remote.generate(*BAD[case]()))

    asyncio.run(online())


@pytest.mark.req("R49")
def test_after_close() -> None:
    llm = LLM("fake")
    llm.close()
    for call in (llm.generate, llm.embed, lambda prompt: next(llm.stream(prompt))):
        with pytest.raises(EngineDead, match="was closed"):
            call("hi")

    async def online() -> None:
        remote = AsyncLLM("fake")
        await remote.close()
        with pytest.raises(EngineDead, match="was closed"):
            await anext(remote.generate("hi"))
        with pytest.raises(EngineDead, match="was closed"):
            await remote.embed("hi")

    asyncio.run(online())


def test_every_public_name_is_there() -> None:
    for name in tokenmill.__all__:
        assert getattr(tokenmill, name) is not None
    assert issubclass(ModelNotFound, TokenmillError)


# -- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_silent_for_short_work_and_where_nobody_looks() -> None:
    now, terminal = [0.0], io.StringIO()
    with ProgressLine("working", 10, show=True, stream=terminal, clock=lambda: now[0]) as line:
        line.update(1)
        assert terminal.getvalue() == ""
        now[0] = 2.0
        line.update(5, lambda seconds: f"after {seconds:.0f} s")
        line.update(6)
    assert terminal.getvalue() == "\r\x1b[Kworking |############            | 5/10 after 2 s\r\x1b[K"
    piped = io.StringIO()
    with ProgressLine("working", 10, stream=piped, clock=lambda: now[0]) as line:
        now[0] = 9.0
        line.update(5)
    assert piped.getvalue() == ""


def test_a_long_batch_shows_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.progress.FIRST_AFTER_S", 0.0)
    with LLM("fake") as llm:
        llm.generate(["a", "b"], SHORT, use_tqdm=True)
        assert "generating |" in capsys.readouterr().err
        llm.generate(["a", "b"], SHORT, use_tqdm=False)
        assert capsys.readouterr().err == ""


def test_a_stream_of_a_closed_model_is_refused() -> None:
    llm = LLM("fake")
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        next(llm.stream("a", SHORT))
