"""What the tests of servers start from: a short folder for sockets, and a store in memory behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing import ManualClock, MemoryStore
from tests.support.stores import open_memory, short_dir


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_dir() as path:
        yield path


@pytest.fixture
def backend() -> MemoryStore:
    return open_memory(ManualClock())
