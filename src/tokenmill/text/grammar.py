"""`GrammarCompiler`: from `StructuredOutputs` to a `Grammar` of the model's tokens, by llguidance. Imported where used.

What llguidance can't enforce is rejected with its name, and what would take long is rejected before or while it is
compiled: a compilation runs on a thread of its own, and its caller waits for a second at most. Everything here is safe
on any thread, but a `GrammarState`, which belongs to its request's engine.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.contract import IntArray
from tokenmill.contract.backend import Mask, trim_host_memory
from tokenmill.errors import ConfigError, InvalidRequest, Overloaded
from tokenmill.params import MAX_GRAMMAR_BYTES, StructuredOutputs
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.tokenizer import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

COMPILE_S = 0.9
"""A caller waits no longer for a compilation, so that it is told within a second."""
MAX_COMPILING = 4
"""Compilations at a time: one that was given up goes on to its end."""
KEPT_GRAMMARS = 256
KEPT_BYTES = 4 << 20
"""Bounds on the cache: compiled grammars, and the bytes of their sources."""
MAX_FORCED = 16 << 10
"""Characters that one literal, or one expression at least, may have: a longer run would hold up an engine's step."""
MAX_STEP_ITEMS = 10_000
"""Of the parser in one step, some 10 ms; llguidance's own limit is five times that."""
MAX_SYMBOLS = 50_000
"""Of a grammar: some 1,000 tools, or 2 s of compiling; llguidance's own limit is ten times that."""
MAX_ENUM_PARTS = 4096
"""Arrays and objects in an enum, each of which takes 50 microseconds to compile; texts and numbers take none."""
FIRST_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}}
MAX_GBNF_BYTES = 64 << 10
"""GBNF is converted to Lark in Python."""


class Grammar:
    """A compiled constraint. States of it are copies of the one that compiling has left: they share its tables."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._lock = threading.Lock()

    def start(self, said: Sequence[int] = ()) -> GrammarState:
        """The state of an output that has begun with these tokens; if they are none of the grammar's, after them."""
        with self._lock:  # a matcher may be used by one thread at a time
            state, fresh = (GrammarState(self._matcher.deep_copy(), self._eos_ids) for _ in range(2))
        return state if state.advance(said) else fresh


class GrammarState:
    """Where an output is in its grammar. It follows the output: forwards, backwards, and into forks."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], num_tokens: int = 0) -> None:
        self.matcher = matcher
        self.eos_ids = eos_ids
        """Tokens that end an output, which the grammar allows where it is complete."""
        self.num_tokens = num_tokens
        """Length of the output it has followed."""
        self.has_ended = False
        """Was the last of them an end-of-sequence token after a complete output?"""

    def advance(self, tokens: Sequence[int]) -> bool:
        """Follow tokens of the output; False if the grammar does not allow them: the state is of no use then."""
        self.num_tokens += len(tokens)
        if self.is_complete:  # a matcher that has stopped does not take the end
            self.has_ended = len(tokens) == 1 and tokens[0] in self.eos_ids
            return self.has_ended
        return bool(self.matcher.consume_tokens(list(tokens)))

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of the first of these tokens the grammar allows to follow; the state stays as it is."""
        return 0 if self.is_complete else int(self.matcher.validate_tokens(list(tokens)))

    def rollback(self, count: int) -> None:
        """The last tokens of the output were taken back."""
        self.num_tokens -= count
        self.matcher.rollback(count - self.has_ended)
        self.has_ended = False

    def fork(self) -> GrammarState:
        fork = GrammarState(self.matcher.deep_copy(), self.eos_ids, self.num_tokens)
        fork.has_ended = self.has_ended
        return fork

    def forced(self) -> list[int]:
        """The tokens that the grammar leaves no choice about, as the model's tokenizer would write them."""
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens

    @property
    def is_complete(self) -> bool:
        """Is the output complete, and may nothing but an end-of-sequence token follow?"""
        return bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why it can't be followed any more: a limit of the parser, or a token that is not allowed."""
        return _first_line(self.matcher.get_error()) if self.matcher.is_error() else None


