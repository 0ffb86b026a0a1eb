"""The node on a real directory: deadlines, deletion, capacity, and disks that fail."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.errors import Unavailable, VolumeError, VolumeFormat, VolumeInUse
from kvstore.keys import BlockKey, BlockName, SpaceId, TokenChain, TokenDigest
from kvstore.limits import MIB
from kvstore.store import FLAG_APPROXIMATE, BlockPut, GetStatus, Pin, Presence, PutOutcome
from kvstore.testing import DAY_S, TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules, TrafficClass
from tests.support.disk import disk_bytes
from tests.support.faults import FaultyFiles
from tests.support.nodes import CAPACITY_BYTES, open_node, payload_of, puts_of, read
from tests.support.spaces import a_chain, a_space

SIZE = 60_000
ZSTD_RULES = ClassRules((replace(TEST_RULES.rules[0], codec="zstd"), TEST_RULES.rules[1]))


def fill(node: Node, space: SpaceId, blocks: int, seed: int, traffic_class: TrafficClass = AGENT) -> TokenChain:
    """Put a chain in batches of 16."""
    chain = a_chain(space, blocks, seed=seed)
    for begin in range(0, blocks, 16):
        node.put(space, puts_of(chain.names[begin : begin + 16], SIZE), traffic_class=traffic_class)
    return chain


def reasons(node: Node, chain: TokenChain) -> list[int]:
    return node.lookup(chain.space_id, chain.names).presence.tolist()


def balanced(node: Node) -> bool:
    """Every segment byte is live, dead, free or a first page, and the live ones are those that a scan lists."""
    scanned = sum(-(-(info.stored_bytes + 256) // 4096) * 4096 for info in node.scan()[0])
    books = node.accounting()
    sums = [
        item["live_bytes"] + item["dead_bytes"] + item["free_bytes"] + item["page_bytes"] == item["total_bytes"]
        for item in books
    ]
    return all(sums) and sum(item["live_bytes"] for item in books) == scanned and books[0]["dead_bytes"] >= 0


class Bench:
    """One directory, one clock, one file system; the node is reopened at will."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.files = FaultyFiles()
        self.node = open_node(path, self.clock, files=self.files)
        self.space = self.node.register_space(a_space())

    @property
    def volume(self) -> Path:
        return self.path / "volume-0"

    def reopen(self, *, lose_index: bool = False, **options: object) -> Node:
        """As after kill -9, optionally without the index."""
        self.node.abandon()
        if lose_index:
            shutil.rmtree(self.volume / "index")
        self.node = open_node(self.path, self.clock, files=self.files, **options)  # type: ignore[arg-type]
        return self.node


