"""What one daemon process is told: a frozen config from a TOML file and the command line.

Owns the names, defaults and checks of every setting. Does not know how they are used. Invariants: unknown keys are
errors; sizes and durations carry units; listening beyond this machine without a token is refused.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore import limits
from kvstore.access import is_loopback
from kvstore.framing import parse_address
from kvstore.units import format_bytes_short, parse_bytes, parse_seconds

CONFIG_BYTES_MAX = 256 * limits.KIB
LISTEN_DEFAULT = "127.0.0.1:7071"
ADMIN_DEFAULT = "127.0.0.1:7072"
SCRUB_BYTES_PER_S_DEFAULT = 20 * limits.MIB
"""About 2 % of what a disk reads: 500 GiB in seven hours."""
OFF = "off"
"""As an address: do not listen there."""
PEERS_MAX = 64
PAGE_CACHE_CHOICES = ("keep", "bypass")
"""The first unless told otherwise."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of one daemon.

    ``capacity_bytes``: physical bytes on disk over all data directories. ``listen`` and ``admin``: HOST:PORT, port 0
    for a free one, or "off". ``token_file``: one token that allows everything; ``tokens``: a file of tokens with roles.
    ``unix``: path of the Unix socket, or None for DATA/store.sock. ``policy``: used when the
    store is made; later changes go through ``reprise retention policy set``. ``segment_bytes`` None: by the capacity.
    ``same_host``: lend segments to clients on the Unix socket, and take puts from their memory. ``scrub_bytes_per_s``:
    how fast each data directory is verified in the background, 0 for not at all. ``free_min_bytes``: what is left
    free on the file system of each data directory, None for a hundredth of it.
    ``overwrite_aged``: what outlived its class's maximum age is overwritten with zeros, not only made zeros of by the
    file system.
    ``page_cache``: whether blocks that are read and written stay in it, or go around it.
    ``pin_quota_bytes``: payload bytes that one owner may pin, legal holds aside; 0: any; None: a quarter of the
    capacity. ``peers``: nodes that are asked at start which purges this one missed, with an operator's token in the
    file ``peer_token``. ``encryption_keys``: a file of cipher keys, or ``encryption_command``: what prints them.
    """

    data: tuple[Path, ...]
    capacity_bytes: int
    listen: str = LISTEN_DEFAULT
    unix: Path | None = None
    admin: str = ADMIN_DEFAULT
    token_file: Path | None = None
    tokens: Path | None = None
    policy: Path | None = None
    segment_bytes: int | None = None
    state_pool_bytes: int = limits.STATE_POOL_BYTES_DEFAULT
    state_ttl_s: float = limits.STATE_TTL_S_DEFAULT
    sweep_every_s: float = 300.0
    drain_s: float = limits.DRAIN_S
    connections_max: int = limits.CONNECTIONS_MAX
    same_host: bool = True
    scrub_bytes_per_s: int = SCRUB_BYTES_PER_S_DEFAULT
    free_min_bytes: int | None = None
    overwrite_aged: bool = False
    page_cache: str = PAGE_CACHE_CHOICES[0]
    pin_quota_bytes: int | None = None
    peers: tuple[str, ...] = ()
    peer_token: Path | None = None
    encryption_keys: Path | None = None
    encryption_command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("say where blocks lie: --data DIR")
        if len({path.resolve() for path in self.data}) != len(self.data):
            raise ValueError("a data directory is named twice")
        if self.capacity_bytes < limits.CAPACITY_BYTES_MIN * len(self.data):
            raise ValueError(f"capacity {format_bytes_short(self.capacity_bytes)} is less than 8 MiB a data directory")
        if self.encryption_keys is not None and self.encryption_command:
            raise ValueError("cipher keys come from a file or from a command: give one of the two")
        if not 1 <= self.connections_max <= 65_536:
            raise ValueError(f"connections_max {self.connections_max} is outside 1..65536")
        for name, seconds in (("state_ttl", self.state_ttl_s), ("sweep_every", self.sweep_every_s)):
            if not 0.0 < seconds <= 366 * 86_400:
                raise ValueError(f"{name} must be more than zero and at most a year")
        if not 0.0 <= self.drain_s <= 3600.0:
            raise ValueError("drain must be at most an hour")
        for option, address in (("--listen", self.listen), ("--admin", self.admin)):
            host = host_and_port(address)
            if host is not None and not is_loopback(host[0]) and not self.asks_for_token:
                raise ValueError(
                    f"{option} {address} is reachable from other machines, and anyone there could read and write every "
                    "block: give --token-file FILE or --tokens FILE, or listen on 127.0.0.1"
                )

    @property
    def asks_for_token(self) -> bool:
        """Whether a client must name a token."""
        return self.token_file is not None or self.tokens is not None

    @property
    def unix_path(self) -> Path:
        return (self.unix if self.unix is not None else self.data[0] / "store.sock").absolute()


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host and port of an address to listen on; None for "off". Raises ValueError for anything else."""
    if address == OFF:
        return None
    parsed = parse_address(address)
    if parsed.path or parsed.name != address:
        raise ValueError(f"{address!r} is not HOST:PORT: give the Unix socket's path with --unix")
    return parsed.host, parsed.port


