"""Traffic on a small node whose clock the test moves, and how long blocks of each class really lasted."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from kvstore.daemon.files import Files
from kvstore.daemon.node import Node
from kvstore.daemon.record import HEADER_BYTES
from kvstore.keys import SpaceId, TokenChain
from kvstore.promises import DAY_S, HOUR_S
from kvstore.store import BlockPut
from kvstore.testing import ManualClock
from kvstore.traffic import TrafficClass
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space

STEP_S = 2 * HOUR_S


class Unsynced(Files):
    """Nobody cuts the power: a month of it in seconds."""

    def fdatasync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


@dataclass
class Traffic:
    """``bytes_per_day`` of each class, every two hours; ``again``: share of chains used once more within 1.5 days.

    ``lives_s``: by class, of blocks that were evicted, since their last use; ``first_evicted_s``: when that began.
    """

    node: Node
    clock: ManualClock
    bytes_per_day: dict[TrafficClass, float]
    again: float = 0.0
    record_bytes: int = 16 * 4096
    lives_s: defaultdict[TrafficClass, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    first_evicted_s: float | None = None
    _used: dict[bytes, tuple[TrafficClass, float]] = field(default_factory=dict)
    _owed: defaultdict[TrafficClass, float] = field(default_factory=lambda: defaultdict(float))
    _uses: list[tuple[float, TrafficClass, TokenChain]] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(7))
    _chains: int = 0
    _told: int = 0

    def run(self, days: float) -> None:
        """So many days of it. Somebody must be listening to the node's events."""
        space_id = self.node.register_space(a_space())
        for step in range(round(days * DAY_S / STEP_S)):
            self.clock.advance(STEP_S)
            for traffic_class, size in self.bytes_per_day.items():
                self._owed[traffic_class] += size * STEP_S / DAY_S
                count = int(self._owed[traffic_class] // self.record_bytes)
                self._owed[traffic_class] -= count * self.record_bytes
                if count:
                    self._put(space_id, traffic_class, count)
            self._use_again(space_id)
            if step % 6 == 0:
                self.node.sweep(apply=True)
            self._hear()

    def mean_life_s(self, traffic_class: TrafficClass, since_s: float) -> float:
        """Of blocks of a class that were evicted since then."""
        return mean(life_s for at_s, life_s in self.lives_s[traffic_class] if at_s >= since_s)

    def _put(self, space_id: SpaceId, traffic_class: TrafficClass, count: int) -> None:
        chain = a_chain(space_id, count, seed=self._chains)
        self._chains += 1
        payload = bytes(self.record_bytes - HEADER_BYTES)
        puts = [BlockPut(name, BLOCK_TOKENS, payload) for name in chain.names]
        self.node.put(space_id, puts, traffic_class=traffic_class)
        self._used |= {bytes(name.key): (traffic_class, self.clock.now_s()) for name in chain.names}
        if self._random.random() < self.again:
            self._uses.append((self.clock.now_s() + self._random.uniform(0.2, 1.5) * DAY_S, traffic_class, chain))

    def _use_again(self, space_id: SpaceId) -> None:
        now_s = self.clock.now_s()
        due = [use for use in self._uses if use[0] <= now_s]
        self._uses = [use for use in self._uses if use[0] > now_s]
        for _, traffic_class, chain in due:
            self.node.touch(space_id, chain.names, traffic_class=traffic_class)
            here = {bytes(name.key) for name in chain.names} & self._used.keys()
            self._used |= dict.fromkeys(here, (traffic_class, now_s))

    def _hear(self) -> None:
        while events := self.node.events.after(self._told).events:
            for event in events:
                self._told = event.sequence
                for key in event.blocks["key"] if event.kind in ("evicted", "expired") else ():
                    traffic_class, used_s = self._used.pop(key.tobytes())
                    if event.kind == "evicted":
                        self.lives_s[traffic_class].append((event.at_s, event.at_s - used_s))
                        self.first_evicted_s = self.first_evicted_s or event.at_s
