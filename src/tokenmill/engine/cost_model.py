"""`CostModel`: predicts the duration of a step and bounds prefill chunks by it. Owned by the engine core's thread.

Steps of two kinds have costs of their own: those that only decode (a replayed CUDA graph, say) and those with prompt
tokens (launched kernel by kernel). For each kind

    seconds = fixed + per_token * tokens + per_cell * cells read by attention

A single line through both would charge the launch cost of prompt steps to their tokens, and chunks would collapse.
Proposed tokens cost what steps that verify some took beyond decoding: a fixed part (a step that waits for the tokens of
the one before it is not submitted ahead) and a part for each of them (`LineFit`).
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tokenmill.contract import IntArray
from tokenmill.engine.plan import Draft

MIN_SHARE = 0.5
"""Where decoding alone takes most of the target, prefill may take this fraction of its time."""
FIRST_CHUNK = 32
WINDOW = 64
"""Steps of a kind that its fit is made from."""
ENOUGH = 3
"""Observations before a prediction is made."""
SMOOTHED_FITS, SMOOTHED_AGE = 16, 4
"""Length of the moving average of slopes, in fits, and the most steps by which its latest fit is behind."""
ROUNDS = 6
DAMPING = 0.02
"""Strength of the previous slopes: the data decide once sizes vary by more than about 15 %."""
FADING = 0.95
"""Of the slopes, each time that they allow less than the smallest chunk."""
TOLERANCE = 0.01
"""Residuals below this fraction of a typical step weigh alike."""
FORGET = 0.98


ALONE_STEPS, ERRORS = 15, 15
"""Observations that `BackgroundCost` keeps of steps without background requests, and with them."""
LEAST_SHARE = 0.25
"""Least fraction of their time that background requests keep when they take longer than predicted."""
TAIL, TAIL_STEPS = 0.95, 128
"""Quantile of the latest steps in which those with background tokens are compared to those without."""
MOST_FACTOR, LOOSENED, TIGHTENED = 7 / 6, 0.01, 0.02
"""Additive control of the background budget by the tail: upper limit of its factor, increment, decrement."""
LONG_AGO = 64
"""Decode steps after which what is known of proposed tokens is doubted: a few are tried again."""
LEAST = 0.02
"""A proposed token costs this fraction of a decode token's step at least."""
FEW_PROPOSED = 4
"""Tokens in a step, of all requests, before it is known what they cost."""
FEW_TIMES, MOST_COUNTS = 9, 16
"""Observations of a count that a `LineFit` keeps, and counts that it keeps some of."""
PER_TOKEN = 0.25
"""Share of the time that is taken for a cost per token while only one count was seen: larger counts are then tried."""
FIT_AGE = WINDOW // 2
"""Steps that a fit may be behind when proposed tokens are priced, which happens in every step: it takes 0.3 ms."""
GUESSED = 0.25
"""What a proposed token costs before that is known, as a fraction of what a step costs whatever is in it."""


@dataclass(frozen=True)
class CostLine:
    """Seconds that tokens cost: `entry` if there are any, and `each` for every one."""

    entry: float = 0.0
    each: float = 0.0

    def __add__(self, other: CostLine) -> CostLine:
        return CostLine(self.entry + other.entry, self.each + other.each)


