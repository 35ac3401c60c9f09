"""What a choice has grown by, and what a request has cost: outputs, as streams and usage counts show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.outputs import ENDED_WELL, CompletionOutput, FinishReason, RequestOutput, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one choice; the last one has its finish reason."""

    index: int
    text: str
    first_token: int
    """Tokens of the choice before these."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None

    @property
    def is_bad_end(self) -> bool:
        """Did it end otherwise than by being complete?"""
        return self.finish_reason is not None and FinishReason(self.finish_reason) not in ENDED_WELL


def whole(choice: CompletionOutput) -> Delta:
    """All of a choice that has ended."""
    return Delta(choice.index, choice.text, 0, choice.token_ids, choice.logprobs, choice.finish_reason)


class Deltas:
    """What each choice of a request has grown by since the last look.

    Tokens are shown when all of their text is, so a stop string never takes one back.
    """

    def __init__(self) -> None:
        self._shown: dict[int, tuple[int, int]] = {}
        """Characters and tokens of each choice."""
        self._ended: set[int] = set()

    def take(self, output: RequestOutput) -> list[Delta]:
        """The choices that have something new, each with what it is."""
        found = []
        for choice in output.outputs:
            chars, tokens = self._shown.get(choice.index, (0, 0))
            ends = choice.finish_reason is not None
            if choice.index in self._ended or (len(choice.text) == chars and not ends):
                continue
            logprobs = None if choice.logprobs is None else choice.logprobs[tokens : choice.num_settled]
            ids = choice.token_ids[tokens : choice.num_settled]
            found.append(Delta(choice.index, choice.text[chars:], tokens, ids, logprobs, choice.finish_reason))
            self._shown[choice.index] = (len(choice.text), max(tokens, choice.num_settled))
            if ends:
                self._ended.add(choice.index)
        return found


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens, as OpenAI counts them."""
    return counted([output.usage for output in outputs])


def counted(usages: Sequence[Usage]) -> dict[str, Any]:
    """Tokens of all of them together, as OpenAI counts them."""
    prompt = sum(used.prompt_tokens for used in usages)
    completion = sum(used.completion_tokens for used in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(used.cached_tokens for used in usages)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
