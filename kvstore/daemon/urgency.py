"""How soon a woken thread is run where more threads want a processor than there are: small requests before bulk.

Owns one setting of the kernel. Does not know requests. Invariant: where a kernel does not have it nothing changes; the
share of the processor that a thread gets is the same, only in smaller slices that come earlier.

Source: sched_setattr(2), the field ``sched_runtime`` of a thread of the ordinary policy, Linux 6.12 or newer.
"""

from __future__ import annotations

import ctypes
import platform
import struct

SLICE_NS = 100_000
"""The least that the kernel takes. By itself it gives 1 to 3 ms, for which a small request would wait for bulk ones."""
_NUMBERS = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("<IIQiIQQQII")


def run_soon() -> bool:
    """Let the calling thread be run soon after it was woken; False where the kernel cannot."""
    return _set_slice(SLICE_NS)


def run_as_usual() -> bool:
    """Take that back."""
    return _set_slice(0)


def _set_slice(slice_ns: int) -> bool:
    number = _NUMBERS.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, 0, 0, slice_ns, 0, 0, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
