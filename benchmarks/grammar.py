"""`python -m benchmarks.grammar`: what structured output costs and saves. Interleaved runs, medians.

mask     a step of 16 rows with masks against one without (default model; bar: at most 5 % more)
forced   filling a schema of 10 fixed keys with and without forced tokens, 1 and 16 sequences (bars: 1.3 and 1.1 times)
compile  a typical tool's schema, first use included (bar: under 5 ms)
gpu      a step of 256 rows with masks against one without, at depth 1, on random weights of a 7B shape and a real
         vocabulary (bar: at most 3 % more); `--vocabulary` names a tekken.json, by default that of mistral-common
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill import LLM, SamplingParams, StructuredOutputs
from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL, EngineConfig
from tokenmill.text.grammar import Grammar, GrammarCompiler
from tokenmill.text.tokenizer import Places

ENDLESS = {"type": "array", "items": {"type": "string", "minLength": 40}, "minItems": 2000}
"""Something to say in every row for as long as it takes: strings, most of whose tokens are free."""
KEYS = ("first_name", "last_name", "email_address", "telephone", "street", "city", "postal_code", "country",
        "date_of_birth", "customer_number")  # fmt: skip
FORM = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 8} for name in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}
TOOL = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "What to search for."},
        "filters": {
            "type": "object",
            "properties": {
                "language": {"enum": ["en", "de", "fr", "ja"]},
                "since": {"type": "string", "format": "date"},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
            },
            "additionalProperties": False,
        },
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "order": {"anyOf": [{"const": "relevance"}, {"const": "date"}]},
    },
    "required": ["query", "limit"],
    "additionalProperties": False,
}


def main() -> None:
    parser = bench_parser("grammar", __doc__ or "")
    parser.add_argument("measures", nargs="*", default=["mask", "forced", "compile"], help="mask, forced, compile, gpu")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of a step, for mask")
    parser.add_argument("--vocabulary", type=Path, default=None, help="tekken.json, for gpu")
    parser.add_argument("--shape", default="qwen2.5-7b", help="shape of the random weights, for gpu")
    options = parser.parse_args()
    measures: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "mask": mask, "forced": forced, "compile": compile_tool, "gpu": gpu,
    }  # fmt: skip
    for name in options.measures:
        print(json.dumps({name: measures[name](options)}), flush=True)


def mask(options: argparse.Namespace, num_rows: int = 16, num_tokens: int = 48) -> dict[str, Any]:
    """Seconds a step with and without masks, by the clock and of CPU time; every row decodes in every step."""
    with LLM(options.model, forced_tokens=False, max_num_seqs=num_rows, num_threads=options.threads) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": f"Number {i}?"}]) for i in range(num_rows)]
        plain = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        masked = SamplingParams(
            temperature=0, max_tokens=num_tokens, structured_outputs=StructuredOutputs(json=ENDLESS)
        )

        def seconds(params: SamplingParams) -> tuple[float, float]:
            began, cpu_began = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params)
            if any(len(output.outputs[0].token_ids) != num_tokens for output in outputs):
                raise AssertionError("a row has ended early")
            return (time.perf_counter() - began) / num_tokens, (time.process_time() - cpu_began) / num_tokens

        seconds(plain), seconds(masked)
        pairs = [(seconds(plain), seconds(masked)) for _ in range(options.rounds)]
    wall, cpu = ([(one[place], other[place]) for one, other in pairs] for place in (0, 1))
    return {"wall": _compared("plain", "masked", wall), "cpu": _compared("plain", "masked", cpu)}


def forced(options: argparse.Namespace) -> dict[str, Any]:
    """How much faster a form is filled with forced tokens."""
    found: dict[str, Any] = {}
    with LLM(options.model) as on, LLM(options.model, forced_tokens=False) as off:
        params = SamplingParams(temperature=0, max_tokens=400, structured_outputs=StructuredOutputs(json=FORM))
        for num_seqs in (1, 16):

            def fill(llm: LLM, number: int, num_seqs: int = num_seqs) -> tuple[float, list[list[int]]]:
                asked = [f"Customer {number}.{i}, as JSON." for i in range(num_seqs)]
                prompts = [llm.chat_prompt([{"role": "user", "content": one}]) for one in asked]
                began = time.perf_counter()
                outputs = llm.generate(prompts, params)
                return time.perf_counter() - began, [output.outputs[0].token_ids for output in outputs]

            fill(on, -1), fill(off, -1)
            pairs = []
            for number in range(options.rounds):
                (with_s, some), (without_s, others) = fill(on, number), fill(off, number)
                if some != others:
                    raise AssertionError("forced tokens have changed an output")
                pairs.append((with_s, without_s))
            found[f"{num_seqs} sequences"] = _compared("forced", "drawn", pairs)
    return found


def compile_tool(options: argparse.Namespace, count: int = 50) -> dict[str, Any]:
    """Milliseconds to compile a schema nobody has compiled, and to take the first step with it."""
    with LLM(options.model) as llm:
        compiler = llm.text.grammars(llm.opened.model.info.vocab_size)
        began = time.perf_counter()
        compiler.warm().result()
        warm_s = time.perf_counter() - began
        times = []
        for number in range(count):
            outputs = StructuredOutputs(json={**TOOL, "description": f"tool {number}"})
            began = time.perf_counter()
            compiler.compile(outputs).start().forced()
            times.append(1000 * (time.perf_counter() - began))
    return {"tokenizer_s": round(warm_s, 3), "first_ms": round(times[0], 2), "median_ms": round(_median(times), 2)}


def gpu(options: argparse.Namespace, num_rows: int = 256, num_steps: int = 96) -> dict[str, Any]:
    """Seconds a decode step on a card, with and without masks, both submitted ahead."""
    from benchmarks.gpu import SHAPES, random_model
    from tokenmill.backends.torch.cuda.layers import Switches
    from tokenmill.engine.core import EngineCore
    from tokenmill.engine.request import Draw, Limits, Request
    from tokenmill.entrypoints.options import choose_limits

    vocabulary = Tekken(options.vocabulary or _mistral_vocabulary())
    compiler = GrammarCompiler(vocabulary, SHAPES[options.shape].vocab_size)
    grammar = compiler.compile(StructuredOutputs(json=ENDLESS))
    model = random_model(options.shape, Switches())
    config = EngineConfig(max_num_seqs=num_rows, max_num_batched_tokens=8192, forced_tokens=False, prefix_caching=False)
    core = EngineCore(model.new_backend(choose_limits(model, config, num_rows * (num_steps + 256))), model.info, config)

    def run(held: Grammar | None, name: str, temperature: float) -> float:
        outputs = StructuredOutputs(json=ENDLESS) if held is not None else None
        params = SamplingParams(temperature=temperature, structured_outputs=outputs)
        for i in range(num_rows):
            prompt = [(7 * i + k) % 1000 for k in range(64)]
            limits = Limits(max_new_tokens=num_steps + 40)
            grammar_state = None if held is None else held.start()
            core.add(Request(f"{name}{i}", prompt, limits, draw=Draw(params=params, seed=i), grammar=grammar_state))
        for _ in range(16):  # prompts, and the first steps
            core.step()
        times = []
        for _ in range(num_steps):
            began = time.perf_counter()
            core.step()
            times.append(time.perf_counter() - began)
        if core.scheduler.rows.num_running != num_rows:
            raise AssertionError(f"{core.scheduler.rows.num_running} of {num_rows} rows are left")
        while core.has_work:
            core.step()
        if core.failure is not None:
            raise core.failure
        return statistics.mean(times)

    found: dict[str, Any] = {"depth": core.depth, "vocabulary": vocabulary.vocab_size}
    for temperature in (0.0, 0.8):
        run(None, "warm", temperature), run(grammar, "warmed", temperature)
        pairs = [(run(None, f"p{i}-", temperature), run(grammar, f"m{i}-", temperature)) for i in range(options.rounds)]
        found[f"temperature {temperature}"] = _compared("plain", "masked", pairs)
    core.close()
    return found


class Tekken:
    """Mistral's vocabulary file as far as grammars need it: the bytes of each token. Texts are cut greedily."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text(encoding="utf-8"))
        num_special = data["config"]["default_num_special_tokens"]
        size = data["config"]["default_vocab_size"]
        words = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][: size - num_special]]
        special = {i: f"<SPECIAL_{i}>" for i in range(num_special)}
        special |= {one["rank"]: one["token_str"] for one in data.get("special_tokens") or ()}
        self.tokens = [*(special[i].encode() for i in range(num_special)), *words]
        self.special_tokens: Mapping[str, int] = {text: i for i, text in special.items()}
        self.eos_ids = frozenset({2})
        self.vocab_size = len(self.tokens)
        self._ids = {token: num_special + i for i, token in enumerate(words)}
        self._longest = max(map(len, words))

    def encode(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:  # noqa: ARG002
        data, ids = text.encode(), []
        while data:
            length = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:length]])
            data = data[length:]
        return ids

    def encode_template(self, text: str, special: Places | None = None, *, limit: int | None = None) -> list[int]:  # noqa: ARG002
        return self.encode(text)

    def min_num_tokens(self, text: str) -> int:  # noqa: ARG002
        return 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:  # noqa: ARG002
        return b"".join(self.tokens[token] for token in ids).decode(errors="replace")

    def inner_texts(self, *, skip_special: bool = True) -> Mapping[int, str]:  # noqa: ARG002
        return {}

    def token_bytes(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else b""


def _mistral_vocabulary() -> Path:
    found = importlib.util.find_spec("mistral_common")
    folders = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    files = sorted(path for folder in folders for path in folder.glob("data/tekken*.json"))
    if not files:
        raise SystemExit("mistral-common has no tekken.json here; name one with --vocabulary")
    return files[-1]


def _compared(one: str, other: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians in milliseconds, and the second as a multiple of the first: the median of the pairs' own ratios."""
    first, second = (_median([pair[place] for pair in pairs]) for place in (0, 1))
    ratio = _median([after / before for before, after in pairs])
    return {f"{one}_ms": round(1000 * first, 3), f"{other}_ms": round(1000 * second, 3), "ratio": round(ratio, 4)}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
