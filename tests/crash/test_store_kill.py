"""kill -9 of the real daemon at random moments: what it acknowledged is there, what it did not is not invented."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from kvstore.client import StoreClient
from kvstore.daemon.fsck import check
from kvstore.errors import StoreError
from kvstore.keys import BlockName, SpaceId
from kvstore.store import BlockPut, GetStatus, Presence, PutOutcome
from kvstore.traffic import AGENT, CHAT
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space
from tests.support.stores import client_of, short_dir
from tests.support.zygote import Zygote

ROUNDS = 100
NAMES = 240
SIZES = (500, 9_000, 40_000)
ACKNOWLEDGED = (PutOutcome.STORED, PutOutcome.TOUCHED, PutOutcome.REPLACED)


@contextlib.contextmanager
def daemon(zygote: Zygote, folder: Path) -> Iterator[tuple[int, StoreClient]]:
    """A running daemon and a client; killed without a word at the end, whatever happens."""
    pid = zygote.start(folder)
    try:
        with client_of(f"unix:{folder / 's'}", connections_per_node=2) as client:
            yield pid, client
    finally:
        zygote.kill(pid)


class Ledger:
    """What the outside world was told. ``unsure``: asked for when the daemon died, so both answers are right."""

    def __init__(self, names: list[BlockName]) -> None:
        self.names = names
        self.acknowledged: set[int] = set()
        self.unsure: set[int] = set()
        self.acknowledgements = 0

    def payload(self, place: int) -> bytes:
        name = self.names[place]
        return random.Random(name.key).randbytes(SIZES[place % len(SIZES)])

    def put(self, client: StoreClient, space: SpaceId, chance: random.Random) -> None:
        begin = chance.randrange(NAMES - 16)
        places = list(range(begin, begin + chance.randint(1, 16)))
        self.unsure.update(set(places) - self.acknowledged)
        blocks = [BlockPut(self.names[place], BLOCK_TOKENS, self.payload(place)) for place in places]
        ack = "disk" if chance.random() < 0.2 else "os"
        outcomes = client.put(space, blocks, traffic_class=chance.choice([AGENT, CHAT]), ack=ack)
        for place, outcome in zip(places, outcomes, strict=True):
            if outcome in ACKNOWLEDGED:
                self.acknowledgements += 1
                self.acknowledged.add(place)
                self.unsure.discard(place)
            elif outcome is not PutOutcome.UNREACHABLE:
                self.unsure.discard(place)

    def delete(self, client: StoreClient, space: SpaceId, chance: random.Random) -> None:
        places = {chance.randrange(NAMES) for _ in range(4)}
        self.unsure |= places & self.acknowledged
        self.acknowledged -= places
        client.delete(space, [self.names[place].key for place in places])
        self.unsure -= places

    def verify(self, client: StoreClient, space: SpaceId) -> None:
        """Acknowledged: there and identical. Unsure: identical or a miss. Everything else: not there."""
        presence = client.lookup(space, self.names).presence
        buffers = [bytearray(SIZES[place % len(SIZES)]) for place in range(NAMES)]
        statuses = client.get_into(space, self.names, buffers, deadline_s=30.0)
        for place in range(NAMES):
            found = presence[place] == Presence.PRESENT
            assert statuses[place] is not GetStatus.CORRUPT
            assert found or statuses[place] is GetStatus.MISS
            if statuses[place] is GetStatus.OK:
                assert place in self.acknowledged | self.unsure, f"block {place} is a phantom"
                assert buffers[place] == self.payload(place), f"block {place} is altered"
            assert place not in self.acknowledged or statuses[place] is GetStatus.OK, f"block {place} is lost"
            if found and statuses[place] is GetStatus.OK and place in self.unsure:
                self.acknowledged.add(place)
        self.unsure.clear()
        stats = client.stats()
        assert stats.get("corrupt", 0) == 0


def work_until_killed(ledger: Ledger, client: StoreClient, space: SpaceId, pid: int, chance: random.Random) -> bool:
    """Put and delete at random until a timer kills the daemon; whether a call was under way then."""
    killed = threading.Event()

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        killed.set()

    timer = threading.Timer(chance.uniform(0.002, 0.12), kill)
    timer.start()
    try:
        while not killed.is_set():
            if chance.random() < 0.15:
                ledger.delete(client, space, chance)
            else:
                ledger.put(client, space, chance)
    except StoreError:
        return True
    finally:
        timer.join()
    return False


def test_a_hundred_kills_lose_nothing_and_invent_nothing() -> None:
    """Each round: verify all that is known, put and delete at random, kill -9 in the middle, then a clean fsck."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with short_dir() as folder, Zygote.running() as zygote:
        with daemon(zygote, folder) as (_, client):
            space = client.register_space(a_space())
        ledger = Ledger(list(a_chain(space, NAMES).names))
        interrupted = 0
        for turn in range(ROUNDS):
            with daemon(zygote, folder) as (pid, client):
                ledger.verify(client, space)
                interrupted += work_until_killed(ledger, client, space, pid, chance)
            report = check(folder / "data")
            assert report.clean, f"round {turn}: {report.to_text()}"
        with daemon(zygote, folder) as (_, client):
            ledger.verify(client, space)
        print(f"{ledger.acknowledgements} acknowledgements, {interrupted} rounds ended within a call")
        assert ledger.acknowledgements > 10 * ROUNDS
