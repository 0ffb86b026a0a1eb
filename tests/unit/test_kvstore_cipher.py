"""Encryption at rest: what lies on disk tells nothing, every key reads its own, and a key that is gone is a purge."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.daemon.cipher import CipherKey, Ciphers, Encryption, KeyMissing, Keyring, decrypt
from kvstore.daemon.codec import Codec, packing_of, slot_of
from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node
from kvstore.daemon.record import HEADER_BYTES, RecordDamaged, RecordHeader, checksum_of, encode_header
from kvstore.keys import BlockName, Space, SpaceId, space_id, tenant_salt
from kvstore.store import FLAG_APPROXIMATE, BlockPut, GetStatus, Presence, PutOutcome
from kvstore.testing import DAY_S, TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRules
from tests.support.nodes import open_node, payload_of, puts_of, read
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space

SIZE = 20_000
ONE, TWO, THREE = (bytes([at]) * 32 for at in (1, 2, 3))
ACME, OTHER = (a_space(tenant_salt=tenant_salt(name)) for name in ("acme", "other"))
ZSTD_RULES = ClassRules((replace(TEST_RULES.rules[0], codec="zstd"), TEST_RULES.rules[1]))


def ring_of(*secrets: bytes, default: bytes | None = None) -> Keyring:
    """Cipher keys of tenant acme, numbered from 1, and perhaps one of everybody else."""
    keys = tuple(CipherKey.make(number, secret) for number, secret in enumerate(secrets, start=1))
    others = (CipherKey.make(1, default, default=True),) if default else ()
    return Keyring({tenant_salt("acme"): keys} if keys else {}, others)


# --- one payload ----------------------------------------------------------------------------------------------------


def sealed(payload: bytes = b"payload", codec: int = Codec.NONE) -> tuple[RecordHeader, bytes]:
    """An encrypted payload, and the header of its record."""
    name = a_chain(space_id(ACME), 1).names[0]
    key = ring_of(ONE).writing(ACME.tenant_salt)
    assert key is not None
    codec_byte, stored = Encryption(key, space_id(ACME)).encrypt(name, FLAG_APPROXIMATE, len(payload), codec, payload)
    header = RecordHeader(
        segment=1,
        generation=2,
        offset=4096,
        key=name.key,
        parent=name.parent,
        space_id=space_id(ACME),
        token_digest=name.token_digest,
        index=name.index,
        tokens=BLOCK_TOKENS,
        class_byte=AGENT,
        flags=FLAG_APPROXIMATE,
        codec=codec_byte,
        stored_bytes=len(stored),
        payload_bytes=len(payload),
        written_s=5,
        checksum=checksum_of(stored),
        touches=((AGENT, 5),),
    )
    return header, stored


def ciphers_of(keyring: Keyring) -> Ciphers:
    return Ciphers(lambda: {space_id(ACME): ACME, space_id(OTHER): OTHER}, keyring)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_what_was_encrypted_comes_back_wherever_its_record_lies(codec: Codec) -> None:
    """Under the same or a further key, after a move; and no two times are the stored bytes the same."""
    header, stored = sealed(b"a payload", codec)
    assert packing_of(header.codec) == codec
    assert slot_of(header.codec) == 1
    for keyring in (ring_of(ONE), ring_of(ONE, TWO, default=THREE)):
        moved = replace(header, segment=9, generation=8, offset=8192, class_byte=CHAT, touches=())
        assert ciphers_of(keyring).decrypt(moved, stored) == b"a payload"
    assert sealed(b"a payload", codec)[1] != stored


def test_what_was_encrypted_for_another_block_is_damage() -> None:
    """Whoever can write to the disk cannot pass one block off as another, nor an approximate one as exact."""
    header, stored = sealed()
    key = ring_of(ONE).writing(ACME.tenant_salt)
    assert key is not None
    other = a_chain(space_id(OTHER), 2).names[1]
    for changes in (
        {"key": other.key},
        {"space_id": space_id(OTHER)},
        {"token_digest": other.token_digest},
        {"payload_bytes": header.payload_bytes + 1},
        {"flags": 0},
        {"codec": header.codec ^ 1},
    ):
        with pytest.raises(RecordDamaged):
            decrypt(key, replace(header, **changes), stored)  # type: ignore[arg-type]
    for at in range(16, len(stored)):
        bad = bytearray(stored)
        bad[at] ^= 1
        with pytest.raises(RecordDamaged):
            decrypt(key, header, bad)
    for length in range(44):
        with pytest.raises(RecordDamaged):
            decrypt(key, header, stored[:length])


@pytest.mark.parametrize("keyring", [Keyring(), ring_of(TWO), ring_of(default=ONE)])
def test_a_key_that_is_not_there_is_no_damage(keyring: Keyring) -> None:
    """None at all, another one under its number, and its own bytes as everybody's key, which has another slot."""
    header, stored = sealed()
    with pytest.raises(KeyMissing):
        ciphers_of(keyring).decrypt(header, stored)


