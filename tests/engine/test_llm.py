"""Text in, text out: `LLM` and `AsyncLLM` on the fake model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tokenmill.backends.fake import FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.entrypoints.llm import LLM
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.entrypoints.process import ProcessClient
from tokenmill.errors import EngineDead, InvalidRequest
from tokenmill.outputs import RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.text.tokenizer import ByteTokenizer

MODEL = FakeModel(FakeConfig(vocab_size=258, max_context=512, depth=1))
TOKENIZER = ByteTokenizer(258)
CONFIG = EngineConfig(max_num_seqs=8)
LIMITS = BackendLimits(num_cells=2048)
OPTIONS = EngineOptions(tokenizer=TOKENIZER, config=CONFIG, kv_cache_tokens=2048)
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(MODEL, **OPTIONS) as one:
        yield one


def ask(prompts: list[str], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """All at once through `AsyncLLM`; the last output of each."""

    async def one(llm: AsyncLLM, prompt: str) -> RequestOutput:
        async for output in llm.generate(prompt, params):
            last = output
        return last

    async def everything() -> list[RequestOutput]:
        async with AsyncLLM(MODEL, **OPTIONS) as llm:
            return list(await asyncio.gather(*(one(llm, prompt) for prompt in prompts)))

    return asyncio.run(everything())


@pytest.mark.req("R28", "R30")
def test_offline_and_online_give_the_same(llm: LLM) -> None:
    prompts = [f"Once upon a time {i}" for i in range(20)]
    offline = llm.generate(prompts, GREEDY)
    online = ask(prompts)
    for one, other in zip(offline, online, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].text == other.outputs[0].text == TOKENIZER.decode(one.outputs[0].token_ids)
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
        assert one.finished
        assert one.usage.completion_tokens == len(one.outputs[0].token_ids)
    assert [output.prompt for output in offline] == prompts


@pytest.mark.req("R28", "R32")
def test_online_over_a_process_gives_the_same(llm: LLM) -> None:
    prompts = [f"Over there {i}" for i in range(6)]
    params = SamplingParams(seed=3, max_tokens=20, top_p=0.9)

    async def one(remote: AsyncLLM, prompt: str) -> RequestOutput:
        async for output in remote.generate(prompt, params):
            last = output
        return last

    async def everything() -> list[RequestOutput]:
        options = {"vocab_size": 258, "max_context": 512, "depth": 1}
        client = ProcessClient("fake", {"extra": options, "config": CONFIG, "kv_cache_tokens": LIMITS.num_cells})
        async with AsyncLLM(MODEL, tokenizer=TOKENIZER, client=client) as remote:
            return list(await asyncio.gather(*(one(remote, prompt) for prompt in prompts)))

    for here, there in zip(llm.generate(prompts, params), asyncio.run(everything()), strict=True):
        assert here.outputs[0].text == there.outputs[0].text
        assert here.outputs[0].finish_reason == there.outputs[0].finish_reason


@pytest.mark.req("R43", "G1")
def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    async def scene() -> list[str]:
        async with AsyncLLM(MODEL, **OPTIONS) as llm:
            lazy = llm.generate("lazy", SamplingParams(max_tokens=300, ignore_eos=True))
            await anext(lazy)
            texts = []
            for i in range(8):
                async for output in llm.generate(f"busy {i}", GREEDY):
                    last = output
                texts.append(last.outputs[0].text)
            async for output in lazy:
                last = output
            assert len(last.outputs[0].token_ids) == 300
            return texts

    with LLM(MODEL, **OPTIONS) as llm:
        assert asyncio.run(scene()) == [llm.generate(f"busy {i}", GREEDY)[0].outputs[0].text for i in range(8)]


@pytest.mark.req("R30", "B10")
def test_the_stream_ends_as_the_whole(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    texts = [(output.outputs[0].text, output.finished) for output in llm.stream("hello", GREEDY)]
    assert texts[-1] == (whole.text, True)
    for (before, _), (after, _) in itertools.pairwise(texts):
        assert after.startswith(before)
    assert len(texts) > 10


@pytest.mark.req("G4", "G14", "R5")
def test_a_stop_string_ends_the_text_and_the_kv_with_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    free = llm.generate("tell me", params)[0].outputs[0]
    valid = [i for i in range(5, 40) if free.text[i] != "\ufffd" and free.text.find(free.text[i : i + 2]) == i]
    stop = free.text[valid[0] : valid[0] + 2]
    stopped = llm.generate("tell me", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=stop))[0]
    output = stopped.outputs[0]
    assert output.text == free.text[: valid[0]]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    # The fake model says many bytes that are no text; those held together with the stop string are not kept.
    assert output.text.startswith(TOKENIZER.decode(output.token_ids))
    log = [*stopped.prompt_token_ids, *output.token_ids, 65]
    follow = llm.generate(log, params)[0]
    with LLM(MODEL, **OPTIONS) as fresh:
        assert follow.outputs[0].token_ids == fresh.generate(log, params)[0].outputs[0].token_ids
    assert follow.usage.cached_tokens >= len(log) - 2


@pytest.mark.req("G20", "G12")
def test_choices_differ_and_do_not_depend_on_their_number(llm: LLM) -> None:
    def choices(n: int) -> list[list[int]]:
        params = SamplingParams(n=n, seed=5, max_tokens=12, ignore_eos=True)
        return [output.token_ids for output in llm.generate("a prompt", params)[0].outputs]

    four, eight = choices(4), choices(8)
    assert eight[:4] == four
    assert len({tuple(tokens) for tokens in eight}) == 8


@pytest.mark.req("R49")
@pytest.mark.parametrize(
    ("prompt", "saying"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 9999], "outside the vocabulary of 258"),
        ([1, -1], "must be from 0 to"),
        ("x" * 600, "maximum context length is"),
        ("a\ud800", "surrogates"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompt: object, saying: str) -> None:
    with pytest.raises(InvalidRequest, match=saying):
        llm.generate(["fine", prompt], GREEDY)  # type: ignore[list-item]
    assert not llm.engine.has_work
    assert llm.generate("fine", GREEDY)[0].finished


def test_prompt_log_probabilities_come_with_the_output(llm: LLM) -> None:
    (out,) = llm.generate("hello", SamplingParams(max_tokens=2, prompt_logprobs=3))
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert [len(one.top) for one in out.prompt_logprobs[1:] if one is not None] == [3] * 4
    assert llm.generate("hello", GREEDY)[0].prompt_logprobs is None


def test_one_params_or_one_for_each(llm: LLM) -> None:
    outs = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, ignore_eos=True)])
    assert [len(out.outputs[0].token_ids) for out in outs] == [1, 2]
    with pytest.raises(InvalidRequest, match="3 SamplingParams for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    assert len(llm.generate([1, 2, 3], GREEDY)) == 1
    assert llm.generate([]) == []


def test_more_prompts_than_a_queue_holds(llm: LLM) -> None:
    outs = llm.generate([[i % 250, i % 7] for i in range(600)], SamplingParams(temperature=0, max_tokens=1))
    assert all(out.finished and out.error is None for out in outs)


def test_a_closed_llm_says_so() -> None:
    llm = LLM(MODEL, **OPTIONS)
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate("hi")


@pytest.mark.req("G18")
def test_leaving_the_loop_cancels_and_others_go_on() -> None:
    async def scene() -> tuple[RequestOutput, int]:
        async with AsyncLLM(MODEL, **OPTIONS) as llm:
            stream = llm.generate("leave", SamplingParams(max_tokens=400, ignore_eos=True))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            async for output in llm.generate("stay", GREEDY):
                last = output
            stats = await asyncio.to_thread(llm._client.stats)
            assert stats[0] is not None
            return last, stats[0].num_running

    last, num_running = asyncio.run(scene())
    assert last.finished
    assert num_running == 0


@pytest.mark.req("G18")
def test_the_death_of_the_engine_reaches_the_stream_once() -> None:
    async def scene() -> list[RequestOutput]:
        async with AsyncLLM(MODEL, **OPTIONS) as llm:
            client = llm._client
            core = client.pool.cores[0].core  # type: ignore[attr-defined]
            core._executor.backend.faults.add(Fault(FaultKind.FATAL, after=3))
            return [output async for output in llm.generate("hi", SamplingParams(max_tokens=400, ignore_eos=True))]

    outputs = asyncio.run(scene())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "error"
    assert "the engine failed" in (outputs[-1].error or "")


def test_an_output_says_what_was_cached_and_where_it_diverged(llm: LLM) -> None:
    llm.generate(["the same beginning of two prompts, and then one"], GREEDY)
    (output,) = llm.generate(["the same beginning of two prompts, and then another"], GREEDY)
    assert output.usage is not None
    assert output.cache is not None
    assert output.cache.num_cached == output.usage.cached_tokens > 0
    assert output.cache.divergence is not None
