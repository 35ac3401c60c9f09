"""Constraints are compiled for a model's tokens; what can't be enforced, or takes too long, is rejected by name."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tokenmill import StructuredOutputs
from tokenmill.errors import InvalidRequest
from tokenmill.text.grammar import GrammarCompiler, MaskWriter, least_length
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.tokenizer import ByteTokenizer, Tokenizer

pytestmark = pytest.mark.req("R29")

CLOSED = {"additionalProperties": False}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, **CLOSED}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(), 257)


def small_tokenizer(*special: str) -> HuggingFaceTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return HuggingFaceTokenizer(tokenizer.to_str(), frozenset({256}))


def allows(compiler: GrammarCompiler, text: str, tokenizer: Tokenizer = ByteTokenizer(), **outputs: Any) -> bool:
    """Does the constraint allow the text as a whole output?"""
    state = compiler.compile(StructuredOutputs(**outputs)).start()
    return state.advance([*tokenizer.encode(text, add_special=False), min(tokenizer.eos_ids)])


@pytest.mark.parametrize(
    ("outputs", "good", "bad"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], **CLOSED}},
         '{"a":12}', '{"a": 12}'),
        ({"json": '{"type": "array", "items": {"type": "boolean"}}'}, "[true,false]", "[1]"),
        ({"json": {"type": "array"}, "any_whitespace": True}, "[1,\n 2]", "[1;2]"),
        ({"json": {"type": "array"}, "whitespace_pattern": "[ ]?"}, "[1, 2]", "[1,\n2]"),
        ({"json_object": True}, '{"x":[null]}', "[]"),
        ({"regex": r"[a-z]+@[a-z]+\.com"}, "a@b.com", "a@b.org"),
        ({"choice": ["yes", "no", "é😀"]}, "é😀", "maybe"),
        ({"grammar": 'start: "a" /b+/'}, "abb", "ab "),
        ({"grammar": 'root ::= "yes" | "no" [0-9]+'}, "no12", "yes1"),
        ({"grammar": 'start: "x" %json {"type":"object","properties":{"a":{"const":1}},"required":["a"]}'},
         'x{"a":1}', 'x{"a": 1}'),
        ({"structural_tag": {"structures": [{"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}],
                             "triggers": ["<f="]}}, "so <f=a>1</f> then", "so <f=a>2</f>"),
        ({"json": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}}, '{"next":{"next":{}}}', '{"next":1}'),
    ],
)  # fmt: skip
def test_each_kind_of_constraint(compiler: GrammarCompiler, outputs: dict[str, Any], good: str, bad: str) -> None:
    assert allows(compiler, good, **outputs)
    assert not allows(compiler, bad, **outputs)


UNENFORCEABLE: dict[str, Any] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "else": {"type": "string", "else": {"minLength": 1}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "minContains": {"type": "array", "minContains": 2},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "minProperties": {"type": "object", "minProperties": 2},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "exclusiveMinimum": {"type": "number", "minimum": 1, "exclusiveMinimum": True},
    "oneOf": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "format": {"type": "string", "format": "no-such-format"},
    "x-guidance": {"type": "array", "x-guidance": {"lenient": True}},
    "$ref": {"$defs": {"node": {**NODE, "required": ["next"]}}, "$ref": "#/$defs/node"},
}


@pytest.mark.fault("T01")
@pytest.mark.parametrize("keyword", UNENFORCEABLE)
@pytest.mark.parametrize(
    "around", ["{}", '{{"type":"object","properties":{{"deep":{{"anyOf":[{{"type":"null"}},{}]}}}}}}']
)
def test_what_cannot_be_enforced_is_rejected_by_name(compiler: GrammarCompiler, keyword: str, around: str) -> None:
    schema = UNENFORCEABLE[keyword]
    if "$ref" in schema:
        around = "{}"  # what it refers to is at the root
    with pytest.raises(InvalidRequest) as rejected:
        compiler.compile(StructuredOutputs(json=around.format(json.dumps(schema))))
    assert keyword in str(rejected.value)
    assert rejected.value.param == "structured_outputs"
    with pytest.raises(InvalidRequest):
        compiler.compile(StructuredOutputs(grammar=f"start: %json {json.dumps(schema)}"))


def test_keywords_are_not_mistaken_for_names(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"not": {"const": "if"}, "contains": {"enum": ["else"]}}, **CLOSED}
    unused = {"$defs": {"unused": {"not": {}}}, "description": "not", "uniqueItems": False}
    assert allows(compiler, '{"not":"if","contains":"else"}', json={**schema, **unused})


@pytest.mark.fault("T01", "T02")
@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "x" * 200_000},
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"grammar": "start: " + "|".join(f'"word{i}"' for i in range(400_000))},
        {"grammar": "start: nothing"},
        {"grammar": 'start: start "a"'},
        {"grammar": "root ::= root2"},
        {"grammar": "start: %json {"},
        {"json": "{"},
        {"json": "[1]"},
        {"json": {"enum": ["x" * 20_000]}},
        {"json": {"$ref": "https://example.com/schema"}},
        {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
        {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"choice": ["x" * 20_000]},
        {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b>"]}},
    ],
    ids=lambda outputs: str(outputs)[:40],
)
def test_malformed_and_exploding_grammars_are_rejected_in_time(
    compiler: GrammarCompiler, outputs: dict[str, Any]
) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequest) as rejected:
        compiler.compile(StructuredOutputs(**outputs))
    assert time.monotonic() - began < 1
    assert str(rejected.value).startswith("structured_outputs")
    assert len(str(rejected.value)) < 500


@pytest.mark.parametrize(
    "outputs",
    [{}, {"regex": "a", "choice": ["a"]}, {"choice": []}, {"choice": "yes"}, {"choice": [1]}, {"regex": 1},
     {"regex": ""}, {"regex": "\ud800"}, {"json_object": 1}, {"json": {"a": float("nan")}}, {"json": {1: {2, 3}}}],
)  # fmt: skip
def test_malformed_constraints_are_rejected_when_they_are_made(outputs: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        StructuredOutputs(**outputs)


def test_thousands_of_choices(compiler: GrammarCompiler) -> None:
    """Each of them would be an alternative of the parser, which has room for 2,000 at a time."""
    choices = [f"{i:04}" for i in range(4000)]
    state = compiler.compile(StructuredOutputs(choice=choices)).start()
    assert state.advance(b"3999")
    assert state.is_complete


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    times: list[float] = []
    compiler.on_compiled = times.append
    first = compiler.compile(StructuredOutputs(json={"const": "once"}))
    assert compiler.compile(StructuredOutputs(json='{"const":"once"}')) is first
    assert compiler.cached(StructuredOutputs(json={"const": "once"})) is first
    assert len(times) == 1


def test_constraints_that_differ_in_whitespace_are_different_grammars(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    options: list[dict[str, Any]] = [{}, {"any_whitespace": True}, {"whitespace_pattern": "[_]*"}]
    texts = (b'{"a":1}', b'{"a": 1}', b'{"a":_1}')
    allowed = [
        [compiler.compile(StructuredOutputs(json=schema, **one)).start().advance(text) for text in texts]
        for one in options
    ]
    assert allowed == [[True, False, False], [True, True, False], [True, False, True]]


@pytest.mark.fault("T03")
def test_the_latest_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.text.grammar.KEPT_GRAMMARS", 2)
    compiler = GrammarCompiler(ByteTokenizer(), 257)
    first, second, third = (StructuredOutputs(choice=[one]) for one in "abc")
    for outputs in (first, second, first, third):  # the first is used again
        compiler.compile(outputs)
    assert [compiler.cached(one) is not None for one in (first, second, third)] == [True, False, True]


def test_a_state_follows_its_output_back_and_into_forks(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(choice=["abc", "abd", "xy"]))
    state = grammar.start()
    assert state.advance(b"ab")
    fork = state.fork()
    assert fork.advance(b"d")
    assert fork.is_complete
    assert not state.is_complete
    state.rollback(2)
    assert state.advance(b"x")
    assert state.forced() == list(b"y")
    assert not state.advance(b"z")
    assert state.error is not None
    assert grammar.start().num_tokens == 0


def test_a_state_goes_back_over_the_end_of_its_output(compiler: GrammarCompiler) -> None:
    """The end is a token of the output, but none that a matcher has taken."""
    state = compiler.compile(StructuredOutputs(choice=["abc", "abd"])).start()
    assert state.advance(b"abc")
    assert state.advance([256])
    for one in (state.fork(), state):
        one.rollback(2)
        assert one.num_tokens == 2
        assert not one.is_complete
        assert one.advance(b"d")
        assert one.is_complete


@pytest.mark.parametrize("kind", ["bytes", "tokenizer.json"])
def test_masks_are_as_wide_as_the_logits_where_the_model_has_more_tokens(kind: str) -> None:
    """Logits are padded in most models; what pads them is never allowed."""
    tokenizer = ByteTokenizer() if kind == "bytes" else small_tokenizer("<|end|>")
    vocab_size = tokenizer.vocab_size + 100
    compiler = GrammarCompiler(tokenizer, vocab_size)
    state = compiler.compile(StructuredOutputs(choice=["a", "b"])).start()
    (mask,) = MaskWriter(vocab_size).write([state], np.array([0], dtype=np.int32), 1)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert allowed.tolist() == sorted(tokenizer.encode(letter, add_special=False)[0] for letter in "ab")


def test_a_tokenizer_may_know_more_tokens_than_the_model() -> None:
    tokenizer = small_tokenizer("<|end|>", "<|unknown to the model|>")
    assert allows(GrammarCompiler(tokenizer, 257), "a", tokenizer, choice=["a", "b"])


def test_each_row_gets_its_own_mask(compiler: GrammarCompiler) -> None:
    states = [compiler.compile(StructuredOutputs(choice=[choice])).start() for choice in ("a", "b")]
    import numpy as np

    from tokenmill.contract import unpack_mask

    masks = unpack_mask(MaskWriter(257).write(states, np.array([2, 0]), 4), 257)
    assert [np.flatnonzero(mask).tolist() for mask in masks[[0, 2]]] == [[ord("b")], [ord("a")]]
    assert masks[[1, 3]].all()


@pytest.mark.parametrize(
    ("expression", "length"),
    [("abc", 3), ("a|bcd", 1), ("(ab)*c", 1), ("(a|bc){5}", 5), ("a{3,}", 3), ("[]abc]x", 2), (r"\(a", 2),
     ("(?:ab)?", 0), ("(?i)abc", 3), (r"\p{L}{3}", 3), ("a{1000}{1000}", 1_000_000), ("(?P<x>ab)c", 3), ("a)b", 3)],
)  # fmt: skip
def test_the_shortest_text_of_an_expression(expression: str, length: int) -> None:
    assert least_length(expression) == length
