"""`SamplingParams`: sampling parameters of one request, named as in vLLM. Validated on construction."""

from __future__ import annotations

import json
import operator
import reprlib
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import InvalidRequest

MAX_N = 64
MAX_LOGPROBS = 20
MAX_TOKENS = 1 << 30
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_SEED = (1 << 63) - 1
MAX_TOKEN_ID = (1 << 31) - 1
MAX_BIAS = 1e6
MAX_GRAMMAR_BYTES = 256 << 10
"""Maximum size of a schema, expression or grammar: a larger one would take too long to compile."""
MAX_CHOICES = 4096
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80
SPECULATION = ("auto", "off", "lookup", "draft")


class Pooling(Enum):
    """How hidden states are pooled into an embedding."""

    LAST = "last"
    MEAN = "mean"


CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Constraint on an output, with vLLM's field names. Exactly one of the first six is given.

    The constraint covers the whole output, from its first token to its end-of-sequence token: a request ends with
    `stop` once it is satisfied and nothing may follow, or with `length` before. A value is hashable and small: it
    travels with the request and is compiled where it is used (`tokenmill.text.grammar`). The shape is checked here;
    `GrammarCompiler.compile` checks whether it can be enforced, and raises `InvalidRequest` if not.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema: an object, or its text. Kept as text; properties are generated in the order of the schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression in the syntax of Rust's regex crate, for the whole output."""
    choice: tuple[str, ...] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A context-free grammar: llguidance's dialect of Lark, or GBNF if one of its lines has `::=`.

    Lark rules may contain special tokens by name (`<|im_end|>`, never quoted) or by id (`<[5]>`), JSON schemas
    (`%json {...}`, checked like `json`), and lazy terms (`TEXT[lazy]: ...`) that end at the first match.
    """
    structural_tag: str | dict[str, Any] | None = None
    """Free text with constrained parts: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`."""
    any_whitespace: bool = False
    """Let the model choose the whitespace of JSON. By default there is none, so that separators are forced tokens."""
    whitespace_pattern: str | None = None
    """The whitespace allowed in JSON, as a regular expression; implies `any_whitespace`."""

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"exactly one of {', '.join(CONSTRAINTS)}, not {' and '.join(given) or 'none of them'}"
            raise _invalid(f"structured_outputs must have {what}")
        for name in ("json_object", "any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(f"structured_outputs.{name} must be true or false, not {shown(getattr(self, name))}")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, _json_text(name, value))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None:
                _check_grammar_text(name, text)

    @property
    def kind(self) -> str:
        """Which of the constraints is set."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))


def _invalid(text: str) -> InvalidRequest:
    return InvalidRequest(text, param="structured_outputs")


def _json_text(name: str, value: Mapping[str, Any]) -> str:
    """A schema as text, unless it is too large: the size is bounded first, since serializing takes time."""
    if min_json_chars(value, MAX_GRAMMAR_BYTES) > MAX_GRAMMAR_BYTES:
        raise _too_long(name)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(f"structured_outputs.{name} is not a JSON value: {error}") from None


def min_json_chars(value: Any, enough: int, ignored: Collection[str] = ()) -> int:
    """A lower bound on the size of a value's JSON text; stops counting beyond `enough`.

    Members of objects with one of the `ignored` keys are not counted.
    """
    count, stack = 0, [value]
    while stack and count <= enough:
        one = stack.pop()
        count += len(one) + 2 if isinstance(one, str) else 1
        if isinstance(one, Mapping):
            kept = [key for key in one if key not in ignored]
            count += sum(len(key) + 3 for key in kept if isinstance(key, str))
            stack.extend(one[key] for key in kept)
        elif isinstance(one, (list, tuple)):
            count += len(one)
            stack.extend(one if count <= enough else ())
    return count


def _choices(choice: Any) -> tuple[str, ...]:
    strings = tuple(choice) if isinstance(choice, (list, tuple)) else ()
    if not strings or not all(isinstance(one, str) for one in strings):
        raise _invalid("structured_outputs.choice must be a list of strings that is not empty")
    if len(strings) > MAX_CHOICES:
        raise _invalid(f"structured_outputs.choice must have at most {MAX_CHOICES} strings, not {len(strings)}")
    if sum(map(len, strings)) > MAX_GRAMMAR_BYTES:
        raise _too_long("choice")
    for one in strings:
        _check_grammar_text("choice", one)
    return strings


def _check_grammar_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise _invalid(f"structured_outputs.{name} must be a string, not {type(text).__name__}")
    if not text:
        raise _invalid(f"structured_outputs.{name} must not be empty")
    try:
        is_too_long = len(text) > MAX_GRAMMAR_BYTES or len(text.encode()) > MAX_GRAMMAR_BYTES
    except UnicodeEncodeError:
        raise _invalid(f"structured_outputs.{name} is not valid Unicode") from None
    if is_too_long:
        raise _too_long(name)


def _too_long(name: str) -> InvalidRequest:
    return _invalid(f"structured_outputs.{name} is too long: at most {MAX_GRAMMAR_BYTES >> 10} KiB are allowed")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. By default, samples from the model's own distribution.

    Order of operations: bias and bans, penalties (repetition, presence, frequency, DRY), temperature,
    typical_p, top_k, top_p, min_p, XTC, draw.
    """

    n: int = 1
    """Number of choices; choice i does not depend on n."""
    temperature: float = 1.0
    """0 for greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 for all tokens."""
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    """None to draw one at admission; it is reported."""
    attempt: int = 0
    """Draws another sample for the same seed; incremented by `regenerate`."""
    max_tokens: int | None = 16
    """None for as many as the context allows."""
    min_tokens: int = 0
    """Stop tokens cannot be drawn before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; excluded from it unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    """Above 1, tokens of prompt and output become less likely."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    """Above 0, tokens that would continue a repetition become less likely (DRY)."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    """Tokens to look back; 0 for all."""
    xtc_probability: float = 0.0
    """Probability of excluding all but the least likely of the tokens above `xtc_threshold` (XTC)."""
    xtc_threshold: float = 0.1
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """Number of top log-probabilities to return beside the drawn token's, before any of the above."""
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    """Constrain the output to a JSON schema, a regular expression or a grammar."""
    speculation: str | None = None
    """Proposer for speculative decoding: `auto`, `off`, `lookup` or `draft`.

    None for the engine's setting."""
    prediction_token_ids: tuple[int, ...] = ()
    """The expected output, used as a draft by speculation."""

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is not default:
                object.__setattr__(self, name, _checked(name, value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} > max_tokens {self.max_tokens}", param="min_tokens")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if a token id given here is not in the model's vocabulary."""
        for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids", "logit_bias", "prediction_token_ids"):
            ids = getattr(self, name)
            if ids and max(ids) >= vocab_size:
                check_ids(name, ids, vocab_size)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the next draw depends on earlier tokens (beyond what the model sees)."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.dry_multiplier
            or self.min_tokens
        )


_DEFAULTS = {one.name: one.default for one in fields(SamplingParams)}
"""Defaults are valid: only changed values are checked."""
_RANGES: dict[str, tuple[float, float, bool]] = {
    # name: (lowest, highest, may it be the lowest itself)
    "temperature": (0, 100, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, True),
    "typical_p": (0, 1, False),
    "repetition_penalty": (0, 10, False),
    "presence_penalty": (-10, 10, True),
    "frequency_penalty": (-10, 10, True),
    "dry_multiplier": (0, 100, True),
    "dry_base": (1, 10, True),
    "xtc_probability": (0, 1, True),
    "xtc_threshold": (0, 1, True),
}
_COUNTS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "top_k": (-1, 1 << 30),
    "attempt": (0, (1 << 32) - 1),
    "min_tokens": (0, 1 << 30),
    "dry_allowed_length": (1, 1 << 20),
    "dry_range": (0, 1 << 30),
    "seed": (0, MAX_SEED),
    "max_tokens": (1, MAX_TOKENS),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs", "allowed_token_ids", "structured_outputs",
                       "speculation"})  # fmt: skip


def _checked(name: str, value: Any) -> Any:
    """Convert a parameter to its own type; `InvalidRequest` if that is not possible."""
    if value is None and name in _OPTIONAL:
        return None
    if name in _RANGES:
        low, high, with_low = _RANGES[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (value == low and not with_low):
            bounds = f"{'[' if with_low else '('}{low}, {high}]"
            raise InvalidRequest(f"{name} must be in {bounds}, not {shown(value)}", param=name)
    elif name in _COUNTS:
        least, most = _COUNTS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            what = f"an integer from {least} to {most}"
            raise InvalidRequest(f"{name} must be {what}, not {shown(value)}", param=name)
    elif name.endswith("_token_ids"):
        ids = tuple(id_array(name, () if value is None else value).tolist())
        if not ids and name == "allowed_token_ids":
            raise InvalidRequest("allowed_token_ids must not be empty", param=name)
        return ids
    elif name == "stop":
        return _stop_strings(value)
    elif name == "logit_bias" and value != {}:
        return _logit_bias(value)
    elif name == "speculation":
        if value not in SPECULATION:
            what = f"one of {', '.join(SPECULATION)}"
            raise InvalidRequest(f"speculation must be {what}, not {shown(value)}", param=name)
    elif name == "structured_outputs":
        return _structured_outputs(value)
    return value


def _structured_outputs(value: Any) -> StructuredOutputs:
    """As given, or constructed from a dict of its fields."""
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in StructuredOutputs.__dataclass_fields__]
        if unknown:
            raise _invalid(f"structured_outputs has no field {shown(unknown[0])}")
        return StructuredOutputs(**value)
    if not isinstance(value, StructuredOutputs):
        raise _invalid(f"structured_outputs must be StructuredOutputs, not {type(value).__name__}")
    return value


def shown(value: Any) -> str:
    """A value for an error message; long ones are truncated before they are formatted."""
    try:
        return f"{_BRIEF.repr(value):.60}"
    except ValueError:  # Python refuses to format integers of thousands of digits
        return "a number of that size"


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) for string in strings):
        raise InvalidRequest(f"stop must be a string or a list of strings, not {type(stop).__name__}", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings are allowed, not {len(strings)}", param="stop")
    for string in strings:
        if not 0 < len(string) <= MAX_STOP_STRING_LENGTH:
            what = f"1 to {MAX_STOP_STRING_LENGTH} characters"
            raise InvalidRequest(f"a stop string must have {what}, not {len(string)}", param="stop")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise InvalidRequest(f"stop string {string!r} is not valid Unicode", param="stop")
    return tuple(strings)


def token_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Token ids as plain integers, from any sequence of integers; `InvalidRequest` otherwise."""
    try:
        # Without a line of Python per id: prompts may have many thousands.
        numbers = tuple(map(operator.index, ids))
        is_plain = not isinstance(ids, (str, bytes)) and bool not in set(map(type, ids))
    except (TypeError, ValueError):
        is_plain = False
    if not is_plain:
        raise InvalidRequest(f"{name} must be a list of token ids, not {shown(ids)}", param=name)
    for number in (min(numbers, default=0), max(numbers, default=0)):
        if not 0 <= number <= MAX_TOKEN_ID:
            what = f"token ids must be from 0 to {MAX_TOKEN_ID}, not {shown(number)}"
            raise InvalidRequest(f"{name}: {what}", param=name)
    return numbers


def id_array(name: str, ids: Any) -> NDArray[np.int32]:
    """`token_ids` as an array, validated in one pass."""
    if isinstance(ids, (list, tuple)):
        try:
            numbers = np.frombuffer(array("i", ids), dtype=np.int32)
        except (TypeError, OverflowError):
            pass
        else:
            # Of the values that were converted, only these may be booleans.
            kinds = {type(ids[place]) for place in np.flatnonzero(numbers <= 1).tolist()}
            if bool not in kinds and (not len(numbers) or numbers.min() >= 0):
                return numbers
    return np.array(token_ids(name, ids), dtype=np.int32)


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise `InvalidRequest` if one of them is not in the model's vocabulary."""
    most = max(ids, default=0)
    if most >= vocab_size:
        raise InvalidRequest(f"{name}: token {most} is outside the vocabulary of {vocab_size}", param=name)


def _logit_bias(bias: Any) -> dict[int, float]:
    """Token id -> finite number; ids may be strings of digits, as in JSON."""
    if bias is None:
        return {}
    if not isinstance(bias, dict):
        what = f"must be a mapping of token ids to numbers, not {type(bias).__name__}"
        raise InvalidRequest(f"logit_bias {what}", param="logit_bias")
    names = [int(name) if isinstance(name, str) and name.isdecimal() and len(name) < 20 else name for name in bias]
    wrong = next((name for name in names if not hasattr(name, "__index__") or isinstance(name, bool)), None)
    if wrong is not None:
        what = f"must be a mapping of token ids to numbers; {shown(wrong)} is not a token id"
        raise InvalidRequest(f"logit_bias {what}", param="logit_bias")
    ids = token_ids("logit_bias", names)
    for token, value in zip(ids, bias.values(), strict=True):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not -MAX_BIAS <= value <= MAX_BIAS:
            what = f"must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {shown(value)}"
            raise InvalidRequest(f"logit_bias of token {token} {what}", param="logit_bias")
    return dict(zip(ids, map(float, bias.values()), strict=True))
