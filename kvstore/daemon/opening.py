"""Opening a node's directories: what they are opened with, the checks before, and the catalog that speaks for all.

Owns the order: nothing is made on disk before it is known that it can work; every directory is locked before one is
recovered. Does not serve. Invariant: if one directory cannot be opened, none stays open.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.daemon.bounds import bounds_of
from kvstore.daemon.catalog import Catalog
from kvstore.daemon.checks import check_rules
from kvstore.daemon.cipher import Ciphers, Keyring
from kvstore.daemon.clock import BoundedClock
from kvstore.daemon.events import EventLog
from kvstore.daemon.files import Files
from kvstore.daemon.pinboard import hold_ends, pin_ends
from kvstore.daemon.shard import Shard
from kvstore.daemon.volume import Volume, VolumeLayout, check_file_system, divide
from kvstore.limits import STATE_POOL_BYTES_DEFAULT, STATE_TTL_S_DEFAULT
from kvstore.store import Clock, Policy
from kvstore.traffic import ClassRules

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What a node is opened with. ``capacity_bytes`` is for all directories together, divided evenly.

    ``segment_bytes`` None: as the directory was made, or by the capacity. ``sweep_interval_s`` 0: no sweep in the
    background.
    ``commit_window_s``: how long a group commit waits for company. ``background``: full segments are sealed beside the
    writer.
    """

    directories: tuple[Path, ...]
    capacity_bytes: int
    segment_bytes: int | None = None
    state_pool_bytes: int = STATE_POOL_BYTES_DEFAULT
    state_ttl_s: float = STATE_TTL_S_DEFAULT
    commit_window_s: float = 0.0
    sweep_interval_s: float = 0.0
    background: bool = False
    scrub_bytes_per_s: int = 0
    """Of each directory; 0: nothing is verified in the background."""
    pin_quota_bytes: int = 0
    """Payload bytes that one owner may pin; 0: as many as there are."""
    overwrite_aged: bool = False
    """What outlived its maximum age is overwritten, not only made zeros of by the file system."""
    bypass_page_cache: bool = False
    """Read and write blocks around the page cache, where the file system lets a volume."""
    free_min_bytes: int | None = 0
    """Left free on each directory's file system; None: a share of it."""
    keyring: Keyring = field(default_factory=Keyring)
    """What encrypts new blocks and reads old ones; empty: they are stored as they are."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a node consists of, recovered."""

    shards: Sequence[Shard]
    catalog: Catalog
    ciphers: Ciphers


def open_directories(
    config: NodeConfig,
    clock: Clock,
    rules: ClassRules | None,
    policy_text: str,
    files: Files,
    new_generation: Callable[[], int],
    events: EventLog,
) -> Opened:
    """Lock, check and recover every directory. Raises ValueError, VolumeInUse, VolumeFormat, VolumeError."""
    if not config.directories or len(set(config.directories)) != len(config.directories):
        raise ValueError("a node needs one data directory or more, each once")
    _raise_open_files_limit()
    free_min_bytes = _check_capacity(config, rules, files)
    opened: list[Volume] = []
    shards: list[Shard] = []
    try:
        opened = [Volume.open(Path(path), create=True) for path in config.directories]
        layouts = [_layout(volume, config) for volume in opened]
        initial = Policy(1, rules, policy_text, int(clock.now_s())) if rules is not None else None
        paths = [volume.catalog_path for volume in opened]
        path = next((path for path in paths if path.exists()), paths[0])
        catalog = Catalog.open(path, layouts[0].catalog_budget_bytes, initial)
        in_force = catalog.content.policy
        if rules is not None and not any(rules == known.rules for known in (in_force, *catalog.content.earlier)):
            log.warning("policy_kept version=%d: the one given is not in force and never was", in_force.version)
        ciphers = Ciphers(lambda: catalog.content.spaces, config.keyring)
        pins, holds = pin_ends(catalog.content.pins), hold_ends(catalog.content.pins)
        bounds = bounds_of(
            opened,
            layouts,
            free_min_bytes,
            files,
            clock.now_s(),
            overwrite_aged=config.overwrite_aged,
            bypass_page_cache=config.bypass_page_cache,
        )
        for volume, layout, bound in zip(opened, layouts, bounds, strict=True):
            shards.append(
                Shard.open(
                    volume,
                    layout,
                    files,
                    in_force.rules,
                    pins,
                    holds,
                    new_generation=new_generation,
                    now_s=int(BoundedClock(clock).now_s()),
                    commit_window_s=config.commit_window_s,
                    bounds=bound,
                    events=events,
                    ciphers=ciphers,
                )
            )
    except BaseException:
        for shard in shards:
            shard.close()
        for volume in opened:
            volume.close()
        raise
    return Opened(shards, catalog, ciphers)


def _check_capacity(config: NodeConfig, rules: ClassRules | None, files: Files) -> list[int]:
    """Refuse what could never work before anything is made on disk. Raises VolumeError, ValueError.

    Returns the bytes to leave free on each directory's file system.
    """
    share_bytes = config.capacity_bytes // len(config.directories)
    divide(share_bytes, config.segment_bytes)
    check_rules(rules, share_bytes * len(config.directories))
    return [check_file_system(Path(path), share_bytes, config.free_min_bytes, files) for path in config.directories]


def _layout(volume: Volume, config: NodeConfig) -> VolumeLayout:
    layout = divide(config.capacity_bytes // len(config.directories), config.segment_bytes or volume.segment_bytes)
    volume.fix_segment_bytes(layout.segment_bytes)
    return layout


def _raise_open_files_limit() -> None:
    """Every segment keeps a descriptor: take what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
