"""Waiting for a node that is overloaded: as it says, a few times, never beyond the deadline, and only by puts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore import submission
from kvstore.client import StoreClient
from kvstore.daemon.node import Node
from kvstore.errors import Overloaded
from kvstore.keys import SpaceId, StateName
from kvstore.patience import SPREAD, TRIES_MAX, Patience
from kvstore.store import BlockPut, GetStatus, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import puts_of
from tests.support.spaces import a_chain, a_space
from tests.support.stores import client_of, open_node, served, short_dir


class Clock:
    """Time that only passes by waiting."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits: list[float] = []
        self.closing = False

    def monotonic(self) -> float:
        return self.now_s

    def pause(self, wait_s: float) -> bool:
        self.waits.append(wait_s)
        self.now_s += wait_s
        return self.closing


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_waits_no_less_than_asked_and_a_few_times(clock: Clock) -> None:
    patience = Patience(1e6, clock.monotonic, clock.pause)
    assert [patience.wait(2.0) for _ in range(TRIES_MAX + 1)] == [True] * (TRIES_MAX - 1) + [False] * 2
    assert all(2.0 <= wait_s <= 2.0 * (1 + SPREAD) for wait_s in clock.waits)
    assert len(set(clock.waits)) == TRIES_MAX - 1, "who was refused together comes again together"


def test_it_never_waits_beyond_the_deadline(clock: Clock) -> None:
    """What would come too late is not waited for; the deadline may pass by another node's waits."""
    assert not Patience(clock.now_s + 1.9, clock.monotonic, clock.pause).wait(2.0)
    assert clock.waits == []
    patience = Patience(clock.now_s + 5.0, clock.monotonic, clock.pause)
    assert patience.wait(2.0)
    clock.now_s += 10.0
    assert not patience.wait(0.0)
    assert len(clock.waits) == 1


def test_a_client_that_closes_tries_nothing_more(clock: Clock) -> None:
    clock.closing = True
    assert not Patience(1e6, clock.monotonic, clock.pause).wait(2.0)


# --- a client and a busy node ---------------------------------------------------------------------------------------

SIZE = 3000


@dataclass
class Busy:
    """A node that says so often that it is overloaded, and how often it was asked."""

    node: Node
    client: StoreClient
    space: SpaceId
    times: int = 0
    retry_after_s: float = 0.01
    asked: int = 0

    def begin(self, verb: str) -> None:
        inner = getattr(self.node, verb)

        def run(*args: Any, **options: Any) -> Any:
            self.asked += 1
            if self.asked <= self.times:
                raise Overloaded("busy", self.retry_after_s)
            return inner(*args, **options)

        setattr(self.node, verb, run)

    def put(self, blocks: int = 3, **options: Any) -> list[PutOutcome]:
        names = list(a_chain(self.space, blocks).names)
        return self.client.put(self.space, puts_of(names, SIZE), traffic_class=AGENT, **options)


@pytest.fixture(params=["socket", "shared memory"])
def busy(request: pytest.FixtureRequest) -> Iterator[Busy]:
    with ExitStack() as stack:
        folder = stack.enter_context(short_dir())
        node = stack.enter_context(closing(open_node(folder / "data", ManualClock())))
        server = stack.enter_context(served(node, folder))
        same_host = request.param == "shared memory"
        client = stack.enter_context(client_of(server.addresses[1], same_host=same_host))
        yield Busy(node, client, client.register_space(a_space()))


def test_a_put_waits_for_an_overloaded_node(busy: Busy) -> None:
    """Refused in memory a few times, stored when asked again as it was said."""
    busy.times = TRIES_MAX - 1
    busy.begin("put")
    assert busy.put() == [PutOutcome.STORED] * 3
    assert busy.asked == TRIES_MAX
    assert busy.client.stats()["client"]["waited"] == TRIES_MAX - 1
    assert busy.client.stats()["client"]["refused"] == 0


def test_only_what_was_refused_is_put_again(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch in three parts the second finds no room: the others are stored once, and it is stored later."""
    monkeypatch.setattr(submission, "PART_BYTES", 2 * SIZE)
    store, asked = busy.node.put, []

    def put(space_id: SpaceId, blocks: Sequence[BlockPut], **options: Any) -> list[PutOutcome]:
        asked.append([block.name.key for block in blocks])
        if len(asked) == 2:
            raise Overloaded("busy", 0.01)
        return store(space_id, blocks, **options)

    busy.node.put = put  # type: ignore[assignment, method-assign]
    assert busy.put(6) == [PutOutcome.STORED] * 6
    keys = [name.key for name in a_chain(busy.space, 6).names]
    assert asked == [keys[0:2], keys[2:4], keys[4:6], keys[2:4]]


def test_a_put_gives_up_in_the_end(busy: Busy) -> None:
    """After a few tries, or at once where the node asks for more time than there is: outcomes, never an error."""
    busy.times = 1000
    busy.begin("put")
    assert busy.put() == [PutOutcome.REFUSED] * 3
    assert busy.asked == TRIES_MAX
    busy.retry_after_s = 4.0
    assert busy.put(deadline_s=3.0) == [PutOutcome.REFUSED] * 3
    assert busy.asked == TRIES_MAX + 1
    busy.client._closing.set()
    assert busy.put() == [PutOutcome.REFUSED] * 3
    assert busy.asked == TRIES_MAX + 2


def test_a_state_waits_too(busy: Busy) -> None:
    busy.times = 2
    busy.begin("put_state")
    name = a_chain(busy.space, 1).names[0]
    assert busy.client.put_state(busy.space, StateName(name.key, name.key, name.key, 4, 0), b"state")
    assert busy.asked == 3


def test_what_is_full_is_not_asked_again(busy: Busy) -> None:
    """REFUSED as an outcome is not for a while: capacity does not come back by waiting."""

    def refuse(space_id: SpaceId, blocks: Any, **options: Any) -> list[PutOutcome]:
        busy.asked += 1
        return [PutOutcome.REFUSED] * len(blocks)

    busy.node.put = refuse  # type: ignore[assignment, method-assign]
    assert busy.put() == [PutOutcome.REFUSED] * 3
    assert busy.asked == 1


def test_reads_do_not_wait(busy: Busy) -> None:
    """A miss at once is better than a hit that comes after a pause."""
    assert busy.put() == [PutOutcome.STORED] * 3
    busy.times = 1000
    for verb in ("lend", "lookup", "get_state"):
        busy.begin(verb)
    names = a_chain(busy.space, 3).names
    assert set(busy.client.get_into(busy.space, names, [bytearray(SIZE) for _ in names])) == {GetStatus.UNREACHABLE}
    assert busy.client.lookup(busy.space, names).prefix_blocks() == 0
    assert busy.client.get_state(busy.space, StateName(names[0].key, names[0].key, names[0].key, 4, 0)) is None
    assert busy.client.stats()["client"]["waited"] == 0