class MaskWriter:
    """Writes the masks of many states at once, on threads that do not hold the interpreter lock."""

    def __init__(self, vocab_size: int) -> None:
        self._width = -(-vocab_size // 32)
        self._executor: LLExecutor | None = None

    def write(self, states: Sequence[GrammarState], places: IntArray, num_rows: int) -> Mask:
        """One mask for each of `num_rows` rows: those at `places` allow what the states do, the others allow all."""
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor()
        masks = np.full((num_rows, self._width), 0xFFFFFFFF, dtype=np.uint32)
        pairs = [(state.matcher, place) for state, place in zip(states, places.tolist(), strict=True)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, self._width * 4, num_rows)
        return masks


class GrammarCompiler:
    """Compiles grammars for one model, and keeps the latest."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: of the model, which may have more tokens than its tokenizer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MAX_COMPILING)
        self._kept: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._warming: Future[LLTokenizer] | None = None
        self.on_compiled: Callable[[float], None] | None = None
        """Told how long each compilation took, one at a time, on its thread."""

    @property
    def is_available(self) -> bool:
        """Is llguidance installed, and does the model have what it needs?"""
        return importlib.util.find_spec("llguidance") is not None and bool(self._tokenizer.eos_ids)

    def warm(self) -> Future[LLTokenizer]:
        """Begin to build llguidance's tokenizer on a thread, if nobody has: 0.3 s and 30 MB for 50,000 tokens, so that
        a model that is never asked for structured outputs or tools does without.
        """
        with self._lock:
            if self._warming is None:
                self._warming = _on_thread(self._build, "tokenmill-grammar-tokenizer")
            return self._warming

    def markers(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of those of the texts that are special tokens to llguidance: no text of a grammar matches them.

        These are more than the tokenizer's own: added tokens that look like tags (`<think>`) count, too.
        """
        known = self.warm().result()
        single = {text: ids[0] for text in texts if len(ids := self._tokenizer.encode_template(text)) == 1}
        return {text: number for text, number in single.items() if known.is_special_token(number)}

    def cached(self, outputs: StructuredOutputs) -> Grammar | None:
        """A grammar that need not be compiled."""
        with self._lock:
            future = self._kept.get(outputs)
            return future.result() if future is not None and future.done() and not future.exception() else None

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """The grammar; `InvalidRequest` if it is malformed, can't be enforced, or takes too long. Blocks meanwhile."""
        tokenizer = self.warm().result()
        with self._lock:
            future = self._kept.get(outputs)
            if future is not None:
                self._kept.move_to_end(outputs)
        if future is None:
            future = self._begin(outputs, tokenizer)
        try:
            return future.result(COMPILE_S)
        except TookTooLong:
            what = f"takes longer than {COMPILE_S} s to compile; simplify it"
            raise _rejected(f"{outputs.kind} {what}") from None

    def _begin(self, outputs: StructuredOutputs, tokenizer: LLTokenizer) -> Future[Grammar]:
        if not self._free.acquire(timeout=COMPILE_S):
            raise Overloaded("too many grammars are being compiled; try again later")

        def work() -> Grammar:
            began = time.perf_counter()
            try:
                return _compiled(outputs, tokenizer, self._tokenizer.eos_ids)
            finally:
                self._free.release()
                with self._lock:
                    if self.on_compiled is not None:
                        self.on_compiled(time.perf_counter() - began)

        with self._lock:
            known = self._kept.get(outputs)
            if known is not None:  # somebody was faster
                self._free.release()
                return known
            future = self._kept[outputs] = _on_thread(work, "tokenmill-grammar")
            while len(self._kept) > KEPT_GRAMMARS or sum(map(_size, self._kept)) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return future

    def _build(self) -> LLTokenizer:
        """The tokenizer, with one grammar compiled: the first one would take several times as long."""
        tokenizer = self._built()
        _compiled(StructuredOutputs(json=FIRST_SCHEMA), tokenizer, self._tokenizer.eos_ids)
        trim_host_memory()
        return tokenizer

    def _built(self) -> LLTokenizer:
        # A tokenizer may know tokens, ends among them, that the model has no logit for.
        eos_ids = tuple(sorted(token for token in self._tokenizer.eos_ids if token < self._vocab_size))
        if not eos_ids:
            raise InvalidRequest("structured_outputs requires a model with an end-of-sequence token")
        if isinstance(self._tokenizer, HuggingFaceTokenizer) and self._tokenizer.vocab_size <= self._vocab_size:
            return _hugging_face(self._tokenizer.to_json(), self._vocab_size, eos_ids)
        return _any(self._tokenizer, self._vocab_size, eos_ids)


def _on_thread(work: Callable[[], Any], name: str) -> Future[Any]:
    """Run it on a thread that holds nobody up, not even the end of the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _size(outputs: StructuredOutputs) -> int:
    texts = (outputs.json, outputs.regex, outputs.grammar, outputs.structural_tag, *(outputs.choice or ()))
    return sum(len(text) for text in texts if text is not None)


# -- the tokenizer, as llguidance wants it ----------------------------------------------------------------------------


def require_llguidance() -> None:
    """Raise `ConfigError` if the package is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        what = "structured outputs require llguidance: pip install 'tokenmill[server]'"
        raise ConfigError(what) from None


@lru_cache(4)
def _hugging_face(tokenizer_json: str, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Kept: a model that is opened again has the same tokenizer."""
    require_llguidance()
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))


@dataclass(frozen=True)
class _Wrapped:
    """A tokenizer whose inside is not known, by the bytes of its tokens."""

    tokenizer: Tokenizer
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        return self.tokenizer.encode(text.decode() if isinstance(text, bytes) else text, add_special=False)


def _any(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    require_llguidance()
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [tokenizer.token_bytes(token) for token in range(min(tokenizer.vocab_size, vocab_size))]
    tokens += [b""] * (vocab_size - len(tokens))  # masks are as wide as the model's logits; these never match
    special = sorted({*(token for token in tokenizer.special_tokens.values() if token < vocab_size), *eos_ids})
    if isinstance(tokenizer, ByteTokenizer):
        special = list(range(256, tokenizer.vocab_size))
    wrapped = TokenizerWrapper(_Wrapped(tokenizer, tokens, special, eos_ids[0]))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(eos_ids))


# -- compiling --------------------------------------------------------------------------------------------------------


def _compiled(outputs: StructuredOutputs, tokenizer: LLTokenizer, eos_ids: frozenset[int]) -> Grammar:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(step_max_items=MAX_STEP_ITEMS, max_grammar_size=MAX_SYMBOLS)
    try:
        matcher = LLMatcher(tokenizer, grammar_source(outputs), log_level=0, limits=limits)
    except InvalidRequest:
        raise
    except ValueError as error:
        raise _rejected(f"{outputs.kind}: {_first_line(str(error))}") from None
    # The first step belongs to compiling: what explodes does so here, and states begin with its tables.
    if not matcher.is_error():
        matcher.compute_ff_tokens()
        allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        second = matcher.deep_copy()
        second.consume_token(int(np.unpackbits(allowed, bitorder="little").argmax()))
        failed = next((one for one in (matcher, second) if one.is_error()), None)
    else:
        failed = matcher
    if failed is not None:
        raise _rejected(f"{outputs.kind}: {_reason(failed.get_error())}")
    return Grammar(matcher, eos_ids)


def grammar_source(outputs: StructuredOutputs) -> str:
    """Llguidance's own form of a constraint. `InvalidRequest` for what it would not enforce, or not in time."""
    from llguidance import LLMatcher

    whitespace = _whitespace(outputs)
    if outputs.json is not None or outputs.json_object:
        schema = {"type": "object"} if outputs.json is None else _parsed("json", str(outputs.json))
        audit_schema("json", schema)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=whitespace)
    if outputs.regex is not None:
        _check_forced("regex", outputs.regex)
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.choice is not None:
        for choice in outputs.choice:
            _check_literal("choice", choice)
        listed = "\n  | ".join(_lark_string(choice) for choice in outputs.choice if choice)
        return LLMatcher.grammar_from_lark(
            f"start: CHOICE\nCHOICE: {listed}"
        )  # a terminal: rules have few alternatives
    if outputs.structural_tag is not None:
        return LLMatcher.grammar_from_lark(_lark("structural_tag", _tags(str(outputs.structural_tag)), whitespace))
    return LLMatcher.grammar_from_lark(_lark("grammar", _as_lark(str(outputs.grammar)), whitespace))


def _whitespace(outputs: StructuredOutputs) -> Any:
    if outputs.whitespace_pattern is not None:
        _check_forced("whitespace_pattern", outputs.whitespace_pattern)
        return {"whitespace_flexible": True, "whitespace_pattern": outputs.whitespace_pattern}
    return {"whitespace_flexible": outputs.any_whitespace}


def _parsed(kind: str, text: str) -> Any:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _rejected(f"{kind} is nested too deeply") from None
    except ValueError as error:
        raise _rejected(f"{kind} is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _rejected(f"{kind} must be a JSON object, not {type(schema).__name__}")
    return schema


def _rejected(text: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.{text}", param="structured_outputs")


def _reason(error: str) -> str:
    """Why llguidance does not compile a grammar, without advice about its own options."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    if "Current row has" in error:
        return "it has too many alternatives at a time; list literals in a terminal, whose name is in upper case"
    if error.startswith("oneOf"):
        return "the keyword oneOf is supported only where its alternatives exclude each other; use anyOf"
    return _first_line(error)


def _first_line(error: str) -> str:
    """Llguidance's errors, without the state of its parser."""
    text = re.split(r"\n<(?:state|backtrace)>", error)[0]
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]}..."


# -- Lark -------------------------------------------------------------------------------------------------------------

LARK_PART = re.compile(
    r"""(?P<literal>"(?:\\.|[^"\\\n])*"i?)|(?://|\#)[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/[a-z]*|(?P<json>%json\s*)"""
)
GBNF_RULE = re.compile(r"^[^\n\"/#]*::=", re.MULTILINE)


def _lark(kind: str, text: str, whitespace: Mapping[str, Any]) -> str:
    """Lark, its literals and expressions checked, its JSON schemas audited and given the whitespace asked for."""
    pieces, at = [], 0
    while (found := LARK_PART.search(text, at)) is not None:
        pieces.append(text[at : found.end()])
        at = found.end()
        if found["json"]:
            try:
                schema, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise _rejected(f"{kind}: %json is not followed by valid JSON: {error}") from None
            if not isinstance(schema, dict):
                raise _rejected(f"{kind}: %json must be followed by a JSON object")
            # How a chat template separates the arguments of tool calls; all else is not the caller's to set.
            separators = schema.pop("x-guidance", {}) if kind == "grammar" else {}
            if not isinstance(separators, dict) or not SEPARATORS.issuperset(separators):
                raise _rejected(f"{kind}: x-guidance may only set {' and '.join(sorted(SEPARATORS))}")
            audit_schema(kind, schema)
            pieces.append(json.dumps(schema | {"x-guidance": {**whitespace, **separators}}))
        elif found["regex"]:
            _check_forced(kind, found["regex"])
        elif found["literal"]:
            _check_literal(kind, found["literal"])
    return "".join([*pieces, text[at:]])


def _as_lark(text: str) -> str:
    if not GBNF_RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > MAX_GBNF_BYTES:
        raise _rejected(f"grammar is too long: at most {MAX_GBNF_BYTES >> 10} KiB of GBNF are allowed")
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # of its own, and whatever its recursion runs into
        raise _rejected(f"grammar is not valid GBNF: {_first_line(str(error))}") from None


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tags(text: str) -> str:
    """VLLM's structural tags as Lark: free text, and from a trigger on, one of the structures that begin with it."""
    from llguidance import StructTag

    tag = _parsed("structural_tag", text)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        what = 'must be {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}'
        raise _rejected(f"structural_tag {what}")
    tags = []
    for one in structures:
        fields = one if isinstance(one, dict) else {}
        begin, schema, end = fields.get("begin"), fields.get("schema"), fields.get("end")
        if not isinstance(begin, str) or not isinstance(schema, dict) or not isinstance(end, str):
            raise _rejected("structural_tag: a structure has a begin and an end, which are strings, and a schema")
        trigger = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
        if trigger is None:
            raise _rejected(f"structural_tag: {begin[:60]!r} begins with none of the triggers")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


# -- JSON schemas: what llguidance would not enforce ------------------------------------------------------------------

SEPARATORS = frozenset({"item_separator", "key_separator"})
UNENFORCED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy", "x-guidance",
})  # fmt: skip
"""Keywords that constrain a value in a way a grammar can't, or that llguidance does not implement; its own options."""
NAMED = ("properties", "patternProperties")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems")
COUNTS = ("minLength", "minItems")


