"""A block's payload, held for sending.

Owns the hold on the segment. Does not read or verify payloads that are sent from the file: the receiver does.
Invariant: while a lease is open, the bytes at its place do not change, unless a purge erases them: its receiver finds a
mark or a checksum that does not fit, and asks again.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.daemon.ledger import Place
from kvstore.daemon.record import HEADER_BYTES, RecordHeader, checksum_of


class PayloadLease:
    """One block's payload for sending; its segment is not recycled until ``close`` (or the end of a ``with``).

    A block stored as it is: send ``payload_bytes`` from ``fd`` at ``offset``; only the header has been verified, the
    receiver checks
    ``checksum`` (XXH3-64 of the bytes sent). Another: ``data`` holds the verified payload, and ``fd`` is None.
    """

    __slots__ = (
        "_release",
        "checksum",
        "codec",
        "data",
        "fd",
        "flags",
        "offset",
        "payload_bytes",
        "stored_bytes",
        "token_digest",
    )

    def __init__(self, place: Place, header: RecordHeader, data: bytes | None, release: Callable[[], None]) -> None:
        self.fd: int | None = place.segment.fd if data is None else None
        self.offset = place.offset + HEADER_BYTES if data is None else 0
        self.stored_bytes = header.stored_bytes
        self.payload_bytes = header.payload_bytes
        self.checksum = header.checksum if data is None else checksum_of(data)
        self.codec = header.codec
        self.flags = header.flags
        self.token_digest = header.token_digest
        self.data: bytes | None = data
        self._release: Callable[[], None] | None = release

    def __enter__(self) -> PayloadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()
