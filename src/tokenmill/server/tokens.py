"""Single tokens and their log-probabilities as OpenAI's answers show them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenmill.outputs import TokenLogprobs
from tokenmill.text.detok import Detokenizer
from tokenmill.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Instead of minus infinity, which JSON can't say."""
KEPT_TOKENS = 16_384
PART_OF_A_CHARACTER = "bytes:"


class TokenForms:
    """What the tokens of one tokenizer look like in an answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = lru_cache(KEPT_TOKENS)(tokenizer.token_bytes)

    def text(self, token: int) -> str:
        """A token's text; of part of a character, its bytes as OpenAI spells them."""
        raw = self._bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return PART_OF_A_CHARACTER + "".join(f"\\x{byte:02x}" for byte in raw)

    def piece(self, token: int) -> str | list[int]:
        """A token's text; of part of a character, its bytes as llama-server gives them."""
        raw = self._bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    def join(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special=False)

    def for_chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """The entries of a chat's `logprobs.content`."""
        return [
            {**self._entry(token, score.logprob), "top_logprobs": [self._entry(*one) for one in score.top]}
            for token, score in zip(token_ids, logprobs, strict=False)
        ]

    def for_completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """The four lists of a completion's `logprobs`."""
        return {
            "tokens": [self.text(token) for token in token_ids],
            "token_logprobs": [None if score is None else finite(score.logprob) for score in logprobs],
            "top_logprobs": [
                None if score is None else self._likeliest(token, score)
                for token, score in zip(token_ids, logprobs, strict=False)
            ],
            "text_offset": list(offsets),
        }

    def for_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`, in vLLM's form: for each token the likeliest ones and itself, by their ids."""
        return [
            None if score is None else self._ranked(token, score)
            for token, score in zip(token_ids, logprobs, strict=True)
        ]

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Characters before each token, and in all at the end."""
        reader, found = Detokenizer(self._tokenizer), [0]
        total = 0
        for token in token_ids:
            total += len(reader.push(token))
            text = self.text(token)
            if not text.startswith(PART_OF_A_CHARACTER):  # what came out with it is text that was held back
                found[-1] = max(found[-1], total - len(text))
            found.append(total)
        found[-1] += len(reader.flush())
        return found

    def _likeliest(self, token: int, score: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that was drawn, by their texts."""
        likeliest = {self.text(one): finite(value) for one, value in score.top}
        return {**likeliest, self.text(token): finite(score.logprob)}

    def _ranked(self, token: int, score: TokenLogprobs) -> dict[str, Any]:
        ranked = {
            str(one): {"logprob": finite(value), "rank": place, "decoded_token": self.text(one)}
            for place, (one, value) in enumerate(score.top, start=1)
        }
        own = {"logprob": finite(score.logprob), "rank": None, "decoded_token": self.text(token)}
        return {**ranked, **({} if str(token) in ranked else {str(token): own})}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._bytes_of(token)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


def finite(logprob: float) -> float:
    return max(logprob, LEAST)
