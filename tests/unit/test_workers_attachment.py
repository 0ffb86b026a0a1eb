"""What adapters are told, and that nothing of the store makes an engine wait or fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.keys import TokenChain, opaque_name
from kvstore.limits import MIB
from kvstore.store import BlockPut, GetStatus, Lookup, Presence, PutOutcome
from kvstore.testing import MemoryStore
from kvstore.traffic import AGENT, CHAT
from tests.support.faulty_store import FaultyStore
from tests.support.spaces import BLOCK_TOKENS, a_space
from tests.support.waiting import WAIT_S
from workers.adapters import attachment as module
from workers.adapters.attachment import OPTIONS_OF_CONNECTORS, Attachment, OptionError, Settings, Terms

STORE = "127.0.0.1:7071"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "store: name at least one node"),
        ({"store": []}, "store: write one address"),
        ({"store": "nowhere"}, "store: .*host:port"),
        ({"store": STORE, "stroe": 1}, "unknown option stroe; known are .*store"),
        ({"store": STORE, "traffic_class": "batch"}, "traffic_class: 'batch' is not one of agent, chat"),
        ({"store": STORE, "classes": {"chat": 17}}, "classes: chat is built in"),
        ({"store": STORE, "classes": {"x": 3}}, "classes: 3 is not"),
        ({"store": STORE, "lookup_deadline_s": 60}, "lookup_deadline_s: expected a number from 0.001 to 5"),
        ({"store": STORE, "lookup_deadline_s": True}, "lookup_deadline_s: expected"),
        ({"store": STORE, "queue_bytes": "1KiB"}, "queue_bytes: expected a size from 1MiB"),
        ({"store": STORE, "epoch": -1}, "epoch: expected a whole number"),
        ({"store": STORE, "same_host": "yes"}, "same_host: expected true or false"),
        ({"store": STORE, "weights_digest": "ab"}, "weights_digest: expected 64 hex digits"),
        ({"store": STORE, "compute_tokens_per_s": 0}, "compute_tokens_per_s: expected"),
        ({"store": STORE, "tenant": ""}, "tenant: expected text"),
        ({"store": STORE, "access_log": "/var/log/a"}, "unknown option access_log; known are classes"),
        ({"store": STORE, "keep_windows": False}, "unknown option keep_windows"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    """The message names the option and says what to write."""
    with pytest.raises(OptionError, match=told):
        Settings.from_options(options)


def test_options_become_settings() -> None:
    """Every option reaches its field, in bytes and seconds; the rest keeps its default."""
    settings = Settings.from_options(
        {
            "store": [STORE, "unix:/run/s.sock"],
            "classes": {"batch": 17},
            "traffic_class": "batch",
            "queue_bytes": "2MiB",
            "lookup_deadline_s": 1,
            "weights_digest": "ab" * 32,
        }
    )
    assert settings.stores == (STORE, "unix:/run/s.sock")
    assert settings.traffic_class == 17
    assert settings.queue_bytes == 2 * MIB
    assert settings.digest_of("anything") == bytes.fromhex("ab" * 32)
    assert Settings.from_options({"store": STORE}).traffic_class == CHAT
    own = Settings.from_options({"store": STORE, "access_log": "a", "keep_windows": False}, also=OPTIONS_OF_CONNECTORS)
    assert (own.access_log, own.keep_windows) == (Path("a"), False)


def test_a_model_without_files_needs_a_digest(tmp_path: Path) -> None:
    """Without weights to hash the operator is told to name them; nothing is guessed from the model's name."""
    with pytest.raises(OptionError, match=r"weights_digest: .*64 hex digits"):
        Settings(stores=(STORE,)).digest_of(str(tmp_path))


@pytest.mark.parametrize(
    ("wishes", "terms"),
    [
        (None, Terms(None, CHAT)),
        ({"other": 1}, Terms(None, CHAT)),
        ({"reprise_tenant": "alice", "reprise_class": "agent"}, Terms("alice", AGENT)),
        ({"reprise_class": 2}, Terms(None, CHAT)),
        ({"reprise_cache": "off"}, None),
        ({"reprise_tenant": 7}, None),
        ({"reprise_tenant": "x" * 513}, None),
        ({"reprise_class": "unheard"}, None),
    ],
)
def test_a_request_says_whose_it_is_or_is_not_cached(wishes: dict[str, Any] | None, terms: Terms | None) -> None:
    """What cannot be read is never taken for nobody's: the request is neither looked up nor stored."""
    assert Settings(stores=(STORE,)).terms(wishes) == terms


