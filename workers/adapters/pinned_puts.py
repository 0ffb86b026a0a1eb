"""Puts straight from memory that an engine holds still until it hears how they ended.

Owns the queue of such jobs, the threads that put them, and when new ones are shed. Does not know any engine. Used
by one thread of the engine; nothing there waits but ``drain`` and ``close``. Invariants: every job that was taken is
reported exactly once, and its memory is not read after that; jobs never hold more than ``held_bytes_max`` together (one
that comes when none is there is taken whatever its size); what is stored already is not sent again but touched; while a
store is full or gone, jobs are shed at once, since memory that is held is memory that the engine lacks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import StoreError
from kvstore.keys import BlockName, opaque_name
from kvstore.limits import LOOKUP_KEYS_MAX, MIB
from kvstore.store import BlockPut, Presence, PutOutcome
from kvstore.traffic import TrafficClass
from workers.adapters.attachment import Attachment
from workers.publish import ACKNOWLEDGED
from workers.spaces import TenantSpace

PUT_THREADS = 2
"""One prepares what it sends while the store writes what the other sent."""
PUT_DEADLINE_S = 5.0
PUT_BYTES_MAX = 256 * MIB
"""Payload of one call, for which the deadline above holds."""
BLOCKS_MAX = 1024
"""Blocks of small jobs that go in one call."""
TOUCHES_MAX = 1024
"""Touches that wait; the oldest is dropped, and its blocks keep the promise that they had."""
PAUSE_S_MIN = 1.0
PAUSE_S_MAX = 30.0
"""After a put was refused or failed, new jobs are shed for so long, twice as long each time until one is taken."""

_SETTLED = (*ACKNOWLEDGED, PutOutcome.DECLINED, PutOutcome.TOO_LARGE)
"""Nothing is gained by waiting before the next put."""


@dataclass(frozen=True, slots=True)
class PutJob:
    """Blocks of one space and class, each in memory that the engine holds. ``number``: what the engine calls the job.

    ``row(at)`` is the payload of the block at this position; it is asked for on the thread that puts.
    """

    number: int
    space: TenantSpace
    traffic_class: TrafficClass
    keys: Sequence[bytes]
    row: Callable[[int], memoryview]
    block_tokens: int
    block_bytes: int

    @property
    def size(self) -> int:
        return len(self.keys) * self.block_bytes


@dataclass(frozen=True, slots=True)
class PutResult:
    """How a job ended. ``done``: every block is stored, was there already, or is not wanted by its class.

    ``tried``: the store was asked; a job that is not done and was not tried was shed.
    """

    number: int
    done: bool
    tried: bool = False
    seconds: float = 0.0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Touch:
    space: TenantSpace
    traffic_class: TrafficClass
    keys: Sequence[bytes]


class PinnedPuts:
    """Make, then ``start``; ``close`` says whether the memory may go."""

    def __init__(
        self,
        attachment: Attachment,
        *,
        held_bytes_max: int,
        threads: int = PUT_THREADS,
        put_deadline_s: float = PUT_DEADLINE_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attachment = attachment
        self._held_bytes_max = held_bytes_max
        self._put_deadline_s = put_deadline_s
        self._monotonic_s = monotonic_s
        self._jobs: deque[PutJob] = deque()
        self._touches: deque[_Touch] = deque(maxlen=TOUCHES_MAX)
        self._finished: deque[PutResult] = deque()
        self._held_bytes = 0
        self._running = 0
        self._pause_s = 0.0
        self._paused_until_s = 0.0
        self._closing = False
        self._hurry = False
        """Somebody waits for the memory: what is begun ends with the call that is under way."""
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"reprise-put-{number}", daemon=True) for number in range(threads)
        ]
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    # --- on the engine's thread ---------------------------------------------------------------------------------------

    def offer(self, job: PutJob) -> None:
        """Take a job, or shed it; either way ``finished`` will tell."""
        with self._changed:
            full = self._held_bytes and self._held_bytes + job.size > self._held_bytes_max
            if full or self._closing or self._monotonic_s() < self._paused_until_s:
                self._shed(job)
                return
            self._jobs.append(job)
            self._held_bytes += job.size
            self._changed.notify_all()

    @property
    def has_room(self) -> bool:
        """Whether what was shed before may come again: the store takes blocks, and half of the bound is free."""
        with self._changed:
            paused = self._closing or self._monotonic_s() < self._paused_until_s
            return not paused and 2 * self._held_bytes <= self._held_bytes_max

    def touch(self, space: TenantSpace, traffic_class: TrafficClass, keys: Sequence[bytes]) -> None:
        """Count a use of blocks by a class, some time soon."""
        with self._changed:
            self._touches.append(_Touch(space, traffic_class, keys))
            self._changed.notify_all()

    def finished(self) -> list[PutResult]:
        """How jobs ended since the last call."""
        results = []
        while self._finished:
            results.append(self._finished.popleft())
        return results

    def take_counts(self) -> Counter[str]:
        """Blocks by what became of them, since the last call."""
        if not self._counts:
            return Counter()
        with self._changed:
            counts, self._counts = self._counts, Counter()
        return counts

    def drain(self, deadline_s: float) -> None:
        """Wait until no job is left. What is not begun by the deadline is shed; what is begun ends by its own."""
        with self._changed:
            if self._changed.wait_for(self._idle, timeout=deadline_s):
                return
            self._hurry = True
            self._shed_all()
            self._changed.wait_for(self._idle)  # as long as one call: memory that is still read must not be reused
            self._hurry = False

    def close(self, deadline_s: float) -> bool:
        """Take no more; put what waits, within the deadline. False: memory of a job is still in use."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if not self._changed.wait_for(self._idle, timeout=deadline_s):
                self._hurry = True
                self._shed_all()
            self._touches.clear()
        for thread in self._threads:
            thread.join(self._put_deadline_s + 1.0)
        return not any(thread.is_alive() for thread in self._threads)

    # --- on the threads that put --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._jobs or self._touches or self._closing)
                    jobs = self._take()
                    touch = None if jobs or not self._touches else self._touches.popleft()
                if jobs:
                    self._put(jobs)
                elif touch is not None:
                    names = [opaque_name(touch.space.id, key) for key in touch.keys[:LOOKUP_KEYS_MAX]]
                    self._count_use(touch.space, touch.traffic_class, names)
                else:
                    return
        finally:  # also of a fault of ours: nobody then waits for a thread that is gone
            with self._changed:
                self._closing = True
                self._shed_all()

    def _take(self) -> list[PutJob]:
        """The next jobs that can go in one call; small ones of one space and class go together."""
        jobs: list[PutJob] = []
        size = blocks = 0
        while self._jobs:
            job = self._jobs[0]
            size, blocks = size + job.size, blocks + len(job.keys)
            if jobs and not (_joins(jobs[0], job) and size <= PUT_BYTES_MAX and blocks <= BLOCKS_MAX):
                break
            jobs.append(self._jobs.popleft())
        self._running += len(jobs)
        return jobs

    def _put(self, jobs: Sequence[PutJob]) -> None:
        """Store the blocks of jobs of one space and class, and report them."""
        begun_s = self._monotonic_s()
        blocks = [(job, at) for job in jobs for at in range(len(job.keys))]
        outcomes = [PutOutcome.UNREACHABLE] * len(blocks)
        try:
            self._store_blocks(blocks, outcomes)
        finally:
            with self._changed:
                self._report(jobs, outcomes, self._monotonic_s() - begun_s)

    def _store_blocks(self, blocks: Sequence[tuple[PutJob, int]], outcomes: list[PutOutcome]) -> None:
        """Fill in how each block ended. What the store has already is touched; only the rest is sent."""
        first = blocks[0][0]
        names = [opaque_name(first.space.id, job.keys[at]) for job, at in blocks]
        for part in _parts(self._touch_present(first, names, outcomes), first.block_bytes):
            puts = [BlockPut(names[at], first.block_tokens, blocks[at][0].row(blocks[at][1])) for at in part]
            ended = self._attachment.store_now(first.space, puts, first.traffic_class, deadline_s=self._put_deadline_s)
            for at, outcome in zip(part, ended, strict=True):
                outcomes[at] = outcome
            if self._hurry or not all(outcome in _SETTLED for outcome in ended):
                return

    def _touch_present(self, job: PutJob, names: Sequence[BlockName], outcomes: list[PutOutcome]) -> list[int]:
        """Touch what is stored; returns the positions of the rest, of which a store that fails leaves none."""
        absent: list[int] = []
        for begin in range(0, len(names), LOOKUP_KEYS_MAX):
            page = names[begin : begin + LOOKUP_KEYS_MAX]
            found = self._attachment.look_up(job.space, page, deadline_s=self._put_deadline_s)
            if found is None or not found.complete:
                return []
            present = (found.presence == int(Presence.PRESENT)).tolist()
            absent += [begin + at for at, here in enumerate(present) if not here]
            here = [at for at, here in enumerate(present) if here]
            if here and self._count_use(job.space, job.traffic_class, [page[at] for at in here]):
                for at in here:
                    outcomes[begin + at] = PutOutcome.TOUCHED
        return absent

    def _count_use(self, space: TenantSpace, traffic_class: TrafficClass, names: Sequence[BlockName]) -> bool:
        try:
            self._attachment.store.touch(space.id, names, traffic_class=traffic_class, deadline_s=self._put_deadline_s)
        except StoreError:  # a promise that is not lengthened: of no consequence now
            return False
        return True

    def _report(self, jobs: Sequence[PutJob], outcomes: Sequence[PutOutcome], seconds: float) -> None:
        """Tell how jobs ended, and decide whether the next ones are shed. Called with the lock held."""
        at = 0
        for job in jobs:
            mine = outcomes[at : at + len(job.keys)]
            at += len(job.keys)
            sent = sum(outcome in (PutOutcome.STORED, PutOutcome.REPLACED) for outcome in mine)
            done = all(outcome in _SETTLED for outcome in mine)
            self._finished.append(PutResult(job.number, done, True, seconds / len(jobs), sent * job.block_bytes))
            self._held_bytes -= job.size
        for outcome in outcomes:
            self._counts[f"store_{outcome.name.lower()}"] += 1
        if all(outcome in _SETTLED for outcome in outcomes):
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(2 * self._pause_s, PAUSE_S_MIN), PAUSE_S_MAX)
            self._paused_until_s = self._monotonic_s() + self._pause_s
            self._shed_all()
        self._running -= len(jobs)
        self._changed.notify_all()

    # --- with the lock held -------------------------------------------------------------------------------------------

    def _idle(self) -> bool:
        return not self._jobs and not self._running

    def _shed_all(self) -> None:
        """What is not begun is shed, and told so."""
        while self._jobs:
            job = self._jobs.popleft()
            self._held_bytes -= job.size
            self._shed(job)
        self._changed.notify_all()

    def _shed(self, job: PutJob) -> None:
        self._counts["store_shed"] += len(job.keys)
        self._finished.append(PutResult(job.number, done=False))


def _joins(first: PutJob, job: PutJob) -> bool:
    return first.space.id == job.space.id and first.traffic_class == job.traffic_class


def _parts(positions: Sequence[int], block_bytes: int) -> list[Sequence[int]]:
    """Positions in calls of at most PUT_BYTES_MAX, or one block."""
    step = max(PUT_BYTES_MAX // block_bytes, 1)
    return [positions[begin : begin + step] for begin in range(0, len(positions), step)]