@pytest.fixture
def bench(tmp_path: Path) -> object:
    made = Bench(tmp_path)
    yield made
    made.files.errors.clear()
    made.node.close()


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lose_index", [False, True])
def test_acknowledged_blocks_survive_a_kill_and_the_loss_of_the_index(bench: Bench, lose_index: bool) -> None:
    chain = fill(bench.node, bench.space, 40, seed=1)
    node = bench.reopen(lose_index=lose_index)
    assert reasons(node, chain) == [Presence.PRESENT] * 40
    for name in chain.names:
        assert read(node, bench.space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
    assert balanced(node)
    written = node.stats()["bytes_written"]
    assert written == 0, "nothing is rewritten by a restart"


def test_restarts_change_no_deadline(bench: Bench) -> None:
    """After touches, also ones too small to be written, keep-until is the same before and after any
    number of restarts.
    """
    chain = fill(bench.node, bench.space, 10, seed=1)
    for step_s in (1, 100, 300, 5000, DAY_S):
        bench.clock.advance(step_s)
        bench.node.touch(bench.space, chain.names[: step_s % 7 + 2], traffic_class=CHAT if step_s > 200 else AGENT)
    before = {info.key: (info.keep_until_s, info.touches) for info in bench.node.scan()[0]}
    for _ in range(3):
        bench.clock.advance(3600)
        node = bench.reopen()
        assert {info.key: (info.keep_until_s, info.touches) for info in node.scan()[0]} == before


def test_a_rules_file_at_restart_does_not_change_the_stored_policy(bench: Bench) -> None:
    shorter = ClassRules((ClassRule(AGENT, "agent", 60), ClassRule(CHAT, "chat", 60)))
    chain = fill(bench.node, bench.space, 2, seed=1)
    node = bench.reopen(rules=shorter)
    bench.clock.advance(2 * DAY_S)
    assert reasons(node, chain) == [Presence.PRESENT] * 2
    assert node.policy().rules == TEST_RULES


def test_an_unreadable_index_is_rebuilt(bench: Bench) -> None:
    chain = fill(bench.node, bench.space, 20, seed=1)
    bench.node.abandon()
    for path in (bench.volume / "index").iterdir():
        path.write_bytes(b"not a database")
    bench.node = open_node(bench.path, bench.clock, files=bench.files)
    assert reasons(bench.node, chain) == [Presence.PRESENT] * 20


def test_a_second_node_on_one_directory_is_refused(bench: Bench) -> None:
    with pytest.raises(VolumeInUse, match=f"process {os.getpid()}"):
        open_node(bench.path, bench.clock)
    assert bench.node.stats()["blocks"] == 0


def test_another_format_version_is_refused_and_nothing_is_lost(bench: Bench) -> None:
    chain = fill(bench.node, bench.space, 3, seed=1)
    bench.node.close()
    path = bench.volume / "FORMAT"
    whole = path.read_text()
    path.write_text(whole.replace('"version": 1', '"version": 9'))
    with pytest.raises(VolumeFormat, match="version 9"):
        open_node(bench.path, bench.clock)
    path.write_text(whole)
    bench.node = open_node(bench.path, bench.clock)
    assert reasons(bench.node, chain) == [Presence.PRESENT] * 3


def test_a_closed_node_says_so(bench: Bench) -> None:
    bench.node.close()
    bench.node.close()
    with pytest.raises(Unavailable):
        bench.node.lookup(bench.space, [])


# --- deletion ---------------------------------------------------------------------------------------------------------


def test_a_deleted_block_never_comes_back(bench: Bench) -> None:
    """Not by a restart, not by a rebuild from segments, not by both; its neighbours stay."""
    chain = fill(bench.node, bench.space, 12, seed=1)
    gone = chain.names[3:6]
    assert bench.node.delete(bench.space, [name.key for name in gone]) == 3
    assert reasons(bench.node, chain)[3:6] == [Presence.PURGED] * 3
    for lose_index in (False, True, True):
        node = bench.reopen(lose_index=lose_index)
        found = reasons(node, chain)
        assert [place for place, reason in enumerate(found) if reason != Presence.PRESENT] == [3, 4, 5]
        assert all(read(node, bench.space, name, SIZE)[0] is GetStatus.MISS for name in gone)
        assert balanced(node)


def test_a_deletion_that_the_index_lost_still_holds(bench: Bench) -> None:
    """Power loss may take the index back in time: the mark on disk decides, and the lookup learns from it."""
    chain = fill(bench.node, bench.space, 4, seed=1)
    bench.node.abandon()
    old_index = bench.path / "old-index"
    shutil.copytree(bench.volume / "index", old_index)
    bench.node = open_node(bench.path, bench.clock, files=bench.files)
    bench.node.delete(bench.space, [chain.names[2].key])
    bench.node.abandon()
    shutil.rmtree(bench.volume / "index")
    shutil.copytree(old_index, bench.volume / "index")
    bench.node = open_node(bench.path, bench.clock, files=bench.files)
    assert read(bench.node, bench.space, chain.names[2], SIZE) == (GetStatus.MISS, bytes(SIZE))
    assert reasons(bench.node, chain)[2] == Presence.PURGED
    assert bench.node.stats()["corrupt"] == 0


def test_a_moved_then_deleted_block_leaves_no_living_copy(bench: Bench) -> None:
    """Moving marks the original: a rebuild after the deletion finds neither copy."""
    chain = fill(bench.node, bench.space, 32, seed=1)
    bench.node.touch(bench.space, chain.names[5:6], traffic_class=CHAT)
    bench.clock.advance(4 * DAY_S)
    effect = bench.node.sweep(apply=True)
    assert effect.blocks == 31
    assert effect.blocks_rewritten == 1
    assert read(bench.node, bench.space, chain.names[5], SIZE) == (GetStatus.OK, payload_of(chain.names[5], SIZE))
    node = bench.reopen(lose_index=True)
    assert [place for place, reason in enumerate(reasons(node, chain)) if reason == Presence.PRESENT] == [5]
    node.delete(bench.space, [chain.names[5].key])
    assert Presence.PRESENT not in reasons(bench.reopen(lose_index=True), chain)


def test_ten_thousand_put_and_delete_cycles_keep_the_books(bench: Bench) -> None:
    """Used bytes neither drift nor leak, and puts are still accepted at the end."""
    chain = a_chain(bench.space, 50, seed=1)
    puts = puts_of(chain.names, 2000)
    keys = [name.key for name in chain.names]
    for cycle in range(200):
        assert set(bench.node.put(bench.space, puts, traffic_class=AGENT)) == {PutOutcome.STORED}, cycle
        assert bench.node.delete(bench.space, keys) == 50
    assert bench.node.stats()["purged"] == 10_000
    assert bench.node.accounting()[0]["live_bytes"] == 0
    assert balanced(bench.node)
    files = [path.stat().st_size for path in (bench.volume / "segments").iterdir()]
    assert bench.node.accounting()[0]["total_bytes"] == sum(files)
    assert disk_bytes(bench.path) <= CAPACITY_BYTES
    assert set(bench.node.put(bench.space, puts, traffic_class=AGENT)) == {PutOutcome.STORED}


# --- retention --------------------------------------------------------------------------------------------------------


def test_an_expired_block_is_never_served(bench: Bench) -> None:
    """Swept or not, restarted or not, by any verb."""
    chain = fill(bench.node, bench.space, 4, seed=1)
    name = chain.names[0]
    bench.clock.advance(3 * DAY_S - 1)
    assert reasons(bench.node, chain) == [Presence.PRESENT] * 4
    bench.clock.advance(1)
    for way in (None, False, True):
        node = bench.node if way is None else bench.reopen(lose_index=way)
        assert reasons(node, chain) == [Presence.EXPIRED] * 4
        assert read(node, bench.space, name, SIZE)[0] is GetStatus.MISS
        assert node.open_payload(bench.space, name) is None
        assert node.touch(bench.space, chain.names, traffic_class=CHAT) == 0
        assert node.pin([Pin(bench.space, name.key, "me", "late")]) == 0
    assert bench.node.sweep(apply=False).blocks == 4
    assert bench.node.sweep(apply=True).blocks == 4
    assert reasons(bench.node, chain) == [Presence.EXPIRED] * 4
    assert bench.node.stats()["blocks_expired_unswept"] == 0
    assert set(bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT)) == {PutOutcome.STORED}


