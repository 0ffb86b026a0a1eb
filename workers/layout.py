"""The worker's KV memory as tensors, and the only place where tensors become bytes.

Owns the tensors behind the slots, the byte layout ``geometry.LAYOUT`` of blocks, and the format of states. Does not
know about models, requests or the store. Invariants: payload lengths are checked before anything is written, so a
refused payload leaves memory untouched; a payload is the same bytes wherever its slots lie; slots begin as zeros, never
as uninitialised memory.

    block   for each global layer: keys [tokens, heads, dim], values [tokens, heads, dim]
    state   header (40 bytes) | for each sliding layer: keys, values of positions [position - held, position)
            | for each global layer: keys, values of the incomplete tail block [position - tail, position)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from kernels.dispatch import Moves, moves_for
from kvstore.keys import AttentionGroup
from workers.geometry import DTYPE_BYTES, STATE_HEADER_BYTES, Geometry
from workers.slots import Slots, SlotTable

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_HEADER = struct.Struct("<4sHHQIIIIQ")
_MAGIC = b"RPST"
_VERSION = 1
assert _HEADER.size == STATE_HEADER_BYTES


class BadPayload(Exception):
    """Bytes that are not what their name promises, or a state that cannot serve the position: treat it as a miss."""


@dataclass(frozen=True, slots=True)
class StateHeader:
    """What a state says of itself. ``held``: positions of each window; below W near the start or after a replay."""

    position: int
    window: int
    held: int
    tail: int
    block_tokens: int
    element_bytes: int
    body_bytes: int

    def encode(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.element_bytes,
            self.position,
            self.window,
            self.held,
            self.tail,
            self.block_tokens,
            self.body_bytes,
        )

    @classmethod
    def decode(cls, payload: memoryview) -> StateHeader:
        """Raises BadPayload for anything but a whole header of this version."""
        if len(payload) < STATE_HEADER_BYTES:
            raise BadPayload(f"a state has at least {STATE_HEADER_BYTES} bytes, not {len(payload)}")
        magic, version, element, position, window, held, tail, block_tokens, body = _HEADER.unpack_from(payload)
        if magic != _MAGIC or version != _VERSION:
            raise BadPayload(f"not a state of version {_VERSION} (magic {magic!r}, version {version})")
        return cls(position, window, held, tail, block_tokens, element, body)


class KvMemory:
    """KV of ``slots.total_tokens`` tokens in every layer: one tensor [layers, 2, slots, heads, dim] an attention group.

    All work happens on one thread. ``moves`` does the copies between slots and payloads.
    """

    def __init__(
        self, geometry: Geometry, slots: Slots, dtype: str, device: str = "cpu", moves: Moves | None = None
    ) -> None:
        if dtype != geometry.dtype:
            raise ValueError(f"the memory's dtype {dtype} is not the geometry's, {geometry.dtype}")
        self.geometry = geometry
        self.block_tokens = slots.page_tokens
        self.device = torch.device(device)
        self._moves = moves or moves_for(self.device)
        self._global = self._allocate(geometry.global_group, slots)
        self._sliding = self._allocate(geometry.sliding_group, slots) if geometry.sliding_group else None
        self._place: dict[int, torch.Tensor] = {}
        for group, memory in self._groups():
            for index, layer in enumerate(group.layers):
                self._place[layer] = memory[index]

    def keys(self, layer: int) -> torch.Tensor:
        """The layer's keys [slots, heads, dim]."""
        return self._place[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        """The layer's values [slots, heads, dim]."""
        return self._place[layer][1]

    def export_block(self, table: SlotTable, block_index: int, out: memoryview) -> None:
        """Write block ``block_index`` of a sequence into ``out``, which must have exactly the block's bytes."""
        begin = block_index * self.block_tokens
        self._require_bytes(len(out), self.geometry.block_payload_bytes(self.block_tokens), "a block")
        self._export(self._global, table, begin, begin + self.block_tokens, out)

    def import_block(self, table: SlotTable, block_index: int, payload: memoryview) -> None:
        """Inverse of ``export_block``. Raises BadPayload for another length; then nothing was written."""
        begin = block_index * self.block_tokens
        self._require_bytes(len(payload), self.geometry.block_payload_bytes(self.block_tokens), "a block")
        self._import(self._global, table, begin, begin + self.block_tokens, payload)

    def export_state(self, table: SlotTable, position: int, window_floor: int = 0) -> bytes:
        """The state after ``position`` tokens. ``window_floor``: below it the windows are absent and are not stored."""
        if not window_floor <= position:
            raise ValueError(f"window_floor {window_floor} is beyond the position {position}")
        group, tail = self.geometry.sliding_group, position % self.block_tokens
        held = min(self.geometry.window, position - window_floor)
        window_bytes = held * self.geometry.window_token_bytes
        tail_bytes = tail * self.geometry.block_token_bytes
        element = DTYPE_BYTES[self.geometry.dtype]
        header = StateHeader(
            position, self.geometry.window, held, tail, self.block_tokens, element, window_bytes + tail_bytes
        )
        payload = bytearray(STATE_HEADER_BYTES + window_bytes + tail_bytes)
        payload[:STATE_HEADER_BYTES] = header.encode()
        body = memoryview(payload)[STATE_HEADER_BYTES:]
        if group and held:
            assert self._sliding is not None
            self._export(self._sliding, table, position - held, position, body[:window_bytes])
        if tail:
            self._export(self._global, table, position - tail, position, body[window_bytes:])
        return bytes(payload)

    def import_state(self, table: SlotTable, position: int, payload: memoryview, position_stored: int) -> int:
        """Restore the state stored after ``position_stored`` tokens, to compute on from ``position``.

        ``position`` may be ``position_stored`` or less, as far as the stored windows reach: W positions are kept, so
        the one before (an identical resend) is always served. The complete blocks before the tail must be in the slots
        already. Returns the ``window_floor`` for what follows. Raises BadPayload; then nothing was written.
        """
        header = StateHeader.decode(payload)
        self._check_header(header, len(payload), position_stored)
        floor = header.position - header.held
        needed = max(0, position - self.geometry.window + 1) if self.geometry.window else position
        if position > header.position or (self.geometry.window and floor > needed):
            raise BadPayload(
                f"the state after {header.position} tokens holds windows from {floor} on; it cannot serve {position}"
            )
        body = payload[STATE_HEADER_BYTES:]
        window_bytes = header.held * self.geometry.window_token_bytes
        if self._sliding is not None and header.held:
            self._import(self._sliding, table, floor, header.position, body[:window_bytes])
        if header.tail:
            self._import(self._global, table, header.position - header.tail, header.position, body[window_bytes:])
        return floor if self.geometry.window else 0

    def _check_header(self, header: StateHeader, payload_bytes: int, position_stored: int) -> None:
        expected = StateHeader(
            position=position_stored,
            window=self.geometry.window,
            held=header.held,
            tail=position_stored % self.block_tokens,
            block_tokens=self.block_tokens,
            element_bytes=DTYPE_BYTES[self.geometry.dtype],
            body_bytes=payload_bytes - STATE_HEADER_BYTES,
        )
        if header != expected or header.held > min(header.window, header.position):
            raise BadPayload(f"the state is {header}, expected {expected}")
        body = header.held * self.geometry.window_token_bytes + header.tail * self.geometry.block_token_bytes
        self._require_bytes(header.body_bytes, body, "the state's body")

    def _groups(self) -> list[tuple[AttentionGroup, torch.Tensor]]:
        groups = [(self.geometry.global_group, self._global)]
        if self.geometry.sliding_group and self._sliding is not None:
            groups.append((self.geometry.sliding_group, self._sliding))
        return groups

    def _allocate(self, group: AttentionGroup, slots: Slots) -> torch.Tensor:
        return torch.zeros(
            (len(group.layers), 2, slots.total_tokens, group.kv_heads, group.head_dim),
            dtype=TORCH_DTYPES[self.geometry.dtype],
            device=self.device,
        )

    @staticmethod
    def _require_bytes(actual: int, expected: int, what: str) -> None:
        if actual != expected:
            raise BadPayload(f"{what} has {expected} bytes here, not {actual}")

    def _export(self, memory: torch.Tensor, table: SlotTable, begin: int, end: int, out: memoryview) -> None:
        """Copy positions [begin, end) of all planes into ``out`` [planes, tokens, width]."""
        planes_PSW = _as_bytes(memory)
        bytes_PTW = torch.frombuffer(out, dtype=torch.uint8).view(planes_PSW.shape[0], end - begin, -1)
        target = bytes_PTW if self.device.type == "cpu" else torch.empty_like(bytes_PTW, device=self.device)
        first = table.first_slot(begin, end)
        if first is not None:
            target.copy_(planes_PSW[:, first : first + end - begin])
        else:
            self._moves.gather(planes_PSW, self._index(table, begin, end), target[None])
        if target is not bytes_PTW:
            bytes_PTW.copy_(target)

    def _import(self, memory: torch.Tensor, table: SlotTable, begin: int, end: int, payload: memoryview) -> None:
        """Inverse of ``_export``. A read-only payload is copied once more, since torch cannot view it."""
        planes_PSW = _as_bytes(memory)
        writable = payload if not payload.readonly else bytearray(payload)
        bytes_PTW = torch.frombuffer(writable, dtype=torch.uint8).view(planes_PSW.shape[0], end - begin, -1)
        source = bytes_PTW.to(self.device)
        first = table.first_slot(begin, end)
        if first is not None:
            planes_PSW[:, first : first + end - begin].copy_(source)
        else:
            self._moves.scatter(source[None], self._index(table, begin, end), planes_PSW)

    def _index(self, table: SlotTable, begin: int, end: int) -> torch.Tensor:
        return torch.tensor(table.slots(begin, end), dtype=torch.long, device=self.device)


def _as_bytes(memory: torch.Tensor) -> torch.Tensor:
    """[layers, 2, slots, heads, dim] as bytes [planes, slots, width]; shares the memory."""
    layers, pair, slots, heads, dim = memory.shape
    return memory.view(layers * pair, slots, heads * dim).view(torch.uint8)
