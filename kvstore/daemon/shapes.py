"""What many blocks have in common, kept once: space, payload length, codec and flags.

Owns the numbers by which rows name a shape and a space, how many rows do, and which shapes are locked: encrypted under
a cipher key that is not there. Does not know rows. Invariant: a number is given anew only when no row has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.daemon.codec import is_encrypted
from kvstore.daemon.fingerprints import grown
from kvstore.daemon.index import Rows
from kvstore.keys import SpaceId

Numbers = npt.NDArray[np.uint32]
IsLocked = Callable[[SpaceId, int], bool]
"""Whether blocks of a space with a codec byte cannot be read."""
_FIRST = 64


class Shape(NamedTuple):
    space_id: SpaceId
    payload_bytes: int
    codec: int
    flags: int


class Shapes:
    """Columns by number: ``space`` (a number of its own kind), ``payload_bytes``, ``codec``, ``flags``, ``locked``,
    ``counts``. ``any_locked`` may stay true when the last locked shape is gone.
    """

    def __init__(self) -> None:
        self._numbers: dict[Shape, int] = {}
        self._spaces: dict[SpaceId, int] = {}
        self._space_ids: list[SpaceId] = []
        self._free: list[int] = []
        self.space = np.zeros(_FIRST, dtype=np.uint32)
        self.payload_bytes = np.zeros(_FIRST, dtype=np.uint32)
        self.codec = np.zeros(_FIRST, dtype=np.uint8)
        self.flags = np.zeros(_FIRST, dtype=np.uint8)
        self.locked = np.zeros(_FIRST, dtype=np.bool_)
        self.any_locked = False
        self._is_locked: IsLocked = lambda _, codec: is_encrypted(codec)
        self.counts = np.zeros(_FIRST, dtype=np.int64)

    def add(self, rows: Rows) -> Numbers:
        """The shape of each row, counted."""
        names = ("payload_bytes", "codec", "flags")
        same = bool((rows["space"] == rows["space"][:1]).all()) and all((rows[n] == rows[n][0]).all() for n in names)
        if same:
            number = self._number(_shape_of(rows[0]))
            self.counts[number] += len(rows)
            return np.full(len(rows), number, dtype=np.uint32)
        packed = np.zeros(len(rows), dtype=[("space", "V32"), *((name, rows.dtype[name]) for name in names)])
        packed["space"] = np.ascontiguousarray(rows["space"]).view("V32").ravel()
        for name in names:
            packed[name] = rows[name]
        plain = packed.view(f"V{packed.dtype.itemsize}")
        _, first, inverse = np.unique(plain, return_index=True, return_inverse=True)
        numbers = np.array([self._number(_shape_of(rows[at])) for at in first], dtype=np.uint32)
        found: Numbers = numbers[inverse.ravel()]
        np.add.at(self.counts, found, 1)
        return found

    def add_one(self, shape: Shape) -> int:
        """As ``add``, of one row."""
        number = self._number(shape)
        self.counts[number] += 1
        return number

    def remove(self, numbers: Numbers) -> None:
        """Rows of these shapes are gone."""
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self.counts[number] -= count
            if not self.counts[number]:
                del self._numbers[self.shape(int(number))]
                self._free.append(int(number))

    def shape(self, number: int) -> Shape:
        return Shape(
            self._space_ids[self.space[number]],
            int(self.payload_bytes[number]),
            int(self.codec[number]),
            int(self.flags[number]),
        )

    def lock(self, is_locked: IsLocked) -> None:
        """Other cipher keys are in force: judge every shape anew, and by the same those to come."""
        self._is_locked = is_locked
        for shape, number in self._numbers.items():
            self.locked[number] = is_locked(shape.space_id, shape.codec)
        self.any_locked = self.rows_locked() > 0

    def rows_locked(self) -> int:
        """How many rows cannot be read."""
        return int(self.counts[self.locked].sum())

    def rows_encrypted(self) -> int:
        return sum(int(self.counts[number]) for shape, number in self._numbers.items() if is_encrypted(shape.codec))

    def space_number(self, space_id: SpaceId) -> int:
        """-1 for a space that never had a row."""
        return self._spaces.get(space_id, -1)

    def space_id(self, number: int) -> SpaceId:
        return self._space_ids[number]

    def in_space(self, space_id: SpaceId) -> npt.NDArray[np.bool_]:
        """By number: whether rows of this shape are in the space."""
        found: npt.NDArray[np.bool_] = (self.counts > 0) & (self.space == self.space_number(space_id))
        return found

    def spaces(self) -> set[SpaceId]:
        """Spaces that have rows."""
        return {shape.space_id for shape in self._numbers}

    @property
    def memory_bytes(self) -> int:
        columns = (self.space, self.payload_bytes, self.codec, self.flags, self.locked, self.counts)
        return sum(column.nbytes for column in columns) + 300 * len(self._numbers) + 100 * len(self._space_ids)

    def _number(self, shape: Shape) -> int:
        number = self._numbers.get(shape)
        if number is not None:
            return number
        number = self._free.pop() if self._free else len(self._numbers)
        if number == len(self.counts):
            size = 2 * number
            self.space, self.payload_bytes = grown(self.space, size), grown(self.payload_bytes, size)
            self.codec, self.flags = grown(self.codec, size), grown(self.flags, size)
            self.locked, self.counts = grown(self.locked, size), grown(self.counts, size)
        space = self._spaces.setdefault(shape.space_id, len(self._space_ids))
        if space == len(self._space_ids):
            self._space_ids.append(shape.space_id)
        self.space[number], self.payload_bytes[number] = space, shape.payload_bytes
        self.codec[number], self.flags[number] = shape.codec, shape.flags
        self.locked[number] = self._is_locked(shape.space_id, shape.codec)
        self.any_locked |= bool(self.locked[number])
        self._numbers[shape] = number
        return number


def _shape_of(row: np.void) -> Shape:
    return Shape(SpaceId(row["space"].tobytes()), int(row["payload_bytes"]), int(row["codec"]), int(row["flags"]))
