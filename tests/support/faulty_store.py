"""A store that fails on demand, around one that works.

Owns the faults: which calls fail, how, and how late. Calls that do not fail go to the inner store unchanged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.store import GetStatus, PutOutcome
from tests.support.waiting import WAIT_S


class FaultyStore:
    """Faults are attributes, to be set by a test at any time.

    ``down``: every call raises Unavailable. ``delay_s``: every data call takes that long, and raises DeadlineExceeded
    if that is beyond its deadline. ``fail_get``: asked with the running number of each block's get; True fails it with
    ``get_status`` and garbage in the buffer. ``fail_state``: the same for states. ``fail_put``: the same for puts.
    ``gate``: puts wait until it is set.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.down = False
        self.delay_s = 0.0
        self.load_s_estimate = 0.0
        self.fail_get: Callable[[int], bool] = lambda number: False
        self.fail_state: Callable[[int], bool] = lambda number: False
        self.fail_put: Callable[[int], bool] = lambda number: False
        self.get_status = GetStatus.MISS
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self._gets = self._states = self._puts = 0

    def lookup(self, space_id: Any, names: Any, *, states: bool = False, deadline_s: float = 5.0) -> Any:
        self._enter("lookup", deadline_s)
        found = self.inner.lookup(space_id, names, states=states, deadline_s=deadline_s)
        return replace(found, load_s_estimate=self.load_s_estimate)

    def get_into(
        self, space_id: Any, names: Sequence[Any], buffers: Sequence[Any], *, deadline_s: float = 5.0
    ) -> list[GetStatus]:
        self._enter("get_into", deadline_s)
        statuses = []
        for name, buffer in zip(names, buffers, strict=True):
            self._gets += 1
            if self.fail_get(self._gets):
                statuses.append(self.get_status)
                buffer[:] = b"\x5a" * len(buffer)  # whatever came of it, nobody may use it
            else:
                statuses += self.inner.get_into(space_id, [name], [buffer], deadline_s=deadline_s)
        return statuses

    def get_state(self, space_id: Any, name: Any, *, deadline_s: float = 5.0) -> Any:
        self._enter("get_state", deadline_s)
        self._states += 1
        return None if self.fail_state(self._states) else self.inner.get_state(space_id, name, deadline_s=deadline_s)

    def put(self, space_id: Any, blocks: Sequence[Any], **options: Any) -> list[PutOutcome]:
        self._enter("put", options.get("deadline_s", 5.0))
        self.gate.wait(WAIT_S)
        outcomes = []
        for block in blocks:
            self._puts += 1
            if self.fail_put(self._puts):
                outcomes.append(PutOutcome.REFUSED)
            else:
                outcomes += self.inner.put(space_id, [block], **options)
        return outcomes

    def put_state(self, *args: Any, **options: Any) -> bool:
        self._enter("put_state", options.get("deadline_s", 5.0))
        self.gate.wait(WAIT_S)
        return bool(self.inner.put_state(*args, **options))

    def touch(self, *args: Any, **options: Any) -> int:
        self._enter("touch", options.get("deadline_s", 5.0))
        return int(self.inner.touch(*args, **options))

    def register_space(self, *args: Any, **options: Any) -> Any:
        self._enter("register_space", options.get("deadline_s", 5.0))
        return self.inner.register_space(*args, **options)

    def close(self) -> None:
        self.inner.close()

    def _enter(self, call: str, deadline_s: float) -> None:
        self.calls.append(call)
        if self.down:
            raise Unavailable("the store is down")
        if self.delay_s > deadline_s:
            time.sleep(deadline_s)
            raise DeadlineExceeded("too slow")
        if self.delay_s:
            time.sleep(self.delay_s)


def forget_states(store: Any) -> None:
    """All states vanish, as after a restart of the node."""
    store._states.clear()
