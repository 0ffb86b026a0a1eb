"""What a node accepts as arguments. Every function raises ValueError with what is wrong and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.daemon.columns import Arrived
from kvstore.limits import BATCH_BLOCKS_MAX, BLOCK_TOKENS_MAX, NAME_BYTES_MAX, PIN_UNTIL_S_MAX
from kvstore.store import FLAGS_KNOWN, BlockPut, Pin
from kvstore.traffic import CLASS_MAX, ClassRules
from kvstore.units import format_bytes
from kvstore.wire import PUT_ACKS, PutAck


def check_put(blocks: Sequence[BlockPut], traffic_class: int, ack: PutAck, checksums: Sequence[int] | None) -> None:
    """Everything of a put but its payloads' lengths."""
    check_count(blocks, BATCH_BLOCKS_MAX, "a put", "blocks")
    check_class(traffic_class)
    if ack not in PUT_ACKS:
        raise ValueError(f"acknowledgement level {ack!r} is not one of {', '.join(map(repr, PUT_ACKS))}")
    if checksums is not None and len(checksums) != len(blocks):
        raise ValueError(f"{len(blocks)} blocks but {len(checksums)} checksums")
    if isinstance(blocks, Arrived):  # its tokens were checked when it was decoded
        check_flags(int(np.bitwise_or.reduce(blocks.rows.columns["flags"])))
        return
    for block in blocks:
        check_flags(block.flags)
        if not 1 <= block.tokens <= BLOCK_TOKENS_MAX:
            raise ValueError(f"a block has 1..{BLOCK_TOKENS_MAX} tokens, not {block.tokens}")


def check_pins(pins: Sequence[Pin]) -> None:
    for pin in pins:
        if len(pin.owner.encode()) > NAME_BYTES_MAX or len(pin.reason.encode()) > NAME_BYTES_MAX:
            raise ValueError(f"owner and reason of a pin have at most {NAME_BYTES_MAX} bytes each")
        if not 0 <= pin.until_s <= PIN_UNTIL_S_MAX:
            raise ValueError(f"a pin ends at 1..{PIN_UNTIL_S_MAX} s since the epoch, or never (0): not {pin.until_s}")


def check_rules(rules: ClassRules | None, capacity_bytes: int) -> None:
    if rules is not None and sum(rule.floor_of(capacity_bytes) for rule in rules.rules) > capacity_bytes:
        raise ValueError(
            f"the floors of all classes are together more than the capacity of {format_bytes(capacity_bytes)}"
        )


def check_count(items: Sequence[object], count_max: int, what: str, unit: str) -> None:
    if len(items) > count_max:
        raise ValueError(f"{what} has at most {count_max} {unit}, not {len(items)}")


def check_class(traffic_class: int) -> None:
    if not 1 <= traffic_class <= CLASS_MAX:
        raise ValueError(f"traffic class {traffic_class} is outside 1..{CLASS_MAX}")


def check_flags(flags: int) -> None:
    if flags & ~FLAGS_KNOWN:
        raise ValueError(f"flags {flags:#x} hold bits that this version does not know")
