"""Errors cross the wire by code."""

from __future__ import annotations

import pytest

from kvstore import errors
from kvstore.errors import BY_CODE, Overloaded, StoreError, from_code


def every_error() -> list[type[StoreError]]:
    found = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, StoreError)]
    assert StoreError in found
    return found


def test_every_error_has_one_code_of_its_own() -> None:
    """No error of the tree is missing from the codes, and none inherits another's."""
    assert {kind.code: kind for kind in every_error()} == BY_CODE
    assert len(BY_CODE) == len(every_error())
    assert all(1 <= code <= 255 for code in BY_CODE)


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_an_error_round_trips_by_its_code(kind: type[StoreError]) -> None:
    """The peer raises the same class with the same message."""
    error = from_code(kind.code, "the message", 2.5)
    assert type(error) is kind
    assert str(error) == "the message"
    assert error.retryable == kind.retryable
    assert kind.__name__ in str(errors.__doc__)


def test_the_wait_of_an_overload_crosses_too() -> None:
    """Overloaded says when to come back."""
    error = from_code(Overloaded.code, "busy", 2.5)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.5


def test_an_unknown_code_is_a_plain_error_that_says_so() -> None:
    """A newer peer's error is still an error."""
    error = from_code(250, "new trouble")
    assert type(error) is StoreError
    assert "new trouble" in str(error)
    assert "250" in str(error)


def test_codes_are_pinned() -> None:
    """Codes are part of the protocol: a change is a new protocol version."""
    assert {code: kind.__name__ for code, kind in BY_CODE.items()} == {
        1: "StoreError",
        2: "Unavailable",
        3: "DeadlineExceeded",
        4: "Overloaded",
        5: "CapacityProtected",
        6: "Unauthorized",
        7: "ProtocolError",
        8: "VersionMismatch",
        9: "SpaceUnknown",
        10: "PolicyConflict",
        11: "VolumeError",
        12: "VolumeInUse",
        13: "VolumeFormat",
        14: "InternalError",
        15: "Held",
        16: "QuotaExceeded",
    }
    assert {kind.__name__ for kind in BY_CODE.values() if kind.retryable} == {
        "Unavailable",
        "DeadlineExceeded",
        "Overloaded",
        "CapacityProtected",
    }
