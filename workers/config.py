"""The worker's configuration: one frozen value from one TOML file and the command line.

Owns names, units, defaults and checks. Does not open anything but the file named. Unknown keys are errors; secrets are
never written here, only the files that hold them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from kvstore.access import is_loopback, split_host_port
from kvstore.limits import BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MAX
from kvstore.units import parse_bytes, parse_seconds
from workers.protocol import Fidelity, Role

REQUESTS_MAX = 10_000


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key and what to write."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker. Times in seconds, sizes in bytes.

    ``replay_windows``: None takes what the model declares, 0 stands for exact. ``stores``: addresses of store nodes.
    ``epoch``: raise it to leave all that is stored for this model behind.
    """

    role: Role
    model: str
    stores: tuple[str, ...]
    data: Path
    listen: str = "127.0.0.1:0"
    token_file: Path | None = None
    store_token_file: Path | None = None
    model_cache: Path | None = None
    dtype: str = "float32"
    device: str = "cpu"
    fidelity: Fidelity = "bounded"
    replay_windows: int | None = None
    kv_memory_bytes: int = 2 << 30
    publish_memory_bytes: int = 256 << 20
    block_tokens: int = BLOCK_TOKENS_DEFAULT
    chunk_tokens: int = 512
    threads: int | None = None
    requests_max: int = 256
    epoch: int = 0
    lookup_deadline_s: float = 0.25
    load_deadline_s: float = 5.0
    settle_deadline_s: float = 2.0
    drain_s: float = 12.0
    access_log_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if not self.stores:
            raise ConfigError("store: name at least one node, such as --store 127.0.0.1:7071")
        host, _ = split_address(self.listen)
        if not is_loopback(host) and self.token_file is None:
            raise ConfigError(
                f"listen: {self.listen} can be reached from other machines; give --token-file, "
                "or listen on 127.0.0.1 only"
            )
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name}: {value} is outside {low}..{high}")

    @property
    def endpoints_path(self) -> Path:
        return self.data / "endpoints.json"

    @property
    def access_log_path(self) -> Path:
        return self.data / "access.jsonl"


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("kv_memory_bytes", 1 << 20, 1 << 44),
    ("publish_memory_bytes", 1 << 20, 1 << 40),
    ("block_tokens", 1, BLOCK_TOKENS_MAX),
    ("chunk_tokens", 1, 1 << 20),
    ("threads", 1, 1024),
    ("requests_max", 1, REQUESTS_MAX),
    ("replay_windows", 0, 1024),
    ("epoch", 0, 2**32 - 1),
    ("lookup_deadline_s", 0.001, 60.0),
    ("load_deadline_s", 0.001, 600.0),
    ("settle_deadline_s", 0.001, 60.0),
    ("drain_s", 0.0, 600.0),
    ("access_log_bytes", 1 << 12, 1 << 40),
)


def load_config(path: Path | None, given: Mapping[str, Any]) -> WorkerConfig:
    """The file's values, overridden by what the command line gave (None: not given). Raises ConfigError."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
    values |= {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(values) - set(_KEYS))
    if unknown:
        raise ConfigError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}")
    finished: dict[str, Any] = {}
    for name, value in values.items():
        field, parse = _KEYS[name]
        try:
            finished[field] = parse(value)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{name}: {error}") from error
    missing = [field.name for field in fields(WorkerConfig) if field.name in _REQUIRED and field.name not in finished]
    if missing:
        raise ConfigError(f"missing: {', '.join(_REQUIRED[name] for name in missing)}")
    return WorkerConfig(**finished)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPv6]:PORT``. Raises ConfigError."""
    try:
        return split_host_port(address)
    except ValueError as error:
        raise ConfigError(f"listen: {error}") from error


# --- parsing of single values -----------------------------------------------------------------------------------------


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
        return str(value)

    return parse


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected text, not {value!r}")
    return value


def _path(value: Any) -> Path:
    return Path(value) if isinstance(value, Path) else Path(_text(value))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, not {value!r}")
    return value


def _size(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} has no unit: write a size such as 2GiB, in quotes")
    return parse_bytes(value)


def _seconds(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} has no unit: write a time such as 250ms, in quotes")
    return parse_seconds(value)


def _windows(value: Any) -> int:
    """0 stands for exact."""
    if value == "exact":
        return 0
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is neither a number of windows from 1 on nor exact")
    return value


def _addresses(value: Any) -> tuple[str, ...]:
    rows = [value] if isinstance(value, str) else list(value)
    return tuple(_text(row) for row in rows)


_KEYS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "role": ("role", _choice(*get_args(Role))),
    "model": ("model", _text),
    "store": ("stores", _addresses),
    "data": ("data", _path),
    "listen": ("listen", _text),
    "token_file": ("token_file", _path),
    "store_token_file": ("store_token_file", _path),
    "model_cache": ("model_cache", _path),
    "dtype": ("dtype", _choice("float32", "bfloat16", "float16")),
    "device": ("device", _text),
    "fidelity": ("fidelity", _choice(*get_args(Fidelity))),
    "replay_windows": ("replay_windows", _windows),
    "kv_memory": ("kv_memory_bytes", _size),
    "publish_memory": ("publish_memory_bytes", _size),
    "block_tokens": ("block_tokens", _whole),
    "chunk_tokens": ("chunk_tokens", _whole),
    "threads": ("threads", _whole),
    "requests_max": ("requests_max", _whole),
    "epoch": ("epoch", _whole),
    "lookup_deadline": ("lookup_deadline_s", _seconds),
    "load_deadline": ("load_deadline_s", _seconds),
    "settle_deadline": ("settle_deadline_s", _seconds),
    "drain": ("drain_s", _seconds),
    "access_log_size": ("access_log_bytes", _size),
}
"""Key in the file and on the command line -> field, parser."""

_REQUIRED = {"role": "--role", "model": "--model", "stores": "--store", "data": "--data"}
