"""A small random Llama with a tokenizer, and what transformers scores with it: the measure for check_lm_eval.py.

Run by the driver's interpreter, which has torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TASK = Path(__file__).with_name("tiny_choice.jsonl")
SPREAD = 0.2
"""Standard deviation of the weights: large, so that scores lie far apart."""
NUM_GREEDY = 5
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
transformers.utils.logging.disable_progress_bar()


def make_checkpoint(folder: Path) -> None:
    """The model, its tokenizer and `reference.json`, in `folder`."""
    questions = [json.loads(line) for line in TASK.read_text(encoding="utf-8").splitlines()]
    tokenizer = _tokenizer([question["question"] for question in questions])
    model = _model(len(tokenizer))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    folder.joinpath("reference.json").write_text(json.dumps(_reference(model, tokenizer, questions)))


def _tokenizer(texts: list[str]) -> Any:
    """Byte-level, so that every text has its tokens and every token sequence its text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts * 3,
        trainers.BpeTrainer(vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False),
    )
    ends = {"eos_token": "<|end|>", "bos_token": "<|end|>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **ends)


def _model(vocab_size: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=SPREAD,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).float().eval()


def _reference(model: Any, tokenizer: Any, questions: list[Any]) -> dict[str, Any]:
    """The score of every choice after its question, how often the best is the right one, and a greedy continuation."""
    choices, num_right = [], 0
    for question in questions:
        context = f"Question: {question['question']}\nAnswer:"
        before = tokenizer(context).input_ids
        scores = []
        for choice in question["choices"]:
            whole = tokenizer(f"{context} {choice}").input_ids
            assert whole[: len(before)] == before, "the context's tokens begin the whole"
            scores.append(_score(model, whole, len(before)))
            choices.append((context, f" {choice}", *scores[-1]))
        num_right += max(range(len(scores)), key=lambda i, scores=scores: scores[i][0]) == question["answer"]
    begin = tokenizer("Answer:").input_ids
    greedy = list(begin)
    for _ in range(NUM_GREEDY):
        greedy.append(int(_logprobs(model, greedy)[-1].argmax()))
    return {
        "choices": choices,
        "accuracy": num_right / len(questions),
        "greedy": (begin, greedy[len(begin) :], _score(model, greedy, len(begin))[0]),
    }


def _score(model: Any, tokens: list[int], num_context: int) -> tuple[float, bool]:
    """The log probability of what follows the context, and whether each token of it is the likeliest."""
    rows = _logprobs(model, tokens)[num_context - 1 : -1]
    follows = torch.tensor(tokens[num_context:])
    return float(rows.gather(1, follows[:, None]).sum()), bool((rows.argmax(-1) == follows).all())


def _logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]"""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
