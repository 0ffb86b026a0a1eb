"""A model without weights: integers instead of vectors, so that any wrong key or value gives wrong tokens.

Owns the arithmetic. Every layer's KV of a token depends on all KV that the layers below see, as in a real model:
through all earlier tokens for a global layer, through the window for a sliding one. Sums are modulo 2^64, so results
never depend on chunking or batching, and can be compared for equality. KV lies in a real ``KvMemory``, as float64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.keys import AttentionGroup
from workers.batch import Slice
from workers.geometry import Geometry
from workers.layout import KvMemory
from workers.protocol import Sampling
from workers.slots import Slots, SlotTable

Bits = npt.NDArray[np.uint64]


def fake_memory(geometry: Geometry, slots: Slots) -> KvMemory:
    return KvMemory(geometry, slots, geometry.dtype)


def fake_choose(row: int, sampling: Sampling, position: int) -> int:
    """The fake's "logits" are the next token itself."""
    return row


class FakeModel:
    """``kinds`` names the layers from below: "s" slides, "g" is global."""

    def __init__(
        self, kinds: str = "ssgsg", window: int = 8, vocabulary: int = 1000, context_tokens: int = 4096
    ) -> None:
        sliding = tuple(index for index, kind in enumerate(kinds) if kind == "s")
        full = tuple(index for index, kind in enumerate(kinds) if kind == "g")
        self.kinds = kinds
        self.window = window
        self.vocabulary = vocabulary
        self.context_tokens = context_tokens
        self.stop_token_ids: tuple[int, ...] = ()
        self.weights_digest = kinds.encode()
        self.geometry = Geometry(
            AttentionGroup(0, full, 1, 1), AttentionGroup(window, sliding, 1, 1) if sliding else None, "float64"
        )
        self.forwards: list[list[int]] = []
        """Tokens of every slice of every forward."""

    def forward(self, memory: KvMemory, slices: Sequence[Slice]) -> list[int]:
        self.forwards.append([len(item.tokens) for item in slices])
        tops = [self._run(memory, item) for item in slices]
        rows = []
        for item, top in zip(slices, tops, strict=True):
            wanted = {"last": top[-1:], "all": top, "none": top[:0]}[item.logits]
            rows.extend(int(value % np.uint64(self.vocabulary)) for value in wanted)
        return rows

    def triangular_steps(
        self, memory: KvMemory, tokens: Sequence[int], table: SlotTable, position: int, chunk_tokens: int
    ) -> Iterator[int]:
        start = max(0, position - self.geometry.exact_replay_tokens)
        for begin in range(start, position, chunk_tokens):
            end = min(position, begin + chunk_tokens)
            item = Slice(tokens[begin:end], begin, table, write_floor=position, window_floor=start, logits="none")
            self._run(memory, item)
            yield max(0, position - self.window + 1)

    def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """What a cold run generates."""
        slots = Slots(-(-(len(prompt) + count) // 16), 16)
        memory, tokens = fake_memory(self.geometry, slots), list(prompt)
        table = slots.allocate(len(prompt) + count)
        computed = 0
        while len(tokens) < len(prompt) + count:
            top = self._run(memory, Slice(tokens[computed:], computed, table))
            computed = len(tokens)
            tokens.append(int(top[-1] % np.uint64(self.vocabulary)))
        return tokens[len(prompt) :]

    def _run(self, memory: KvMemory, item: Slice) -> Bits:
        hidden = _mix(np.asarray(item.tokens, np.uint64), 1)
        for layer, kind in enumerate(self.kinds):
            new = _mix(hidden, layer + 2)
            floor = item.write_floor if kind == "g" else 0
            keys = _bits(memory, layer)
            write = [position for position in range(item.start, item.end) if position >= floor]
            if write:
                keys[item.table.slots(write[0], item.end)] = new[write[0] - item.start :]
            low = item.window_floor if kind == "s" else 0
            held = keys[item.table.slots(low, item.end)] * _mix(np.arange(low, item.end, dtype=np.uint64), 99)
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(held, dtype=np.uint64)])
            ends = np.arange(item.start, item.end) + 1 - low
            begins = np.maximum(ends - self.window, 0) if kind == "s" else np.zeros_like(ends)
            hidden = _mix(hidden + sums[ends] - sums[begins], layer + 50)
        return hidden


def _bits(memory: KvMemory, layer: int) -> Bits:
    return memory.keys(layer)[:, 0, 0].numpy().view(np.uint64)


def _mix(values: Bits, salt: int) -> Bits:
    """splitmix64's finaliser."""
    with np.errstate(over="ignore"):
        x = values + np.uint64(salt) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
