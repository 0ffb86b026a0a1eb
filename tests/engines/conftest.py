"""Tests inside real engines share a node of the store; where an engine is absent, test_engines_absent.py says so."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import StoreClient
from tests.support.store_process import StoreProcess


@pytest.fixture(scope="module")
def served() -> Iterator[StoreProcess]:
    """A node, in a folder whose name fits into a socket's."""
    with tempfile.TemporaryDirectory(prefix="reprise-") as folder:
        process = StoreProcess(Path(folder), capacity="256MiB")
        process.begin()
        yield process
        process.end()


@pytest.fixture
def store(served: StoreProcess) -> StoreProcess:
    """The node, serving, and empty."""
    client = StoreClient.connect([served.address])
    for name in client.spaces():
        client.delete_space(name)
    client.close()
    return served
