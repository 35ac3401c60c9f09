"""`StepSampler`: the `Sampler` of one step. Runs where the logits are: torch on CPU or CUDA, numpy through torch.

Rows fall into three kinds, each done together: greedy ones take the largest logit, plain ones draw in vocabulary order,
filtered ones draw from the tokens in order of likelihood. Which kind a row is depends on its own parameters alone, so a
seeded request draws the same token alone and in any crowd. Where a device has a kernel for the whole draw, that does it
(`FusedDraw`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenmill.contract import BAD_ROW, IntArray, Sampled
from tokenmill.kernels.device import largest, masked, upload
from tokenmill.sampling import ops
from tokenmill.sampling.ops import uniforms
from tokenmill.sampling.state import SamplingState

DRAW_FIELDS = ("seed", "choice", "attempt", "position", "temperature", "top_k", "top_p", "min_p", "typical_p",
               "xtc_probability", "xtc_threshold")  # fmt: skip
"""The first four are the key, as `philox.uniforms` takes it; floats are given by their bits as float32."""


class FusedDraw(Protocol):
    """The whole draw from edited logits, for rows of any parameters."""

    def __call__(
        self, logits: Tensor, told: Tensor, bad_row: int, *, is_filtered: bool = False, is_typical: bool = False
    ) -> Tensor:
        """The id that each row's random number falls on; the largest logit's at temperature 0.

        told: int64, [rows, fields]: `DRAW_FIELDS` of each row, in one piece, since every upload costs the host.
        is_filtered: some row is drawn in order of likelihood; is_typical: some row has a typical-p.
        """
        ...


def fused_draw() -> FusedDraw:
    """For CUDA; elsewhere `ops` is all there is."""
    from tokenmill.kernels.drawing import draw  # needs triton

    return draw


FEW = (64, 1024)
"""Filtered draws look at this many likeliest tokens, then at more; all are sorted only if these are not enough."""


@dataclass(frozen=True)
class StepSampler:
    """Samples logits row i for row `rows[i]` of the state; the new token will stand at `positions[i]`."""

    state: SamplingState
    rows: IntArray
    """A row may occur several times: its draws after proposed tokens."""
    positions: IntArray
    proposed: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Place in `rows` -> tokens between the row's log and this draw, which no draw has confirmed yet."""

    def __call__(self, logits: Any, mask: Any | None) -> Sampled:
        from_numpy = isinstance(logits, np.ndarray)
        if from_numpy and torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # such backends have threads of their own, and torch's would spin beside them
        raw = torch.from_numpy(logits) if from_numpy else logits
        state, rows = self.state, self.rows
        fused = fused_draw() if raw.is_cuda else None
        if fused is not None and state.is_raw[rows].all():
            return Sampled(self._draw_fused(fused, raw if mask is None else masked(raw, mask)))
        top, ids = largest(raw)
        bad, extras = ~top.isfinite(), {}
        if mask is not None or not state.is_plain_greedy[rows].all():
            num_logprobs = int(state.num_logprobs[rows].max(initial=-1))
            if num_logprobs >= 0:
                extras = self._logprobs(raw, num_logprobs)
            edited = self._edited(raw, mask)
            if edited is not raw:
                top, ids = largest(edited)
                bad |= ~top.isfinite()
            if bad.device.type != "cpu" or bool(bad.any()):
                edited = edited.masked_fill(bad[:, None], 0.0)
            if fused is not None:
                ids = self._draw_fused(fused, edited).to(ids.dtype)
            elif state.floats["temperature"][rows].any():
                ids = self._sample(edited, ids)
            if extras:
                extras["logprob"] = _chosen(raw, ids)
        ids = torch.where(bad, BAD_ROW, ids)
        if from_numpy:
            return Sampled(ids.numpy().astype(np.int32), {name: value.numpy() for name, value in extras.items()})
        return Sampled(ids.to(torch.int32), extras)

    # -- before the draw ----------------------------------------------------------------------------------------------

    def _edited(self, raw: Tensor, mask: Any | None) -> Tensor:
        """The logits with masks, bias, bans, penalties and rules applied, in this order; `raw` stays as it is."""
        state, rows = self.state, self.rows
        edited, penalized, ruled = (
            which[rows].nonzero()[0] for which in (state.has_edits, state.has_penalties, state.has_rules)
        )
        if mask is None and not len(edited) and not len(penalized) and not len(ruled):
            return raw.to(torch.float32)
        logits = raw.to(torch.float32, copy=True) if mask is None else masked(raw, mask).to(torch.float32)
        listed = {place: ids for place in edited.tolist() if (ids := state.allowed[rows[place]]) is not None}
        if listed:
            _keep_only(logits, np.array(list(listed)), list(listed.values()))
        places, tokens, added = state.edits(rows, edited, self.proposed)
        if len(tokens):
            logits[upload(places, logits.device), upload(tokens, logits.device)] += upload(added, logits.device)
        if len(penalized):
            index = upload(penalized, logits.device)
            tables = state.histories(rows, penalized, self.proposed)
            seen, counts = (upload(table, logits.device) for table in tables)
            values = (self._floats(name, penalized, logits) for name in _PENALTIES)
            at = (index[:, None], seen)
            logits[at] = ops.penalize(logits[at], counts, *values)
        if len(ruled):
            at_place, token, taxes = (upload(part, logits.device) for part in state.taxes(rows, ruled, self.proposed))
            logits[at_place, token] = ops.tax(logits[at_place, token], taxes)
        return logits

    # -- the draw -----------------------------------------------------------------------------------------------------

    def _sample(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Draw where rows are to be drawn; the others keep their largest logit, `ids`."""
        state, rows = self.state, self.rows
        temperature = state.floats["temperature"][rows]
        drawn, filtered = temperature > 0, state.is_filtered[rows]
        for kind, place in ((self._draw_plain, drawn & ~filtered), (self._draw_filtered, drawn & filtered)):
            index = place.nonzero()[0]
            if len(index):
                scaled = ops.cool(_rows(logits, index), self._floats("temperature", index, logits))
                ids[upload(index, ids.device)] = kind(scaled, index)
        return ids

    def _draw_fused(self, draw: FusedDraw, raw: Tensor) -> Tensor:
        """All rows at once; those of temperature 0 take their largest logit."""
        state, rows = self.state, self.rows
        told = np.zeros((len(rows), len(DRAW_FIELDS)), dtype=np.int64)
        for column, values in enumerate((state.seed, state.choice, state.attempt)):
            told[:, column] = values[rows]
        told[:, DRAW_FIELDS.index("position")] = self.positions
        told[:, DRAW_FIELDS.index("top_k")] = state.top_k[rows]
        for name in ("temperature", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            told[:, DRAW_FIELDS.index(name)] = state.floats[name][rows].view(np.int32)
        is_typical = bool((state.floats["typical_p"][rows] < 1).any())
        is_filtered = bool(state.is_filtered[rows].any())
        return draw(raw, upload(told, raw.device), BAD_ROW, is_filtered=is_filtered, is_typical=is_typical)

    def _draw_plain(self, logits: Tensor, index: np.ndarray) -> Tensor:
        if self.state.floats["min_p"][self.rows[index]].any():
            floor = logits.amax(dim=-1, keepdim=True) + self._floats("min_p", index, logits)[:, None].log()
            logits = logits.masked_fill(logits < floor, ops.NEVER)
        return ops.draw(logits, self._uniforms(index, logits)[0])

    def _draw_filtered(self, logits: Tensor, index: np.ndarray) -> Tensor:
        typical = (self.state.floats["typical_p"][self.rows[index]] < 1).nonzero()[0]
        if len(typical):
            kept = ops.keep_typical(_rows(logits, typical), self._floats("typical_p", index[typical], logits))
            logits = logits.clone()
            logits[upload(typical, logits.device)] = kept
        ids = torch.empty(len(index), dtype=torch.int64, device=logits.device)
        left, top_k = np.arange(len(index)), self.state.top_k[self.rows[index]]
        for few in FEW:
            enough = left[top_k[left] <= few]
            if len(enough):
                found, _ = self._draw_among(_rows(logits, enough), index[enough], min(few, logits.shape[-1]))
                ids[upload(enough, ids.device)] = found
                left = left[top_k[left] > few]
        if len(left):
            ids[upload(left, ids.device)] = self._draw_by_mass(_rows(logits, left), index[left])
        return ids

    def _draw_by_mass(self, logits: Tensor, index: np.ndarray) -> Tensor:
        """Without a small top-k, how many tokens are enough depends on their probabilities."""
        ids = torch.empty(len(index), dtype=torch.int64, device=logits.device)
        left = torch.arange(len(index), device=logits.device)
        for few in (*FEW, logits.shape[-1]):
            chosen = logits if len(left) == len(index) else logits[left]
            ids[left], enough = self._draw_among(chosen, index[left.cpu().numpy()], min(few, logits.shape[-1]))
            left = left[~enough]
            if not len(left):
                break
        return ids

    def _draw_among(self, logits: Tensor, index: np.ndarray, few: int) -> tuple[Tensor, Tensor]:
        """Draw among the `few` likeliest tokens: (ids, were they enough to hold all that the filters keep?)."""
        vocab = logits.shape[-1]
        values, order = ops.likeliest(logits, few)
        top_k = upload(self.state.top_k[self.rows[index]], logits.device).clamp(max=vocab)
        top_p, min_p = self._floats("top_p", index, logits), self._floats("min_p", index, logits)
        total = ops.mass(logits)
        kept = ops.keep_likely(values, total, top_k, top_p, min_p, vocab)
        mass = (values - total[:, None]).exp().sum(dim=-1, dtype=torch.float64)
        # Top-p is a part of the top-k tokens' mass, which is known if they are all here, or are all there are.
        enough = (top_k <= few) | ((top_k == vocab) & (mass > top_p) & (top_p < 1))
        first, second = self._uniforms(index, logits)
        struck = second < self._floats("xtc_probability", index, logits)
        kept = ops.exclude_top_choices(kept, self._floats("xtc_threshold", index, logits), struck)
        return order.gather(-1, ops.draw(kept, first)[:, None])[:, 0], enough

    # -- helpers ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _logprobs(raw: Tensor, count: int) -> dict[str, Tensor]:
        """The likeliest tokens of every row under the model's own distribution."""
        logprobs = raw.to(torch.float32).log_softmax(dim=-1)
        top, top_ids = logprobs.topk(min(count, raw.shape[-1]), dim=-1)
        return {"top_logprobs": top, "top_ids": top_ids}

    def _floats(self, name: str, index: np.ndarray, like: Tensor) -> Tensor:
        return upload(self.state.floats[name][self.rows[index]], like.device)

    def _uniforms(self, index: np.ndarray, like: Tensor) -> tuple[Tensor, Tensor]:
        state, rows = self.state, self.rows[index]
        positions = self.positions[index].astype(np.int64)
        first, second = uniforms(state.seed[rows], state.choice[rows], state.attempt[rows], positions)
        return upload(first, like.device), upload(second, like.device)


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _rows(logits: Tensor, index: np.ndarray) -> Tensor:
    """Some rows, in order; all of them are not copied."""
    return logits if len(index) == len(logits) else logits[upload(index, logits.device)]


def _keep_only(logits: Tensor, places: np.ndarray, allowed: list[np.ndarray]) -> None:
    """Rule out all tokens of the rows at `places` but those allowed: for all rows at once, as each step costs a launch.

    On the CPU by numpy, which does not wake other threads for it.
    """
    at = (np.repeat(places, [len(ids) for ids in allowed]), np.concatenate(allowed))
    if logits.device.type == "cpu":
        table = logits.numpy()
        kept = table[at]
        table[places] = ops.NEVER
        table[at] = kept
    else:
        there = (upload(at[0], logits.device), upload(at[1], logits.device))
        kept_there = logits[there]
        # Not by assignment, which would wait for the copy of the number.
        logits.index_fill_(0, upload(places.astype(np.int64), logits.device), ops.NEVER)
        logits[there] = kept_there


def _chosen(raw: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of the drawn tokens under the model's own distribution."""
    return raw.to(torch.float32).log_softmax(dim=-1).gather(-1, ids[:, None])[:, 0]
