"""Events: what becomes of blocks, told to whoever listens, bounded, resumable, and never waited for."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from kvstore.cli import build_app
from kvstore.daemon.admin import AdminServer, EventFeed, create_app
from kvstore.daemon.events import EventLog, event_json
from kvstore.daemon.index import ENTRY_DTYPE
from kvstore.daemon.node import Node
from kvstore.errors import Overloaded, StoreError, Unauthorized, Unavailable
from kvstore.events import Position, follow_events, read_events
from kvstore.keys import AttentionGroup, Space, SpaceId, TokenChain
from kvstore.limits import EVENT_BLOCKS_MAX, EVENT_LINE_BYTES_MAX, EVENT_LISTENERS_MAX, MIB
from kvstore.store import GetStatus
from kvstore.testing import DAY_S, TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT
from tests.support.nodes import open_node, read
from tests.support.spaces import BLOCK_TOKENS, PAYLOAD_BYTES, a_chain, a_space, put_chain

Event = dict[str, Any]
SPACE = SpaceId(bytes(range(32)))


def rows(count: int, first: int = 0, at_s: int = 5) -> np.ndarray[Any, np.dtype[np.void]]:
    """Rows of a chain of blocks, each the parent of the next one."""
    found = np.zeros(count, ENTRY_DTYPE)
    found["written_s"] = at_s
    numbers = np.arange(first, first + count, dtype=np.uint64)
    found["key"][:, 0], found["parent"][:, 0] = numbers + 1, numbers
    found["space"] = np.frombuffer(SPACE, dtype="<u8")
    found["index"], found["tokens"], found["payload_bytes"], found["class_byte"] = numbers, 64, 100, AGENT
    return found


def told(log: EventLog, after: int = 0) -> list[Event]:
    """Everything that is remembered, as a reader is told it."""
    found: list[Event] = []
    while page := log.after(after).events:
        found += [event_json(event, "epoch", TEST_RULES, {}) for event in page]
        after = page[-1].sequence
    return found


def test_a_run_spans_its_blocks_and_no_token_more() -> None:
    """The span of an event is its blocks times their tokens, and a break in the chain begins another run."""
    log = EventLog()
    with log.listening():
        log.stored(np.concatenate([rows(3), rows(2, first=7)]))
    (event,) = told(log)
    assert [(run["first_block"], run["blocks"]) for run in event["runs"]] == [(0, 3), (7, 2)]
    for run in event["runs"]:
        assert run["end_token"] - run["first_token"] == run["blocks"] * run["block_tokens"] == len(run["keys"]) * 64
    assert event["runs"][0]["end_token"] == 192
    assert (event["event"], event["at_s"], event["runs"][0]["class"]) == ("stored", 5, "agent")


def test_blocks_of_other_spaces_and_classes_are_other_runs() -> None:
    """A run is of one space and one class, and names the group of layers whose KV its blocks hold."""
    log = EventLog()
    mixed = rows(4)
    mixed["class_byte"][1:] = CHAT
    mixed["space"][2:] = 0
    mixed["tokens"][3] = 32
    with log.listening():
        log.stored(mixed)
    sliding = a_space(groups=(AttentionGroup(128, (0,), 1, 8),))
    event = event_json(log.after(0).events[0], "epoch", TEST_RULES, {SpaceId(bytes(32)): sliding})
    assert [run["class"] for run in event["runs"]] == ["agent", "chat", "chat", "chat"]
    assert [(run["group"], run["window_tokens"]) for run in event["runs"]] == [("global", 0)] * 2 + [
        ("sliding", 128)
    ] * 2


def test_nothing_is_kept_while_nobody_listens() -> None:
    """A log is off until somebody listens, stays on a while after, and then forgets; the next epoch is another one."""
    now_s = [0.0]
    log = EventLog(linger_s=60, monotonic_s=lambda: now_s[0])
    assert not log.recording
    with log.listening():
        first = log.position().epoch
        log.stored(rows(1))
    now_s[0] = 59.0
    log.stored(rows(1))
    assert log.recording
    assert len(told(log)) == 2
    now_s[0] = 61.0
    log.stored(rows(1))
    assert not log.recording
    assert log.memory_bytes == 0
    with log.listening():
        assert log.position().epoch != first
        assert log.position().newest == 0


def test_memory_is_bounded_whatever_happens() -> None:
    """Many small and few large events: the latest are kept, within the bound, and sequence numbers go on."""
    log = EventLog(bytes_max=MIB)
    with log.listening():
        for size in [1] * 5000 + [3 * EVENT_BLOCKS_MAX] * 20:
            log.stored(rows(size))
            assert log.memory_bytes <= MIB
        page = log.after(0)
        assert page.newest == 5000 + 60
        assert page.events[0].sequence == page.oldest > 5000
        assert all(len(event.blocks) <= EVENT_BLOCKS_MAX for event in page.events)


def test_the_longest_event_fits_its_line() -> None:
    """Each block a run of its own is the worst that an event can be."""
    log = EventLog()
    apart = rows(EVENT_BLOCKS_MAX)
    apart["index"], apart["written_s"] = 2**32 - 1, 2**40
    with log.listening():
        log.stored(apart)
    (event,) = told(log)
    assert len(event["runs"]) == EVENT_BLOCKS_MAX
    assert len(json.dumps(event)) < EVENT_LINE_BYTES_MAX


def test_so_many_may_listen_and_no_more() -> None:
    """The next one is refused, and may listen when another has left."""
    log = EventLog()
    readers = [log.listening() for _ in range(EVENT_LISTENERS_MAX)]
    for reader in readers:
        reader.__enter__()
    assert not log.has_room
    with pytest.raises(Overloaded), log.listening():
        pass
    readers[0].__exit__(None, None, None)
    with log.listening():
        assert not log.has_room


# --- what a node tells ----------------------------------------------------------------------------------------------


@contextmanager
def listened(path: Path, clock: ManualClock, **options: Any) -> Iterator[Node]:
    node = open_node(path, clock, **options)
    try:
        with node.events.listening():
            yield node
    finally:
        node.close()


def kinds(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    return [(event["event"], run["first_block"], run["blocks"]) for event in events for run in event["runs"]]


def keys_of(events: Sequence[Event], kind: str) -> set[str]:
    return {key for event in events if event["event"] == kind for run in event["runs"] for key in run["keys"]}


def hex_keys(chain: TokenChain) -> set[str]:
    return {name.key.hex() for name in chain.names}


def test_a_node_tells_of_each_end_of_a_block(tmp_path: Path) -> None:
    """Stored, touched (nothing), expired, purged, quarantined: each block is told once, under its keys and span."""
    clock = ManualClock()
    with listened(tmp_path, clock) as node:
        space_id = node.register_space(a_space())
        chains = [a_chain(space_id, 4, seed=seed) for seed in range(3)]
        for chain in chains:
            put_chain(node, chain, AGENT)
            put_chain(node, chain, AGENT)
        assert kinds(told(node.events)) == [("stored", 0, 4)] * 3
        node.delete(space_id, [name.key for name in chains[0].names[1:]])
        damage(tmp_path, chains[1].names[2].key)
        assert read(node, space_id, chains[1].names[2], PAYLOAD_BYTES)[0] is GetStatus.CORRUPT
        clock.advance(4 * DAY_S)
        node.sweep(apply=True)
        events = told(node.events)
        assert keys_of(events, "stored") == set().union(*map(hex_keys, chains))
        assert keys_of(events, "purged") == {name.key.hex() for name in chains[0].names[1:]}
        assert keys_of(events, "quarantined") == {chains[1].names[2].key.hex()}
        gone = keys_of(events, "purged") | keys_of(events, "quarantined")
        assert keys_of(events, "expired") == keys_of(events, "stored") - gone
        for run in itertools.chain.from_iterable(event["runs"] for event in events):
            assert run["end_token"] - run["first_token"] == run["blocks"] * BLOCK_TOKENS
            assert (run["space"], run["class"], run["group"]) == (space_id.hex(), "agent", "global")


def damage(path: Path, key: bytes) -> None:
    """Flip a byte of the payload of a block, wherever its record lies."""
    for file in path.rglob("*.seg"):
        data = bytearray(file.read_bytes())
        at = data.find(key)
        if at >= 0:
            header = at - at % 4096 if at % 4096 < 256 else at
            data[header + 300] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("no record of the key")


def test_a_full_node_tells_what_it_evicted(tmp_path: Path) -> None:
    """What was stored and is not there any more was told as evicted, and nothing else was."""
    clock = ManualClock()
    with listened(tmp_path, clock) as node:
        space_id = node.register_space(a_space())
        chains = [a_chain(space_id, 8, seed=seed) for seed in range(40)]
        for chain in chains:
            put_chain(node, chain, AGENT, payload_bytes=100_000)
            clock.advance(60)
        events = told(node.events)
        evicted = keys_of(events, "evicted")
        assert evicted
        there = {
            name.key.hex()
            for chain in chains
            for name, here in zip(chain.names, node.lookup(space_id, chain.names).presence == 1, strict=True)
            if here
        }
        assert keys_of(events, "stored") - evicted == there


def test_a_restart_is_another_epoch(tmp_path: Path) -> None:
    """A reader that comes back with a position of before knows that it missed something."""
    clock = ManualClock()
    with listened(tmp_path, clock) as node:
        put_chain(node, a_chain(node.register_space(a_space()), 2), AGENT)
        epoch = node.events.position().epoch
    with listened(tmp_path, clock) as node:
        assert node.events.position().epoch != epoch
        assert told(node.events) == []


# --- over HTTP ------------------------------------------------------------------------------------------------------

TOKEN = "a-token-of-some-length"


@contextmanager
def served(log: EventLog, port: int = 0, token: bytes = b"") -> Iterator[str]:
    """The admin endpoint over a log; its address."""
    healthy = threading.Event()
    healthy.set()
    spaces: dict[SpaceId, Space] = {}
    feed = EventFeed(log, lambda: TEST_RULES, lambda: spaces, lambda given: not token or given == token)
    server = AdminServer.start(
        create_app(dict, CollectorRegistry(), healthy.is_set, feed),
        "127.0.0.1",
        port,
    )
    try:
        yield server.address
    finally:
        healthy.clear()
        server.stop()


def test_a_reader_hears_what_comes_and_goes_on_where_it_was() -> None:
    """From now on; then, after its connection broke, from its position: everything once, in order."""
    log = EventLog()
    with served(log) as address:
        stream = read_events(address)
        begin = next(stream)
        assert (begin["event"], begin["sequence"]) == ("begin", 0)
        log.stored(rows(2))
        heard = [next(stream)]
        stream.close()
        log.stored(rows(1, at_s=6))
        log.stored(rows(1, at_s=7))
        position = Position(heard[0]["epoch"], heard[0]["sequence"])
        heard += [event for event in read_events(address, None, position, follow=False) if event["event"] != "begin"]
        assert [(event["sequence"], event["at_s"]) for event in heard] == [(1, 5), (2, 6), (3, 7)]
        assert [event["at_s"] for event in read_events(address, follow=False) if "runs" in event] == [5, 6, 7]


def test_a_slow_reader_is_told_of_its_gap_and_holds_nobody_up() -> None:
    """A reader that does not read while the log turns over twice finds one gap of exactly what it missed."""
    log = EventLog(bytes_max=MIB)
    with served(log) as address:
        stream = read_events(address)
        next(stream)
        for _ in range(400):
            log.stored(rows(EVENT_BLOCKS_MAX))
        assert log.memory_bytes <= MIB
        sequence, missed = 0, 0
        while sequence < 400:
            event = next(stream)
            if event["event"] == "gap":
                missed += event["missed_events"]
                assert event["sequence"] == sequence + event["missed_events"]
            else:
                assert event["sequence"] == sequence + 1
            sequence = event["sequence"]
        assert missed > 300
        stream.close()


def test_what_cannot_be_told_is_a_gap() -> None:
    """A change whose blocks nobody can name any more is a hole in the sequence, at its end too."""
    log = EventLog()
    with served(log) as address:
        stream = read_events(address)
        epoch = next(stream)["epoch"]
        log.stored(rows(1))
        log.lost()
        assert [(event["event"], event["sequence"]) for event in itertools.islice(stream, 2)] == [
            ("stored", 1),
            ("gap", 2),
        ]
        stream.close()
        found = list(read_events(address, None, Position("another", 7), follow=False))
        assert [event["event"] for event in found] == ["gap", "begin", "stored", "gap"]
        assert (found[0]["epoch"], found[0]["missed_events"]) == (epoch, None)
        ahead = list(read_events(address, None, Position(epoch, 99), follow=False))
        assert ahead[0]["event"] == "gap"


def test_events_want_the_token() -> None:
    """As the metrics do."""
    with served(EventLog(), token=TOKEN.encode()) as address:
        with pytest.raises(Unauthorized):
            next(read_events(address))
        with pytest.raises(Unauthorized):
            next(read_events(address, "another-token-of-some-length"))
        assert next(read_events(address, TOKEN, follow=False))["event"] == "begin"


def test_a_reader_beyond_the_bound_is_told_to_come_later() -> None:
    """Its connection is answered, not kept."""
    log = EventLog()
    with served(log) as address:
        readers = [log.listening() for _ in range(EVENT_LISTENERS_MAX)]
        for reader in readers:
            reader.__enter__()
        with pytest.raises(Unavailable, match="takes no reader"):
            next(read_events(address))


def test_following_outlives_a_restart() -> None:
    """The endpoint goes and comes back with another epoch: a gap, and the events go on."""
    log, lost = EventLog(), list[StoreError]()
    with served(log) as address:
        stream = follow_events(address, None, None, lambda _: False, lost.append)
        assert next(stream)["event"] == "begin"
        log.stored(rows(1))
        assert next(stream)["sequence"] == 1
    again = EventLog()
    with served(again, port=int(address.rpartition(":")[2])):
        gap, begin = next(stream), next(stream)
        assert (gap["event"], gap["missed_events"], begin["event"]) == ("gap", None, "begin")
        again.stored(rows(1, at_s=6))
        assert next(stream)["at_s"] == 6
        stream.close()
    assert lost


def test_the_command_prints_lines_for_programs_and_for_people() -> None:
    """``reprise store events``: one document a line with --json, else a line for each run."""
    log = EventLog()
    command = build_app(lambda path: (TEST_RULES, ""))
    with served(log) as address:
        with log.listening():
            log.stored(rows(3))
        as_json = CliRunner().invoke(command, ["events", address, "--json"])
        text = CliRunner().invoke(command, ["events", address])
        assert [json.loads(line)["event"] for line in as_json.stdout.splitlines()] == ["begin", "stored"]
        assert "stored      agent global blocks 0..2 (tokens 0..191)" in text.stdout
    assert CliRunner().invoke(command, ["events", address]).exit_code == 1
    assert CliRunner().invoke(command, ["events", "nowhere"]).exit_code == 2
