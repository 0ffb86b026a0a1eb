"""A disk that neither takes a write nor refuses it: whoever only asks or reads does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.daemon.index import IndexBatch
from kvstore.daemon.node import Node
from kvstore.errors import DeadlineExceeded
from kvstore.keys import SpaceId, TokenChain
from kvstore.store import FLAG_APPROXIMATE, GetStatus, Presence
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.faults import FaultyFiles
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space
from tests.support.waiting import WAIT_S

SIZE = 60_000


class Stalling(FaultyFiles):
    """From ``stall`` on one operation waits until ``release``; ``waiting``: somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()
        self._go_on = threading.Event()
        self._operation = ""

    def stall(self, operation: str) -> None:
        self._operation = operation

    def release(self) -> None:
        self._go_on.set()

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._wait("pwritev")
        return super().pwritev(fd, views, offset)

    def fdatasync(self, fd: int) -> None:
        self._wait("fdatasync")
        super().fdatasync(fd)

    def _wait(self, operation: str) -> None:
        if operation == self._operation:
            self.waiting.set()
            self._go_on.wait(WAIT_S)


@pytest.fixture
def files() -> Stalling:
    return Stalling()


@pytest.fixture
def node(tmp_path: Path, files: Stalling) -> Iterator[Node]:
    made = open_node(tmp_path, ManualClock(), files=files)
    yield made
    files.release()
    made.close()


def put_third(node: Node, space: SpaceId) -> None:
    node.put(space, puts_of(a_chain(space, 3).names[2:], SIZE), traffic_class=AGENT)


def put_third_on_disk(node: Node, space: SpaceId) -> None:
    node.put(space, puts_of(a_chain(space, 3).names[2:], SIZE), traffic_class=AGENT, ack="disk")


def replace_another(node: Node, space: SpaceId) -> None:
    node.put(space, puts_of(a_chain(space, 8, seed=1).names[:1], SIZE), traffic_class=AGENT)


def delete_another(node: Node, space: SpaceId) -> None:
    node.delete(space, [a_chain(space, 8, seed=1).names[0].key])


@pytest.mark.parametrize(
    ("work", "operation", "prefix"),
    [
        (put_third, "pwritev", 2),
        (put_third_on_disk, "fdatasync", 3),
        (replace_another, "pwritev", 2),
        (delete_another, "pwritev", 2),
        (delete_another, "fdatasync", 2),
    ],
)
def test_a_writer_that_hangs_in_the_disk_holds_up_no_lookup_and_no_read(
    node: Node, files: Stalling, work: Callable[[Node, SpaceId], None], operation: str, prefix: int
) -> None:
    """The lookup answers at once with what is stored, which is read; another writer waits for its own deadline."""
    space = node.register_space(a_space())
    chain, other = a_chain(space, 3), a_chain(space, 8, seed=1)
    node.put(space, puts_of(chain.names[:2], SIZE), traffic_class=AGENT)
    node.put(space, puts_of(other.names, SIZE, FLAG_APPROXIMATE), traffic_class=AGENT)
    found: list[object] = []

    def ask() -> None:
        found.append(node.lookup(space, chain.names).prefix_blocks())
        found.extend(read(node, space, name, SIZE) for name in chain.names[:2])

    files.stall(operation)
    writer, reader = threading.Thread(target=work, args=(node, space)), threading.Thread(target=ask)
    try:
        writer.start()
        assert files.waiting.wait(WAIT_S)
        reader.start()
        reader.join(WAIT_S / 2)
        assert found == [prefix, *((GetStatus.OK, payload_of(name, SIZE)) for name in chain.names[:2])]
        if operation == "pwritev":
            with pytest.raises(DeadlineExceeded):
                node.put(space, puts_of(a_chain(space, 1, seed=2).names, SIZE), traffic_class=AGENT, deadline_s=0.1)
    finally:
        files.release()
        writer.join(WAIT_S)
    assert not writer.is_alive()


def test_an_index_that_learns_of_a_recycled_segment_holds_up_no_lookup_and_no_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of entries go with a segment: whoever asks meanwhile is answered by the map, which knows already."""
    space, index = node.register_space(a_space()), node._shards[0]._ledger.index
    write, waiting, go_on = index.write, threading.Event(), threading.Event()

    def slow_write(batch: IndexBatch) -> None:
        if len(batch.removed):
            waiting.set()
            go_on.wait(WAIT_S)
        write(batch)

    chains = [a_chain(space, 20, seed=seed) for seed in range(30)]
    stored: list[TokenChain] = []

    def fill() -> None:
        for chain in chains:
            node.put(space, puts_of(list(chain.names), SIZE), traffic_class=AGENT)
            stored.append(chain)

    found: list[object] = []

    def ask() -> None:
        found.append(node.lookup(space, stored[-1].names).prefix_blocks())
        found.append(node.lookup(space, chains[0].names).presence[0])
        found.append(read(node, space, stored[-1].names[0], SIZE))

    monkeypatch.setattr(index, "write", slow_write)
    writer, reader = threading.Thread(target=fill), threading.Thread(target=ask)
    try:
        writer.start()
        assert waiting.wait(WAIT_S)
        reader.start()
        reader.join(WAIT_S / 2)
        name = stored[-1].names[0]
        assert found == [20, Presence.EVICTED, (GetStatus.OK, payload_of(name, SIZE))]
    finally:
        go_on.set()
        writer.join(WAIT_S)
    assert not writer.is_alive()