class Rig:
    """An attachment over a store in memory that fails when told to."""

    def __init__(self, **settings: Any) -> None:
        self.store = FaultyStore(MemoryStore())
        settings = {"lookup_deadline_s": WAIT_S, "load_deadline_s": WAIT_S} | settings
        self.attached = Attachment(Settings(stores=(STORE,), **settings), self.store, a_space())
        self.attached.publisher.start()
        self.space = self.attached.spaces.of(None)
        self.names = list(TokenChain(self.space.id, BLOCK_TOKENS, range(3 * BLOCK_TOKENS)).names)

    def publish(self) -> None:
        ticket = self.attached.ticket(self.space, CHAT)
        for name in self.names:
            assert self.attached.publisher.offer_block(ticket, name, BLOCK_TOKENS, bytearray(b"x" * 64), 0)
        assert self.attached.publisher.flush(ticket, WAIT_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.attached.close(WAIT_S)


def test_what_was_offered_is_found_and_loaded(rig: Rig) -> None:
    """Puts go by the queue; a look-up and a load on the threads here bring the bytes back, and both are counted."""
    rig.publish()
    buffers = [bytearray(64) for _ in rig.names]
    asked = rig.attached.ask(lambda left_s: rig.attached.look_up(rig.space, rig.names, deadline_s=left_s))
    future = rig.attached.load_soon(lambda left_s: rig.attached.load(rig.space, rig.names, buffers, deadline_s=left_s))
    assert future.result(WAIT_S) == [GetStatus.OK] * 3
    assert asked._future is not None
    found = asked._future.result(WAIT_S)
    assert asked.settled
    assert found is not None
    assert found.prefix_blocks() == 3
    assert buffers == [bytearray(b"x" * 64)] * 3
    assert (rig.attached.stats()["found"], rig.attached.stats()["loaded_bytes"]) == (3, 192)


def test_a_store_that_fails_is_misses(rig: Rig) -> None:
    """Neither look-up nor load raises; both are counted as failed."""
    rig.publish()
    rig.store.down = True
    assert rig.attached.look_up(rig.space, rig.names) is None
    assert rig.attached.load(rig.space, rig.names, [bytearray(64) for _ in rig.names]) == [GetStatus.UNREACHABLE] * 3
    assert (rig.attached.counts.lookups_failed, rig.attached.counts.loads_failed) == (1, 3)


def test_a_node_that_is_down_is_told_and_counted(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The message itself names store and problem, since engines print nothing else; not once a look-up."""
    rig.publish()
    whole = rig.store.lookup
    rig.store.lookup = lambda *args, **options: _silent(whole(*args, **options))  # type: ignore[method-assign]
    for _ in range(3):
        assert rig.attached.look_up(rig.space, rig.names) is not None
    (told,) = [record.message for record in caplog.records]
    assert "store_fails" in told
    assert STORE in told
    assert rig.attached.counts.lookups_failed == 3


def _silent(found: Lookup) -> Lookup:
    return replace(found, presence=np.full_like(found.presence, Presence.UNREACHABLE), complete=False)


def test_a_look_up_that_hangs_is_a_miss_at_its_deadline() -> None:
    """Whoever polls finds it settled without an answer, and never waits."""
    rig, gate = Rig(lookup_deadline_s=0.01), threading.Event()
    try:
        asked = rig.attached.ask(lambda left_s: gate.wait(WAIT_S))
        while not asked.settled:
            pass
        assert asked.answer() is None
    finally:
        gate.set()
        rig.attached.close(WAIT_S)


def test_a_fault_of_ours_costs_a_hit_and_is_told(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong on a thread here reaches the log, and never the engine that polls."""
    asked = rig.attached.ask(lambda left_s: 1 // 0)
    assert asked._future is not None
    assert isinstance(asked._future.exception(WAIT_S), ZeroDivisionError)
    assert asked.settled
    assert asked.answer() is None
    assert isinstance(rig.attached.load_soon(lambda left_s: 1 // 0).exception(WAIT_S), ZeroDivisionError)
    rig.attached._load_pool.shutdown(wait=True)
    rig.attached._lookup_pool.shutdown(wait=True)
    assert [record.message for record in caplog.records] == ["adapter_fault"] * 2


def test_look_ups_beyond_the_bound_are_misses_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of look-ups cannot grow: the next one is settled without an answer, and room comes back."""
    monkeypatch.setattr(module, "LOOKUPS_MAX", 1)
    gate = threading.Event()
    first = rig.attached.ask(lambda left_s: gate.wait(WAIT_S))
    second = rig.attached.ask(lambda left_s: True)
    assert second.settled
    assert second.answer() is None
    gate.set()
    assert first._future is not None
    assert first._future.result(WAIT_S)
    while rig.attached._asking:
        pass
    assert rig.attached.counts.lookups_shed == 1


def test_a_closed_attachment_answers_with_misses() -> None:
    """An engine that goes on while it is shut down finds nothing, and no exception."""
    rig = Rig()
    rig.attached.close(WAIT_S)
    asked = rig.attached.ask(lambda left_s: True)
    assert asked.settled
    assert asked.answer() is None
    assert not rig.attached.publisher.offer_block(
        rig.attached.ticket(rig.space, CHAT), rig.names[0], BLOCK_TOKENS, bytearray(8), 0
    )


def test_a_hit_that_takes_longer_than_computing_is_declined() -> None:
    """By the store's estimate and the engine's speed; without a speed nothing is declined."""
    found = rig_lookup(load_s_estimate=2.0)
    slow, fast, unknown = Rig(compute_tokens_per_s=100.0), Rig(compute_tokens_per_s=1000.0), Rig()
    for rig, declined in ((slow, False), (fast, True), (unknown, False)):
        assert rig.attached.declines(found, 300) is declined
        rig.attached.close(WAIT_S)


def rig_lookup(load_s_estimate: float) -> Lookup:
    rig = Rig()
    rig.publish()
    found = rig.store.lookup(rig.space.id, rig.names)
    rig.attached.close(WAIT_S)
    return Lookup(found.presence, found.flags, found.payload_bytes, load_s_estimate=load_s_estimate)


def test_an_engines_own_keys_are_stored_like_any_block(rig: Rig) -> None:
    """Blocks under opaque names are put, found and read, and one key's bytes are not another's."""
    names = [opaque_name(rig.space.id, bytes([number]) * 36) for number in range(3)]
    rig.store.register_space(rig.space.space)
    rig.store.put(rig.space.id, [BlockPut(name, 16, name.key) for name in names[:2]], traffic_class=CHAT)
    found = rig.attached.look_up(rig.space, names)
    assert found is not None
    assert found.presence.tolist() == [1, 1, 0]
    buffers = [bytearray(32) for _ in names]
    assert rig.attached.load(rig.space, names, buffers) == [GetStatus.OK, GetStatus.OK, GetStatus.MISS]
    assert [bytes(buffer) for buffer in buffers[:2]] == [name.key for name in names[:2]]


def test_a_put_from_the_engines_memory_waits_for_no_queue(rig: Rig) -> None:
    """It is acknowledged on return, a store that was wiped meanwhile is told of the space again, and all is counted."""
    blocks = [BlockPut(name, BLOCK_TOKENS, memoryview(b"x" * 64)) for name in rig.names]
    assert rig.attached.store_now(rig.space, blocks, CHAT) == [PutOutcome.STORED] * 3
    assert rig.attached.store_now(rig.space, blocks, CHAT) == [PutOutcome.TOUCHED] * 3
    rig.store.inner = MemoryStore()
    assert rig.attached.store_now(rig.space, blocks[:1], CHAT) == [PutOutcome.STORED]
    rig.store.down = True
    assert rig.attached.store_now(rig.space, blocks, CHAT) == [PutOutcome.UNREACHABLE] * 3
    counts = rig.attached.counts
    assert (counts.stored, counts.stored_bytes, counts.stores_failed) == (7, 7 * 64, 3)
