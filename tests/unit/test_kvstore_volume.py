"""Data directories: whose they are, what format, how divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.daemon.volume import SEGMENTS_MIN, Volume, check_file_system, divide
from kvstore.errors import VolumeError, VolumeFormat, VolumeInUse
from kvstore.limits import CAPACITY_BYTES_MIN, GIB, KIB, MIB, SEGMENT_BYTES_DEFAULT


def a_volume(path: Path) -> Volume:
    volume = Volume.open(path, create=True)
    volume.fix_segment_bytes(MIB)
    return volume


@given(st.integers(CAPACITY_BYTES_MIN, 2**50))
def test_the_parts_never_exceed_the_capacity(capacity_bytes: int) -> None:
    layout = divide(capacity_bytes)
    files = layout.segments_max * (layout.segment_bytes + 4 * KIB)
    assert files + layout.index_budget_bytes + layout.catalog_budget_bytes <= capacity_bytes
    assert layout.segments_max >= SEGMENTS_MIN
    assert layout.segment_bytes <= SEGMENT_BYTES_DEFAULT


@pytest.mark.parametrize(
    ("capacity_bytes", "segment_bytes", "problem"),
    [
        (CAPACITY_BYTES_MIN - 1, None, "at least 8MiB"),
        (64 * MIB, 64 * MIB, "holds 0 segments"),
        (GIB, 1000, "segments of 1000B"),
        (GIB, 2 * MIB + 1, "multiple of 4KiB"),
        (GIB, 8 * GIB, "MiB..4GiB"),
    ],
)
def test_capacities_that_cannot_work_are_refused(capacity_bytes: int, segment_bytes: int | None, problem: str) -> None:
    with pytest.raises(VolumeError, match=problem):
        divide(capacity_bytes, segment_bytes)


def test_a_directory_in_use_names_its_holder(tmp_path: Path) -> None:
    """Also from another process, and free again after the holder is gone, however it went."""
    volume = a_volume(tmp_path)
    with pytest.raises(VolumeInUse, match=str(os.getpid())):
        Volume.open(tmp_path, create=True)
    code = (
        "import sys; from pathlib import Path; from kvstore.daemon.volume import Volume\n"
        "Volume.open(Path(sys.argv[1]), create=False)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert child.returncode != 0
    assert f"in use by process {os.getpid()}" in child.stderr
    volume.close()
    Volume.open(tmp_path, create=False).close()


def test_another_format_version_is_refused_and_untouched(tmp_path: Path) -> None:
    a_volume(tmp_path).close()
    path = tmp_path / "FORMAT"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "version": 2}))
    before = sorted(item.name for item in tmp_path.iterdir())
    with pytest.raises(VolumeFormat, match="version 2, this program reads version 1"):
        Volume.open(tmp_path, create=True)
    assert sorted(item.name for item in tmp_path.iterdir()) == before


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"kind": 1}', "\udcff", '{"kind":"reprise-kv volume"'])
def test_a_spoiled_format_file_is_refused(tmp_path: Path, text: str) -> None:
    a_volume(tmp_path).close()
    (tmp_path / "FORMAT").write_text(text, errors="surrogateescape")
    with pytest.raises(VolumeFormat):
        Volume.open(tmp_path, create=True)


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(VolumeFormat, match="not empty"):
        Volume.open(tmp_path, create=True)
    with pytest.raises(VolumeFormat, match="not a store directory"):
        Volume.open(tmp_path, create=False)


def test_a_file_in_place_of_the_directory_is_an_error_of_the_volume(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(VolumeError):
        Volume.open(tmp_path / "file", create=True)


def test_the_segment_size_is_fixed_when_the_directory_is_made(tmp_path: Path) -> None:
    volume = a_volume(tmp_path)
    with pytest.raises(VolumeError, match="was made with segments of 1MiB, not 2MiB"):
        volume.fix_segment_bytes(2 * MIB)
    volume.close()


def test_a_capacity_beyond_the_file_system_is_refused(tmp_path: Path) -> None:
    """Sizes are told in units, and a directory that does not exist yet is judged by where it would lie."""
    with pytest.raises(VolumeError, match=r"capacity of 1EiB is more .* \(\d+\.\d [KMGTP]iB\)"):
        check_file_system(tmp_path / "not" / "yet", 2**60)
    check_file_system(tmp_path / "not" / "yet", MIB)
    assert not list(tmp_path.iterdir())


def test_a_first_start_that_ended_early_leaves_a_directory_that_can_be_started_on(tmp_path: Path) -> None:
    """The format file comes before anything else: what a first start made is never taken for a foreign directory."""
    volume = Volume.open(tmp_path / "v", create=True)
    volume.segments_path.write_bytes(b"in the way")
    with pytest.raises(VolumeError):
        volume.fix_segment_bytes(MIB)
    volume.close()
    volume.segments_path.unlink()
    again = Volume.open(tmp_path / "v", create=True)
    assert again.segment_bytes == MIB
    again.close()
