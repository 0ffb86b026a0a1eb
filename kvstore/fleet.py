"""Several nodes as one: who owns what, jobs side by side, questions to all.

Owns the links, the placement and the threads that use them. Does not know what the verbs mean. Invariants: ``run``
returns when every job has ended, and every job ends by its deadline; a question to all says which nodes did not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from kvstore import control as verbs
from kvstore import limits, wire
from kvstore.errors import DeadlineExceeded, SpaceUnknown, StoreError, Unauthorized, Unavailable, VersionMismatch
from kvstore.keys import BlockName, ChainNames
from kvstore.link import Call, NodeLink, Receive, Talk, deadline_after
from kvstore.placement import Placement
from kvstore.receive import take_json

T = TypeVar("T")
Failure = StoreError | ValueError

CALL_BYTES = 32 * limits.MIB
"""Payload that one put moves on one connection; a larger batch is spread over the node's connections."""

GET_CALL_BYTES = 64 * limits.MIB
"""As CALL_BYTES, of a get. A call costs the daemon 0.75 ms and the client as much: what was moved before has driven all
else out of the processor's cache. 64 blocks of 4 MiB in shared memory take 0.13 CPU seconds a GB so, instead of 0.16.
"""

SHARE_BYTES_MIN = 16 * limits.MIB
"""A batch is not spread so thin that a connection moves less: another thread costs as much as reading that."""

LOUD = (Unauthorized, VersionMismatch, SpaceUnknown, ValueError)
"""Faults of set-up or of the caller: raised even where a failing node would count as misses."""


