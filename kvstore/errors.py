"""Errors of the store, and the codes by which they cross the wire.

    StoreError
    |-- Unavailable          (retryable) no connection, node down, daemon draining
    |-- DeadlineExceeded     (retryable) the call's deadline passed
    |-- Overloaded           (retryable) admission refused; carries retry_after_s
    |-- CapacityProtected    (retryable) the volume is full of pinned or guaranteed blocks
    |-- Unauthorized         token missing, wrong, or not allowed to do this
    |-- ProtocolError        malformed, oversized or unexpected frame; the connection is closed
    |   `-- VersionMismatch  the peer speaks another protocol, key or digest version
    |-- SpaceUnknown         a space id that was never registered with this store
    |-- Held                 a block is under a legal hold; nothing was removed
    |-- QuotaExceeded        an owner's pins would hold more bytes than allowed
    |-- PolicyConflict       compare-and-set on the policy lost against another writer
    |-- VolumeError          the data directory cannot be used (format, lock, I/O)
    |   |-- VolumeInUse      another process holds the directory
    |   `-- VolumeFormat     another format version, or not a store directory
    `-- InternalError        a fault of the daemon; see its log

A miss is a value (``Presence``, ``GetStatus``), never an error. ``ValueError`` is the caller's mistake.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of all operating conditions of the store."""

    code = 1
    retryable = False


class Unavailable(StoreError):
    code = 2
    retryable = True


class DeadlineExceeded(StoreError):
    code = 3
    retryable = True


class Overloaded(StoreError):
    code = 4
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CapacityProtected(StoreError):
    code = 5
    retryable = True


class Unauthorized(StoreError):
    code = 6


class ProtocolError(StoreError):
    code = 7


class VersionMismatch(ProtocolError):
    code = 8


class SpaceUnknown(StoreError):
    code = 9


class PolicyConflict(StoreError):
    code = 10


class VolumeError(StoreError):
    code = 11


class VolumeInUse(VolumeError):
    code = 12


class VolumeFormat(VolumeError):
    code = 13


class InternalError(StoreError):
    code = 14


class Held(StoreError):
    code = 15


class QuotaExceeded(StoreError):
    code = 16


BY_CODE: dict[int, type[StoreError]] = {
    kind.code: kind
    for kind in (
        StoreError,
        Unavailable,
        DeadlineExceeded,
        Overloaded,
        CapacityProtected,
        Unauthorized,
        ProtocolError,
        VersionMismatch,
        SpaceUnknown,
        PolicyConflict,
        VolumeError,
        VolumeInUse,
        VolumeFormat,
        InternalError,
        Held,
        QuotaExceeded,
    )
}


def from_code(code: int, message: str, retry_after_s: float = 0.0) -> StoreError:
    """The error that a peer sent; an unknown code becomes a plain ``StoreError`` that says so."""
    kind = BY_CODE.get(code)
    if kind is None:
        return StoreError(f"{message} (unknown error code {code})")
    if kind is Overloaded:
        return Overloaded(message, retry_after_s)
    return kind(message)
