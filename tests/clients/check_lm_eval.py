"""EleutherAI's `lm-eval`: its scores over the server are those of transformers on the same weights.

Its model `local-completions` sends prompts as token ids to /v1/completions, with echo and logprobs, and adds up what
belongs to the continuation. The driver runs the server on a small random checkpoint, whose folder has the tokenizer and
`reference.json`, the scores by transformers; here MODEL is that folder, and its name the name of the served model.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.clients.checking import Target, run_checks

HERE = Path(__file__).parent
TASK = "tiny_choice"
TOLERANCE = 1e-3
"""Of the score of a continuation: a few tokens, each as near as float32 is."""


def connect(target: Target, **more: Any) -> LocalCompletionsAPI:
    os.environ["OPENAI_API_KEY"] = target.api_key
    settings: Any = {"tokenizer_backend": "huggingface", "tokenizer": target.model, "max_length": 512, **more}
    address = f"{target.base_url}/completions"
    return LocalCompletionsAPI(model=Path(target.model).name, base_url=address, max_retries=1, **settings)


def reference(target: Target) -> Any:
    return json.loads(Path(target.model, "reference.json").read_text())


@cache
def evaluate(target: Target) -> Any:
    manager = TaskManager(include_path=str(HERE), include_defaults=False)
    found = lm_eval.simple_evaluate(connect(target), tasks=[TASK], task_manager=manager, bootstrap_iters=0)
    assert found is not None
    return found


def assert_near(found: float, expected: float, what: object) -> None:
    assert abs(found - expected) < TOLERANCE, f"{what}: {found}, by transformers {expected}"


def check_loglikelihoods_are_those_of_transformers(target: Target) -> None:
    expected = {(context, choice): score for context, choice, score, _ in reference(target)["choices"]}
    samples = evaluate(target)["samples"][TASK]
    scores = {}
    for sample in samples:
        for (context, choice), (score, _) in zip(_pairs(sample), sample["filtered_resps"], strict=True):
            scores[context, choice] = float(score)
    assert scores.keys() == expected.keys(), (list(scores)[:2], list(expected)[:2])
    for pair, score in scores.items():
        assert_near(score, expected[pair], pair)


def _pairs(sample: Any) -> list[tuple[str, str]]:
    """Contexts and continuations of a sample, as they are logged: {"gen_args_0": {"arg_0": .., "arg_1": ..}, ..}."""
    arguments = sample["arguments"]
    return [(one["arg_0"], one["arg_1"]) for one in arguments.values()] if isinstance(arguments, dict) else arguments


def check_accuracy_is_that_of_transformers(target: Target) -> None:
    expected = reference(target)["accuracy"]
    assert evaluate(target)["results"][TASK]["acc,none"] == expected, (evaluate(target)["results"], expected)


def check_the_greedy_continuation_is_recognised(target: Target) -> None:
    context, continuation, score = reference(target)["greedy"]
    other = [continuation[0], *((token + 1) % 200 for token in continuation[1:])]
    pairs = [(("", ""), context, continuation), (("", ""), context, other)]
    (found, greedy), (_, other_greedy) = connect(target)._loglikelihood_tokens(pairs)
    assert_near(found, score, "the greedy continuation")
    assert greedy, "the likeliest tokens are not the greatest of their top_logprobs"
    assert not other_greedy, "unlikely tokens count as the likeliest"


def check_several_prompts_a_request_and_several_requests_at_once(target: Target) -> None:
    pairs = [(context, choice) for context, choice, *_ in reference(target)["choices"]]
    expected = [score for _, _, score, _ in reference(target)["choices"]]
    for settings in ({"batch_size": 8}, {"num_concurrent": 4}):
        model = connect(target, **settings)
        requests = [((a, b), *model._encode_pair(a, b)) for a, b in pairs]
        found = [score for score, _ in model._loglikelihood_tokens(requests)]
        for pair, score, right in zip(pairs, found, expected, strict=True):
            assert_near(score, right, (settings, pair))


def check_prompts_as_text(target: Target) -> None:
    context, choice, score, _ = reference(target)["choices"][0]
    model = connect(target, tokenized_requests=False)
    ((found, _),) = model._loglikelihood_tokens([((context, choice), *model._encode_pair(context, choice))])
    assert_near(found, score, (context, choice))


if __name__ == "__main__":
    run_checks(vars())
