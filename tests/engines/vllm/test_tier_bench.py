"""The bench of tiers: figures of every tier, and no figure for bytes that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import StoreClient
from ops.bench.attach_tier import FS, FS_BUFFERED, REPRISE, measure
from ops.bench.tier_drive import DriveError
from tests.support.store_process import StoreProcess

CHUNK_BYTES = 5000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreProcess]:
    store = StoreProcess(tmp_path)
    store.begin()
    yield store
    store.end()


def test_every_tier_is_measured(node: StoreProcess, tmp_path: Path) -> None:
    """The same figures of each, and nothing is left where the file tier wrote."""
    folder = tmp_path / "files"
    figures = measure(node.address, folder, data=tmp_path / "data", rounds=1, chunk_bytes=CHUNK_BYTES)
    assert list(figures) == [REPRISE, FS, FS_BUFFERED]
    for tier in figures.values():
        assert {"load_gb_per_s", "store_gb_per_s", "load_cold_gb_per_s", "lookups_per_s", "step_us"} < set(tier)
        assert all(figure > 0 for figure in tier.values())
    assert not list(folder.rglob("*"))


def test_wrong_bytes_are_no_figure(node: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came back is compared with what was stored."""
    real = StoreClient.get_into

    def altered(self: Any, space: Any, names: Any, buffers: Any, **kwargs: Any) -> Any:
        statuses = real(self, space, names, buffers, **kwargs)
        buffers[0][0] ^= 1
        return statuses

    monkeypatch.setattr(StoreClient, "get_into", altered)
    with pytest.raises(DriveError, match="other bytes"):
        measure(node.address, tmp_path / "files", rounds=1, chunk_bytes=CHUNK_BYTES)
