"""Bytes of blocks and states: the same wherever slots lie, refused when they are not what their name promises."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import AttentionGroup
from workers.geometry import STATE_HEADER_BYTES, Geometry
from workers.layout import BadPayload, KvMemory, StateHeader
from workers.slots import Slots, SlotTable

BLOCK = 4
HYBRID = Geometry(AttentionGroup(0, (1, 3), 2, 3), AttentionGroup(6, (0, 2), 2, 3), "float32")
FULL = Geometry(AttentionGroup(0, (0, 1), 1, 4), None, "bfloat16")


def filled(geometry: Geometry, scattered: bool, tokens: int = 40) -> tuple[KvMemory, SlotTable]:
    """A memory whose value at (layer, key/value, position) tells where it is from, in contiguous or scattered pages."""
    slots = Slots(32, BLOCK)
    if scattered:
        tables = [slots.allocate(BLOCK) for _ in range(32)]
        random.Random(5).shuffle(tables)
        for other in tables[: len(tables) // 2]:
            slots.free(other)
    table = slots.allocate(tokens)
    assert (table.first_slot(0, tokens) is None) is scattered
    memory = KvMemory(geometry, slots, geometry.dtype)
    for layer in range(geometry.layers):
        for offset, tensor in ((0, memory.keys(layer)), (64, memory.values(layer))):
            for position, slot in enumerate(table.slots(0, tokens)):
                tensor[slot] = layer * 128 + offset + position
    return memory, table


def block_of(memory: KvMemory, table: SlotTable, index: int) -> bytearray:
    payload = bytearray(memory.geometry.block_payload_bytes(BLOCK))
    memory.export_block(table, index, memoryview(payload))
    return payload


@pytest.mark.parametrize("geometry", [HYBRID, FULL])
def test_a_block_is_the_same_bytes_wherever_its_slots_lie(geometry: Geometry) -> None:
    """Contiguous and scattered pages give equal payloads, in the documented order of planes."""
    contiguous, scattered = filled(geometry, False), filled(geometry, True)
    for index in range(10):
        assert block_of(*contiguous, index) == block_of(*scattered, index)
    dtype = contiguous[0].keys(0).dtype
    block = torch.frombuffer(block_of(*contiguous, 2), dtype=dtype).view(2, 2, BLOCK, -1)
    for plane, layer in enumerate(geometry.global_group.layers):
        expected = layer * 128 + torch.arange(8, 12).to(dtype)
        assert torch.equal(block[plane, 0, :, 0], expected)
        assert torch.equal(block[plane, 1, :, 0], (expected.float() + 64).to(dtype))


@pytest.mark.parametrize("geometry", [HYBRID, FULL])
@pytest.mark.parametrize("read_only", [True, False])
def test_an_imported_block_fills_its_slots_and_no_others(geometry: Geometry, read_only: bool) -> None:
    """Import is the inverse of export; every other slot and every sliding layer stays as it was."""
    source, source_table = filled(geometry, False)
    target, target_table = filled(geometry, True)
    for layer in range(geometry.layers):
        target.keys(layer).zero_()
        target.values(layer).zero_()
    payload = block_of(source, source_table, 3)
    target.import_block(target_table, 3, memoryview(bytes(payload) if read_only else payload))
    assert block_of(target, target_table, 3) == payload
    inside = target_table.slots(12, 16)
    for layer in range(geometry.layers):
        others = [slot for slot in range(128) if slot not in inside or layer not in geometry.global_group.layers]
        assert not target.keys(layer)[others].any()


@given(position=st.integers(1, 39), floor=st.integers(0, 39), scattered=st.booleans(), back=st.integers(0, 3))
def test_a_state_restores_its_windows_and_its_tail(position: int, floor: int, scattered: bool, back: int) -> None:
    """What comes back is what the windows and the tail held; it serves p, p-1, and further only from the start."""
    floor = min(floor, position)
    source, table = filled(HYBRID, scattered)
    payload = memoryview(source.export_state(table, position, floor))
    held = min(6, position - floor)
    if floor == 0:
        assert len(payload) == HYBRID.state_payload_bytes(position, BLOCK)
    slots = Slots(32, BLOCK)
    target, at = KvMemory(HYBRID, slots, "float32"), slots.allocate(40)
    resume = position - back
    if resume < 0 or position - held > max(0, resume - 5):
        if resume >= 0:
            with pytest.raises(BadPayload, match="cannot serve"):
                target.import_state(at, resume, payload, position)
            assert not any(target.keys(layer).any() for layer in range(4))
        return
    assert target.import_state(at, resume, payload, position) == position - held
    for layer in range(4):
        begin = position - (position % BLOCK if layer in (1, 3) else held)
        for mine, theirs in ((target.keys(layer), source.keys(layer)), (target.values(layer), source.values(layer))):
            expected = torch.zeros_like(mine)
            expected[at.slots(begin, position)] = theirs[table.slots(begin, position)]
            assert torch.equal(mine, expected)


def test_a_state_of_w_positions_serves_the_identical_resend() -> None:
    """W positions are kept, not W-1, so that the position before (lookup leaves one token to compute) is served too."""
    memory, table = filled(HYBRID, False)
    payload = memoryview(memory.export_state(table, 20))
    assert memory.import_state(table, 20, payload, 20) == 14
    assert memory.import_state(table, 19, payload, 20) == 14
    with pytest.raises(BadPayload, match="cannot serve 18"):
        memory.import_state(table, 18, payload, 20)
    with pytest.raises(BadPayload, match="cannot serve 21"):
        memory.import_state(table, 21, payload, 20)


def test_a_model_without_sliding_layers_has_states_of_the_tail_only() -> None:
    """Any position within the tail's block may resume from it."""
    memory, table = filled(FULL, False)
    payload = memoryview(memory.export_state(table, 18))
    assert len(payload) == STATE_HEADER_BYTES + 2 * FULL.block_token_bytes
    assert memory.import_state(table, 17, payload, 18) == 0