def test_an_unknown_class_byte_is_kept_at_the_longest_promise_and_reported(bench: Bench) -> None:
    chain = fill(bench.node, bench.space, 3, seed=1, traffic_class=TrafficClass(77))
    bench.clock.advance(7 * DAY_S - 1)
    node = bench.reopen(lose_index=True)
    assert reasons(node, chain) == [Presence.PRESENT] * 3
    assert node.stats()["unknown_classes"] == 1
    assert node.stats()["class_blocks"] == {"class-77": 3}
    bench.clock.advance(1)
    assert reasons(node, chain) == [Presence.EXPIRED] * 3


def test_recency_is_ours_and_not_the_file_systems(bench: Bench) -> None:
    """Access and modification times of the files decide nothing."""
    chain = fill(bench.node, bench.space, 3, seed=1)
    for path in (bench.volume / "segments").iterdir():
        os.utime(path, (0, 0))
    bench.clock.advance(3 * DAY_S - 1)
    assert reasons(bench.reopen(), chain) == [Presence.PRESENT] * 3


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_used_last_is_evicted_last_whatever_the_files_say(bench: Bench, restart: bool) -> None:
    """Blocks that came first and were used since outlive younger ones; the times of their files say the opposite."""
    used, unused = (fill(bench.node, bench.space, 48, seed=seed) for seed in (1, 2))
    bench.clock.advance(DAY_S)
    assert bench.node.touch(bench.space, used.names, traffic_class=AGENT) == 48
    hot = {info.segment for info in bench.node.scan()[0] if info.key in {name.key for name in used.names}}
    for path in (bench.volume / "segments").iterdir():
        os.utime(path, (0, 0) if int(path.stem) in hot else None)
    node = bench.reopen() if restart else bench.node
    seeds = iter(range(3, 40))
    while reasons(node, unused).count(Presence.PRESENT) > 16:  # a last few may share a segment with used ones
        fill(node, bench.space, 16, seed=next(seeds))
    assert reasons(node, used) == [Presence.PRESENT] * 48


# --- capacity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directories", [1, 2])
def test_disk_usage_never_exceeds_the_capacity(tmp_path: Path, directories: int) -> None:
    """While four times the capacity is put, in two classes, ``du`` stays below it at every step, and puts go on."""
    clock = ManualClock()
    node = open_node(tmp_path, clock, directories=directories, capacity_bytes=CAPACITY_BYTES * directories)
    space = node.register_space(a_space())
    highest = 0
    for seed in range(70):
        chain = a_chain(space, 16, seed=seed)
        outcomes = node.put(space, puts_of(chain.names, SIZE), traffic_class=(AGENT, CHAT)[seed % 2])
        assert set(outcomes) == {PutOutcome.STORED}
        highest = max(highest, disk_bytes(tmp_path))
        clock.advance(3600)
    assert CAPACITY_BYTES * directories // 2 < highest <= CAPACITY_BYTES * directories
    stats = node.stats()
    assert stats["evicted"] > 0
    assert stats["refused"] == 0
    assert len(node.accounting()) == directories
    assert all(item["live_bytes"] > 0 for item in node.accounting())
    node.close()


def test_a_full_store_evicts_the_lower_class_first(bench: Bench) -> None:
    chats = fill(bench.node, bench.space, 64, seed=1, traffic_class=CHAT)
    for seed in range(2, 20):
        fill(bench.node, bench.space, 32, seed=seed, traffic_class=AGENT)
    assert reasons(bench.node, chats) == [Presence.PRESENT] * 64
    assert bench.node.stats()["evicted"] > 0


