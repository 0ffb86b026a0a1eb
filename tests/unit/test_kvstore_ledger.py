"""Taking many blocks at once."""

from __future__ import annotations

from pathlib import Path

from kvstore.daemon.segment import Segment
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import open_node, puts_of
from tests.support.spaces import a_chain, a_space


def test_many_are_taken_as_one_would_be_and_given_back_once(tmp_path: Path) -> None:
    """Columns name each record; what is absent, of another digest or of another space takes no lease."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space, other = node.register_space(a_space()), node.register_space(a_space(tenant_salt=b"other"))
    chain = a_chain(space, 12).names
    node.put(space, puts_of(chain[:8], 20_000), traffic_class=AGENT)
    ledger = node._shards[0]._ledger
    keys = b"".join(name.key for name in chain)
    digests = b"".join(name.token_digest for name in chain)
    wrong = digests[16:32] + digests[16:]
    taken = ledger.take_many(space, keys, wrong, clock.now_s())
    assert taken.found.tolist() == [False] + [True] * 7 + [False] * 4
    assert sum(taken.leases.values()) == sum(segment.leases for segment in taken.leases) == 7
    places = [ledger.take(space, name, clock.now_s()) for name in chain[1:8]]
    for at, place in enumerate(places, 1):
        assert place is not None
        row = [*taken.rows[["segment", "generation", "offset"]][at].item(), taken.payload_bytes[at]]
        assert row == [place.segment.number, place.generation, place.offset, 20_000]
        assert taken.record_bytes[at] == 20_480
        ledger.give_back(place)
    segments: list[Segment] = list(taken.leases)
    lent = taken.rows[taken.found]
    assert [segments[file].number for file in lent["file"]] == lent["segment"].tolist()
    for at, name in enumerate(chain):
        alone = ledger.take_many(space, name.key, wrong[16 * at : 16 * at + 16], clock.now_s())
        names = ["status", "segment", "generation", "offset", "flags"]
        assert alone.rows[names].tolist() == taken.rows[names][at : at + 1].tolist()
        for column in ("record_bytes", "payload_bytes", "codec"):
            assert getattr(alone, column).tolist() == getattr(taken, column)[at : at + 1].tolist()
        assert list(alone.leases.values()) == [1] * int(taken.found[at])
        ledger.give_back_many(alone)
    ledger.give_back_many(taken)
    ledger.give_back_many(taken)
    assert [segment.leases for segment in segments] == [0] * len(segments)
    assert not ledger.take_many(other, keys, digests, clock.now_s()).found.any()
    assert not ledger.take_many(space, b"", b"", clock.now_s()).found.size
    assert not taken.rows["offset"][~taken.found].any()
    node.close()
