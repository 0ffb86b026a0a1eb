"""A fuzzer's bytes, read as a program: small numbers and byte strings, zeros once they are used up."""

from __future__ import annotations


class Program:
    """Reads from the front. Whatever the bytes are, every question has an answer."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at >= len(self._data)

    def take(self, count: int) -> bytes:
        """Up to ``count`` bytes, fewer at the end."""
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def number(self, width_bytes: int) -> int:
        return int.from_bytes(self.take(width_bytes), "little")

    def below(self, bound: int) -> int:
        """A number in 0..bound-1."""
        return self.number(2 if bound > 256 else 1) % bound

    def flag(self) -> bool:
        return bool(self.number(1) & 1)

    def rest(self) -> bytes:
        return self.take(max(0, len(self._data) - self._at))
