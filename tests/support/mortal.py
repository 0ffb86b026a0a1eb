"""Files of a node that dies at a given step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvstore.daemon.files import Files

T = TypeVar("T")


class Killed(BaseException):
    """What no handler of the daemon catches."""


class MortalFiles(Files):
    """Real files until the ``last``-th operation that changes something: that one is not done, a write half done."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.steps = 0

    def open(self, path: Path, *, create: bool = False) -> int:
        return self.step(lambda: super(MortalFiles, self).open(path, create=create)) if create else super().open(path)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        def write_half() -> None:
            data = b"".join(views)
            super(MortalFiles, self).pwritev(fd, [memoryview(data)[: len(data) // 2 // 512 * 512]], offset)

        return self.step(lambda: super(MortalFiles, self).pwritev(fd, views, offset), write_half)

    def fdatasync(self, fd: int) -> None:
        self.step(lambda: super(MortalFiles, self).fdatasync(fd))

    def allocate(self, fd: int, count: int) -> bool:
        return self.step(lambda: super(MortalFiles, self).allocate(fd, count))

    def rename(self, source: Path, target: Path) -> None:
        self.step(lambda: super(MortalFiles, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        self.step(lambda: super(MortalFiles, self).unlink(path))

    def erase(self, fd: int, offset: int, count: int, *, overwrite: bool) -> None:
        def erase_half() -> None:
            super(MortalFiles, self).erase(fd, offset, count // 2 // 4096 * 4096, overwrite=overwrite)

        self.step(lambda: super(MortalFiles, self).erase(fd, offset, count, overwrite=overwrite), erase_half)

    def around(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Let a function that writes without ``Files`` be a step, too: not done, or done and then the end."""
        inner = getattr(owner, name)

        def outer(*given: Any, **named: Any) -> Any:
            self.step(lambda: None)
            done = inner(*given, **named)
            self.step(lambda: None)
            return done

        patch.setattr(owner, name, outer)

    def step(self, do: Callable[[], T], do_half: Callable[[], None] | None = None) -> T:
        self.steps += 1
        if self.steps >= self.last:
            if do_half is not None and self.steps == self.last:
                do_half()
            raise Killed
        return do()