def _damage(kind: str, payload: bytearray) -> bytearray:
    match kind:
        case "magic":
            payload[0] ^= 1
        case "version":
            payload[4] += 1
        case "truncated":
            del payload[-1]
        case "longer":
            payload += b"\0"
        case "header only":
            del payload[STATE_HEADER_BYTES - 1 :]
        case "held beyond W":
            struct.pack_into("<I", payload, 20, 7)
        case "other window":
            struct.pack_into("<I", payload, 16, 5)
        case "other dtype":
            struct.pack_into("<H", payload, 6, 2)
        case "other position":
            struct.pack_into("<Q", payload, 8, 22)
        case "empty":
            payload.clear()
    return payload


@pytest.mark.parametrize(
    "kind",
    ["magic", "version", "truncated", "longer", "header only", "held beyond W", "other window", "other dtype",
     "other position", "empty"],
)  # fmt: skip
def test_a_state_that_is_not_what_its_name_promises_leaves_memory_untouched(kind: str) -> None:
    """Any damage to header or length is BadPayload before a byte is written."""
    memory, table = filled(HYBRID, False)
    payload = _damage(kind, bytearray(memory.export_state(table, 21)))
    before = [memory.keys(layer).clone() for layer in range(4)]
    with pytest.raises(BadPayload):
        memory.import_state(table, 21, memoryview(payload), 21)
    assert all(torch.equal(memory.keys(layer), before[layer]) for layer in range(4))


@pytest.mark.parametrize("change", [-1, 1, -10_000])
def test_a_block_of_another_length_leaves_memory_untouched(change: int) -> None:
    """A payload of the wrong size never reaches the slots, so attention never reads half a block."""
    memory, table = filled(HYBRID, False)
    before = block_of(memory, table, 0)
    wrong = bytes(max(0, len(before) + change))
    with pytest.raises(BadPayload, match="bytes"):
        memory.import_block(table, 0, memoryview(wrong))
    assert block_of(memory, table, 0) == before


def test_fresh_memory_is_zero_and_of_the_geometrys_dtype() -> None:
    """Slots never begin as uninitialised memory."""
    memory = KvMemory(FULL, Slots(4, BLOCK), "bfloat16")
    assert not memory.keys(1).any()
    assert memory.keys(1).shape == (16, 1, 4)
    with pytest.raises(ValueError, match="dtype"):
        KvMemory(FULL, Slots(4, BLOCK), "float32")


@given(st.binary(max_size=80))
def test_any_bytes_are_a_header_or_bad_payload(data: bytes) -> None:
    """Decoding garbage never raises anything else, and what decodes encodes to the same bytes."""
    try:
        header = StateHeader.decode(memoryview(data))
    except BadPayload:
        return
    assert header.encode() == data[:STATE_HEADER_BYTES]
