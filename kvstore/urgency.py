"""How soon a woken thread is run where more threads want a processor than there are: small requests before bulk.

Owns one setting of the kernel. Does not know requests. Invariants: where a kernel does not have it nothing changes; the
share of the processor that a thread gets is the same, only in smaller slices that come earlier; its policy and its nice
value stay.

Source: sched_setattr(2), the field ``sched_runtime`` of a thread of the ordinary policy, Linux 6.12 or newer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from types import TracebackType

SLICE_NS = 100_000
"""The least that the kernel takes. By itself it gives 1 to 3 ms, for which a small request would wait for bulk ones."""
_NUMBERS = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("<IIQiIQQQII")
_KEEP_POLICY = 0x08
_SYSCALL = ctypes.CDLL(None).syscall if platform.system() == "Linux" else None


class Soon:
    """``with`` it, the calling thread is run soon after it was woken; afterwards as usual. That takes 6 us."""

    __slots__ = ("_is_set",)

    def __enter__(self) -> None:
        self._is_set = run_soon()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_set:
            run_as_usual()


def run_soon() -> bool:
    """Let the calling thread be run soon after it was woken; False where the kernel cannot."""
    return _set_slice(SLICE_NS)


def run_as_usual() -> bool:
    """Take that back."""
    return _set_slice(0)


def _set_slice(slice_ns: int) -> bool:
    number = _NUMBERS.get(platform.machine())
    if number is None or _SYSCALL is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread, though it says process
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, _KEEP_POLICY, nice, 0, slice_ns, 0, 0, 0, 0)
    return bool(_SYSCALL(number, 0, attributes, 0) == 0)
