"""Publishing: never waits, never exceeds its bytes, and settles every request once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvstore.errors import SpaceUnknown, Unauthorized
from kvstore.keys import Space, SpaceId, TokenChain
from kvstore.store import PutOutcome
from kvstore.testing import MemoryStore
from kvstore.traffic import CHAT
from tests.support.faulty_store import FaultyStore
from tests.support.spaces import a_space
from tests.support.waiting import WAIT_S
from workers.publish import PAUSE_S, TELL_EVERY_S, Publisher, Ticket
from workers.spaces import Spaces, TenantSpace


class Rig:
    """A publisher over a store that can fail, and a chain of blocks to offer."""

    def __init__(self, *, queue_bytes_max: int = 10_000, started: bool = True) -> None:
        space: Space = a_space()
        self.memory = MemoryStore()
        self.store = FaultyStore(self.memory)
        self.spaces = Spaces(space, self.store)
        self.now_s = 0.0
        self.publisher = Publisher(
            self.store, self.spaces, queue_bytes_max=queue_bytes_max, monotonic_s=lambda: self.now_s
        )
        self.tenant: TenantSpace = self.spaces.of(None)
        self.chain = TokenChain(self.tenant.id, space.block_tokens, range(space.block_tokens * 20))
        if started:
            self.publisher.start()

    def ticket(self) -> Ticket:
        return self.publisher.ticket(self.tenant, CHAT)

    def offer(self, ticket: Ticket, index: int, size: int = 100) -> bool:
        payload = bytearray(bytes([index]) * size)
        return self.publisher.offer_block(ticket, self.chain.names[index], self.chain.block_tokens, payload, 0)


def test_everything_offered_is_acknowledged_once() -> None:
    """Blocks, a state and a touch; the ticket counts them, and a flush says so."""
    rig = Rig()
    ticket = rig.ticket()
    assert all(rig.offer(ticket, index) for index in range(10))
    assert rig.publisher.offer_state(ticket, rig.chain.state_name(7), b"state", 0)
    assert rig.publisher.offer_touch(ticket, rig.chain.names[:3])
    assert rig.publisher.flush(ticket, WAIT_S)
    assert (ticket.blocks_acknowledged, ticket.failed, ticket.pending) == (10, 0, 0)
    assert rig.memory.stats()["blocks"] == 10
    assert rig.publisher.close(WAIT_S)
    assert rig.publisher.queue_bytes == 0


def test_queue_is_bounded_by_bytes_and_sheds_beyond() -> None:
    """With the store hanging, offers return at once; what does not fit is refused and makes the ticket unpublished."""
    rig = Rig(queue_bytes_max=1000)
    rig.store.gate.clear()
    ticket = rig.ticket()
    taken = [rig.offer(ticket, index) for index in range(20)]
    assert taken.count(True) <= 10
    assert rig.publisher.queue_bytes <= 1000
    assert rig.publisher.counts.shed == taken.count(False)
    assert not rig.publisher.flush(ticket, 0.05)
    rig.store.gate.set()
    assert not rig.publisher.flush(ticket, WAIT_S)  # all settled, but not all published
    assert ticket.settled
    again = rig.ticket()
    assert rig.offer(again, 15)
    assert rig.publisher.flush(again, WAIT_S)
    rig.publisher.close(WAIT_S)


def test_callback_comes_once_when_settled() -> None:
    """At once if nothing is pending; else after the last acknowledgement; never for an abandoned ticket."""
    rig = Rig()
    called = threading.Event()
    rig.publisher.when_settled(rig.ticket(), called.set)
    assert called.is_set()
    rig.store.gate.clear()
    ticket, late, abandoned = rig.ticket(), threading.Event(), threading.Event()
    rig.offer(ticket, 0)
    rig.publisher.when_settled(ticket, late.set)
    other = rig.ticket()
    rig.offer(other, 1)
    rig.publisher.when_settled(other, abandoned.set)
    rig.publisher.abandon(other)
    assert not late.is_set()
    rig.store.gate.set()
    assert late.wait(WAIT_S)
    rig.publisher.close(WAIT_S)
    assert not abandoned.is_set()
    assert rig.memory.stats()["blocks"] == 2  # what is computed is still stored


def test_dead_store_fails_what_is_queued_at_once_and_is_tried_again_later() -> None:
    """One call finds out; the rest of the queue does not wait for a deadline each. After a pause it is tried again."""
    rig = Rig(started=False)
    rig.store.down = True
    tickets = [rig.ticket() for _ in range(8)]
    for index, ticket in enumerate(tickets):
        rig.offer(ticket, index)
        rig.publisher.offer_state(ticket, rig.chain.state_name(index + 1), b"state", 0)
    rig.publisher.start()
    assert not any(rig.publisher.flush(ticket, WAIT_S) for ticket in tickets)
    assert all(ticket.settled for ticket in tickets)
    assert rig.store.calls == ["register_space"]
    rig.store.down, rig.now_s = False, PAUSE_S + 1
    ticket = rig.ticket()
    rig.offer(ticket, 0)
    assert rig.publisher.flush(ticket, WAIT_S)
    rig.publisher.close(WAIT_S)


def test_a_refused_token_is_told_and_does_not_hold_up_others(caplog: pytest.LogCaptureFixture) -> None:
    """The store takes one tenant's blocks and not another's: the one's are stored at once, and it is logged once a
    minute why the other's are not."""
    rig = Rig()
    register = rig.memory.register_space

    def refuse(space: Space, **options: Any) -> SpaceId:
        if space.tenant_salt is not None:
            raise Unauthorized("the space does not carry the salt of this token's tenant")
        return register(space, **options)

    rig.memory.register_space = refuse  # type: ignore[method-assign]
    other = rig.spaces.of("bolt")
    for at, told in ((0.0, 1), (TELL_EVERY_S - 1, 1), (TELL_EVERY_S, 2)):
        rig.now_s = at
        refused, stored = rig.publisher.ticket(other, CHAT), rig.ticket()
        for ticket in (refused, stored):
            rig.offer(ticket, 0)
        assert not rig.publisher.flush(refused, WAIT_S)
        assert rig.publisher.flush(stored, WAIT_S)
        assert [record.message.split(":")[0] for record in caplog.records] == ["store_refuses_puts"] * told
    rig.publisher.close(WAIT_S)


