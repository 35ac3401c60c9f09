"""`Scheduler`: one rule. Every request has a log and a number of computed tokens; each tick lets it catch up.

There is no prefill phase and no decode phase. A tick gives one token to every request that needs just one (it
decodes), then chunks to those that need more, then starts new ones, within the token budget, the rows and the KV.
Chunked prefill, prefix hits and resuming after preemption are consequences, not cases. `docs/scheduling.md` has the
whole story.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tokenmill.config import EngineConfig
from tokenmill.core import BAD_ROW, Batch, IntArray, Output
from tokenmill.engine.cost_model import CostModel
from tokenmill.engine.events import EventBus, Phase
from tokenmill.engine.kv_manager import KVManager
from tokenmill.engine.lifecycle import RequestState
from tokenmill.engine.plan import Draft, StepPlan
from tokenmill.engine.policies import Order
from tokenmill.engine.prefix import Match
from tokenmill.engine.queue import Deadlines, WaitingQueue
from tokenmill.engine.request import NO_ROW, Request
from tokenmill.engine.rows import RunningRows
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import FinishReason, GeneratedToken


class Scheduler:
    """Decides what runs; computes nothing. Owned by its engine core's thread."""

    def __init__(self, config: EngineConfig, kv: KVManager, max_model_len: int, events: EventBus) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self.rows = RunningRows(config.max_num_seqs)
        self.queue = WaitingQueue(config.max_queue, config.max_queue_tokens)
        self.order = Order(self.rows, config.max_wait_ticks)
        self.cost = CostModel()
        self.deadlines = Deadlines()
        self.requests: dict[str, Request] = {}
        """The ones that have not ended."""
        self.tick = 0
        self._arrivals = 0
        self._events = events
        self._outputs: list[GeneratedToken] = []

    # -- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. One that can't be taken ends at once, with `overload`."""
        if request.request_id in self.requests:
            raise InvalidRequest(f"request {request.request_id} is running already")
        check_length(request, self.max_model_len)
        self._arrivals += 1
        request.arrival, request.arrived_at, request.last_progress = self._arrivals, self._events.clock(), self.tick
        self.requests[request.request_id] = request
        self.order.enter(request)
        self._events.phase(request, Phase.QUEUED, self.tick)
        full = self.queue.why_full(request, self.rows.num_free)
        if full is not None:
            self.finish(request, FinishReason.OVERLOAD, error=full)
            return
        self.queue.add(request)
        if request.limits.timeout_s is not None:
            self.deadlines.set(request.arrived_at + request.limits.timeout_s, request, until_started=False)
        if self.config.queue_timeout_s is not None:
            self.deadlines.set(request.arrived_at + self.config.queue_timeout_s, request, until_started=True)

    def finish(
        self, request: Request, reason: FinishReason, token: int | None = None, error: str | None = None
    ) -> None:
        """End a request in whatever state it is: its KV is parked (dropped after an error), its caller is told."""
        row = request.row
        self.order.leave(request, row)
        if row != NO_ROW:
            seq = self.rows.detach(request)
            if reason is FinishReason.ERROR:
                self.kv.release(seq)
            else:
                self.kv.park(seq, request.tokens, request.hints.namespace, request.hints.owner)
        elif request in self.queue:
            self.queue.remove(request)
        request.finish(reason, error)
        del self.requests[request.request_id]
        self._outputs.append(GeneratedToken(request.request_id, token, reason, error))
        self._events.phase(request, Phase.ENDED, self.tick)

    def abandon_all(self, reason: FinishReason, error: str) -> None:
        """End every request without touching KV, which may be lost: for an engine that dies or closes."""
        for request in list(self.requests.values()):
            request.finish(reason, error)
            self._outputs.append(GeneratedToken(request.request_id, None, reason, error))
            self._events.phase(request, Phase.ENDED, self.tick)
        self.requests.clear()

    def take_outputs(self) -> list[GeneratedToken]:
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def expire(self) -> None:
        """End the requests whose time is up."""
        for request, until_started in self.deadlines.ringing(self._events.clock()):
            if not until_started:
                self.finish(request, FinishReason.TIMEOUT, error=f"not done after {request.limits.timeout_s} s")
            elif request.state is RequestState.WAITING:
                self.finish(request, FinishReason.TIMEOUT, error=f"not started after {self.config.queue_timeout_s} s")

    # -- the tick -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan one step: decode tokens first, then prefill chunks, then new requests. None if nothing can run."""
        self.tick += 1
        self.expire()
        draft = Draft(self.config.max_num_batched_tokens)
        owed = self.rows.owed()
        self._decode(draft, (owed == 1).nonzero()[0].astype(np.int32))
        self._prefill(draft, (owed > 1).nonzero()[0])
        if not draft.preempted:
            self._admit(draft)
        return self._seal(draft)

    def _decode(self, draft: Draft, rows: IntArray) -> None:
        """One token for each request that needs one; when KV is short, the last in order makes room for the others."""
        while len(rows) and not self._has_room_for_decodes(draft, rows):
            victim = self.order.sort(self.rows.running(), self.tick)[-1]
            rows = rows[rows != victim.row]
            self._preempt(victim)
            draft.preempted = True

    def _prefill(self, draft: Draft, rows: NDArray[np.intp]) -> None:
        """Chunks for running requests that are behind."""
        if not len(rows):
            return
        behind = self.order.sort([request for row in rows if (request := self.rows.requests[row])], self.tick)
        for place, request in enumerate(behind):
            if request.row == NO_ROW:  # made room for one before it
                continue
            count = self._chunk(draft, request, int(self.rows.num_computed[request.row]))
            if count == 0:
                return
            cells = self.kv.cells_for(count)
            if self._make_room_before(draft, cells, behind[place + 1 :]):
                draft.give_chunk(request.row, count, cells, int(self.rows.num_computed[request.row]))

    def _admit(self, draft: Draft) -> None:
        """Start waiting requests, first ones first; the first that does not fit stops the others."""
        if not self.rows.num_free or not len(self.queue):
            return
        for request in self.order.sort(self.queue, self.tick):
            tokens = request.token_array()
            match = self.kv.match(tokens, request.hints.namespace)
            if self._is_worth_waiting(request, match):
                continue
            if not self._chunk(draft, request, match.length) or not self._start(draft, request, tokens, match):
                return
            if not self.rows.num_free:
                return

    # -- parts of the tick --------------------------------------------------------------------------------------------

    def _make_room_before(self, draft: Draft, cells: int, later: list[Request]) -> bool:
        """Room for a chunk: evict parked KV, then preempt those behind it in order. Never one that decodes."""
        while not self.kv.make_room(draft.cells + cells):
            victims = [request for request in later if request.row != NO_ROW]
            if not victims:
                return False
            self._preempt(victims[-1])
            draft.preempted = True
        return True

    def _has_room_for_decodes(self, draft: Draft, rows: IntArray) -> bool:
        """Promise cells to the rows if they can be had, evicting parked KV; the exact need is asked only when tight."""
        cells = len(rows) * self.kv.cells_for(1)
        if self.kv.free() < cells:
            cells = self.kv.needed(self._decode_batch(rows))
            if not self.kv.make_room(cells):
                return False
        draft.give_decodes(rows, cells, float(self.rows.num_computed[rows].sum()))
        return True

    def _chunk(self, draft: Draft, request: Request, num_computed: int) -> int:
        """How many tokens the request gets now: what it needs, within its quota, the chunk size and the budget."""
        count = min(len(request.tokens) - num_computed, draft.budget)
        if request.limits.max_tokens_per_step is not None:
            count = min(count, request.limits.max_tokens_per_step)
        if len(draft.decodes):
            fits = self.cost.largest_chunk(draft, num_computed, self.config.target_tick_ms / 1000)
            count = min(count, self.config.prefill_chunk, fits)
        return count

    def _is_worth_waiting(self, request: Request, match: Match) -> bool:
        """Is a neighbour computing this request's prefix right now? Then it is cheaper to wait for it (G19)."""
        saved = match.coming - match.length
        return saved >= max(1, self.config.min_shared_prefix) and not self.order.is_aged(request, self.tick)

    def _start(self, draft: Draft, request: Request, tokens: IntArray, match: Match) -> bool:
        """Give a waiting request a sequence, a row and its first chunk; False if there is no room for it."""
        remaining = self.kv.cells_for(len(tokens) - match.length)
        margin = self.config.admission_margin * self.kv.kv.block_size * self.rows.num_running
        promised = draft.cells + self._cells_owed(draft)
        if not self.kv.make_room(promised + remaining + margin, keep=match.entry):
            if self.rows.num_running:
                return False
            match = Match()
            self.kv.evict_all()
        leased = self._lease(request, match)
        if leased is None:
            return False
        seq, num_computed = leased
        self.queue.remove(request)
        first_time = request.state is RequestState.WAITING
        request.become(RequestState.RUNNING)
        row = self.rows.attach(request, seq, num_computed, request.max_tokens(self.max_model_len), self.tick)
        if first_time:
            request.num_cached = num_computed
        self.order.started(request, self.tick)
        self.kv.announce(seq, tokens, request.hints.namespace, self._computed_in(row))
        self._events.phase(request, Phase.PREFILL, self.tick)
        count = self._chunk(draft, request, num_computed)
        if count:
            draft.give_chunk(row, count, self.kv.cells_for(count), num_computed)
        return True

    def _lease(self, request: Request, match: Match) -> tuple[int, int] | None:
        """A sequence for the request, with as much of its prefix as can be had: (sequence, tokens)."""
        source = self.requests.get(request.hints.fork_of or "")
        if source is not None and source.row != NO_ROW:
            length = min(int(self.rows.num_computed[source.row]), len(source.tokens), len(request.tokens) - 1)
            if length > match.length and source.tokens[:length] == request.tokens[:length]:
                seq = self.kv.fork(int(self.rows.seq[source.row]), length)
                if seq is not None:
                    return seq, length
        return self.kv.start(match, request.hints.owner)

    def _preempt(self, request: Request) -> None:
        """Take the row away. Its KV is parked: evicted first if cells are short, found again if they are not."""
        self.order.settle(request, request.row)
        seq = self.rows.detach(request)
        self.kv.park(seq, request.tokens, request.hints.namespace, request.hints.owner)
        request.become(RequestState.PREEMPTED)
        request.num_preemptions += 1
        request.last_progress = self.tick
        self.queue.add(request)
        self._events.phase(request, Phase.PREEMPTED, self.tick)

    def _cells_owed(self, draft: Draft) -> int:
        """Cells that running requests still need for their prompts, beyond this step."""
        owed = self.rows.owed()
        behind = np.flatnonzero(owed > 1)
        return sum(self.kv.cells_for(int(owed[row]) - draft.chunks.get(int(row), 0)) for row in behind)

    def _computed_in(self, row: int) -> Callable[[], int]:
        return lambda: int(self.rows.num_computed[row])

    # -- plans --------------------------------------------------------------------------------------------------------

    def _seal(self, draft: Draft) -> StepPlan | None:
        """Turn the draft into arrays and count its tokens as computed."""
        if draft.num_tokens == 0:
            return None
        rows, decodes = self.rows, draft.decodes
        all_rows = sampled = decodes
        counts = np.ones_like(decodes)
        batch = self._decode_batch(decodes) if len(decodes) else None
        if batch is None or draft.chunks:
            batch, completed = self._with_chunks(batch, draft.chunks)
            all_rows = np.concatenate([decodes, np.fromiter(draft.chunks, np.int32)])
            counts = np.concatenate([counts, np.fromiter(draft.chunks.values(), np.int32)])
            sampled = np.concatenate([decodes, np.array(completed, dtype=np.int32)])
        plan = StepPlan(
            tick=self.tick,
            batch=batch,
            rows=all_rows,
            leases=rows.lease[all_rows],
            counts=counts,
            sampled_rows=sampled,
            sampled_leases=rows.lease[sampled],
            num_decode=len(decodes),
            attention=draft.attention,
        )
        rows.submit(plan)
        return plan

    def _with_chunks(self, decodes: Batch | None, chunks: dict[int, int]) -> tuple[Batch, list[int]]:
        """The decode tokens, then the chunks; and the rows whose last known token is among them: they get a new one."""
        rows = self.rows
        tokens, pos, seqs, output = [], [], [], []
        completed = []
        if decodes is not None:
            tokens, pos, seqs, output = [decodes.token], [decodes.pos], [decodes.seq_ids], [decodes.output]
        for row, count in chunks.items():
            request, begin = rows.requests[row], int(rows.num_computed[row])
            assert request is not None
            tokens.append(np.array(request.tokens[begin : begin + count], dtype=np.int32))
            pos.append(np.arange(begin, begin + count, dtype=np.int32))
            seqs.append(np.full((count, 1), rows.seq[row], dtype=np.int32))
            flags = np.zeros(count, dtype=np.uint8)
            if begin + count == rows.num_tokens[row]:
                flags[-1] = Output.LOGITS
                completed.append(row)
            output.append(flags)
        batch = Batch(
            token=np.concatenate(tokens),
            pos=np.concatenate(pos),
            seq_ids=np.concatenate(seqs),
            output=np.concatenate(output),
        )
        return batch, completed

    def _decode_batch(self, rows: IntArray) -> Batch:
        ones = np.ones(len(rows), dtype=np.uint8)
        positions = self.rows.num_computed[rows]
        return Batch(
            token=self.rows.input_tokens(rows), pos=positions, seq_ids=self.rows.seq[rows][:, None], output=ones
        )

    def plan_alone(self, request: Request, count: int) -> StepPlan | None:
        """A step for one running request only, to find out whether it is the one that fails."""
        if request.row == NO_ROW:
            return None
        self.tick += 1
        draft = Draft(count)
        num_computed = int(self.rows.num_computed[request.row])
        count = min(count, len(request.tokens) - num_computed)
        if count <= 0 or not self.kv.make_room(self.kv.cells_for(count)):
            return None
        draft.give_chunk(request.row, count, 0, num_computed)
        return self._seal(draft)

    # -- results ------------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, ids: IntArray) -> None:
        """Give the sampled tokens to their requests, and end those that are complete."""
        rows, ids = self.rows.settle(plan, ids)
        full = (self.rows.num_tokens[rows] >= self.rows.limit[rows]).tolist()
        if self.rows.fresh[rows].any():
            self._note_first_tokens(rows)
        requests, outputs = self.rows.requests, self._outputs
        for row, token, is_full in zip(rows.tolist(), ids.tolist(), full, strict=True):
            request = requests[row]
            assert request is not None
            if token == BAD_ROW:
                self.finish(request, FinishReason.ERROR, error="the model gave logits that are not finite")
                continue
            request.tokens.append(token)
            if (
                token in request.limits.stop_ids
                and len(request.tokens) - request.num_prompt > request.limits.min_new_tokens
            ):
                self.finish(request, FinishReason.STOP, token)
            elif is_full:
                self.finish(request, FinishReason.LENGTH, token)
            else:
                outputs.append(GeneratedToken(request.request_id, token))

    def undo(self, plan: StepPlan) -> None:
        """The step could not be submitted: its tokens are to be computed again."""
        self.rows.undo(plan)

    def resync(self) -> None:
        """Steps in flight were lost: what has been computed is what KV memory holds, and no token is pending."""
        for request in self.rows.running():
            self.rows.num_computed[request.row] = self.kv.length(int(self.rows.seq[request.row]))
            self.rows.pending[request.row] = 0
        self.kv.resync()

    def _note_first_tokens(self, rows: IntArray) -> None:
        for row in rows[self.rows.fresh[rows]]:
            request = self.rows.requests[row]
            if request is not None:
                self._events.phase(request, Phase.DECODE, self.tick)
        self.rows.fresh[rows] = False


def check_length(request: Request, max_model_len: int) -> None:
    """Raise `InvalidRequest` unless the prompt leaves room for a token. Safe on any thread."""
    longest = min(max_model_len, request.limits.max_context or max_model_len)
    if request.num_prompt >= longest:
        raise InvalidRequest(
            f"the prompt has {request.num_prompt} tokens; the context of {longest} has no room for a new one"
        )
