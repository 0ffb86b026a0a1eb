"""One synchronous step after another: admit, load, run one forward, sample, publish, finish.

Owns the sequences of a worker, their slots, and the order of things in a step. Does not know HTTP, threads of its own,
or what a prefill's and a decode's events look like (a ``Role`` does). Everything that touches slots or tensors runs on
the one thread that calls ``step``; ``submit``, ``cancel`` and the results of fetches arrive through a bounded inbox.

    waiting -> loading -> running -> finishing -> ended         cancel and failure end a sequence from anywhere
       ^_____________________|  preempted: the youngest gives its slots to an older one, and is fetched anew

Invariants (``check_integrity``): used slots are exactly those of live sequences; a waiting, finishing or ended sequence
holds none; a sequence is in one place only. No starvation: arrival order decides, and a request that could not fit
alone is refused at ``submit``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvstore.keys import TokenChain
from kvstore.limits import STATE_BYTES_MAX
from kvstore.traffic import TrafficClass
from workers.batch import Slice
from workers.errors import Rejected
from workers.fetch import Fetched, Fetcher
from workers.layout import BadPayload
from workers.plan import REASON_OFF, cold_plan
from workers.protocol import Fidelity, Load, Sampling, WorkerFailure
from workers.publish import Publisher
from workers.scheduler import SAMPLES_MAX, Attention, CostModel, Limits, Sample, Wanting, fit_cost, schedule
from workers.sequence import LiveSequence, Place
from workers.slots import OutOfSlots, Slots, SlotTable

REASON_BAD = "quarantined"
"""A state or block whose bytes were verified but are not of this worker's layout."""


class Memory(Protocol):
    """The KV memory's way in and out (``workers/layout.py``)."""

    def export_block(self, table: SlotTable, block_index: int, out: memoryview) -> None: ...
    def import_block(self, table: SlotTable, block_index: int, payload: memoryview) -> None: ...
    def export_state(self, table: SlotTable, position: int, window_floor: int) -> bytes: ...
    def import_state(self, table: SlotTable, position: int, payload: memoryview, position_stored: int) -> int: ...


class Forward(Protocol):
    """The model's part of a step (``workers/model.py``): rows of logits in slice order; an exact replay in pieces."""

    def forward(self, memory: Any, slices: Sequence[Slice]) -> Any: ...
    def triangular_steps(
        self, memory: Any, tokens: Sequence[int], table: SlotTable, position: int, chunk_tokens: int
    ) -> Iterator[int]: ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Numbers that the engine goes by; sizes in bytes and tokens, times in seconds.

    ``requests_max``: requests in the engine at once, waiting ones included; the next is refused with 503.
    ``settle_deadline_s``: how long the last event waits for the store's acknowledgements.
    """

    limits: Limits
    attention: Attention
    block_tokens: int
    block_payload_bytes: int
    context_tokens: int
    vocabulary: int
    fidelity: Fidelity = "bounded"
    requests_max: int = 256
    fetches_max: int = 4
    settle_deadline_s: float = 2.0
    retry_after_s: float = 1.0


@dataclass(slots=True)
class EngineCounts:
    """Counters, written on the engine's thread only."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    cancelled: int = 0
    failed: int = 0
    imports_failed: int = 0


Observer = Callable[[LiveSequence, str], None]
"""Told of every sequence that ended: "finished", "cancelled" or "failed"."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine works with, finished by whoever composes it."""

    model: Forward
    memory: Memory
    slots: Slots
    choose: Callable[[Any, Sampling, int], int]
    fetcher: Fetcher
    publisher: Publisher
    fetch_pool: Executor