def test_a_store_full_of_pinned_blocks_refuses_and_goes_on_reading(bench: Bench) -> None:
    """Every put is refused as retryable, every read works, and after unpinning puts go on."""
    chains = []
    for seed in range(40):
        chain = a_chain(bench.space, 8, seed=seed)
        outcomes = bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT)
        stored = [name for name, outcome in zip(chain.names, outcomes, strict=True) if outcome is PutOutcome.STORED]
        bench.node.pin([Pin(bench.space, name.key, "test", "hold") for name in stored])
        chains.append(stored)
        if len(stored) < 8:
            break
    else:
        pytest.fail("pins did not fill the store")
    late = a_chain(bench.space, 4, seed=99)
    for _ in range(3):
        outcomes = bench.node.put(bench.space, puts_of(late.names, SIZE), traffic_class=CHAT)
        assert set(outcomes) == {PutOutcome.REFUSED}
    for name in [name for stored in chains for name in stored]:
        assert read(bench.node, bench.space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
    assert disk_bytes(bench.path) <= CAPACITY_BYTES
    bench.clock.advance(30 * DAY_S)
    assert reasons(bench.reopen(), a_chain(bench.space, 8)) == [Presence.PRESENT] * 8
    bench.node.unpin(bench.space, [name.key for stored in chains for name in stored])
    assert set(bench.node.put(bench.space, puts_of(late.names, SIZE), traffic_class=CHAT)) == {PutOutcome.STORED}


def test_a_few_pins_in_every_segment_do_not_wedge_eviction(bench: Bench) -> None:
    """Pinned blocks are carried out of their segments: with one of 16 pinned, new blocks still find room for ever."""
    pinned: list[BlockName] = []
    for seed in range(40):
        chain = a_chain(bench.space, 16, seed=seed)
        outcomes = bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT)
        assert set(outcomes) == {PutOutcome.STORED}
        bench.node.pin([Pin(bench.space, chain.names[7].key, "test", "hold")])
        pinned.append(chain.names[7])
    for name in pinned:
        assert read(bench.node, bench.space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
    assert balanced(bench.node)
    assert disk_bytes(bench.path) <= CAPACITY_BYTES


def test_a_block_larger_than_a_segment_says_what_to_do(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Its outcome is not one that is worth another try; the log says once what to change; the others are stored."""
    names = a_chain(bench.space, 3).names
    puts = [BlockPut(name, 4, bytes(size)) for name, size in zip(names, (1000, 2 * MIB, 1000), strict=True)]
    for first in (PutOutcome.STORED, PutOutcome.TOUCHED):
        outcomes = bench.node.put(bench.space, puts, traffic_class=AGENT)
        assert outcomes == [first, PutOutcome.TOO_LARGE, first]
    assert bench.node.put(bench.space, puts[1:2], traffic_class=AGENT) == [PutOutcome.TOO_LARGE]
    assert [record.getMessage() for record in caplog.records if "larger segments" in record.getMessage()] == [
        f"block_too_large stored_bytes={2 * MIB}: make the store with larger segments"
    ]


def test_a_lowered_capacity_is_reached_at_the_next_start(bench: Bench) -> None:
    chain = fill(bench.node, bench.space, 150, seed=1)
    node = bench.reopen(capacity_bytes=8 * MIB)
    assert disk_bytes(bench.path) <= 8 * MIB
    assert 0 < reasons(node, chain).count(Presence.PRESENT) < 150
    assert balanced(node)


def test_a_lowered_capacity_that_pins_forbid_is_refused(bench: Bench) -> None:
    chain = fill(bench.node, bench.space, 150, seed=1)
    bench.node.pin([Pin(bench.space, name.key, "test", "hold") for name in chain.names])
    with pytest.raises(VolumeError, match="unpin"):
        bench.reopen(capacity_bytes=8 * MIB)
    node = bench.reopen()
    assert reasons(node, chain) == [Presence.PRESENT] * 150


# --- disks that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("budget", [0, 300, 70_000])
def test_a_failed_write_refuses_that_put_and_nothing_else(bench: Bench, number: int, budget: int) -> None:
    """The node stays up, reads go on, nothing of the refused put is ever seen, and the next put works."""
    before = fill(bench.node, bench.space, 8, seed=1)
    bench.files.errors["pwritev"], bench.files.write_budget = number, budget
    late = a_chain(bench.space, 4, seed=2)
    assert set(bench.node.put(bench.space, puts_of(late.names, SIZE), traffic_class=AGENT)) == {PutOutcome.REFUSED}
    assert reasons(bench.node, late) == [Presence.NEVER] * 4
    assert read(bench.node, bench.space, before.names[0], SIZE)[0] is GetStatus.OK
    assert bench.node.stats()["write_errors"] > 0
    bench.files.errors.clear()
    bench.files.write_budget = None
    node = bench.reopen(lose_index=True)
    assert reasons(node, before) == [Presence.PRESENT] * 8
    assert set(node.put(bench.space, puts_of(late.names, SIZE), traffic_class=AGENT)) <= {
        PutOutcome.STORED,
        PutOutcome.TOUCHED,
    }
    assert balanced(node)


def test_a_full_file_system_recycles_instead_of_growing(bench: Bench) -> None:
    """When no file can be created the store lives in those that it has."""
    fill(bench.node, bench.space, 64, seed=1)
    files = len(list((bench.volume / "segments").iterdir()))
    bench.files.errors["allocate"] = errno.ENOSPC
    for seed in range(2, 8):
        chain = a_chain(bench.space, 16, seed=seed)
        assert set(bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT)) == {PutOutcome.STORED}
        assert reasons(bench.node, chain) == [Presence.PRESENT] * 16
    assert len(list((bench.volume / "segments").iterdir())) == files


def test_a_read_error_is_a_miss_and_the_block_is_quarantined(bench: Bench) -> None:
    chain = fill(bench.node, bench.space, 3, seed=1)
    bench.files.errors["preadv"] = errno.EIO
    assert read(bench.node, bench.space, chain.names[1], SIZE) == (GetStatus.MISS, bytes(SIZE))
    assert bench.node.open_payload(bench.space, chain.names[0]) is None
    bench.files.errors.clear()
    assert reasons(bench.node, chain) == [Presence.QUARANTINED, Presence.QUARANTINED, Presence.PRESENT]
    assert bench.node.stats()["read_errors"] == 2


def test_one_stuck_segment_does_not_wedge_eviction(bench: Bench) -> None:
    """A file that refuses every write is passed over; the others are recycled, and its blocks stay readable."""
    stuck = fill(bench.node, bench.space, 16, seed=0)
    bench.files.only = f"{bench.node.scan()[0][0].segment:08d}.seg"
    for seed in range(1, 8):
        fill(bench.node, bench.space, 16, seed=seed)
    bench.files.errors["pwritev"] = errno.EPERM
    for seed in range(20, 40):
        chain = a_chain(bench.space, 16, seed=seed)
        assert set(bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT)) == {PutOutcome.STORED}
    served = [name for name in stuck.names if read(bench.node, bench.space, name, SIZE)[0] is GetStatus.OK]
    assert served
    assert bench.node.stats()["segments_failed"] == 1


def test_a_failed_flush_refuses_the_blocks_that_wanted_the_disk(bench: Bench) -> None:
    """What the disk did not confirm is neither acknowledged nor served; ``os`` puts before and after are not harmed."""
    before = fill(bench.node, bench.space, 4, seed=1, traffic_class=CHAT)
    bench.node.close()
    bench.node = open_node(bench.path, bench.clock, files=bench.files)
    chain = a_chain(bench.space, 4, seed=2)
    bench.files.errors["fdatasync"] = errno.EIO
    outcomes = bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT, ack="disk")
    assert set(outcomes) == {PutOutcome.REFUSED}
    assert Presence.PRESENT not in reasons(bench.node, chain)
    bench.files.errors.clear()
    assert reasons(bench.node, before) == [Presence.PRESENT] * 4
    outcomes = bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT, ack="disk")
    assert set(outcomes) == {PutOutcome.STORED}
    assert bench.files.calls["fdatasync"] > 0


def test_a_flipped_bit_in_every_part_of_a_record_is_a_miss(bench: Bench) -> None:
    """Header, payload, first and last byte: never wrong bytes, the buffer is zeroed, the block
    quarantined and counted.
    """
    chain = fill(bench.node, bench.space, 12, seed=1)
    places = {info.key: info.segment for info in bench.node.scan()[0]}
    fill_order = [name for name in chain.names if places[name.key] == places[chain.names[0].key]]
    path = bench.volume / "segments" / f"{places[chain.names[0].key]:08d}.seg"
    record = -(-(256 + SIZE) // 4096) * 4096
    offsets = [0, 10, 100, 199, 256, 257, 30_000, 255 + SIZE]
    for number, (name, within) in enumerate(zip(fill_order, offsets, strict=False)):
        with open(path, "r+b") as stream:
            stream.seek(4096 + number * record + within)
            byte = stream.read(1)
            stream.seek(-1, 1)
            stream.write(bytes([byte[0] ^ 0x20]))
        assert read(bench.node, bench.space, name, SIZE) == (GetStatus.CORRUPT, bytes(SIZE))
        assert bench.node.lookup(bench.space, [name]).presence.tolist() == [Presence.QUARANTINED]
    spoiled = min(len(fill_order), len(offsets))
    assert bench.node.stats()["corrupt"] == bench.node.stats()["quarantined"] == spoiled == 8
    node = bench.reopen(lose_index=True)
    assert reasons(node, chain).count(Presence.PRESENT) == 4


def test_reporting_a_good_block_as_corrupt_changes_nothing(bench: Bench) -> None:
    """A client cannot make the store drop good blocks; a really bad one goes."""
    chain = fill(bench.node, bench.space, 2, seed=1)
    assert not bench.node.report_corrupt(bench.space, chain.names[0])
    assert reasons(bench.node, chain) == [Presence.PRESENT] * 2
    path = next((bench.volume / "segments").iterdir())
    with open(path, "r+b") as stream:
        stream.seek(4096 + 1000)
        stream.write(b"spoiled")
    assert bench.node.report_corrupt(bench.space, chain.names[0])
    assert reasons(bench.node, chain) == [Presence.QUARANTINED, Presence.PRESENT]


def test_a_segment_file_deleted_under_load_costs_its_blocks_only(bench: Bench) -> None:
    """Reads and puts go on, nothing wrong is returned, and a restart knows exactly what is left."""
    chains = [fill(bench.node, bench.space, 16, seed=seed) for seed in range(5)]
    stop = threading.Event()
    wrong: list[BlockName] = []

    def hammer() -> None:
        while not stop.is_set():
            for chain in chains:
                for name in chain.names:
                    status, data = read(bench.node, bench.space, name, SIZE)
                    if status is GetStatus.OK and data != payload_of(name, SIZE):
                        wrong.append(name)

    reader = threading.Thread(target=hammer)
    reader.start()
    (bench.volume / "segments" / "00000002.seg").unlink()
    for seed in range(5, 8):
        chains.append(fill(bench.node, bench.space, 16, seed=seed))
    stop.set()
    reader.join(60)
    assert wrong == []
    bench.node.sweep(apply=True)
    lost = [chain.names for chain in chains if Presence.QUARANTINED in reasons(bench.node, chain)]
    assert lost
    before = [reasons(bench.node, chain) for chain in chains]
    assert [reasons(bench.reopen(), chain) for chain in chains] == before
    assert balanced(bench.node)


def test_a_truncated_segment_is_misses_and_fsck_says_so(bench: Bench) -> None:
    chain = fill(bench.node, bench.space, 10, seed=1)
    path = bench.volume / "segments" / "00000001.seg"
    os.truncate(path, 4096 + 3 * 61_440 + 5000)
    statuses = [read(bench.node, bench.space, name, SIZE)[0] for name in chain.names]
    assert statuses[:3] == [GetStatus.OK] * 3
    assert set(statuses[3:]) == {GetStatus.CORRUPT}
    bench.node.close()
    report = check(bench.volume)
    assert report.findings_by_kind["segment-cut"] == 1
    check(bench.volume, repair=True)
    assert check(bench.volume).clean
    bench.node = open_node(bench.path, bench.clock)
    assert reasons(bench.node, chain)[:3] == [Presence.PRESENT] * 3


# --- identity and buffers ---------------------------------------------------------------------------------------------


def test_a_colliding_key_is_a_miss_for_the_other_prefix(bench: Bench) -> None:
    """Two prefixes whose key collides (as with an 8-bit hash): the second never gets the first one's bytes."""
    name = a_chain(bench.space, 1).names[0]
    twin = replace(name, token_digest=TokenDigest(b"\x01" * 16))
    bench.node.put(bench.space, puts_of([name], SIZE), traffic_class=AGENT)
    assert bench.node.put(bench.space, puts_of([twin], SIZE), traffic_class=AGENT) == [PutOutcome.REFUSED]
    assert bench.node.lookup(bench.space, [name, twin]).presence.tolist() == [Presence.PRESENT, Presence.NEVER]
    assert read(bench.node, bench.space, twin, SIZE) == (GetStatus.MISS, b"\xa5" * SIZE)
    assert bench.node.stats()["quarantined"] == 0
    assert read(bench.node, bench.space, name, SIZE)[0] is GetStatus.OK


def test_of_two_keys_with_one_fingerprint_in_a_batch_the_first_is_stored(bench: Bench) -> None:
    """Keys whose first 8 bytes are alike are put together: the second is refused, as in a put of its own, and does not
    come up when the first one is gone.
    """
    name, twin = _with_twin(bench.space)
    outcomes = bench.node.put(bench.space, puts_of([name, twin], SIZE), traffic_class=AGENT)
    assert outcomes == [PutOutcome.STORED, PutOutcome.REFUSED]
    assert read(bench.node, bench.space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
    assert bench.node.delete(bench.space, [twin.key]) == 0
    assert bench.node.delete(bench.space, [name.key]) == 1
    assert read(bench.node, bench.space, twin, SIZE)[0] is GetStatus.MISS


@pytest.mark.parametrize("order", [1, -1])
def test_a_key_is_deleted_also_beside_one_with_its_fingerprint(bench: Bench, order: int) -> None:
    """A deletion names the stored key and one that only begins alike: the block is gone, whichever came first."""
    name, twin = _with_twin(bench.space)
    bench.node.put(bench.space, puts_of([name], SIZE), traffic_class=AGENT)
    assert bench.node.delete(bench.space, [twin.key]) == 0
    assert bench.node.delete(bench.space, [name.key, twin.key][::order]) == 1
    assert read(bench.node, bench.space, name, SIZE)[0] is GetStatus.MISS


def _with_twin(space: SpaceId) -> tuple[BlockName, BlockName]:
    """A name, and one of another prefix whose key begins with the same 8 bytes."""
    name, other = a_chain(space, 2).names
    return name, replace(other, key=BlockKey(name.key[:8] + bytes(24)))


@pytest.mark.parametrize("lent", [False, True])
def test_an_entry_that_points_at_another_block_never_serves_it(bench: Bench, lent: bool) -> None:
    """The record itself says whose it is: with two places exchanged both blocks are misses, and the third is there."""
    names = fill(bench.node, bench.space, 3, seed=1).names
    presence = bench.node._shards[0]._ledger.presence
    first, second = (presence.slot(name.key) for name in names[:2])
    presence.places[[first, second]] = presence.places[[second, first]]
    for name in names[:2]:
        if lent:
            assert bench.node.open_payload(bench.space, name) is None
        else:
            assert read(bench.node, bench.space, name, SIZE)[0] in (GetStatus.CORRUPT, GetStatus.MISS)
    assert Presence.PRESENT not in bench.node.lookup(bench.space, names[:2]).presence
    assert read(bench.node, bench.space, names[2], SIZE) == (GetStatus.OK, payload_of(names[2], SIZE))


def test_a_payload_that_changes_while_it_is_written_is_not_acknowledged(bench: Bench) -> None:
    """The buffer is overwritten between submission and the end of the write: ALTERED, a miss, also after a rebuild."""
    name = a_chain(bench.space, 1).names[0]
    payload = bytearray(payload_of(name, SIZE))
    wrong = payload[100] ^ 1

    class Meddling(FaultyFiles):
        def pwritev(self, fd: int, views: object, offset: int) -> int:
            payload[100] = wrong
            return super().pwritev(fd, views, offset)  # type: ignore[arg-type]

    bench.files = Meddling()
    bench.reopen()
    outcomes = bench.node.put(bench.space, [BlockPut(name, 4, payload)], traffic_class=AGENT)
    assert outcomes == [PutOutcome.ALTERED]
    assert bench.node.lookup(bench.space, [name]).presence.tolist() == [Presence.NEVER]
    bench.files = FaultyFiles()
    assert bench.reopen(lose_index=True).lookup(bench.space, [name]).presence.tolist() != [Presence.PRESENT]


def test_a_wrong_checksum_at_submission_is_altered_and_keeps_nothing(bench: Bench) -> None:
    names = a_chain(bench.space, 2).names
    puts = puts_of(list(names), SIZE)
    good = xxhash.xxh3_64_intdigest(puts[0].payload)
    outcomes = bench.node.put(bench.space, puts, traffic_class=AGENT, checksums=[good, 1])
    assert outcomes == [PutOutcome.STORED, PutOutcome.ALTERED]
    assert bench.node.lookup(bench.space, names).presence.tolist() == [Presence.PRESENT, Presence.NEVER]


def test_compressed_blocks_come_back_whole_by_both_ways(tmp_path: Path) -> None:
    """A class with zstd stores fewer bytes; get and the sender's lease give the payload and its own checksum."""
    node = open_node(tmp_path, ManualClock(), rules=ZSTD_RULES)
    space = node.register_space(a_space())
    name = a_chain(space, 1).names[0]
    payload = bytes(range(200)) * 300
    node.put(space, [BlockPut(name, 4, payload)], traffic_class=AGENT)
    assert node.scan()[0][0].stored_bytes < len(payload) // 2
    assert read(node, space, name, len(payload)) == (GetStatus.OK, payload)
    with node.open_payload(space, name) as lease:
        assert lease.fd is None
        assert lease.data == payload
        assert lease.checksum == xxhash.xxh3_64_intdigest(payload)
    node.close()


def test_a_lease_holds_its_segment_until_it_is_closed(bench: Bench) -> None:
    """While a payload is being sent its bytes stay, whatever is put; afterwards the segment can be recycled."""
    chain = fill(bench.node, bench.space, 1, seed=0)
    name = chain.names[0]
    lease = bench.node.open_payload(bench.space, name)
    assert lease is not None
    assert lease.fd is not None
    for seed in range(1, 40):
        fill(bench.node, bench.space, 16, seed=seed)
    assert os.pread(lease.fd, lease.payload_bytes, lease.offset) == payload_of(name, SIZE)
    assert bench.node.stats()["leases"] == 1
    lease.close()
    lease.close()
    for seed in range(40, 60):
        fill(bench.node, bench.space, 16, seed=seed)
    assert bench.node.stats()["leases"] == 0
    assert reasons(bench.node, chain) == [Presence.EVICTED]


def test_lookups_and_failed_reads_leave_nothing_held(bench: Bench) -> None:
    """After many lookups, misses, wrong sizes and unused leases everything can still be evicted."""
    chain = fill(bench.node, bench.space, 16, seed=0)
    for turn in range(500):
        bench.node.lookup(bench.space, chain.names, states=True)
        read(bench.node, bench.space, chain.names[turn % 16], SIZE - 1)
        lease = bench.node.open_payload(bench.space, chain.names[turn % 16])
        assert lease is not None
        lease.close()
    assert bench.node.stats()["leases"] == 0
    for seed in range(1, 30):
        fill(bench.node, bench.space, 16, seed=seed)
    assert reasons(bench.node, chain) == [Presence.EVICTED] * 16


def test_an_exact_block_displaces_an_approximate_one_for_good(bench: Bench) -> None:
    """The replaced record is dead on disk: no rebuild brings the approximate bytes back; touches are kept."""
    names = list(a_chain(bench.space, 3).names)
    approximate = [replace(put, flags=FLAG_APPROXIMATE, payload=b"\x01" * SIZE) for put in puts_of(names, SIZE)]
    assert bench.node.put(bench.space, approximate, traffic_class=CHAT) == [PutOutcome.STORED] * 3
    assert bench.node.put(bench.space, puts_of(names, SIZE), traffic_class=AGENT) == [PutOutcome.REPLACED] * 3
    assert bench.node.put(bench.space, approximate, traffic_class=AGENT) == [PutOutcome.TOUCHED] * 3
    for lose_index in (False, True):
        node = bench.reopen(lose_index=lose_index)
        for name in names:
            assert read(node, bench.space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
        assert node.lookup(bench.space, names).flags.tolist() == [0, 0, 0]
        assert {tuple(sorted(info.touches)) for info in node.scan()[0]} == {(AGENT, CHAT)}


def test_replacing_in_a_full_store_never_marks_a_recycled_record(bench: Bench) -> None:
    """Room for a put is made by recycling the very segment that holds what it replaces, and the put's first blocks go
    there: none of them may die of the replacement.
    """
    old = a_chain(bench.space, 17, seed=0).names
    approximate = [replace(put, flags=FLAG_APPROXIMATE) for put in puts_of(old, SIZE)]
    bench.node.put(bench.space, approximate, traffic_class=AGENT)
    later = [fill(bench.node, bench.space, 17, seed=seed) for seed in range(1, 12)]
    assert bench.node.stats()["segments_free"] == 1
    sparse = [*old[2:], *later[0].names[1:]]
    bench.node.delete(bench.space, [name.key for name in sparse])
    batch = [*a_chain(bench.space, 34, seed=99).names, old[0]]
    bench.node.put(bench.space, puts_of(batch, SIZE), traffic_class=AGENT)
    assert bench.node.stats()["blocks_rewritten"] == 3
    for name in batch:
        assert read(bench.node, bench.space, name, SIZE) == (GetStatus.OK, payload_of(name, SIZE))
    assert bench.node.stats()["corrupt"] == 0
    assert balanced(bench.node)


def test_threads_share_a_node(bench: Bench) -> None:
    """Writers, readers, touches, deletes and sweeps at once: every byte that is returned is right."""
    problems: list[str] = []

    def work(number: int) -> None:
        for turn in range(12):
            chain = a_chain(bench.space, 8, seed=number % 3 * 20 + turn)
            bench.node.put(bench.space, puts_of(chain.names, SIZE), traffic_class=AGENT)
            for name in chain.names:
                status, data = read(bench.node, bench.space, name, SIZE)
                if status is GetStatus.OK and data != payload_of(name, SIZE):
                    problems.append("altered")
                if status is GetStatus.CORRUPT:
                    problems.append("corrupt")
            bench.node.touch(bench.space, chain.names, traffic_class=CHAT)
            if turn % 4 == number % 4:
                bench.node.delete(bench.space, [chain.names[0].key])
                bench.node.sweep(apply=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert problems == []
    assert bench.node.stats()["leases"] == 0
    assert balanced(bench.node)
    bench.node.close()
    assert check(bench.volume).clean


# --- several directories ----------------------------------------------------------------------------------------------


def test_a_directory_added_later_loses_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(a_space())
    chain = fill(node, space, 64, seed=1)
    node.close()
    node = open_node(tmp_path, clock, directories=2, capacity_bytes=2 * CAPACITY_BYTES)
    assert reasons(node, chain) == [Presence.PRESENT] * 64
    assert set(node.put(space, puts_of(chain.names, SIZE), traffic_class=AGENT)) == {PutOutcome.TOUCHED}
    for seed in range(2, 5):
        fill(node, space, 64, seed=seed)
    assert node.accounting()[1]["live_bytes"] > 0
    keys = [info.key for info in node.scan()[0]]
    assert keys == sorted(keys)
    assert node.delete_space(space) == len(keys)
    node.close()