def _paths(value: object) -> tuple[Path, ...]:
    rows = value if isinstance(value, (list, tuple)) else [value]
    return tuple(_path(row) for row in rows)


def _command(value: object) -> tuple[str, ...]:
    """A command and its arguments, from one text as a shell would split it, or from a list; no shell runs it."""
    words = value if isinstance(value, (list, tuple)) else shlex.split(_text(value))
    if not words:
        raise ValueError("it names no command")
    return tuple(_text(word) for word in words)


def _addresses(value: object) -> tuple[str, ...]:
    rows = [_text(row) for row in (value if isinstance(value, (list, tuple)) else [value])]
    for row in rows:
        parse_address(row)
    if len(rows) > PEERS_MAX:
        raise ValueError(f"at most {PEERS_MAX} peers are asked, not {len(rows)}")
    return tuple(rows)


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    return Path(_text(value))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a text in quotes")
    return value


def _bytes(value: object) -> int:
    return parse_bytes(_text(value))


def _bytes_or_none(value: object) -> int:
    """Bytes; 0 from ``0`` or ``off``."""
    return 0 if _text(value) in ("0", OFF) else _bytes(value)


def _rate(value: object) -> int:
    """Bytes a second from ``20MiB/s`` or ``20MiB``; 0 from ``0`` or ``off``."""
    return _bytes_or_none(_text(value).removesuffix("/s"))


def _seconds(value: object) -> float:
    return parse_seconds(_text(value))


def _count(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _page_cache(value: object) -> str:
    if value not in PAGE_CACHE_CHOICES:
        raise ValueError(f"{value!r} is neither {' nor '.join(PAGE_CACHE_CHOICES)}")
    return str(value)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


SETTINGS: Mapping[str, tuple[str, Callable[[object], Any]]] = {
    "data": ("data", _paths),
    "capacity": ("capacity_bytes", _bytes),
    "listen": ("listen", _text),
    "unix": ("unix", _path),
    "admin": ("admin", _text),
    "token_file": ("token_file", _path),
    "tokens": ("tokens", _path),
    "policy": ("policy", _path),
    "segment_bytes": ("segment_bytes", _bytes),
    "state_pool": ("state_pool_bytes", _bytes),
    "state_ttl": ("state_ttl_s", _seconds),
    "sweep_every": ("sweep_every_s", _seconds),
    "drain": ("drain_s", _seconds),
    "connections_max": ("connections_max", _count),
    "same_host": ("same_host", _switch),
    "scrub_rate": ("scrub_bytes_per_s", _rate),
    "free_min": ("free_min_bytes", _bytes_or_none),
    "overwrite_aged": ("overwrite_aged", _switch),
    "page_cache": ("page_cache", _page_cache),
    "pin_quota": ("pin_quota_bytes", _bytes_or_none),
    "peers": ("peers", _addresses),
    "peer_token": ("peer_token", _path),
    "encryption_keys": ("encryption_keys", _path),
    "encryption_command": ("encryption_command", _command),
}
"""Key in the TOML file (and option of the command line) -> field, and how its value is read."""


def load_config(path: Path | None, given: Mapping[str, object]) -> StoreConfig:
    """The file's settings, and over them those given on the command line (None: not given).

    Raises ValueError that names the file or option, and what is wrong.
    """
    values: dict[str, Any] = {}
    for origin, settings in ((str(path), _read_toml(path)), ("", given)):
        for key, value in settings.items():
            if value is None:
                continue
            if key not in SETTINGS:
                raise ValueError(f"{origin}: unknown key {key!r}; known are {', '.join(SETTINGS)}")
            name, read = SETTINGS[key]
            try:
                values[name] = read(value)
            except ValueError as error:
                option = "--" + key.replace("_", "-")
                raise ValueError(f"{origin}: {key}: {error}" if origin else f"{option}: {error}") from error
    for key in ("data", "capacity"):
        if SETTINGS[key][0] not in values:
            example = "--data DIR" if key == "data" else "--capacity 20GiB"
            raise ValueError(f"{key} is missing: give {example}, or {key} in the file of --config")
    return StoreConfig(**values)


def _read_toml(path: Path | None) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ValueError(f"{path} is larger than {CONFIG_BYTES_MAX} bytes: is it a config file?")
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read the config {path}: {error}") from error
