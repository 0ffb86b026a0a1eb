"""A put in parts: what is under way at once, and what becomes of the other parts when one is refused or lost."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore import limits, local, sharing, submission, wire
from kvstore.arena import Arena
from kvstore.client import StoreClient
from kvstore.daemon.node import Node, NodeConfig
from kvstore.errors import CapacityProtected, Overloaded, ProtocolError, SpaceUnknown, StoreError, Unavailable
from kvstore.keys import BlockName, SpaceId
from kvstore.link import Call, Hold
from kvstore.local import PARTS, Peer
from kvstore.store import AckLevel, BlockPut, GetStatus, Presence, PutOutcome
from kvstore.submission import Submission
from kvstore.testing import TEST_RULES, ManualClock, MemoryStore
from kvstore.traffic import AGENT
from tests.support.faults import FaultyFiles
from tests.support.nodes import puts_of
from tests.support.spaces import a_chain, a_space
from tests.support.stores import client_of, served, short_dir

SPACE = SpaceId(bytes(32))
PART_BYTES = 16 * limits.MIB
SIZE = PART_BYTES // 3 + 1
"""Two blocks a part."""
STORED, REFUSED, UNREACHABLE = PutOutcome.STORED, PutOutcome.REFUSED, PutOutcome.UNREACHABLE
Answer = Sequence[PutOutcome] | StoreError


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_dir() as path:
        yield path


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has several, each of a few blocks."""
    monkeypatch.setattr(submission, "PART_BYTES", PART_BYTES)


class FakeHold:
    """Answers what it is told to, and remembers what was asked and how much was under way."""

    def __init__(self, answers: Sequence[Answer], arena: Arena | None = None) -> None:
        self.peer = Peer(arena, (0, PARTS * local.PART_BYTES), 5.0) if arena is not None else None
        self.sent: list[tuple[wire.Opcode, list[bytes]]] = []
        self.under_way_max = 0
        self.acks: set[str] = set()
        self.confirmed: Sequence[bytes] = ()
        self._answers = deque(answers)
        self._waiting: deque[int] = deque()

    def send(self, call: Call) -> int:
        is_local = call.opcode == wire.Opcode.PUT_LOCAL
        put = sharing.decode_put_local(call.body)[1] if is_local else wire.decode_put(call.body)
        self.sent.append((call.opcode, [row.name.key for row in put.rows]))
        self.acks.add(put.ack)
        self._waiting.append(len(self.sent))
        self.under_way_max = max(self.under_way_max, len(self._waiting))
        return len(self.sent)

    def take(self, opcode: wire.Opcode, request_id: int, receive: Callable[..., Any]) -> Sequence[PutOutcome]:
        assert self._waiting.popleft() == request_id
        assert self.sent[request_id - 1][0] == opcode
        answer = self._answers.popleft()
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def ask(self, call: Call, receive: Callable[..., Any]) -> list[bool]:
        """CONFIRM, the only question: every third key is lost, unless an error is what comes next."""
        assert call.opcode == wire.Opcode.CONFIRM
        assert not self._waiting
        self.confirmed = wire.decode_confirm(call.body)[1]
        if self._answers:
            raise cast(StoreError, self._answers.popleft())
        return [at % 3 != 2 for at in range(len(self.confirmed))]

    def put(self, batch: Submission) -> None:
        submission.put(cast(Hold, self), batch)


def a_submission(sizes: Sequence[int], ack: AckLevel = "os") -> Submission:
    names = a_chain(SPACE, len(sizes)).names
    puts = [BlockPut(name, 4, bytes(size)) for name, size in zip(names, sizes, strict=True)]
    return Submission(SPACE, AGENT, ack, puts, [memoryview(put.payload) for put in puts])


def keys_of(batch: Submission, *positions: int) -> list[bytes]:
    return [batch.blocks[at].name.key for at in positions]