def test_a_key_shows_in_no_representation() -> None:
    key = CipherKey.make(1, ONE)
    assert "root" not in repr(ring_of(ONE))
    assert key.root != ONE
    assert key.key_id not in (ONE[:16], key.root[:16])


# --- a node ---------------------------------------------------------------------------------------------------------


class Bench:
    """A node with cipher keys of tenant acme; another tenant has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.open(ring_of(ONE))

    def open(self, keyring: Keyring, rules: ClassRules = TEST_RULES) -> None:
        self.node: Node = open_node(self.path, self.clock, rules=rules, keyring=keyring)

    def reopen(self, keyring: Keyring) -> None:
        self.node.close()
        self.open(keyring)

    def put(self, space: Space, blocks: int, seed: int = 0, flags: int = 0) -> tuple[SpaceId, list[BlockName]]:
        name = self.node.register_space(space)
        names = list(a_chain(name, blocks, seed=seed).names)
        self.outcomes = self.node.put(name, puts_of(names, SIZE, flags), traffic_class=AGENT)
        return name, names

    def presence(self, space: SpaceId, names: list[BlockName]) -> set[int]:
        """As a look-up says, which must be what gets do."""
        found = self.node.lookup(space, names).presence.tolist()
        for name, presence in zip(names, found, strict=True):
            status, data = read(self.node, space, name, SIZE)
            assert status == (GetStatus.OK if presence == Presence.PRESENT else GetStatus.MISS)
            assert status != GetStatus.OK or data == payload_of(name, SIZE)
        return set(found)

    def raw(self) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(self.path.rglob("*")) if path.is_file())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.node.close()


def test_no_window_of_an_encrypted_payload_lies_in_the_data_directory(bench: Bench) -> None:
    """Of a tenant without a key, every one does."""
    acme, mine = bench.put(ACME, 8)
    other, others = bench.put(OTHER, 8)
    assert bench.presence(acme, mine) == bench.presence(other, others) == {Presence.PRESENT}
    bench.node.close()
    raw = bench.raw()
    for names, there in ((mine, False), (others, True)):
        payloads = [payload_of(name, SIZE) for name in names]
        assert {payload[at : at + 8] in raw for payload in payloads for at in range(0, SIZE - 8, 997)} == {there}
    assert ONE not in raw


def test_a_key_that_is_dropped_purges_at_once_and_one_that_comes_back_restores(bench: Bench) -> None:
    """Look-ups, gets, single gets and states; nothing is quarantined, the other tenant sees nothing of it."""
    acme, mine = bench.put(ACME, 6)
    other, others = bench.put(OTHER, 6)
    state = a_chain(acme, 1).state_name(3)
    assert bench.node.put_state(acme, state, b"state")
    bench.node.set_keyring(Keyring())
    assert bench.presence(acme, mine) == {Presence.PURGED}
    assert bench.node.get_state(acme, state) is None
    assert bench.node.open_payload(acme, mine[0]) is None
    assert bench.node.touch(acme, mine, traffic_class=AGENT) == 0
    assert bench.node.sight(acme, mine[:1])[0].presence is Presence.PURGED
    assert bench.presence(other, others) == {Presence.PRESENT}
    stats = bench.node.stats()
    assert (stats["blocks_encrypted"], stats["blocks_without_key"], stats["blocks"]) == (6, 6, 12)
    assert stats["key_missing"] == 7
    assert stats["corrupt"] == stats["quarantined"] == 0
    bench.node.set_keyring(ring_of(ONE))
    assert bench.presence(acme, mine) == {Presence.PRESENT}
    assert bench.node.stats()["blocks_without_key"] == 0


def test_blocks_without_a_key_are_stored_again_under_the_new_one(bench: Bench) -> None:
    """A put of such a block is no touch, or it would be a miss for ever; an approximate one will do."""
    acme, mine = bench.put(ACME, 6)
    bench.node.set_keyring(Keyring({tenant_salt("acme"): (CipherKey.make(2, TWO),)}))
    assert bench.presence(acme, mine) == {Presence.PURGED}
    bench.put(ACME, 6, flags=FLAG_APPROXIMATE)
    assert set(bench.outcomes) == {PutOutcome.REPLACED}
    assert bench.presence(acme, mine) == {Presence.PRESENT}
    bench.put(ACME, 6, flags=FLAG_APPROXIMATE)
    assert set(bench.outcomes) == {PutOutcome.TOUCHED}
    bench.reopen(Keyring({tenant_salt("acme"): (CipherKey.make(2, TWO),)}))
    assert bench.presence(acme, mine) == {Presence.PRESENT}


def test_rotation_writes_with_the_latest_and_reads_with_all(bench: Bench) -> None:
    acme, old = bench.put(ACME, 4)
    bench.node.set_keyring(ring_of(ONE, TWO))
    _, new = bench.put(ACME, 4, seed=1)
    assert bench.presence(acme, old + new) == {Presence.PRESENT}
    bench.reopen(Keyring({tenant_salt("acme"): (CipherKey.make(2, TWO),)}))
    assert bench.presence(acme, old) == {Presence.PURGED}
    assert bench.presence(acme, new) == {Presence.PRESENT}


def test_another_key_under_an_old_number_is_found_out_by_the_first_get(bench: Bench) -> None:
    """It reads nothing, quarantines nothing, and the block can be stored again."""
    acme, mine = bench.put(ACME, 3)
    bench.reopen(ring_of(TWO))
    for name in mine:
        assert read(bench.node, acme, name, SIZE) == (GetStatus.MISS, b"\xa5" * SIZE)
        assert not bench.node.report_corrupt(acme, name)
    assert bench.presence(acme, mine) == {Presence.PURGED}
    assert bench.node.stats()["quarantined"] == 0
    bench.put(ACME, 3)
    assert bench.presence(acme, mine) == {Presence.PRESENT}
    bench.reopen(ring_of(ONE))
    assert {read(bench.node, acme, name, SIZE)[0] for name in mine} == {GetStatus.MISS}, (
        "they are of the second key now"
    )


@pytest.mark.parametrize("without", ["nothing", "index", "keys", "catalog"])
def test_a_restart_needs_the_keys_and_nothing_else(bench: Bench, without: str) -> None:
    """The index may be lost, and the catalog, which names the tenants; a check of the directory needs no key."""
    acme, mine = bench.put(ACME, 6)
    bench.node.close()
    if without == "index":
        shutil.rmtree(bench.path / "volume-0" / "index")
    if without == "catalog":
        (bench.path / "volume-0" / "catalog.json").unlink()
    report = check(bench.path / "volume-0")
    assert (report.clean, report.live_records) == (True, 6)
    bench.open(Keyring() if without == "keys" else ring_of(ONE))
    bench.node.register_space(ACME)
    assert bench.presence(acme, mine) == {Presence.PURGED if without == "keys" else Presence.PRESENT}


def test_compression_comes_before_encryption(tmp_path: Path) -> None:
    """Encrypted bytes do not shrink."""
    bench = Bench(tmp_path)
    bench.node.close()
    shutil.rmtree(tmp_path)
    bench.open(ring_of(ONE), ZSTD_RULES)
    acme = bench.node.register_space(ACME)
    name = a_chain(acme, 1).names[0]
    payload = b"the same words again and again " * 1000
    bench.node.put(acme, [BlockPut(name, BLOCK_TOKENS, payload)], traffic_class=AGENT)
    assert bench.node.scan()[0][0].stored_bytes < len(payload) // 10
    assert read(bench.node, acme, name, len(payload)) == (GetStatus.OK, payload)
    bench.reopen(ring_of(ONE))
    assert read(bench.node, acme, name, len(payload)) == (GetStatus.OK, payload)
    bench.node.close()
    assert payload[:16] not in bench.raw()


@pytest.mark.parametrize("forged", [False, True])
def test_a_flipped_bit_is_quarantined_also_under_a_checksum_that_fits(bench: Bench, forged: bool) -> None:
    """The tag finds what whoever can write to the disk has made to fit otherwise."""
    acme, mine = bench.put(ACME, 4)
    ledger = bench.node._shards[0]._ledger
    place = ledger.place(ledger.presence.slot(mine[1].key))
    assert place is not None
    header, _ = place.segment.read_header(place.offset)
    fd = place.segment.fd
    stored = bytearray(os.pread(fd, header.stored_bytes, place.offset + HEADER_BYTES))
    stored[header.stored_bytes // 2] ^= 4
    os.pwrite(fd, stored, place.offset + HEADER_BYTES)
    if forged:
        os.pwrite(fd, encode_header(replace(header, checksum=checksum_of(stored))), place.offset)
    status, data = read(bench.node, acme, mine[1], SIZE)
    assert (status, data) == (GetStatus.CORRUPT, bytes(SIZE))
    assert bench.node.stats()["quarantined"] == 1
    assert bench.presence(acme, [mine[0], *mine[2:]]) == {Presence.PRESENT}


def test_encrypted_blocks_move_as_they_lie(bench: Bench) -> None:
    """What survives its segment is written again while no key is there, and read once there is one."""
    acme, mine = bench.put(ACME, 32)
    bench.node.touch(acme, mine[5:6], traffic_class=CHAT)
    bench.node.set_keyring(Keyring())
    bench.clock.advance(4 * DAY_S)
    effect = bench.node.sweep(apply=True)
    assert (effect.blocks, effect.blocks_rewritten) == (31, 1)
    bench.node.set_keyring(ring_of(ONE))
    assert bench.presence(acme, mine[5:6]) == {Presence.PRESENT}
    bench.reopen(ring_of(ONE))
    assert bench.presence(acme, mine[5:6]) == {Presence.PRESENT}
