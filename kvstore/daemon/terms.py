"""The rules of all classes as tables by class byte, for questions about many blocks at once.

Owns the tables. Does not know blocks. Invariant: tables agree with the rules that they were made from, for bytes that
no rule names too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.traffic import FIXED, TOUCH_PARTS, ClassRules

NEVER_S = 2**62
_BYTES = range(256)


@dataclass(frozen=True, slots=True)
class Terms:
    """Shape [256] each. ``keep_for_s``: seconds from a touch. ``renew_s``: seconds after which another touch by the
    same class counts: it would not lengthen the promise before, or not by enough to be worth a write. ``max_age_s``:
    seconds from the write by a class; NEVER_S: no bound.
    """

    keep_for_s: npt.NDArray[np.int64]
    renew_s: npt.NDArray[np.int64]
    max_age_s: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rules: ClassRules) -> Terms:
        keep_for_s = np.array([rules.keep_for_s(class_byte) for class_byte in _BYTES], dtype=np.int64)
        renew_s = -(-keep_for_s // TOUCH_PARTS)
        renew_s[[rule.class_byte for rule in rules.rules if rule.keep == FIXED]] = NEVER_S
        max_age_s = np.full(len(keep_for_s), NEVER_S, dtype=np.int64)
        for rule in rules.rules:
            if rule.max_age_s:
                max_age_s[rule.class_byte] = rule.max_age_s
        return cls(keep_for_s, renew_s, max_age_s)

    @property
    def bounds_age(self) -> bool:
        """Whether some class has a maximum age."""
        return bool((self.max_age_s < NEVER_S).any())