def test_parts_have_at_most_their_bytes_or_one_block() -> None:
    """In order, without a gap; no block is cut."""
    assert list(a_submission([]).parts(PART_BYTES, PART_BYTES)) == []
    sizes = [PART_BYTES, 1, PART_BYTES - 1, 1, PART_BYTES + 1, 1]
    assert list(a_submission(sizes).parts(PART_BYTES, PART_BYTES)) == [[0], [1, 2], [3], [4], [5]]
    assert list(a_submission([1, 1, PART_BYTES - 1]).parts(1, PART_BYTES)) == [[0], [1, 2]]
    many = list(a_submission([1] * (limits.BATCH_BLOCKS_MAX + 1)).parts(PART_BYTES, PART_BYTES))
    assert [len(part) for part in many] == [limits.BATCH_BLOCKS_MAX, 1]


def test_a_batch_that_is_large_begins_with_a_small_part() -> None:
    """The daemon can begin while most of the batch is still to be prepared; a smaller one is not cut for that."""
    block = limits.MIB
    arena, fd = Arena.create()
    try:
        counts = [submission.EARLY_BYTES // block, submission.EARLY_BYTES // block - 1]
        large, small = (FakeHold([[STORED]] * 4, arena) for _ in counts)
        for hold, count in zip((large, small), counts, strict=True):
            with pytest.raises(ProtocolError):
                hold.put(a_submission([block] * count))
    finally:
        arena.close()
        os.close(fd)
    assert len(large.sent[0][1]) == submission.FIRST_BYTES // block
    assert len(large.sent[1][1]) == len(small.sent[0][1]) == PART_BYTES // block


def test_parts_in_place_are_larger_but_only_if_all_of_the_batch_is() -> None:
    """What lies in the arena needs no room in it; a block that does not would be copied beyond the room of its part."""
    block = limits.MIB
    arena, fd = Arena.create()
    try:
        room = arena.reserve([block] * 40)
        assert room is not None
        batch = a_submission([block] * 40)
        mixed = [*room.views[:-1], memoryview(bytes(block))]
        for views, counts in ((room.views, (8, 32)), (mixed, (8, 16, 16))):
            hold = FakeHold([[STORED] * count for count in counts], arena)
            placed = Submission(SPACE, AGENT, "os", batch.blocks, views)
            hold.put(placed)
            assert [len(keys) for _, keys in hold.sent] == [*counts]
            assert {opcode for opcode, _ in hold.sent} == {wire.Opcode.PUT_LOCAL}
            assert placed.outcomes == [STORED] * 40
        del placed, views, mixed
        room.release()
    finally:
        arena.close()
        os.close(fd)


def test_some_parts_are_under_way_at_once_and_no_more() -> None:
    """While one is written the next is sent; a part of the arena is not filled again before its answer came."""
    batch = a_submission([SIZE] * 9)
    hold = FakeHold([[STORED] * 2] * 4 + [[STORED]])
    hold.put(batch)
    assert hold.under_way_max == PARTS
    assert [len(keys) for _, keys in hold.sent] == [2, 2, 2, 2, 1]
    assert batch.outcomes == [STORED] * 9


def test_a_refused_part_refuses_only_its_blocks() -> None:
    batch = a_submission([SIZE] * 6)
    FakeHold([[STORED] * 2, CapacityProtected("all is pinned"), [STORED] * 2]).put(batch)
    assert batch.outcomes == [STORED, STORED, REFUSED, REFUSED, STORED, STORED]


def test_a_part_that_met_an_overloaded_node_may_be_sent_again_alone() -> None:
    """The others are stored by then; what was refused to the end is REFUSED, and nothing else."""
    batch = a_submission([SIZE] * 6)
    with pytest.raises(Overloaded):
        FakeHold([[STORED] * 2, Overloaded("no room"), [STORED] * 2]).put(batch)
    again = FakeHold([Overloaded("still none")])
    with pytest.raises(Overloaded):
        again.put(batch)
    assert [keys for _, keys in again.sent] == [keys_of(batch, 2, 3)]
    batch.refuse_the_rest()
    assert batch.outcomes == [STORED, STORED, REFUSED, REFUSED, STORED, STORED]


def test_another_attempt_sends_what_was_not_answered() -> None:
    """The connection breaks after one part of four was answered: what it said stays said."""
    batch = a_submission([SIZE] * 8)
    with pytest.raises(Unavailable):
        FakeHold([[STORED, REFUSED], Unavailable("gone")]).put(batch)
    assert batch.outcomes == [STORED, REFUSED] + [UNREACHABLE] * 6
    again = FakeHold([[PutOutcome.TOUCHED] * 2, [STORED] * 2, [STORED] * 2])
    again.put(batch)
    assert [keys for _, keys in again.sent] == [keys_of(batch, at, at + 1) for at in (2, 4, 6)]
    assert batch.outcomes == [STORED, REFUSED, PutOutcome.TOUCHED, PutOutcome.TOUCHED] + [STORED] * 4


def test_what_is_said_against_the_request_is_raised_after_the_other_answers() -> None:
    """Nothing more is sent, and nothing stays outstanding: the connection can be used again."""
    batch = a_submission([SIZE] * 10)
    hold = FakeHold([SpaceUnknown("never heard of it")] * 2)
    with pytest.raises(SpaceUnknown):
        hold.put(batch)
    assert len(hold.sent) == PARTS
    assert not hold._waiting


def test_another_number_of_outcomes_than_blocks_is_not_believed() -> None:
    batch = a_submission([SIZE] * 2)
    with pytest.raises(ProtocolError):
        FakeHold([[STORED]]).put(batch)
    assert batch.outcomes == [UNREACHABLE] * 2


def test_a_block_too_large_for_the_arena_goes_alone_through_the_socket() -> None:
    """The others go through the arena all the same."""
    arena, fd = Arena.create()
    try:
        batch = a_submission([SIZE, PART_BYTES + 1, SIZE])
        hold = FakeHold([[STORED]] * 3, arena)
        hold.put(batch)
        assert [opcode for opcode, _ in hold.sent] == [wire.Opcode.PUT_LOCAL, wire.Opcode.PUT, wire.Opcode.PUT_LOCAL]
        assert batch.outcomes == [STORED] * 3
    finally:
        arena.close()
        os.close(fd)


def test_parts_that_the_disk_shall_have_wait_for_one_flush() -> None:
    """Each is begun; what was acknowledged of all is confirmed at the end, and what the disk lost is refused."""
    batch = a_submission([SIZE] * 6, "disk")
    hold = FakeHold([[STORED] * 2, [PutOutcome.TOUCHED, REFUSED], [PutOutcome.REPLACED, STORED]])
    hold.put(batch)
    assert hold.acks == {"begun"}
    assert hold.confirmed == keys_of(batch, 0, 1, 2, 4, 5)
    assert batch.outcomes == [STORED, STORED, REFUSED, REFUSED, PutOutcome.REPLACED, STORED]


def test_one_part_that_the_disk_shall_have_waits_for_its_own() -> None:
    batch = a_submission([SIZE] * 2, "disk")
    hold = FakeHold([[STORED] * 2])
    hold.put(batch)
    assert (hold.acks, hold.confirmed) == ({"disk"}, ())
    assert batch.outcomes == [STORED] * 2


@pytest.mark.parametrize("answers", [[[STORED] * 2, [STORED] * 2], [[STORED] * 2]], ids=["at the end", "before it"])
def test_what_was_only_begun_is_sent_again(answers: list[Answer]) -> None:
    """A connection that breaks before the disk confirmed leaves nothing acknowledged."""
    batch = a_submission([SIZE] * 4, "disk")
    with pytest.raises(Unavailable):
        FakeHold([*answers, Unavailable("gone")]).put(batch)
    assert batch.outcomes == [UNREACHABLE] * 4
    again = FakeHold([[PutOutcome.TOUCHED] * 2] * 2)
    again.put(batch)
    assert again.confirmed == keys_of(batch, 0, 1, 2, 3)
    assert batch.outcomes == [PutOutcome.TOUCHED, PutOutcome.TOUCHED, REFUSED, PutOutcome.TOUCHED]


def test_an_overloaded_part_leaves_the_others_confirmed() -> None:
    batch = a_submission([SIZE] * 4, "disk")
    with pytest.raises(Overloaded):
        FakeHold([[STORED] * 2, Overloaded("no room")]).put(batch)
    assert batch.outcomes == [STORED] * 2 + [UNREACHABLE] * 2


# --- with a daemon --------------------------------------------------------------------------------------------------


class Partly(MemoryStore):
    """Refuses whatever comes together with one block."""

    refused: BlockName

    def put(self, space_id: Any, blocks: Any, **options: Any) -> list[PutOutcome]:
        if any(block.name.key == self.refused.key for block in blocks):
            raise Overloaded("not with this one")
        return super().put(space_id, blocks, **options)


def test_a_part_that_the_daemon_refuses_leaves_the_others_stored(folder: Path) -> None:
    backend = Partly(ManualClock())
    with served(backend, folder) as server, client_of(server.addresses[0], connections_per_node=1) as client:
        space = client.register_space(a_space())
        names = list(a_chain(space, 6).names)
        backend.refused = names[2]
        outcomes = client.put(space, puts_of(names, SIZE), traffic_class=AGENT)
        assert outcomes == [STORED, STORED, REFUSED, REFUSED, STORED, STORED]
        assert client.stats()["client"]["refused"] == 2


@pytest.mark.parametrize("way", [0, 1], ids=["tcp", "same host"])
def test_many_parts_of_a_space_that_the_daemon_forgot(folder: Path, way: int) -> None:
    """It is told and the parts are sent again, on the connection that there was; every block comes back."""
    config = NodeConfig(directories=(folder / "data",), capacity_bytes=128 * limits.MIB, segment_bytes=8 * limits.MIB)
    node = Node.open(config, ManualClock(), TEST_RULES)
    with served(node, folder) as server, client_of(server.addresses[way], connections_per_node=1) as client:
        space = client.register_space(a_space())
        names = list(a_chain(space, 7).names)
        puts = puts_of(names, SIZE)
        assert client.put(space, puts[:1], traffic_class=AGENT) == [STORED]
        before = server.connections
        node.delete_space(space)
        cast(Any, node._catalog.content.spaces).pop(space)
        assert client.put(space, puts, traffic_class=AGENT) == [STORED] * 7
        assert server.connections == before
        check(client, space, puts)
    node.close()


def check(client: StoreClient, space: SpaceId, puts: Sequence[BlockPut]) -> None:
    buffers = [bytearray(len(put.payload)) for put in puts]
    statuses = client.get_into(space, [put.name for put in puts], buffers)
    assert statuses == [GetStatus.OK] * len(puts)
    assert buffers == [put.payload for put in puts]


@pytest.mark.parametrize("way", [0, 1], ids=["tcp", "same host"])
def test_a_put_in_parts_is_on_disk_when_it_is_acknowledged(folder: Path, way: int) -> None:
    """One flush a call, not one a part; blocks that the disk does not take are refused and not served."""
    files = FaultyFiles()
    config = NodeConfig(directories=(folder / "data",), capacity_bytes=256 * limits.MIB, segment_bytes=64 * limits.MIB)
    node = Node.open(config, ManualClock(), TEST_RULES, files=files)
    with served(node, folder) as server, client_of(server.addresses[way], connections_per_node=1) as client:
        space = client.register_space(a_space())
        first, second = (puts_of(list(a_chain(space, 5, seed=seed).names), SIZE) for seed in (1, 2))
        before = files.calls.get("fdatasync", 0)
        assert client.put(space, first, traffic_class=AGENT, ack="disk") == [STORED] * 5
        assert files.calls["fdatasync"] == before + 1
        files.errors["fdatasync"] = errno.EIO
        assert client.put(space, second, traffic_class=AGENT, ack="disk") == [REFUSED] * 5
        files.errors.clear()
        presence = client.lookup(space, [put.name for put in [*first, *second]]).presence.tolist()
        assert presence[:5] == [Presence.PRESENT] * 5
        assert Presence.PRESENT not in presence[5:]
        check(client, space, first)
    node.close()
