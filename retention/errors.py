"""Errors of retention.

    RetentionError
    |-- PolicyInvalid     (also ValueError) a policy document, or a change of one, that must not be applied
    |-- SelectionInvalid  (also ValueError) a space, key or tenant that is malformed or not unique
    |-- TraceInvalid      (also ValueError) a trace of traffic that cannot be replayed; which line, and why
    |-- PackageMissing    a package that only some commands need is not installed; its name, and how to install it
    |-- ReceiptInvalid    (also ValueError) a receipt or key file that is none, or does not verify
    `-- NothingMatched    a well-formed selection that no stored block, space or pin answers to

Errors of the store itself are ``kvstore.errors.StoreError`` and pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence


class RetentionError(Exception):
    """Base of all errors of retention."""


class PolicyInvalid(RetentionError, ValueError):
    """Every problem of a policy at once, each with what to do about it."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class SelectionInvalid(RetentionError, ValueError):
    pass


class TraceInvalid(RetentionError, ValueError):
    pass


class ReceiptInvalid(RetentionError, ValueError):
    pass


class PackageMissing(RetentionError):
    pass


class NothingMatched(RetentionError):
    """``opaque_spaces``: of a purge by tokens, spaces that were not looked through."""

    def __init__(self, message: str, opaque_spaces: int = 0) -> None:
        super().__init__(message)
        self.opaque_spaces = opaque_spaces
