"""Keys that were offered once: a bounded memory in which an old offer is forgotten.

Owns two Bloom filters, the younger one being filled. Does not know blocks or classes. Invariants: what was offered
among the last OFFERS_MAX keys is remembered, what was offered before the last 2 x OFFERS_MAX is not; a key that was
never offered is taken for one that was at most once in 200 times (16 bits a key, four of them set), and then it is
stored one offer early. A restart forgets everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.keys import BlockKey
from kvstore.limits import OFFERS_MAX as OFFERS_MAX

BITS_A_KEY = 16


class Offers:
    """Not thread-safe."""

    def __init__(self, keys_max: int = OFFERS_MAX) -> None:
        if keys_max < 1 or keys_max & (keys_max - 1):
            raise ValueError(f"{keys_max} keys are not a power of two")
        self._keys_max = keys_max
        self._young, self._old = self._empty(), self._empty()
        self._count = 0

    @property
    def memory_bytes(self) -> int:
        return self._young.nbytes + self._old.nbytes

    def remember(self, keys: Sequence[BlockKey]) -> npt.NDArray[np.bool_]:
        """Which of the keys had been offered before this call; the others are from now on."""
        if not keys:
            return np.zeros(0, dtype=np.bool_)
        # A key is a digest: its own bits are as good as a hash of it.
        bits = np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 4) & np.uint64(self._keys_max * BITS_A_KEY - 1)
        at, mask = (bits >> np.uint64(3)).astype(np.intp), np.uint8(1) << (bits & np.uint64(7)).astype(np.uint8)
        known: npt.NDArray[np.bool_] = _holds(self._young, at, mask) | _holds(self._old, at, mask)
        np.bitwise_or.at(self._young, at[~known], mask[~known])
        self._count += int(np.count_nonzero(~known))
        if self._count >= self._keys_max:
            self._young, self._old, self._count = self._empty(), self._young, 0
        return known

    def _empty(self) -> npt.NDArray[np.uint8]:
        return np.zeros(self._keys_max * BITS_A_KEY // 8, dtype=np.uint8)


def _holds(
    field: npt.NDArray[np.uint8], at: npt.NDArray[np.intp], mask: npt.NDArray[np.uint8]
) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = ((field[at] & mask) != 0).all(axis=1)
    return found
