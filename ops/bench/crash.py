"""The crash bench: kill the real daemon again and again, cut the power of a node again and again, and judge each time.

Owns the rounds and the report. Does not know what clients do or what is expected. Invariants: every round's random
choices follow from the seed and the round's number, so a failure can be looked at again; a new store is made every
``ROUNDS_A_STORE`` rounds, so that its youth is tested as well as its age; every process and folder is gone at the end.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.client import StoreClient
from kvstore.daemon.files import disk_bytes
from kvstore.daemon.fsck import check
from kvstore.daemon.record import record_bytes
from kvstore.errors import StoreError
from ops.bench.crash_book import CAPACITY_BYTES, VIOLATIONS, Book, spaces
from ops.bench.crash_clients import Client, judge_fsck, shares, verify
from ops.bench.crash_daemon import NOWHERE, DaemonFailed, Daemons
from ops.bench.crash_points import choose_point
from ops.bench.crash_policy import BRIEF
from ops.bench.crash_power import PowerRig

ROUNDS_A_STORE = 10
CLIENTS = ("local", "unix", "tcp")
"""One client each: over shared memory, over the Unix socket only, over TCP."""
ROUND_S_MAX = 0.5
"""A point that was not reached by then is not waited for: the daemon is killed from outside."""
ROUND_PUTS = 60
"""Unless fewer puts than that were acknowledged, on a busy machine."""
LINES_MAX = 40
"""Violations printed; all are counted."""
Progress = Callable[[str], None]


@dataclass(slots=True)
class CrashReport:
    """What happened. ``violations``: kind and words, of all rounds."""

    seed: int
    rounds: int
    cuts: int
    kills: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    """What became of the index when the power was cut."""
    violations: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def add(self, book: Book, where: str) -> None:
        """Take a store's counts and violations over."""
        self.counts.update(book.counts)
        self.violations += [(kind, f"{where}: {what}") for kind, what in book.violations]
        book.counts.clear()
        book.violations.clear()

    def to_json(self) -> dict[str, Any]:
        kinds = Counter(kind for kind, _ in self.violations)
        return {
            "seed": self.seed,
            "rounds": self.rounds,
            "cuts": self.cuts,
            "kills": dict(self.kills.most_common()),
            "counts": dict(sorted(self.counts.items())),
            "index_fates": dict(self.fates),
            **{kind: kinds[kind] for kind in VIOLATIONS},
            "violations": self.violations[:100],
            "seconds": round(self.seconds, 1),
        }


def run(*, rounds: int, cuts: int, seed: int, data: Path | None, progress: Progress) -> CrashReport:
    """Kill ``rounds`` times, then cut the power ``cuts`` times. Raises DaemonFailed if a daemon ends by itself."""
    report = CrashReport(seed, rounds, cuts)
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="crash", dir=data))
    try:
        with Daemons.running() as daemons:
            for first in range(0, rounds, ROUNDS_A_STORE):
                numbers = range(first, min(first + ROUNDS_A_STORE, rounds))
                _KillRig(daemons, folder / str(first), seed, report).run(numbers)
                progress(f"{numbers.stop} of {rounds} kills, {report.counts['acknowledged']} acknowledged puts")
        for first in range(0, cuts, ROUNDS_A_STORE):
            numbers = range(first, min(first + ROUNDS_A_STORE, cuts))
            rig = PowerRig(folder / f"power-{first}", random.Random(f"{seed} power {first}"))
            rig.run(len(numbers))
            report.fates.update(rig.fates)
            report.add(rig.book, f"power cuts {numbers.start}..{numbers.stop - 1}")
            shutil.rmtree(rig.folder, ignore_errors=True)
            progress(f"{numbers.stop} of {cuts} power cuts")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.seconds = time.monotonic() - began_s
    return report


