"""Records on their way to a socket: from files, through the page cache or around it, or made in memory.

Owns the order of sending and reading ahead. Does not know why a record goes out. Invariants: exactly the bytes that
were announced are sent, what a file lacks as zeros, so that the frame stays whole and the reader's checksum finds it;
who finds no buffer to read around the page cache is served through it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

from kvstore.daemon.files import open_for_reading
from kvstore.daemon.request import Request
from kvstore.daemon.segment import Segment
from kvstore.direct import PageReader, pieces_of
from kvstore.store import Buffer


class Stretch(NamedTuple):
    """Bytes that lie together in one file; ``offset`` is where a record begins."""

    segment: Segment
    offset: int
    length: int


class Made(NamedTuple):
    """A record in memory."""

    header: bytes
    data: Buffer


def send(request: Request, parts: Iterable[Stretch | Made], stall_s: float) -> None:
    """All of the payload, part after part, once the answer was begun. Raises as ``Request.send_file``."""
    for part in parts:
        if isinstance(part, Made):
            request.send_made(*part, stall_s)
        else:
            request.send_file(part.segment.fd, part.offset, part.length, stall_s)


def send_around(request: Request, parts: Sequence[Stretch | Made], pages: PageReader, stall_s: float) -> None:
    """As ``send``, of parts some of which are to be read around the page cache."""
    with ExitStack() as held:
        direct = _open_cold(held, parts)
        pieces = [
            piece
            for part in parts
            if isinstance(part, Stretch) and part in direct
            for piece in pieces_of(direct[part], part.offset, part.length)
        ]
        reading = held.enter_context(closing(pages.read(pieces)))
        for part in parts:
            if isinstance(part, Stretch) and part in direct:
                _send_read(request, part, reading, stall_s)
            else:
                send(request, (part,), stall_s)


def _open_cold(held: ExitStack, parts: Sequence[Stretch | Made]) -> Mapping[Stretch, int]:
    """Which parts are read around the page cache, each with a descriptor for that; not one that cannot be had."""
    direct: dict[Stretch, int] = {}
    opened: dict[int, int] = {}
    for part in parts:
        if isinstance(part, Made) or not part.segment.is_cold(part.offset, part.length):
            continue
        fd = opened.get(part.segment.fd)
        if fd is None:
            try:
                fd = opened[part.segment.fd] = open_for_reading(part.segment.fd, direct=True)
            except OSError:  # too many open files
                continue
            held.callback(os.close, fd)
        direct[part] = fd
    return direct


def _send_read(request: Request, part: Stretch, reading: Iterator[memoryview | None], stall_s: float) -> None:
    """One part as it is read; what does not come that way is sent from the file."""
    end = part.offset + part.length
    for _, offset, length in pieces_of(part.segment.fd, part.offset, part.length):
        wanted = min(length, end - offset)
        view = next(reading, None)
        came = min(len(view), wanted) if view is not None else 0
        if view is not None and came:
            request.send_made(b"", view[:came], stall_s)
        if came < wanted:
            request.send_file(part.segment.fd, offset + came, wanted - came, stall_s)
