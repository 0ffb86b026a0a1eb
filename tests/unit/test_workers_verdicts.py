"""Verdicts of an engine's requests: one batch a step, an answer in time or a miss, and a failed load stays a miss."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore import limits
from kvstore.keys import opaque_name
from kvstore.store import BlockPut
from kvstore.testing import MemoryStore
from kvstore.traffic import CHAT
from tests.support.faulty_store import FaultyStore
from tests.support.spaces import BLOCK_TOKENS, a_space
from tests.support.waiting import WAIT_S
from workers.adapters.attachment import Attachment, Settings
from workers.adapters.verdicts import RequestVerdicts, Verdicts, _batches, _Part
from workers.spaces import TenantSpace

BLOCK_BYTES = 1000


class Asking(FaultyStore):
    """Remembers the keys of every look-up, and holds look-ups back until it is told."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def lookup(self, space_id: Any, names: Any, *, states: bool = False, deadline_s: float = 5.0) -> Any:
        self.asked.append(len(names))
        assert self.may_answer.wait(WAIT_S)
        return super().lookup(space_id, names, states=states, deadline_s=deadline_s)


@dataclass(slots=True)
class Bench:
    """Verdicts over a store in memory, on a clock that the test moves."""

    store: Asking
    attachment: Attachment
    verdicts: Verdicts
    counts: Counter[str]
    now_s: list[float] = field(default_factory=lambda: [0.0])

    @property
    def space(self) -> TenantSpace:
        return self.attachment.spaces.of(None)

    def stored(self, *keys: bytes) -> None:
        space = self.space
        self.attachment.spaces.ensure_registered(space, deadline_s=1.0)
        puts = [BlockPut(opaque_name(space.id, key), BLOCK_TOKENS, key.ljust(BLOCK_BYTES, b"-")) for key in keys]
        self.store.inner.put(space.id, puts, traffic_class=CHAT)

    def request(self, tenant: str | None = None) -> RequestVerdicts:
        return RequestVerdicts(self.attachment.spaces.of(tenant), CHAT)

    def answered(self) -> None:
        """Wait until nothing is open."""
        ends_s = time.monotonic() + WAIT_S
        while self.verdicts.open_questions:
            self.verdicts.settle()
            assert time.monotonic() < ends_s


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[Bench] = []

    def made(*, compute_tokens_per_s: float | None = None) -> Bench:
        settings = Settings(("127.0.0.1:1",), lookup_deadline_s=5.0, compute_tokens_per_s=compute_tokens_per_s)
        store, now_s = Asking(MemoryStore()), [0.0]
        attachment = Attachment(settings, store, a_space(), monotonic_s=lambda: now_s[0])
        counts: Counter[str] = Counter()

        def tokens_of(keys: Sequence[bytes]) -> int:
            return BLOCK_TOKENS * len(keys)

        opened.append(Bench(store, attachment, Verdicts(attachment, tokens_of, counts), counts, now_s))
        return opened[-1]

    yield made
    for bench in opened:
        bench.store.may_answer.set()
        bench.attachment.close(0.0)


def test_a_step_asks_once_for_all_of_its_requests(make: Make) -> None:
    """However many requests and keys, one call a step; the verdicts come in a later step."""
    bench = make()
    bench.stored(b"a", b"c")
    one, other = bench.request(), bench.request()
    assert [bench.verdicts.of(one, key) for key in (b"a", b"b", b"a")] == [None, None, None]
    assert bench.verdicts.of(other, b"c") is None
    assert bench.store.asked == []
    bench.verdicts.send()
    bench.answered()
    assert [bench.verdicts.of(one, key) for key in (b"a", b"b")] == [True, False]
    assert bench.verdicts.of(other, b"c") is True
    bench.verdicts.send()
    assert bench.store.asked == [3]