def test_wiped_store_learns_the_space_again() -> None:
    """The first put after the wipe fails; the next request registers the space and is stored."""
    rig = Rig()
    first = rig.ticket()
    rig.offer(first, 0)
    assert rig.publisher.flush(first, WAIT_S)
    rig.memory._spaces.clear()
    with pytest.raises(SpaceUnknown):
        rig.memory.put(rig.tenant.id, [], traffic_class=CHAT)
    second = rig.ticket()
    rig.offer(second, 1)
    assert not rig.publisher.flush(second, WAIT_S)
    third = rig.ticket()
    rig.offer(third, 2)
    assert rig.publisher.flush(third, WAIT_S)
    rig.publisher.close(WAIT_S)


def test_states_come_after_their_blocks() -> None:
    """A state that is acknowledged finds its blocks stored already."""
    rig = Rig(started=False)
    ticket = rig.ticket()
    for index in range(5):
        rig.offer(ticket, index)
    rig.publisher.offer_state(ticket, rig.chain.state_name(5), b"state", 0)
    rig.publisher.start()
    assert rig.publisher.flush(ticket, WAIT_S)
    assert rig.store.calls == ["register_space", "put", "put_state"]
    rig.publisher.close(WAIT_S)


def test_offers_after_close_are_shed() -> None:
    """Closing puts what is queued and takes nothing more."""
    rig = Rig()
    ticket = rig.ticket()
    rig.offer(ticket, 0)
    assert rig.publisher.close(WAIT_S)
    assert not rig.offer(ticket, 1)
    assert rig.memory.stats()["blocks"] == 1


def test_a_declined_block_is_neither_acknowledged_nor_a_failure_of_the_store() -> None:
    """The policy of its class did not want it: the request is not published, no error is counted, nothing is paused."""
    rig = Rig()

    class Declining(MemoryStore):
        def put(self, *arguments: Any, **options: Any) -> list[PutOutcome]:
            return [PutOutcome.DECLINED] * len(arguments[1])

    publisher = Publisher(Declining(), rig.spaces, queue_bytes_max=1000)
    ticket = publisher.ticket(rig.tenant, CHAT)
    name = rig.chain.names[0]
    publisher.start()
    assert publisher.offer_block(ticket, name, rig.chain.block_tokens, bytearray(100), 0)
    assert not publisher.flush(ticket, WAIT_S)
    counts = publisher.counts
    assert (counts.blocks_declined, counts.blocks_failed, counts.errors) == (1, 0, 0)
    assert publisher.close(WAIT_S)
