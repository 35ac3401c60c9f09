"""Scores of prompts over HTTP: those of transformers on the same weights, as evaluation harnesses ask for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.parity.checkpoints import logits_of, save
from tests.server.serving import Running, running
from tokenmill import AsyncLLM
from tokenmill.server.config import ServerConfig

VARIANT = "llama"
VOCAB_SIZE = 160
TOLERANCE = 1e-3
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
TASK: list[dict[str, Any]] = [
    {"question": "What colour is the sea?", "choices": [" blue", " a train", " seven", " loud"]},
    {"question": "How many legs has a spider?", "choices": [" two", " eight", " none", " a hundred and one"]},
    {"question": "Which of these is an animal?", "choices": [" a stone", " a chair", " an otter"]},
    {"question": "What is the capital of France?", "choices": [" Rome", " Paris", " Oslo", " Lima"]},
    {"question": "What do bees make?", "choices": [" paper boats", " honey", " glass", " rain, mostly"]},
    {"question": "Where does the sun rise?", "choices": [" in the west", " in the north", " in the east"]},
]
PROMPT = "Question: Where does the sun rise?\nAnswer:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, and a tokenizer for texts in ASCII."""
    made = save(VARIANT, tmp_path_factory.mktemp("model"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = [tokenizer.pre_tokenizer.pre_tokenize_str(chr(code))[0][0] for code in range(128)]
    texts = [one["question"] + "".join(one["choices"]) for one in TASK]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    llm = AsyncLLM(str(folder), dtype="float32", kv_cache_tokens=4096, num_threads=1)
    with running(llm, ServerConfig()) as one:
        yield one


def logprobs_of(ids: list[int]) -> torch.Tensor:
    """[tokens, vocab]: what transformers gives for what follows each token."""
    return logits_of(VARIANT, ids).double().log_softmax(-1)


def complete(server: Running, **changes: Any) -> Any:
    reply = server.post("/v1/completions", {"model": "fake", "temperature": 0, **changes})
    assert reply.status == 200, reply.body
    return reply.json()


# -- as lm-eval does it -----------------------------------------------------------------------------------------------


def scores_by_server(server: Running, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """lm-eval's `local-completions`: its request, and its way to read the answer."""
    body = {"prompt": [context + follows for context, follows in pairs], "max_tokens": 1, "logprobs": 1}
    answer = complete(server, **body, seed=1234, echo=True)
    found = []
    for choice, (context, _) in zip(sorted(answer["choices"], key=itemgetter("index")), pairs, strict=True):
        scores = {name: values[len(context) : -1] for name, values in choice["logprobs"].items()}
        likeliest = [max(top, key=top.get) for top in scores["top_logprobs"]]
        is_greedy = scores["tokens"] == likeliest
        greatest = [max(top.values()) for top in scores["top_logprobs"]]
        assert is_greedy == (scores["token_logprobs"] == greatest), "its older and its newer rule differ"
        found.append((sum(scores["token_logprobs"]), is_greedy))
    return found


def scores_by_transformers(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    found = []
    for context, follows in pairs:
        rows = logprobs_of(context + follows)[len(context) - 1 : -1]
        wanted = torch.tensor(follows)
        found.append((float(rows.gather(1, wanted[:, None]).sum()), bool((rows.argmax(-1) == wanted).all())))
    return found


def test_a_multiple_choice_task_has_the_scores_of_transformers(
    server: Running, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    task = tmp_path / "task.jsonl"
    task.write_text("\n".join(json.dumps(one) for one in TASK))
    for item in map(json.loads, task.read_text().splitlines()):
        context = tokenizer.encode(f"Question: {item['question']}\nAnswer:").ids
        pairs = [(context, tokenizer.encode(choice).ids) for choice in item["choices"]]
        found, wanted = scores_by_server(server, pairs), scores_by_transformers(pairs)
        for (score, is_greedy), (right_score, right_greedy) in zip(found, wanted, strict=True):
            assert score == pytest.approx(right_score, abs=TOLERANCE)
            assert is_greedy == right_greedy
        assert found.index(max(found)) == wanted.index(max(wanted))


def test_the_greedy_continuation_is_recognised(server: Running, tokenizer: Tokenizer) -> None:
    context = tokenizer.encode(PROMPT).ids
    follows: list[int] = []
    for _ in range(6):
        follows.append(int(logprobs_of(context + follows)[-1].argmax()))
    pairs = [(context, follows), (context, [*follows[:-1], (follows[-1] + 1) % VOCAB_SIZE])]
    found = scores_by_server(server, pairs)
    assert [is_greedy for _, is_greedy in found] == [True, False]
    for (score, _), (right, _) in zip(found, scores_by_transformers(pairs), strict=True):
        assert score == pytest.approx(right, abs=TOLERANCE)


# -- other forms ------------------------------------------------------------------------------------------------------


def test_what_is_echoed(server: Running, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    (choice,) = complete(server, prompt=PROMPT, max_tokens=5, echo=True, logprobs=3)["choices"]
    scores = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(scores["tokens"]) == choice["text"]
    assert {len(values) for values in scores.values()} == {len(ids) + 5}
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    plain = complete(server, prompt=PROMPT, max_tokens=5, logprobs=3)["choices"][0]
    assert choice["text"] == PROMPT + plain["text"]
    assert scores["token_logprobs"][len(ids) :] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=TOLERANCE)
    for place, top in enumerate(scores["top_logprobs"][1 : len(ids)]):
        wanted = logprobs_of(ids)[place].topk(3)
        assert list(top)[:3] == [tokenizer.decode([int(token)]) for token in wanted.indices]
        assert list(top.values())[:3] == pytest.approx(wanted.values.tolist(), abs=TOLERANCE)


def test_a_text_has_the_scores_of_its_ids(server: Running, tokenizer: Tokenizer) -> None:
    texts = [PROMPT, "What do bees make?"]
    options: dict[str, Any] = {"max_tokens": 1, "echo": True, "logprobs": 1}
    by_text = complete(server, prompt=texts, **options)["choices"]
    by_ids = complete(server, prompt=[tokenizer.encode(text).ids for text in texts], **options)["choices"]
    assert len(by_text) == 2
    for one, other in zip(by_text, by_ids, strict=True):
        assert one["text"] == other["text"]
        assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        assert one["logprobs"]["token_logprobs"][1:] == pytest.approx(other["logprobs"]["token_logprobs"][1:], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_without_new_tokens_there_is_the_prompt_alone(server: Running, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode(PROMPT).ids
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = server.post("/v1/completions", {**body, **options})
    first, last = reply.events() if stream else (reply.json(), reply.json())
    (choice,) = first["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert {len(values) for values in choice["logprobs"].values()} == {len(ids)}
    wanted = logprobs_of(ids)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted.tolist(), abs=TOLERANCE)
    used = last["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (len(ids), 0, len(ids))


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_with_echo_joined_is_the_answer(server: Running, n: int) -> None:
    body: dict[str, Any] = {"prompt": [PROMPT, "bees"], "max_tokens": 6, "echo": True, "logprobs": 2, "n": n}
    body |= {"seed": 7, "temperature": 1}
    whole = complete(server, **body)["choices"]
    events = server.post("/v1/completions", {"model": "fake", **body, "stream": True}).events()
    chunks = [choice for event in events for choice in event["choices"]]
    assert len(whole) == 2 * n
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert len(mine) > 1
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert mine[0]["text"].startswith(PROMPT if choice["index"] < n else "bees")
        joined = {name: [x for chunk in mine for x in chunk["logprobs"][name]] for name in choice["logprobs"]}
        assert joined["tokens"] == choice["logprobs"]["tokens"]
        assert joined["text_offset"] == choice["logprobs"]["text_offset"]
        values = joined["token_logprobs"][1:]
        assert values == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=TOLERANCE)


def test_echo_without_scores(server: Running) -> None:
    (choice,) = complete(server, prompt=PROMPT, max_tokens=2, echo=True)["choices"]
    assert choice["text"].startswith(PROMPT)
    assert choice["logprobs"] is None


# -- prompt_logprobs, as vLLM has them --------------------------------------------------------------------------------


def assert_prompt_logprobs(found: list[Any], ids: list[int], tokenizer: Tokenizer, count: int) -> None:
    """For each token but the first: itself and the likeliest ones, by id, with rank and text."""
    first, *others = found
    assert first is None
    for token, entry, row in zip(ids[1:], others, logprobs_of(ids)[:-1], strict=True):
        likeliest = row.topk(count)
        assert set(entry) == {str(int(one)) for one in likeliest.indices} | {str(token)}
        for name, score in entry.items():
            assert set(score) == {"logprob", "rank", "decoded_token"}
            assert score["logprob"] == pytest.approx(float(row[int(name)]), abs=TOLERANCE)
            assert score["decoded_token"] == tokenizer.decode([int(name)])
            assert math.isfinite(score["logprob"])
        for rank, one in enumerate(likeliest.indices, start=1):
            assert entry[str(int(one))]["rank"] == rank


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_of_a_completion(server: Running, tokenizer: Tokenizer, stream: bool) -> None:
    prompts = [tokenizer.encode(PROMPT).ids, tokenizer.encode("What do bees make?").ids]
    body = {"model": "fake", "prompt": prompts, "max_tokens": 2, "prompt_logprobs": 2, "stream": stream}
    reply = server.post("/v1/completions", body)
    choices = [choice for event in reply.events() for choice in event["choices"]] if stream else reply.json()["choices"]
    for place, ids in enumerate(prompts):
        (found,) = [one["prompt_logprobs"] for one in choices if one["index"] == place and "prompt_logprobs" in one]
        assert_prompt_logprobs(found, ids, tokenizer, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_of_a_chat(server: Running, tokenizer: Tokenizer, stream: bool, count: int) -> None:
    reply = server.chat(max_tokens=2, prompt_logprobs=count, return_token_ids=True, stream=stream)
    answer = reply.events()[0] if stream else reply.json()
    ids = tokenizer.encode("user: hi\nassistant:").ids
    assert answer["prompt_token_ids"] == ids
    assert_prompt_logprobs(answer["prompt_logprobs"], ids, tokenizer, count)
    assert not stream or all("prompt_logprobs" not in event for event in reply.events()[1:])