def test_tenants_are_asked_apart(make: Make) -> None:
    """What one tenant stored is a miss for another, though the engine's key is the same."""
    bench = make()
    bench.stored(b"a")
    mine, theirs = bench.request(), bench.request("other")
    assert bench.verdicts.of(mine, b"a") is bench.verdicts.of(theirs, b"a") is None
    bench.verdicts.send()
    bench.answered()
    assert (bench.verdicts.of(mine, b"a"), bench.verdicts.of(theirs, b"a")) == (True, False)
    assert bench.store.asked == [1, 1]


def test_a_question_without_an_answer_is_a_miss_at_its_deadline(make: Make) -> None:
    """Nobody above has a deadline: without a verdict a request would wait for ever. A late answer changes nothing."""
    bench = make()
    bench.stored(b"a")
    request = bench.request()
    bench.store.may_answer.clear()
    assert bench.verdicts.of(request, b"a") is None
    bench.verdicts.send()
    bench.now_s[0] = 4.9
    bench.verdicts.settle()
    assert bench.verdicts.of(request, b"a") is None
    bench.now_s[0] = 5.1
    bench.verdicts.send()
    assert bench.verdicts.of(request, b"a") is False
    assert bench.counts["lookup_unanswered"] == 1
    bench.store.may_answer.set()
    bench.attachment._lookup_pool.shutdown(wait=True)
    bench.verdicts.send()
    assert bench.verdicts.of(request, b"a") is False


def test_a_store_that_is_down_is_a_miss(make: Make) -> None:
    """No error reaches the scheduler."""
    bench = make()
    bench.store.down = True
    request = bench.request()
    assert bench.verdicts.of(request, b"a") is None
    bench.verdicts.send()
    bench.answered()
    assert bench.verdicts.of(request, b"a") is False


def test_a_failed_load_stays_a_miss(make: Make) -> None:
    """Else the engine would load the same block for ever; only the request that saw it fail is told so."""
    bench = make()
    bench.stored(b"a")
    request, other = bench.request(), bench.request()
    for asking in (request, other):
        bench.verdicts.of(asking, b"a")
    bench.verdicts.send()
    bench.answered()
    assert bench.verdicts.of(request, b"a") is True
    request.strike([b"a"])
    bench.verdicts.send()
    assert (bench.verdicts.of(request, b"a"), bench.verdicts.of(other, b"a")) == (False, True)


def test_a_request_that_is_not_to_be_cached_asks_nothing(make: Make) -> None:
    """All is a miss, at once."""
    bench = make()
    assert bench.verdicts.of(RequestVerdicts(None, CHAT), b"a") is False
    bench.verdicts.send()
    assert bench.store.asked == []


def test_a_request_that_ended_is_not_asked_for(make: Make) -> None:
    """What it wanted to know in its last step is dropped."""
    bench = make()
    request = bench.request()
    bench.verdicts.of(request, b"a")
    bench.verdicts.forget(request)
    bench.verdicts.send()
    assert bench.store.asked == []


@pytest.mark.parametrize(("rate", "verdict"), [(1e6, False), (1.0, True), (None, True)])
def test_a_hit_that_computing_beats_is_declined(make: Make, rate: float | None, verdict: bool) -> None:
    """By the store's estimate, a request's share of it, and the rate that the operator gave."""
    bench = make(compute_tokens_per_s=rate)
    bench.stored(b"a", b"b")
    bench.store.load_s_estimate = 0.5
    request = bench.request()
    for key in (b"a", b"b", b"c"):
        bench.verdicts.of(request, key)
    bench.verdicts.send()
    bench.answered()
    assert [bench.verdicts.of(request, key) for key in (b"a", b"b", b"c")] == [verdict, verdict, False]
    assert bench.counts["declined_slow"] == (0 if verdict else 3)


def test_questions_keep_within_what_one_look_up_may_ask(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that asks for more is several calls, and no key is lost."""
    monkeypatch.setattr("workers.adapters.verdicts.LOOKUP_KEYS_MAX", 4)
    request = make().request()
    sizes = [[len(part.keys) for part in batch] for batch in _batches(_Part(request, [b"k"] * n) for n in (3, 1, 9))]
    assert sizes == [[3, 1], [4], [4], [1]]
    assert limits.LOOKUP_KEYS_MAX > 4
