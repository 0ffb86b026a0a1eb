"""JSON values that must be of one kind: what comes from a peer or a file is not coerced. Each raises TypeError."""

from __future__ import annotations


def whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def truth(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is not true or false")
    return value


def string(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a string")
    return value
