"""One forward's work, as data: which tokens of which sequence, where they stand, and what they may see.

Owns ``Slice``. Does not know about tensors or models. A forward takes several slices of several sequences at once.

        0 ........ window_floor ........ start ........ start + len(tokens)
        |  absent  |   held in slots     |   computed now             |      sliding layers
        |          stored in slots       |   computed now             |      global layers
                                              ^ write_floor: below it, the stored KV is served, the recomputed dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workers.slots import SlotTable


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive tokens of one sequence to run through the model.

    ``start``: absolute position of ``tokens[0]``.
    ``write_floor``: in global layers, positions below it serve the stored KV and drop the recomputed one.
    ``window_floor``: in sliding layers, keys at positions below it are absent (masked, never zero-filled).
    ``logits``: rows wanted: of the last token, of all, or none.
    """

    tokens: Sequence[int]
    start: int
    table: SlotTable
    write_floor: int = 0
    window_floor: int = 0
    logits: Literal["last", "all", "none"] = "last"

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a slice has at least one token")
        if not 0 <= self.window_floor <= self.start:
            raise ValueError(f"window_floor {self.window_floor} is outside 0..{self.start}, the slice's start")
        if self.write_floor < 0:
            raise ValueError(f"write_floor {self.write_floor} is negative")
        if self.end > self.table.tokens:
            raise ValueError(f"the slice ends at {self.end}, beyond the {self.table.tokens} slots of its table")

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)
