"""Proposers for tests: one that knows what requests will say, and is wrong as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engine.helpers import VOCAB, alone
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.contract import BackendLimits
from tokenmill.engine.core import DraftModel, EngineCore
from tokenmill.engine.cost_model import CostLine, Price
from tokenmill.engine.proposers import NO_PROPOSAL, Proposal
from tokenmill.engine.request import Request
from tokenmill.engine.speculation import Candidate

Known = Callable[[Request], Sequence[int]]
"""A request's output as it would be, from its first token on."""


@dataclass
class Oracle:
    """Proposes what the request will say; some proposals are wrong in one place, some are missing."""

    known: Known
    wrong: float = 0.4
    missing: float = 0.1
    name: str = "lookup"
    num_asked: int = 0
    kept: list[str] = field(default_factory=list)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Proposal]:
        return [self._propose(request, count) for request, count in zip(requests, most, strict=True)]

    def _propose(self, request: Request, most: int) -> Proposal:
        self.num_asked += 1
        done = len(request.output)
        choose = random.Random(f"{request.request_id} {done}")
        tokens = list(self.known(request)[done : done + most])
        if not tokens or choose.random() < self.missing:
            return NO_PROPOSAL
        if choose.random() < self.wrong:
            place = choose.randrange(len(tokens))
            tokens[place] = (tokens[place] + 1) % VOCAB
        return Proposal(tuple(tokens), 8)

    def can_propose(self, request: Request) -> bool:  # noqa: ARG002
        return True

    def cost(self, num_requests: int) -> CostLine:  # noqa: ARG002
        return CostLine()

    def forget(self, request: Request) -> None:
        pass

    def keep(self, request: Request) -> None:
        self.kept.append(request.request_id)


def draft_model(vocab_size: int = VOCAB, depth: int = 0, **limits: Any) -> DraftModel:
    """The same model as the tests' own, or one of another size that says something else."""
    model = FakeModel(FakeConfig(vocab_size=vocab_size, max_context=256, block_size=4, depth=depth))
    if vocab_size != VOCAB:
        model.replace_weight("salt", 1)
    return DraftModel(model, BackendLimits(**{"num_cells": 4096, "max_seqs": 64} | limits))


def said_alone(request: Request) -> list[int]:
    """What a greedy request says on a fresh backend with nobody else."""
    return alone(tuple(request.tokens[: request.num_prompt]), 64)


def compute_all(found: Mapping[int, Candidate], *_: object) -> dict[int, int]:
    """Whatever it costs."""
    return {row: len(candidate.proposal.tokens) for row, candidate in found.items()}


def speculate(engine: EngineCore, proposer: Oracle) -> Oracle:
    """Let an engine compute all that this one proposes, within its budget."""
    engine.scheduler.speculation.use(proposer)
    verify_all(engine)
    return proposer


def verify_all(engine: EngineCore) -> None:
    """Let an engine compute all that is proposed to it, within its budget, and ask for as much as it can."""
    speculation = engine.scheduler.speculation

    def ask_all(_: str, requests: list[Request], *__: object) -> tuple[list[Request], list[int]]:
        return requests, [speculation._most(request) for request in requests]

    def within_budget(found: Mapping[int, Candidate], draft: object, price: object) -> dict[int, int]:
        left, counts = draft.budget, compute_all(found)  # type: ignore[attr-defined]
        for row, count in counts.items():
            counts[row] = min(count, left)
            left -= counts[row]
        return counts

    speculation.allot = within_budget  # type: ignore[method-assign]
    speculation._worth_drafting = ask_all  # type: ignore[assignment,method-assign]
    engine.scheduler.cost.price = lambda _: Price(1.0, CostLine())  # type: ignore[method-assign]