class Engine:
    """The sequences of one worker. See the module for what runs on which thread."""

    def __init__(
        self,
        parts: Parts,
        settings: EngineSettings,
        *,
        observe: Observer = lambda sequence, outcome: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._observe = observe
        self._monotonic_s = monotonic_s
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._in_flight = 0
        self._arrivals = 0
        self._waiting: list[LiveSequence] = []
        self._loading: list[LiveSequence] = []
        self._running: list[LiveSequence] = []
        self._finishing: list[LiveSequence] = []
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._cost = CostModel()
        self.counts = EngineCounts()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, sequence: LiveSequence) -> None:
        """Take a request. Raises Rejected: 400 when it can never be served, 503 when too many are in flight."""
        self._check_size(sequence)
        with self._wake:
            if self._in_flight >= self._settings.requests_max:
                raise Rejected(
                    503,
                    f"the worker has {self._in_flight} requests, which is its limit: try another worker, or later",
                    code="busy",
                    retry_after_s=self._settings.retry_after_s,
                )
            self._in_flight += 1
            sequence.submitted_s = self._monotonic_s()
        self._post(lambda: self._arrive(sequence))

    def cancel(self, sequence: LiveSequence) -> None:
        """Forget a request and free its slots; harmless when it has ended."""
        self._post(lambda: self._cancel(sequence))

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives in the inbox, or the timeout."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._inbox), timeout=timeout_s)

    def wake(self) -> None:
        """End a ``wait``."""
        self._post(lambda: None)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def cost(self) -> CostModel:
        """The fitted cost of a step."""
        return self._cost

    def compute_s(self, tokens: int) -> float:
        """Seconds that computing the first ``tokens`` tokens of a prompt would take; 0 while unknown."""
        cost, chunk = self._cost, self._settings.limits.chunk_tokens
        if not cost.known:
            return 0.0
        return cost.seconds(tokens, self._settings.attention.pairs(0, tokens)) + cost.base_s * (tokens // chunk)

    def load(self, *, draining: bool = False) -> Load:
        """The load now; read without a lock, so one step's figures may mix."""
        waiting, running = list(self._waiting) + list(self._loading), list(self._running)
        pairs = self._settings.attention.pairs
        slots = self._parts.slots
        return Load(
            running=len(running) + len(self._finishing),
            waiting=max(self._in_flight - len(running) - len(self._finishing), 0),
            queued_pairs=sum(pairs(0, len(item.tokens)) for item in waiting)
            + sum(pairs(item.computed, item.remaining) for item in running),
            kv_tokens=slots.total_tokens - slots.free_tokens,
            kv_tokens_max=slots.total_tokens,
            draining=draining,
        )

    # --- on the engine's thread ---------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do what can be done now, one forward at most. False: nothing ran, so ``wait`` is in order."""
        self._read_inbox()
        self._settle_late()
        self._start_loads()
        replaying = self._replay_one()
        return self._run(replaying=replaying) or replaying

    def idle_s(self) -> float:
        """How long a ``wait`` may last before a deadline needs the next step."""
        now_s = self._monotonic_s()
        return min((max(0.0, item.settle_by_s - now_s) for item in self._finishing), default=1.0)

    def run_until_idle(self, timeout_s: float) -> None:
        """Step until no request is left, for tests and benches. Raises TimeoutError."""
        until_s = time.monotonic() + timeout_s
        while self._in_flight or self._inbox:
            if not self.step() and self._in_flight:
                self.wait(min(self.idle_s(), 0.05))
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self._in_flight} requests are still in the engine after {timeout_s} s")

    def fail_all(self, message: str) -> None:
        """End every sequence with a retryable failure, after a fault of the model or the machine."""
        self._read_inbox()
        for sequence in self._everybody():
            self._fail(sequence, "internal", message, retryable=True)

    def check_integrity(self) -> None:
        """Assert the module's invariants."""
        slots = self._parts.slots
        slots.check_integrity()
        holding = self._loading + self._running
        held = sum(sequence.table.tokens for sequence in holding if sequence.table is not None)
        assert held + slots.free_tokens == slots.total_tokens, "a slot is lost, or is held by nobody"
        assert all(sequence.table is None for sequence in self._waiting + self._finishing), "slots held while waiting"
        assert len({id(sequence) for sequence in self._everybody()}) == len(self._everybody()), "in two places"

    def _everybody(self) -> list[LiveSequence]:
        return [*self._waiting, *self._loading, *self._running, *self._finishing]

    # --- arrival ------------------------------------------------------------------------------------------------------

    def _check_size(self, sequence: LiveSequence) -> None:
        total = len(sequence.tokens) + sequence.generate_max
        settings = self._settings
        if total > settings.context_tokens:
            raise Rejected(
                400,
                f"{len(sequence.tokens)} tokens and {sequence.generate_max} to generate are more than the model's "
                f"context of {settings.context_tokens} tokens: shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
            )
        if total > self._parts.slots.total_tokens:
            raise Rejected(
                400,
                f"{total} tokens do not fit the worker's KV memory of {self._parts.slots.total_tokens} tokens: "
                f"shorten the prompt, or give the worker more --kv-memory",
                code="context_length_exceeded",
            )
        if max(sequence.tokens) >= settings.vocabulary:
            raise Rejected(
                400,
                f"a token id is outside the model's vocabulary of {settings.vocabulary}: was another tokenizer used?",
                code="unknown_token",
            )

    def _post(self, call: Callable[[], None]) -> None:
        """Bound of the inbox: a few calls a request in flight, which ``requests_max`` bounds."""
        with self._wake:
            self._inbox.append(call)
            self._wake.notify_all()

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _arrive(self, sequence: LiveSequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._queue(sequence)

    def _queue(self, sequence: LiveSequence) -> None:
        sequence.place = Place.WAITING
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda item: item.arrival)

    # --- loading ------------------------------------------------------------------------------------------------------

    def _start_loads(self) -> None:
        """Give slots to who waits, in order, and fetch; whoever does not fit holds up those behind."""
        slots = self._parts.slots
        while self._waiting and len(self._loading) < self._settings.fetches_max:
            sequence = self._waiting[0]
            spare = len(self._running) * self._settings.block_tokens  # room to grow by a block each
            alone = not self._running and not self._loading
            if len(sequence.tokens) + (0 if alone else spare) > slots.free_tokens:
                return
            try:
                sequence.table = slots.allocate(len(sequence.tokens))
            except OutOfSlots:
                return
            self._waiting.pop(0)
            sequence.place = Place.LOADING
            self._loading.append(sequence)
            if sequence.request.cache:
                self._fetch(sequence)
            else:
                self._begin(sequence, Fetched(cold_plan(len(sequence.tokens), reason=REASON_OFF, publish=False)))

    def _fetch(self, sequence: LiveSequence) -> None:
        """Hash and fetch on the pool; the result comes back through the inbox."""
        tokens, chain, table = list(sequence.tokens), sequence.chain, sequence.table
        fidelity = sequence.request.fidelity or self._settings.fidelity

        def work() -> None:
            known = chain or TokenChain(sequence.space.id, self._settings.block_tokens, tokens)
            fetched = self._parts.fetcher.fetch(sequence.space, known, fidelity)
            self._post(lambda: self._loaded(sequence, table, known, fetched))

        future = self._parts.fetch_pool.submit(work)
        future.add_done_callback(lambda done: self._fetch_died(sequence, table, done.exception()))

    def _fetch_died(self, sequence: LiveSequence, table: SlotTable | None, error: BaseException | None) -> None:
        """A fetch never raises; if it does all the same, the request is answered with a failure, not left to hang."""

        def fail() -> None:
            if sequence.table is table:
                self._fail(sequence, "internal", f"the fetch broke: {error!r}", retryable=True)

        if error is not None:
            self._post(fail)

    def _loaded(self, sequence: LiveSequence, table: SlotTable | None, chain: TokenChain, fetched: Fetched) -> None:
        if sequence.place is not Place.LOADING or sequence.table is not table:
            return  # cancelled meanwhile
        sequence.chain = chain
        began_s = self._monotonic_s()
        try:
            self._import(sequence, fetched)
        except BadPayload:  # verified bytes that are not this layout's: computed instead
            self.counts.imports_failed += 1
            fetched = replace(fetched, plan=cold_plan(len(sequence.tokens), reason=REASON_BAD), blocks=(), state=None)
            sequence.window_floor = 0
        sequence.load_s += fetched.load_s + self._monotonic_s() - began_s
        self._begin(sequence, fetched)

    def _import(self, sequence: LiveSequence, fetched: Fetched) -> None:
        plan, table, memory = fetched.plan, sequence.table, self._parts.memory
        assert table is not None
        sequence.window_floor = plan.window_floor
        if plan.state is not None and fetched.state is not None:
            floor = memory.import_state(table, plan.compute_start, memoryview(fetched.state), plan.state.position)
            sequence.window_floor = max(sequence.window_floor, floor)
        for index, payload in enumerate(fetched.blocks):
            memory.import_block(table, index, memoryview(payload))

    def _begin(self, sequence: LiveSequence, fetched: Fetched) -> None:
        plan = fetched.plan
        self._loading.remove(sequence)
        sequence.plan = plan
        sequence.account(replace(fetched, blocks=(), state=None))
        sequence.computed = plan.boundary if plan.triangular else plan.compute_start
        if plan.triangular:
            assert sequence.table is not None
            sequence.replay = self._parts.model.triangular_steps(
                self._parts.memory, sequence.tokens, sequence.table, plan.boundary, self._settings.limits.chunk_tokens
            )
        sequence.next_publish = plan.publish_from
        if plan.publish and sequence.ticket is None:
            traffic_class = TrafficClass(sequence.request.traffic_class)
            sequence.ticket = self._parts.publisher.ticket(sequence.space, traffic_class)
        if sequence.ticket and sequence.chain and plan.publish_from and not sequence.generated:
            self._parts.publisher.offer_touch(sequence.ticket, sequence.chain.names[: plan.publish_from])
        sequence.place = Place.RUNNING
        self._running.append(sequence)
        self._running.sort(key=lambda item: item.arrival)

    # --- running ------------------------------------------------------------------------------------------------------

    def _replay_one(self) -> bool:
        """One piece of one sequence's exact replay; beside it decodes and short prefills run in this step."""
        for sequence in self._running:
            if sequence.replay is not None:
                began_s = self._monotonic_s()
                if next(sequence.replay, None) is None:
                    sequence.replay = None
                sequence.compute_s += self._monotonic_s() - began_s
                return True
        return False

    def _run(self, *, replaying: bool) -> bool:
        """One forward over what the scheduler grants."""
        self._make_room()
        settings = self._settings
        most = settings.limits.chunk_tokens if replaying else settings.context_tokens
        ready = [item for item in self._running if item.replay is None and item.remaining <= most]
        wanting = [Wanting(item.computed, item.remaining, item.decoding) for item in ready]
        grants = schedule(wanting, settings.limits, settings.attention, self._cost)
        work = [(item, count) for item, count in zip(ready, grants, strict=True) if count]
        if not work:
            return False
        slices = [self._slice(item, count) for item, count in work]
        began_s = self._monotonic_s()
        rows = self._parts.model.forward(self._parts.memory, slices)
        chosen = self._choose(work, rows)
        self._measure(work, self._monotonic_s() - began_s)
        for (sequence, count), token in zip(work, chosen, strict=True):
            self._advance(sequence, count, token)
        return True

    def _make_room(self) -> None:
        """A slot for every decode's next token; the youngest gives way when there is none."""
        for sequence in list(self._running):
            while sequence.place is Place.RUNNING and sequence.table is not None:
                if sequence.table.tokens >= len(sequence.tokens):
                    break
                try:
                    self._parts.slots.extend(sequence.table, len(sequence.tokens))
                except OutOfSlots:
                    self._preempt(self._running[-1])

    def _preempt(self, sequence: LiveSequence) -> None:
        self._leave(sequence)
        self.counts.preemptions += 1
        self._queue(sequence)

    def _slice(self, sequence: LiveSequence, count: int) -> Slice:
        plan = sequence.plan
        assert plan is not None and sequence.table is not None
        start = sequence.computed
        return Slice(
            tokens=sequence.tokens[start : start + count],
            start=start,
            table=sequence.table,
            write_floor=plan.write_floor,
            window_floor=sequence.window_floor,
            logits="last" if count == sequence.remaining else "none",
        )

    def _choose(self, work: Sequence[tuple[LiveSequence, int]], rows: Any) -> list[int | None]:
        """The next token of each sequence whose last row came out; -1 where the logits were not numbers."""
        chosen: list[int | None] = []
        row = 0
        for sequence, count in work:
            if count != sequence.remaining:
                chosen.append(None)
                continue
            try:
                token = self._parts.choose(rows[row], sequence.request.sampling, len(sequence.tokens))
            except ValueError:
                token = -1
            chosen.append(token)
            row += 1
        return chosen

    def _measure(self, work: Sequence[tuple[LiveSequence, int]], seconds: float) -> None:
        pairs = self._settings.attention.pairs
        tokens = sum(count for _, count in work)
        self._samples.append(Sample(tokens, sum(pairs(item.computed, count) for item, count in work), seconds))
        for sequence, count in work:
            sequence.compute_s += seconds * count / tokens
        self.counts.steps += 1
        self.counts.tokens_computed += tokens
        if self.counts.steps % 8 == 0:
            self._cost = fit_cost(list(self._samples))

    def _advance(self, sequence: LiveSequence, count: int, token: int | None) -> None:
        sequence.computed += count
        if token is not None and token < 0:
            self._fail(sequence, "model_fault", "the model's logits are not numbers", retryable=False)
            return
        if token is not None:
            sequence.tokens.append(token)
            sequence.generated += 1
            self.counts.tokens_generated += 1
            if sequence.generated == 1:
                sequence.account_queued(self._monotonic_s())
            if sequence.chain is not None:
                sequence.chain.append([token])
            sequence.role.token_chosen(sequence, token)
        self._publish_blocks(sequence)
        if token is not None and (sequence.generated >= sequence.generate_max or token in sequence.stop_token_ids):
            sequence.end_reason = "stop" if token in sequence.stop_token_ids else "length"
            self._finish(sequence)

    # --- publishing and the end ---------------------------------------------------------------------------------------

    def _publish_blocks(self, sequence: LiveSequence) -> None:
        """Copy out and offer every block whose KV is complete; the last chosen token has none yet."""
        plan, ticket, table = sequence.plan, sequence.ticket, sequence.table
        if plan is None or ticket is None or table is None or not plan.publish or sequence.chain is None:
            return
        while sequence.next_publish < sequence.computed // self._settings.block_tokens:
            index = sequence.next_publish
            payload = bytearray(self._settings.block_payload_bytes)
            self._parts.memory.export_block(table, index, memoryview(payload))
            self._parts.publisher.offer_block(
                ticket, sequence.chain.names[index], self._settings.block_tokens, payload, plan.publish_flags
            )
            sequence.next_publish += 1

    def _finish(self, sequence: LiveSequence) -> None:
        """Offer the state at the end, free the slots, and wait (without blocking) for the acknowledgements."""
        plan, ticket, table = sequence.plan, sequence.ticket, sequence.table
        assert plan is not None and table is not None
        if ticket is not None and plan.publish and sequence.chain is not None:
            payload = self._parts.memory.export_state(table, sequence.computed, sequence.window_floor)
            if len(payload) <= STATE_BYTES_MAX:
                name = sequence.chain.state_name(sequence.computed)
                self._parts.publisher.offer_state(ticket, name, payload, plan.publish_flags)
        self._leave(sequence)
        sequence.place = Place.FINISHING
        sequence.settle_by_s = self._monotonic_s() + self._settings.settle_deadline_s
        self._finishing.append(sequence)
        if ticket is None:
            self._end(sequence, "finished", published=False)
        else:
            self._parts.publisher.when_settled(ticket, lambda: self._post(lambda: self._settled(sequence)))

    def _settled(self, sequence: LiveSequence) -> None:
        if sequence.place is Place.FINISHING and sequence.ticket is not None:
            self._end(sequence, "finished", published=sequence.ticket.published)

    def _settle_late(self) -> None:
        now_s = self._monotonic_s()
        for sequence in list(self._finishing):
            if now_s >= sequence.settle_by_s:
                self._end(sequence, "finished", published=False)

    def _cancel(self, sequence: LiveSequence) -> None:
        if sequence.place is not Place.ENDED:
            self.counts.cancelled += 1
            self._end(sequence, "cancelled", published=False)

    def _fail(self, sequence: LiveSequence, code: str, message: str, *, retryable: bool) -> None:
        if sequence.place is Place.ENDED:
            return
        self.counts.failed += 1
        self._end(sequence, "failed", published=False)
        sequence.emit(WorkerFailure(code=code, message=message, retryable=retryable))

    def _end(self, sequence: LiveSequence, outcome: str, *, published: bool) -> None:
        self._leave(sequence)
        if sequence.ticket is not None:
            self._parts.publisher.abandon(sequence.ticket)
        sequence.place = Place.ENDED
        if not sequence.generated:
            sequence.account_queued(self._monotonic_s())
        with self._wake:
            self._in_flight -= 1
        self._observe(sequence, outcome)
        if outcome == "finished":
            sequence.role.ended(sequence, published)

    def _leave(self, sequence: LiveSequence) -> None:
        """Take a sequence out of its place and give back its slots."""
        for place in (self._waiting, self._loading, self._running, self._finishing):
            if sequence in place:
                place.remove(sequence)
        sequence.replay = None
        if sequence.table is not None:
            self._parts.slots.free(sequence.table)
            sequence.table = None
