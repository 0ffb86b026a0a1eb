"""Reading what a store holds, page by page, within one deadline.

Owns the paging. Does not know what the blocks are wanted for. Invariant: it holds one page at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvstore.errors import DeadlineExceeded, InternalError
from kvstore.keys import SpaceId
from kvstore.limits import SCAN_PAGE_MAX
from kvstore.store import BlockInfo, Store

SCAN_S_DEFAULT = 120.0
"""Seconds for a whole scan; a node iterates about two million blocks a second, the wire less."""


def scan_blocks(
    store: Store,
    space_id: SpaceId | None = None,
    *,
    deadline_s: float = SCAN_S_DEFAULT,
    page_blocks: int = SCAN_PAGE_MAX,
    monotonic_s: Callable[[], float] = time.monotonic,
) -> Iterator[BlockInfo]:
    """Every stored block of a space, or of all. Raises DeadlineExceeded when the scan as a whole takes too long."""
    end_s = monotonic_s() + deadline_s
    cursor = b""
    while True:
        left_s = end_s - monotonic_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"the scan took longer than {deadline_s:g} s; give it more time, or name one space")
        page, following = store.scan(space_id, cursor=cursor, limit=page_blocks, deadline_s=left_s)
        yield from page
        if not following:
            return
        if following == cursor:
            raise InternalError("the store's scan does not advance")
        cursor = following
