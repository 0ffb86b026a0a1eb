"""Cold blocks: which records to compress once nobody has used them for long, and how they then look.

Pure. Does not know files, or when anything is written again. Invariants: a block that is compressed is the same block,
with another checksum and length of what is stored; one that does not shrink stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from kvstore.daemon.codec import Codec, compress
from kvstore.daemon.presence import Touches
from kvstore.daemon.record import RecordHeader, checksum_of
from kvstore.store import Buffer
from kvstore.traffic import ClassRules


def compress_after_s(rules: ClassRules, class_byte: int) -> int:
    """Seconds without a use after which a class wants its blocks compressed; 0: never."""
    rule = rules.by_byte(class_byte)
    return rule.compress_after_s if rule is not None else 0


def as_written_again(
    header: RecordHeader, payload: Buffer, touches: Touches, now_s: int, rules: ClassRules
) -> tuple[RecordHeader, Buffer]:
    """A record that is being moved: compressed if its class wants that of one that has been cold for so long."""
    after_s = compress_after_s(rules, header.class_byte)
    used_s = max((touch_s for _, touch_s in touches), default=header.written_s)
    if not after_s or header.codec != Codec.NONE or used_s + after_s > now_s:
        return header, payload
    codec, stored = compress("zstd", payload)
    if codec == Codec.NONE:
        return header, payload
    return replace(header, codec=codec, stored_bytes=len(stored), checksum=checksum_of(stored)), stored
