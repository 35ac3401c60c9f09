"""Running a conversation again from its file, in deterministic mode: is each answer the same, token for token?

An answer follows from its prompt, its parameters and its seed, and nothing else. So whatever differs is a difference of
the model, of its arithmetic, or of the file; the first token that does is where to look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.entrypoints.llm import LLM
from tokenmill.errors import SessionFileError
from tokenmill.params import SamplingParams
from tokenmill.session.fingerprint import fingerprint
from tokenmill.session.portable import SessionFile, read_fingerprint, read_whole, unpack

ENDED_BY_ITSELF = frozenset({"stop", "length"})


@dataclass(frozen=True)
class Replayed:
    """An answer that was run again."""

    turn: int
    num_tokens: int
    """Of the answer as it is in the file."""
    at: int | None
    """The first token of it that is another; None: all are the same."""
    recorded: int | None = None
    drawn: int | None = None
    """None: nothing more was drawn."""


def open_file(path: Path, llm: LLM) -> SessionFile:
    """A session file, if it is of this model."""
    opened, data = llm.opened, read_whole(path)
    refusal = fingerprint(opened.model, opened.text).why_not(read_fingerprint(data).of_log)
    if refusal is not None:
        raise SessionFileError(refusal)
    return unpack(data, path.name, opened.model.info.vocab_size)


def replay(file: SessionFile, llm: LLM) -> Iterator[Replayed]:
    """Each answer of the conversation, run again from the log before it; as they come.

    Answers are skipped that the log does not reproduce: the template has rewritten them since, turns before them were
    dropped to fit the context, or their beginning was given.
    """
    record, sampling = file.record, file.record.head["sampling"]
    begin: int | None = 0
    for number, turn in enumerate(record.turns):
        is_known = begin is not None and turn.end is not None and turn.end > begin
        if turn.kind == "answer" and turn.is_replayable and is_known:
            recorded = record.tokens.array[begin : turn.end].tolist()
            params = _as_it_was(replace(sampling, **(turn.changes or {})), len(recorded), turn.finish_reason)
            (output,) = llm.generate([record.tokens.array[:begin].tolist()], params)
            yield _compared(number, recorded, output.outputs[0].token_ids)
        begin = turn.end


def _as_it_was(params: SamplingParams, num_tokens: int, finish_reason: str | None) -> SamplingParams:
    """The parameters of an answer, as long as it was. One that was cut off did not see its end coming."""
    return replace(
        params,
        max_tokens=num_tokens,
        min_tokens=min(params.min_tokens, num_tokens),
        ignore_eos=params.ignore_eos or finish_reason not in ENDED_BY_ITSELF,
        stop=(),
        logprobs=None,
        prompt_logprobs=None,
    )


def _compared(turn: int, recorded: list[int], drawn: list[int]) -> Replayed:
    for at, token in enumerate(recorded):
        other = drawn[at] if at < len(drawn) else None
        if token != other:
            return Replayed(turn, len(recorded), at, token, other)
    return Replayed(turn, len(recorded), None)
