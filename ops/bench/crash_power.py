"""Power cuts: a node in this process whose files lose what was not synced, and whose index is not what it was.

Owns one store under power cuts, and what becomes of its index (RocksDB's files do not go through ``Files``): it is as
it was, as it was some time ago, cut short, or gone. Does not know what clients do. Invariants: what was acknowledged
at level ``disk`` is there; what was deleted stays away, whatever index is found; what is damaged is found out.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvstore.daemon.cipher import CipherKey, Keyring
from kvstore.daemon.files import Files
from kvstore.daemon.fsck import check
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.record import record_bytes
from kvstore.limits import MIB
from kvstore.testing import T0_S
from ops.bench.crash_book import CAPACITY_BYTES, RULES, SEGMENT_BYTES, Book, spaces
from ops.bench.crash_clients import Client, shares, verify
from ops.bench.crash_files import PowerCut, PowerFiles

STEPS_MAX = 400
"""File operations between two cuts."""
FATES = ("kept", "kept", "earlier", "cut short", "lost")
DAMAGE = ("record-damaged", "records-damaged", "records-missing", "record-without-entry", "entry-without-record")
"""What fsck may find after a power cut: writes lost of blocks that expired before anybody read them, and records whose
segment lost the header of its next life.
"""
DAYS_MAX = 1.5
"""The clock moves less than what class agent is kept for."""


@dataclass(slots=True)
class _Clock:
    """The wall clock of one node: it also runs backwards."""

    at_s: float = T0_S

    def now_s(self) -> float:
        return self.at_s


class PowerRig:
    """One node that loses its power several times; it encrypts, or not, as chance has it."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.book = Book(chance.getrandbits(64))
        self.fates: Counter[str] = Counter()
        self._chance = chance
        own = CipherKey.make(1, chance.randbytes(32), default=True)
        self._keyring = Keyring(default=(own,) if chance.random() < 0.5 else ())
        self._clock = _Clock()

    @property
    def _index(self) -> Path:
        return self.folder / "data" / "index"

    @property
    def _earlier(self) -> Path:
        return self.folder / "index-earlier"

    def run(self, cuts: int) -> None:
        """Live, lose power, be verified; so many times."""
        self.folder.mkdir(parents=True)
        for _ in range(cuts):
            files = PowerFiles(self._chance, self._chance.randint(1, STEPS_MAX))
            self._live(files)
            files.cut()
            self.book.judge_files(self.folder / "data" / "segments")
            self._change_index()
            node = self._open(Files())
            try:
                self._client(node).put_unread()
                verify(node, self.book, after_kill=False)
                self._balance(node)
            finally:
                node.close()
            self._check()

    def _live(self, files: PowerFiles) -> None:
        """Until the power is cut; at one moment the index is put aside."""
        shutil.rmtree(self._earlier, ignore_errors=True)
        node: Node | None = None
        try:
            node = self._open(files)
            client = self._client(node)
            while True:
                if self._chance.random() < 0.05:
                    self._put_index_aside()
                self._move_clock()
                client.step()
        except PowerCut:
            self.book.counts["cut"] += 1
        finally:
            if node is not None:
                node.abandon()

    def _client(self, node: Node) -> Client:
        return Client(self.book, node, shares(self.book, 1)[0], self._chance, after_kill=False)

    def _put_index_aside(self) -> None:
        """Copy it; RocksDB removes files in the background, so that there may be no whole copy this time."""
        shutil.rmtree(self._earlier, ignore_errors=True)
        try:
            shutil.copytree(self._index, self._earlier)
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(self._earlier, ignore_errors=True)

    def _move_clock(self) -> None:
        """Mostly a little, now and then by hours, also back."""
        self._clock.at_s += self._chance.random() * 0.3
        if self._chance.random() < 0.03:
            self._clock.at_s = T0_S + self._chance.uniform(0, DAYS_MAX) * 86_400

    def _change_index(self) -> None:
        fate = self._chance.choice(FATES)
        if fate == "earlier" and not self._earlier.exists():
            fate = "lost"
        if fate in ("earlier", "lost"):
            shutil.rmtree(self._index, ignore_errors=True)
        if fate == "earlier":
            shutil.copytree(self._earlier, self._index)
        logs = sorted(self._index.glob("*.log")) if fate == "cut short" else []
        if logs:
            with logs[-1].open("r+b") as stream:
                stream.truncate(self._chance.randint(0, logs[-1].stat().st_size))
        self.fates[fate] += 1

    def _balance(self, node: Node) -> None:
        """Accounting adds up to the files, and to what a scan lists."""
        (books,) = node.accounting()
        parts = books["live_bytes"] + books["dead_bytes"] + books["free_bytes"] + books["page_bytes"]
        sizes = sum(path.stat().st_size for path in (self.folder / "data" / "segments").glob("*.seg"))
        live = sum(record_bytes(info.stored_bytes) for info in node.scan()[0])
        if not parts == books["total_bytes"] == sizes or books["live_bytes"] != live or books["dead_bytes"] < 0:
            self.book.accuse("unbalanced", f"{books} for files of {sizes} bytes and {live} bytes of records")

    def _check(self) -> None:
        """A power cut may leave damage; a start and an end later it is known, and only what nobody reads is left."""
        report = check(self.folder / "data")
        for finding in report.findings:
            if finding.kind not in DAMAGE:
                self.book.accuse("unclean", f"{finding.kind} {finding.where}: {finding.detail}")

    def _open(self, files: Files) -> Node:
        config = NodeConfig(
            directories=(self.folder / "data",),
            capacity_bytes=CAPACITY_BYTES,
            segment_bytes=SEGMENT_BYTES,
            state_pool_bytes=MIB,
            keyring=self._keyring,
        )
        node = Node.open(config, self._clock, RULES, files=files)
        for space in spaces():
            node.register_space(space)
        return node