class Fleet:
    """The nodes of one client. Thread-safe."""

    def __init__(
        self,
        links: Sequence[NodeLink],
        placement: Placement,
        executor: ThreadPoolExecutor,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(links) != len(placement.names):
            raise ValueError("a client needs one link a node")
        self.links = tuple(links)
        self.placement = placement
        self.monotonic = monotonic
        self._executor = executor

    def ends_s(self, deadline_s: float) -> float:
        """The point of the monotonic clock at which a call with this deadline ends."""
        return deadline_after(deadline_s, self.monotonic)

    def left_s(self, ends_s: float) -> float:
        return max(ends_s - self.monotonic(), 1e-6)

    def name(self, node: int) -> str:
        return self.links[node].name

    def exchange(self, node: int, call: Call, ends_s: float, receive: Receive[T]) -> T:
        return self.links[node].exchange(call, ends_s, receive)

    def converse(self, node: int, call: Call, ends_s: float, talk: Talk[T]) -> T:
        return self.links[node].converse(call, ends_s, talk)

    def spread(
        self,
        work: Callable[[int, Sequence[int]], None],
        names: Sequence[BlockName],
        sizes: Sequence[int],
        *,
        call_bytes: int = CALL_BYTES,
        cut_where_shared: bool = True,
    ) -> list[Callable[[], None]]:
        """Jobs ``work(node, positions)`` that together cover the names, none larger than one call may be; unless
        ``cut_where_shared``, a node on this host has one job, however large.
        """
        if len(names) == 1:
            return [job(work, self.placement.owner(names[0].route) if len(self.links) > 1 else 0, range(1))]
        return [
            job(work, node, part)
            for node, owned in self.group(names).items()
            for part in (
                split(owned, sizes, min(self._share_bytes(node, _bytes_of(owned, sizes)), call_bytes))
                if cut_where_shared or not self.links[node].shares
                else [owned]
            )
        ]

    def _share_bytes(self, node: int, total_bytes: int) -> int:
        """What each of a node's connections moves of a batch, so that all of them do."""
        return max(-(-total_bytes // self.links[node].connections), SHARE_BYTES_MIN)

    def group(self, names: Sequence[BlockName]) -> dict[int, Sequence[int]]:
        """Positions of the names by the node that owns their stripe."""
        if len(self.links) == 1:
            return {0: range(len(names))} if len(names) else {}
        groups: dict[int, list[int]] = {}
        if isinstance(names, ChainNames):
            for route, places in names.stripes():
                groups.setdefault(self.placement.owner(route), []).extend(places)
            return dict(groups)
        owners: dict[bytes, int] = {}
        for at, name in enumerate(names):
            owner = owners.get(name.route)
            if owner is None:
                owner = owners[name.route] = self.placement.owner(name.route)
            groups.setdefault(owner, []).append(at)
        return dict(groups)

    def run(self, jobs: Sequence[Callable[[], None]], ends_s: float) -> list[Failure]:
        """Run jobs side by side, the first in the caller's thread; each ends by the deadline itself.

        Returns what failed, after all have ended.
        """
        futures = [self._executor.submit(_outcome, job) for job in jobs[1:]]
        failures = [failure for failure in map(_outcome, jobs[:1]) if failure is not None]
        if not futures:
            return failures
        _, late = wait(futures, timeout=max(ends_s - self.monotonic(), 0.0))
        running = []
        for future in late:
            if future.cancel():
                failures.append(DeadlineExceeded("the deadline passed before a connection was free"))
            else:
                running.append(future)
        wait(running)  # they hold the caller's buffers, and their sockets end them now
        return failures + [
            failure for future in futures if not future.cancelled() and (failure := future.result()) is not None
        ]

    def control(self, node: int, verb: str, args: Mapping[str, Any], ends_s: float, *, insist: bool = True) -> Any:
        body = verbs.encode_request(verb, args)
        call = Call(wire.Opcode.CONTROL, body, repeatable=verb in verbs.REPEATABLE, insist=insist)
        return verbs.decode_result(self.links[node].exchange(call, ends_s, take_json))

    def control_all(
        self, verb: str, args: Mapping[str, Any], deadline_s: float
    ) -> tuple[dict[int, Any], dict[int, StoreError]]:
        """Ask every node: the answers, and the errors of those that did not answer. Other errors are raised."""
        ends_s = self.ends_s(deadline_s)
        answers: dict[int, Any] = {}
        failures: dict[int, StoreError] = {}

        def ask(node: int) -> None:
            try:
                answers[node] = self.control(node, verb, args, ends_s)
            except (Unavailable, DeadlineExceeded) as error:
                failures[node] = error

        others = self.run([job(ask, node) for node in range(len(self.links))], ends_s)
        for failure in others:
            raise failure
        return answers, failures

    def control_every(self, verb: str, args: Mapping[str, Any], deadline_s: float) -> dict[int, Any]:
        """Ask every node; raises Unavailable, naming them, if any did not answer, or what kept the only one from it."""
        answers, failures = self.control_all(verb, args, deadline_s)
        if failures and len(self.links) == 1:
            raise first(failures)
        if failures:
            names = "; ".join(f"{self.links[node].name}: {error}" for node, error in sorted(failures.items()))
            raise Unavailable(f"not every node answered {verb!r} ({names})")
        return answers

    def close(self) -> None:
        for link in self.links:
            link.close()
        self._executor.shutdown(wait=False, cancel_futures=True)


def job(work: Callable[..., None], *args: object) -> Callable[[], None]:
    return lambda: work(*args)


def _outcome(job: Callable[[], None]) -> Failure | None:
    try:
        job()
    except (StoreError, ValueError) as error:
        return error
    return None


def raise_loud(failures: Iterable[Failure]) -> None:
    for failure in failures:
        if isinstance(failure, LOUD):
            raise failure


def first(failures: Mapping[int, StoreError]) -> StoreError:
    return next(iter(failures.values()), Unavailable("no node answered"))


def split(positions: Sequence[int], sizes: Sequence[int], bytes_max: int = CALL_BYTES) -> Sequence[Sequence[int]]:
    """Runs of positions that one call moves: at most ``bytes_max`` (or one block) and BATCH_BLOCKS_MAX blocks."""
    if len(positions) <= limits.BATCH_BLOCKS_MAX and _bytes_of(positions, sizes) <= bytes_max:
        return [positions] if positions else []
    parts: list[list[int]] = []
    held_bytes = 0
    for at in positions:
        full = not parts or len(parts[-1]) >= limits.BATCH_BLOCKS_MAX or held_bytes + sizes[at] > bytes_max
        if full:
            parts.append([])
            held_bytes = 0
        parts[-1].append(at)
        held_bytes += sizes[at]
    return parts


def _bytes_of(positions: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(sizes) if len(positions) == len(sizes) else sum([sizes[at] for at in positions])
