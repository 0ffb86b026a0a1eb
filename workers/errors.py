"""Errors of the workers' contract. Torch-free: the gateway handles them too.

WorkerError
|-- Unavailable      (retryable) no connection, draining, or no answer before the deadline
|-- Rejected         the worker refused the request; carries status, message, retry_after_s (503: retryable)
|-- Failed           the worker began and could not finish; carries code and ``retryable``
`-- ProtocolError    what came back is not the worker's protocol
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of all operating conditions between gateway and worker."""

    retryable = False


class Unavailable(WorkerError):
    """Nobody answered: another worker may."""

    retryable = True


class Rejected(WorkerError):
    """The request was refused before any work. ``status`` is the HTTP status."""

    def __init__(
        self, status: int, message: str, *, code: str = "rejected", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s
        self.retryable = status == 503


class Failed(WorkerError):
    """The stream ended without a result."""

    def __init__(self, message: str, *, code: str = "failed", retryable: bool = True) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retryable = retryable


class ProtocolError(WorkerError):
    """The peer sent something that the protocol does not know."""