def print_report(report: CrashReport, console: Console) -> None:
    """Kills by point, figures, then every violation."""
    table = Table(title=f"{report.rounds} kills, {report.cuts} power cuts, seed {report.seed}", title_justify="left")
    for heading, justify in (("killed at", "left"), ("kills", "right"), ("counted", "left"), ("", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left", no_wrap=True)
    figures = [*report.counts.items(), *((f"index {fate}", count) for fate, count in report.fates.items())]
    for kill, figure in zip_longest(sorted(report.kills.items()), sorted(figures), fillvalue=("", "")):
        table.add_row(kill[0], str(kill[1]), figure[0], str(figure[1]))
    console.print(table)
    found = report.to_json()
    line = ", ".join(f"{kind} {found[kind]}" for kind in VIOLATIONS)
    console.print(f"{line}; {report.seconds:.0f} s", highlight=False)
    for kind, what in report.violations[:LINES_MAX]:
        console.print(f"{kind}: {what}", highlight=False, markup=False)


class _KillRig:
    """One store that is killed several times."""

    def __init__(self, daemons: Daemons, folder: Path, seed: int, report: CrashReport) -> None:
        self._daemons = daemons
        self._folder = folder
        self._seed = seed
        self._report = report
        self._book = Book(random.Random(f"{seed} {folder.name}").getrandbits(64))

    def run(self, numbers: range) -> None:
        """These rounds, then one in which the store ends in order, and its books are compared."""
        self._folder.mkdir()
        for number in numbers:
            self._round(number, growing=number == numbers.start)
            self._report.add(self._book, f"round {number}")
        self._settle()
        self._report.add(self._book, f"after round {numbers.stop - 1}")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _round(self, number: int, *, growing: bool) -> None:
        chance = random.Random(f"{self._seed} round {number}")
        point, hits = (NOWHERE, 1) if chance.random() < 0.15 else choose_point(chance, growing=growing)
        early = growing or chance.random() < 0.15
        pid = self._daemons.begin(self._folder, point, hits, early=early)
        stop = threading.Event()
        with ExitStack() as ending:
            try:
                addresses = self._daemons.addresses(self._folder, pid)
                if addresses is not None:
                    self._serve(addresses, chance, pid, stop, ending, early=early)
            finally:
                self._report.kills[self._daemons.kill(self._folder, pid)] += 1
                stop.set()
        judge_fsck(check(self._folder / "data"), self._book)
        self._book.judge_files(self._folder / "data" / "segments")
        if disk_bytes(self._folder / "data") > CAPACITY_BYTES:
            self._book.accuse("unbalanced", f"{disk_bytes(self._folder / 'data')} bytes on disk")

    def _serve(
        self,
        addresses: tuple[str, str],
        chance: random.Random,
        pid: int,
        stop: threading.Event,
        ending: ExitStack,
        *,
        early: bool,
    ) -> None:
        """Verify (an ``early`` daemon may die of it), then let clients work until the daemon is dead, or time is up and
        they have done something.

        ``ending`` closes the clients and waits for their threads, after the daemon was killed.
        """
        unix, tcp = addresses
        stores: list[StoreClient] = []
        for kind in CLIENTS:
            address = tcp if kind == "tcp" else unix
            stores.append(StoreClient.connect([address], connections_per_node=1, same_host=kind == "local"))
            ending.callback(stores[-1].close)
        clients = [
            Client(self._book, store, mine, random.Random(chance.getrandbits(64)))
            for store, mine in zip(stores, shares(self._book, len(stores)), strict=True)
        ]
        try:
            for space in spaces():
                stores[0].register_space(space)
            for client in clients:
                client.put_unread()
            verify(chance.choice(stores), self._book)
        except StoreError as error:
            if not early:
                raise DaemonFailed(f"the daemon could not be verified: {error!r}") from error
            return
        self._daemons.arm(pid)
        for client in clients:
            thread = threading.Thread(target=client.work, args=(stop,), name="crash-client")
            thread.start()
            ending.callback(thread.join)
        self._daemons.wait(
            pid, chance.uniform(0.1, ROUND_S_MAX), lambda: self._book.counts["acknowledged"] >= ROUND_PUTS
        )

    def _settle(self) -> None:
        """A start without a point: everything is verified; then an end in order, after which all books agree."""
        pid = self._daemons.begin(self._folder)
        try:
            addresses = self._daemons.addresses(self._folder, pid)
            assert addresses is not None
            with closing(StoreClient.connect([addresses[0]])) as store:
                verify(store, self._book)
                infos = store.scan()[0]
        finally:
            self._daemons.stop(pid)
        report = check(self._folder / "data")
        judge_fsck(report, self._book)
        self._book.judge_files(self._folder / "data" / "segments")
        brief = {BRIEF, *self._book.policy.brief}
        lasting = {block.name.key for block in self._book.blocks if block.traffic_class not in brief}
        least = sum(record_bytes(info.stored_bytes) for info in infos if info.key in lasting)
        most = sum(record_bytes(info.stored_bytes) for info in infos)
        if not least <= report.live_bytes <= most or report.adoptable_records or report.index_stale:
            self._book.accuse("unbalanced", f"a scan lists {least}..{most} bytes: {report.to_text()}")