class LineFit:
    """A `CostLine` through the medians of the latest observations of each count."""

    def __init__(self, least_times: int = 1) -> None:
        """`least_times`: counts seen less often are left out once others were: one delay would tilt the line."""
        self._least_times = least_times
        self._times: OrderedDict[int, deque[float]] = OrderedDict()
        """Count -> seconds; the count that was seen last is the last."""
        self._line: CostLine | None = None
        self.num_observed = 0

    def observe(self, count: int, seconds: float) -> None:
        self._times.setdefault(count, deque(maxlen=FEW_TIMES)).append(seconds)
        self._times.move_to_end(count)
        if len(self._times) > MOST_COUNTS:
            self._times.popitem(last=False)
        self.num_observed += 1
        self._line = None

    @property
    def largest(self) -> int:
        """Of the counts that were seen."""
        return max(self._times, default=0)

    @property
    def line(self) -> CostLine:
        """Free of charge before anything was observed."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> CostLine:
        medians = [(count, statistics.median(times), len(times)) for count, times in self._times.items()]
        medians = [one for one in medians if one[2] >= self._least_times] or medians
        if not medians:
            return CostLine()
        weight = sum(times for _, _, times in medians)
        count = sum(count * times for count, _, times in medians) / weight
        seconds = sum(median * times for _, median, times in medians) / weight
        spread = sum(times * (one - count) ** 2 for one, _, times in medians)
        if spread:
            each = sum(times * (one - count) * (median - seconds) for one, median, times in medians) / spread
        else:
            each = PER_TOKEN * seconds / count
        each = min(max(0.0, each), max(0.0, seconds) / count)  # the fixed part is not negative, either
        return CostLine(max(0.0, seconds - each * count), each)


@dataclass(frozen=True)
class Price:
    """Seconds of a step as it is, and what proposed tokens beside it cost."""

    base: float
    proposed: CostLine
    most: int = 1 << 30
    """Proposed tokens that it holds for: not many more than were seen."""


class StepFit:
    """Duration of one kind of step, fitted to the latest ones.

    Least absolute deviations, by iteratively reweighted least squares: a compilation, a swapped-out process or a slow
    start moves the fit only once such steps are the majority. Steps of one size can't tell the fixed cost from the
    slopes; then the previous slopes hold.
    """

    def __init__(self) -> None:
        self._steps = np.zeros((WINDOW, 3))  # tokens, cells, seconds
        self._num_prefill = np.zeros(WINDOW, dtype=np.int64)
        self._num_observed = 0
        self._fixed, self._slopes = 0.0, np.zeros(2)
        self._smoothed_slopes, self._num_fits = np.zeros(2), 0
        self._age = 0
        """Steps, and changes of the slopes, since the last fit."""

    def observe(self, num_tokens: int, attention: float, seconds: float, num_prefill: int) -> None:
        place = self._num_observed % WINDOW
        self._steps[place] = num_tokens, attention, seconds
        self._num_prefill[place] = num_prefill
        self._num_observed += 1
        self._age += 1

    def assume(self, per_token: float) -> None:
        """Start from this slope until the steps differ enough in size to tell."""
        self._slopes = np.array([per_token, 0.0])
        self._age += FIT_AGE
        self._num_fits = 0

    def doubt(self) -> None:
        """Chunks are as small as they get, so nothing will show that the slopes are too large: let them fade."""
        self._slopes = FADING * self._slopes
        self._age += FIT_AGE

    @property
    def is_known(self) -> bool:
        return self._num_observed >= ENOUGH

    @property
    def largest_prefill(self) -> int:
        """Most prompt tokens in one of the latest steps."""
        return int(self._num_prefill.max())

    @property
    def slopes(self) -> tuple[float, float]:
        """Seconds per token and per cell."""
        self._fit()
        return float(self._slopes[0]), float(self._slopes[1])

    @property
    def smoothed_slopes(self) -> tuple[float, float]:
        """A moving average: what background requests get does not follow the noise of single steps."""
        if self._age > SMOOTHED_AGE or not self._num_fits:
            self._fit()
        return float(self._smoothed_slopes[0]), float(self._smoothed_slopes[1])

    def predict(self, num_tokens: int, attention: float, max_age: int = 0) -> float | None:
        """Seconds for such a step; None before enough of them were seen. The fit may be `max_age` steps behind."""
        if not self.is_known:
            return None
        if self._age > min(max_age, self._num_observed // 4):
            self._fit()
        return self._fixed + float(self._slopes[0]) * num_tokens + float(self._slopes[1]) * attention

    def _fit(self) -> None:
        if not self._age:
            return
        self._age = 0
        tokens, cells, seconds = self._steps[: min(self._num_observed, WINDOW)].T
        scale = np.maximum([tokens.mean(), cells.mean()], 1.0)
        sizes = np.stack([tokens, cells]) / scale[:, None]
        before = slopes = self._slopes * scale
        floor = TOLERANCE * float(np.median(seconds)) + 1e-9
        weights = np.full(len(seconds), 1 / len(seconds))
        for _ in range(ROUNDS):
            center, typical = sizes @ weights, seconds @ weights
            off = sizes - center[:, None]
            gram = (off * weights) @ off.T + DAMPING * np.eye(2)
            change = np.linalg.solve(gram, (off * weights) @ (seconds - typical - before @ off))
            slopes = np.maximum(before + change, 0.0)
            fixed = float(typical - slopes @ center)
            weights = 1 / np.maximum(np.abs(seconds - fixed - slopes @ sizes), floor)
            weights /= weights.sum()
        self._fixed, self._slopes = fixed, slopes / scale
        self._num_fits += 1
        self._smoothed_slopes += (self._slopes - self._smoothed_slopes) / min(self._num_fits, SMOOTHED_FITS)


class BackgroundCost:
    """What steps take without background requests, and how well the time that these take beside others is predicted.

    Both are medians of what was observed: beside background requests, steps without them are few and of one size, so
    that a fit through all steps would have to extrapolate to them.
    """

    def __init__(self) -> None:
        self._alone: deque[tuple[int, float]] = deque(maxlen=ALONE_STEPS)
        """Rows and seconds of the latest steps that decoded without background requests."""
        self._errors: deque[float] = deque(maxlen=ERRORS)
        """Predicted seconds of background tokens less those that they took, relative to the step without them."""
        self._lengths: tuple[deque[float], deque[float]] = deque(maxlen=TAIL_STEPS), deque(maxlen=TAIL_STEPS)
        """Of steps without background tokens, and with them; relative to the median of the former."""
        self._factor = 1.0

    def observe(self, num_rows: int, seconds: float, background_s: float) -> None:
        """A step in which others decoded so many rows; `background_s` was predicted for background tokens."""
        alone = self.alone_s(num_rows)
        if alone:
            self._lengths[background_s > 0].append(seconds / alone)
            if background_s:
                self._errors.append((alone + background_s - seconds) / alone)
        if background_s == 0:
            self._alone.append((num_rows, seconds))

    def alone_s(self, num_rows: int) -> float | None:
        """Seconds of a step in which others decode so many rows; None before enough of them were seen."""
        if len(self._alone) < ENOUGH:
            return None
        return statistics.median(seconds * min(1.0, num_rows / rows) for rows, seconds in self._alone)

    def budget_s(self, alone_s: float, slowdown: float) -> float:
        """Predicted seconds by which background tokens may lengthen such a step, the next one."""
        share = self._adapted(slowdown) * (slowdown - 1)
        error = statistics.median(self._errors) if len(self._errors) >= ENOUGH else 0.0
        return alone_s * min(max(share + error, LEAST_SHARE * share), share)

    def _adapted(self, slowdown: float) -> float:
        """The factor, changed a little: up while the tail of steps with background tokens is short enough, else down.

        Where steps vary by themselves, what is added to all of them lengthens the tail by less than the same factor.
        """
        alone, both = map(_tail, self._lengths)
        if alone is not None and both is not None:
            change = LOOSENED if both < slowdown * alone else -TIGHTENED
            self._factor = min(max(1.0, self._factor + change), MOST_FACTOR)
        return self._factor


def _tail(lengths: Collection[float]) -> float | None:
    """A high quantile; None before enough was seen."""
    return sorted(lengths)[int(TAIL * len(lengths))] if len(lengths) >= TAIL_STEPS // 2 else None


class CostModel:
    """Predicts the duration of steps. `error` is its latest relative error on steps with prompt tokens, decaying."""

    def __init__(self, min_chunk: int = 8) -> None:
        self.error = 0.0
        self._min_chunk = min_chunk
        """Prompt tokens given whatever they cost: prompts must finish, too."""
        self._decode, self._prefill = StepFit(), StepFit()
        self._proposed = LineFit()
        """What proposed tokens took, in the latest steps that had some and no prompts..."""
        self._since_proposed = 0
        """...and the decode steps since."""
        self.background = BackgroundCost()

    def observe(
        self, num_tokens: int, attention: float, seconds: float, num_prefill: int, num_proposed: int = 0
    ) -> None:
        """Learn from a step of so many tokens, `num_prefill` of them of prompts, `num_proposed` to be verified."""
        if num_proposed and not num_prefill:
            self._observe_proposed(num_tokens, attention, seconds, num_proposed)
            return
        kind = self._kind(num_prefill)
        self._since_proposed += not num_prefill
        if num_prefill:
            predicted = kind.predict(num_tokens, attention, SMOOTHED_AGE)
            if predicted is None:  # all that it took beyond decoding is charged to the tokens, for now
                decoding = self._decode.predict(num_tokens - num_prefill, 0.0) or 0.0
                kind.assume(max(0.0, seconds - decoding) / num_prefill)
            elif seconds > 0:
                self.error = max(abs(predicted - seconds) / seconds, FORGET * self.error)
        kind.observe(num_tokens, attention, seconds, num_prefill)

    def predict(self, num_tokens: int, attention: float, num_prefill: int = 0, num_proposed: int = 0) -> float | None:
        """Seconds for such a step; None before enough of its kind were seen."""
        if num_prefill or not num_proposed:
            return self._kind(num_prefill).predict(num_tokens, attention)
        decoding = self._decode.predict(num_tokens - num_proposed, attention)
        line = self._proposed.line
        return None if decoding is None else decoding + line.entry + num_proposed * line.each

    def _observe_proposed(self, num_tokens: int, attention: float, seconds: float, num_proposed: int) -> None:
        decoding = self._decode.predict(num_tokens - num_proposed, attention * (1 - num_proposed / num_tokens), FIT_AGE)
        if decoding is not None:
            self._proposed.observe(num_proposed, seconds - decoding)
            self._since_proposed = 0

    def _kind(self, num_prefill: int) -> StepFit:
        return self._prefill if num_prefill else self._decode

    def price(self, draft: Draft) -> Price | None:
        """What proposed tokens cost beside what the step already holds; None before its own cost is known."""
        per_cell, num_tokens = draft.attention / max(draft.num_tokens, 1), draft.num_tokens
        kind = self._prefill if draft.chunks else self._decode
        base = kind.predict(num_tokens, draft.attention, FIT_AGE)
        if not base:
            return None
        if draft.chunks:
            each, read = self._prefill.smoothed_slopes
            return Price(base, CostLine(0.0, each + read * per_cell))
        if self._proposed.num_observed < ENOUGH or self._since_proposed > LONG_AGO:
            return Price(base, CostLine(0.0, base * GUESSED / (1 + GUESSED * num_tokens)), FEW_PROPOSED)
        line = self._proposed.line
        each = max(line.each, LEAST * base / num_tokens)
        return Price(base, CostLine(line.entry, each), 2 * self._proposed.largest)

    # -- background requests ------------------------------------------------------------------------------------------

    def alone_s(self, num_rows: int, cells: float) -> float:
        """Seconds of a step in which so many rows decode, and no background requests; 0 before it is known."""
        if (observed := self.background.alone_s(num_rows)) is not None:
            return observed
        predicted = [kind.predict(num_rows, cells) for kind in (self._decode, self._prefill)]
        return max(0.0, min((one for one in predicted if one is not None), default=0.0))

    def decodes_in(self, seconds: float, cells: IntArray) -> int:
        """How many rows, with so many cells each, may decode beside others in this time; one before that is known."""
        if not self._decode.is_known:
            return 1
        per_token, per_cell = self._token_slopes
        return int(np.searchsorted(np.cumsum(per_token + per_cell * cells), seconds, side="right"))

    def decode_s(self, num_rows: int, cells: float) -> float:
        """Seconds that so many rows more add to a step that decodes."""
        per_token, per_cell = self._token_slopes
        return per_token * num_rows + per_cell * cells

    def chunk_in(self, seconds: float, draft: Draft, num_computed: int) -> int:
        """Prompt tokens at position `num_computed` that this time is enough for, beside what the step holds."""
        per_token, per_cell = self._token_slopes
        limit = max(FIRST_CHUNK, 2 * self._prefill.largest_prefill)
        return _tokens_in(seconds - self._entry_s(draft), per_token, per_cell, num_computed, limit)

    def chunk_s(self, draft: Draft, num_computed: int, count: int) -> float:
        """Seconds that so many prompt tokens at position `num_computed` add to the step."""
        per_token, per_cell = self._token_slopes
        return self._entry_s(draft) + count * (per_token + per_cell * (num_computed + count / 2))

    def prompt_s(self, num_tokens: int) -> float | None:
        """Seconds to compute a prompt of so many tokens; None before enough prompts were seen."""
        if not self._prefill.is_known:
            return None
        per_token, per_cell = self._prefill.slopes
        return num_tokens * (per_token + per_cell * num_tokens / 2)

    @property
    def _token_slopes(self) -> tuple[float, float]:
        """Of steps with prompt tokens, which are of many sizes; decode steps beside the same streams are of one."""
        return (self._prefill if self._prefill.is_known else self._decode).smoothed_slopes

    def _entry_s(self, draft: Draft) -> float:
        """What any prompt token adds to a step that only decodes so far."""
        if draft.num_tokens > len(draft.decodes):
            return 0.0
        with_prompt = self._prefill.predict(draft.num_tokens, draft.attention, SMOOTHED_AGE)
        if with_prompt is None or draft.alone_s == 0:
            return 0.0
        return max(0.0, with_prompt - draft.alone_s - draft.background_given_s)

    # -- chunks of prompts --------------------------------------------------------------------------------------------

    def largest_chunk(self, draft: Draft, num_computed: int, target_s: float) -> int:
        """Prefill tokens at position `num_computed` that fit beside what the step already holds.

        At most twice what was measured lately, so that a fit is not trusted far beyond its observations.
        """
        already = draft.num_tokens - len(draft.decodes)
        limit = max(FIRST_CHUNK, self._min_chunk, 2 * self._prefill.largest_prefill) - already
        least = self._min_chunk - already
        decoding = self._decode.predict(len(draft.decodes), draft.decode_attention) or 0.0
        allowed = max(target_s, (1 + MIN_SHARE) * decoding)
        so_far = self._prefill.predict(draft.num_tokens, draft.attention)
        if so_far is None:  # a prompt token costs no more than one that is decoded, or than those seen so far
            per_token = decoding / len(draft.decodes) if len(draft.decodes) else self._prefill.slopes[0]
            chunk = _tokens_in(allowed - decoding, per_token, 0.0, 0, limit + already) - already
            return max(0, min(limit, max(chunk, least)))
        per_token, per_cell = self._prefill.slopes
        chunk = _tokens_in(allowed - so_far, per_token, per_cell, num_computed, limit)
        # Any prompt token costs this much more than decoding alone: a chunk is worth that once it takes as long itself.
        entry = (self._prefill.predict(len(draft.decodes), draft.decode_attention) or 0.0) - decoding
        worthwhile = _tokens_in(entry, per_token, per_cell, num_computed, limit + already) - already
        if max(chunk, worthwhile) < least:
            self._prefill.doubt()
        return max(0, min(limit, max(chunk, worthwhile, least)))


def _tokens_in(seconds: float, per_token: float, per_cell: float, num_computed: int, most: int) -> int:
    """How many tokens from position `num_computed` on are computed in this time: n * linear + n^2 * square."""
    linear, square = per_token + per_cell * num_computed, per_cell / 2
    if seconds <= 0:
        return 0
    if linear * most + square * most * most <= seconds:
        return most
    return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))