def audit_schema(kind: str, schema: dict[str, Any]) -> None:
    """Raise `InvalidRequest` if the schema has a keyword that would be ignored or coerced, or no finite value."""
    try:
        references = _Audit(kind, schema).references()
        if not _is_finite(schema, references):
            raise _rejected(f"{kind}: $ref is infinitely recursive: no finite value satisfies the schema")
    except RecursionError:
        raise _rejected(f"{kind} is nested too deeply") from None


class _Audit:
    """A walk over all that a schema uses: its own parts, and what it refers to."""

    def __init__(self, kind: str, schema: dict[str, Any]) -> None:
        self._kind = kind
        self._root = schema

    def references(self) -> dict[str, Any]:
        """Each reference in it and the schema it stands for; `InvalidRequest` for a keyword that is not enforced."""
        found: dict[str, Any] = {}
        stack: list[tuple[str, Any]] = [("#", self._root)]
        while stack:
            path, schema = stack.pop()
            if not isinstance(schema, dict):
                continue
            self._check(path, schema)
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in found:
                found[reference] = target = _resolved(self._root, reference)
                # One that is not a plain pointer is left to llguidance; what it means is among the definitions.
                targets = [(reference, target)] if target is not None else list(_definitions(self._root))
                stack.extend(targets)
            stack.extend(_parts(path, schema))
        return found

    def _check(self, path: str, schema: dict[str, Any]) -> None:
        for keyword in schema:
            if keyword in UNENFORCED and not (keyword == "uniqueItems" and schema[keyword] is False):
                raise self._unsupported(keyword, path)
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(schema.get(keyword), bool):
                raise self._unsupported(f"{keyword} (as a boolean)", path)
        least, required = schema.get("minProperties"), schema.get("required")
        # Keys that a schema does not name may be repeated, and a repeated key counts once.
        if isinstance(least, (int, float)) and least > (len(set(required)) if isinstance(required, list) else 0):
            raise self._unsupported("minProperties (more than are required)", path)
        for keyword in COUNTS:
            if isinstance(schema.get(keyword), (int, float)) and schema[keyword] > MAX_FORCED:
                raise self._unsupported(f"{keyword} over {MAX_FORCED}", path)
        if isinstance(schema.get("pattern"), str):
            _check_forced(f"{self._kind}: pattern", schema["pattern"])
        for value in (schema.get("const"), *_listed(schema, "enum")):
            if isinstance(value, str):
                _check_literal(self._kind, value)
        if sum(isinstance(value, (dict, list)) for value in _listed(schema, "enum")) > MAX_ENUM_PARTS:
            raise self._unsupported(f"enum with more than {MAX_ENUM_PARTS} arrays and objects", path)
        schema.pop("uniqueItems", None)  # false: it means nothing

    def _unsupported(self, keyword: str, path: str) -> InvalidRequest:
        return _rejected(f"{self._kind}: the keyword {keyword} is not supported (at {path})")


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _parts(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in NAMED:
        if isinstance(schema.get(name), dict):
            yield from ((f"{path}/{name}/{key}", part) for key, part in schema[name].items())
    for name in (*LISTED, *SINGLE):
        part = schema.get(name)
        if isinstance(part, list):
            yield from ((f"{path}/{name}/{place}", one) for place, one in enumerate(part))
        elif isinstance(part, dict):
            yield f"{path}/{name}", part


def _definitions(root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("$defs", "definitions"):
        if isinstance(root.get(name), dict):
            yield from ((f"#/{name}/{key}", part) for key, part in root[name].items())


def _resolved(root: Any, reference: str) -> Any | None:
    """What a JSON pointer of this document points at; None if it is another kind of reference."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    schema = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and key in schema:
            schema = schema[key]
        elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return None
    return schema


def _is_finite(schema: Any, references: Mapping[str, Any]) -> bool:
    """Can a value that satisfies the schema end? Found as a least fixed point over its references."""
    finite = {name for name, target in references.items() if target is None}
    while True:
        seen: set[str] = set()

        def ends(one: Any, seen: set[str] = seen) -> bool:
            if not isinstance(one, dict):
                return True
            name = one.get("$ref")
            if isinstance(name, str) and name in references and name not in finite:
                if name in seen:
                    return False
                seen.add(name)
                if not ends(references[name]):
                    return False
                finite.add(name)
            parts = [part for part in one.get("allOf", ()) if isinstance(one.get("allOf"), list)]
            choices = [one[name] for name in ("anyOf", "oneOf") if isinstance(one.get(name), list)]
            return (
                all(ends(part) for part in (*parts, *_needed(one)))
                and all(any(ends(part) for part in choice) for choice in choices if choice)
            )  # fmt: skip

        before = len(finite)
        if ends(schema):
            return True
        if len(finite) == before:
            return False


def _needed(schema: Mapping[str, Any]) -> list[Any]:
    """The parts of which every value of the schema has one, if all its values are objects, or all are arrays."""
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            return [properties[name] for name in required if isinstance(name, str) and name in properties]
    if schema.get("type") == "array" and isinstance(schema.get("minItems"), int):
        first = schema.get("prefixItems") if isinstance(schema.get("prefixItems"), list) else []
        needed = list(first or [])[: schema["minItems"]]
        return needed if schema["minItems"] <= len(needed) else [*needed, schema.get("items")]
    return []


# -- expressions and literals: how long a run they force --------------------------------------------------------------


def _check_literal(kind: str, text: str) -> None:
    if len(text) > MAX_FORCED:
        raise _rejected(f"{kind} has a literal of {len(text)} characters; at most {MAX_FORCED} are allowed")


def _check_forced(kind: str, expression: str) -> None:
    length = least_length(expression)
    if length > MAX_FORCED:
        raise _rejected(f"{kind} matches nothing shorter than {length} characters; at most {MAX_FORCED} are allowed")


def least_length(expression: str) -> int:
    """Length of the shortest text that a regular expression matches, about: a bound on the run it may force.

    A class, an escape and a dot are one character. What is not well-formed is left to the compiler.
    """
    frames: list[list[int]] = [[-1, 0, 0]]  # of each open group: shortest alternative, this one so far, its last atom
    for found in REGEX_PART.finditer(expression):
        frame, part = frames[-1], found[0]
        if part.startswith("(?") and part.endswith(")"):  # flags
            continue
        if part.startswith("("):
            frames.append([-1, 0, 0])
        elif part == ")" and len(frames) > 1:
            best, length, _ = frames.pop()
            atom = length if best < 0 else min(best, length)
            frame = frames[-1]
            frame[1], frame[2] = frame[1] + atom, atom
        elif part == "|":
            frame[:] = [frame[1] if frame[0] < 0 else min(frame[0], frame[1]), 0, 0]
        elif part in ("*", "?"):
            frame[1], frame[2] = frame[1] - frame[2], 0
        elif found["least"]:
            times = min(int(found["least"]), MAX_GRAMMAR_BYTES)
            frame[1], frame[2] = frame[1] + frame[2] * (times - 1), frame[2] * times
        elif part != "+":
            frame[1], frame[2] = frame[1] + 1, 1
    best, length, _ = frames[0]
    return length if best < 0 else min(best, length)


REGEX_PART = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:[^\]]*:\]|[^\]\\])*\]|\(\?[a-zA-Z-]+\)"
    r"|\((?:\?P?<[A-Za-z_][^>]*>|\?[^:)=!<]*[:=!<])?"
    r"|\{(?P<least>\d{1,9})(?:,\d*)?\}|.",
    re.DOTALL,
)
