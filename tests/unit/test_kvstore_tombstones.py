"""What is remembered of removed keys."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.daemon.tombstones import Tombstones
from kvstore.store import Presence


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_buried_are_forgotten_and_no_others(seed: int) -> None:
    """As a dictionary in the order of burial would: whoever is buried again is young again, whoever came back is not
    counted, and batches are larger than the bound at times.
    """
    drawn = random.Random(seed)
    count_max = drawn.choice((1, 20, 300))
    tombstones, model = Tombstones(count_max), dict[int, int]()
    for turn in range(200):
        some = drawn.sample(range(1, 3 * count_max + 5), min(drawn.choice((1, 7, 2 * count_max)), 3 * count_max))
        fingerprints = np.array(some, dtype=np.uint64)
        if drawn.random() < 0.3:
            back = tombstones.forget(fingerprints).tolist()
            assert back == [each for each in some if model.pop(each, None) is not None]
            continue
        reasons = [drawn.choice((Presence.EVICTED, Presence.EXPIRED)) for _ in some]
        forgotten = tombstones.bury(fingerprints, np.array(reasons, dtype=np.uint8), turn).tolist()
        for each, reason in zip(some, reasons, strict=True):
            model.pop(each, None)
            model[each] = reason
        oldest = list(model)[: max(len(model) - count_max, 0)]
        assert forgotten == oldest
        for each in oldest:
            del model[each]
        assert [fingerprint for fingerprint, _ in tombstones.items()] == list(model)
        asked = np.arange(1, 3 * count_max + 5, dtype=np.uint64)
        assert tombstones.reasons(asked).tolist() == [model.get(each, 0) for each in asked.tolist()]
