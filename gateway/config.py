"""Settings of one gateway process: one frozen value from a TOML file and flags.

Owns names, defaults and ranges. Only ``cli.py`` reads it from outside; the rest gets what it needs. Invariants: unknown
names are errors; without API keys the gateway listens on loopback only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.errors import ConfigError
from kvstore.access import is_loopback, split_host_port
from kvstore.traffic import BUILT_IN_NAMES, CLASS_MAX, OPERATOR_CLASS_MIN, TrafficClass

CONFIG_BYTES_MAX = 1 << 20
WORKERS_MAX = 1024
_LISTS = frozenset({"prefill", "decode", "store"})


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What an operator sets.

    ``prefill``, ``decode``: worker addresses (a worker with both roles stands in both). ``keys``: file of API keys.
    ``classes``: operator classes, name to byte. ``store``: addresses from which operator classes are read instead.
    ``worker_token_file``, ``store_token_file``: secrets shown to workers and store. ``data``: where endpoints.json
    goes. ``access_log``: file that is told which prefixes were asked for, by digests; None: none is.
    ``body_bytes_max``: larger bodies get 413. ``messages_max``: longer chats get 400. ``requests_max``: requests at
    once, the next gets 503; ``tenant_requests_max``: the same for one API key, 429. ``prefill_s_max``: silence
    before the first token. ``event_s_max``: silence between tokens. ``continue_s_max``: how long an answer in
    progress waits for another decode worker. ``stalled_s_max``: a worker that answers no poll for this long is
    waited for no more. ``write_s_max``: a client that reads nothing for this long is dropped. ``drain_s``: time for
    requests in flight after SIGTERM.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    listen: str = "127.0.0.1:8000"
    keys: str | None = None
    classes: Mapping[str, TrafficClass] = field(default_factory=dict)
    store: tuple[str, ...] = ()
    store_token_file: str | None = None
    worker_token_file: str | None = None
    data: str | None = None
    access_log: str | None = None
    body_bytes_max: int = 8 << 20
    messages_max: int = 4096
    requests_max: int = 256
    tenant_requests_max: int = 256
    body_s_max: float = 30.0
    prefill_s_max: float = 600.0
    event_s_max: float = 120.0
    hand_off_s_max: float = 30.0
    continue_s_max: float = 15.0
    stalled_s_max: float = 30.0
    write_s_max: float = 60.0
    poll_s: float = 0.5
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.prefill or not self.decode:
            raise ConfigError("name at least one --prefill and one --decode worker")
        if len(self.prefill) + len(self.decode) > WORKERS_MAX:
            raise ConfigError(f"at most {WORKERS_MAX} workers can be named")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(item.default, int | float) and not value > 0:
                raise ConfigError(f"{item.name} = {value} must be above zero")
        for name, byte in self.classes.items():
            check_class(name, byte)
        for url in (*self.prefill, *self.decode):
            check_worker_url(url)
        host, _ = self.address
        if self.keys is None and not is_loopback(host):
            raise ConfigError(
                f"without --keys the gateway listens on loopback only, not on {host}: "
                "write a file of API keys and pass --keys FILE"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of ``listen``."""
        return parse_listen(self.listen)

    @property
    def class_names(self) -> dict[str, TrafficClass]:
        """Every class that can be named: the built-in ones and the operator's."""
        return {**BUILT_IN_NAMES, **self.classes}


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ConfigError."""
    try:
        return split_host_port(text)
    except ValueError as error:
        raise ConfigError(f"--listen {error}") from error


def check_worker_url(url: str) -> None:
    """Raises ConfigError unless a worker's address is ``http://HOST:PORT``."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isascii()
    except ValueError:
        usable = False
    if not usable or any(letter.isspace() for letter in url):
        raise ConfigError(f"worker address {url!r} is not http://HOST:PORT")


def check_class(name: str, byte: int) -> None:
    """Raises ConfigError unless an operator class may have this name and byte."""
    if name in BUILT_IN_NAMES:
        raise ConfigError(f"class {name!r} is built in; leave it out")
    if isinstance(byte, bool) or not isinstance(byte, int) or not OPERATOR_CLASS_MIN <= byte <= CLASS_MAX:
        raise ConfigError(f"class {name!r} needs a byte of {OPERATOR_CLASS_MIN}..{CLASS_MAX}, as in the store's policy")


def parse_classes(text: str) -> dict[str, TrafficClass]:
    """Operator classes from ``batch=16,scratch=17``. Raises ConfigError."""
    classes: dict[str, TrafficClass] = {}
    for part in filter(None, text.split(",")):
        name, separator, byte = part.partition("=")
        if not separator or not byte.strip().isdigit():
            raise ConfigError(f"--policy-classes {part!r} is not NAME=BYTE, such as batch=16")
        classes[name.strip()] = TrafficClass(int(byte))
    return classes


def load_config(path: Path | None, flags: Mapping[str, Any]) -> GatewayConfig:
    """Settings of a file, overridden by the flags that were given (not None). Raises ConfigError."""
    values: dict[str, Any] = _read(path) if path is not None else {}
    values |= {name: value for name, value in flags.items() if value is not None}
    known = {item.name: item for item in fields(GatewayConfig)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown settings: {', '.join(unknown)} (known: {', '.join(known)})")
    return GatewayConfig(**{name: _typed(name, value) for name, value in values.items()})


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if len(data) > CONFIG_BYTES_MAX:
            raise ConfigError(f"{path} has more than {CONFIG_BYTES_MAX} bytes")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _typed(name: str, value: Any) -> Any:
    """A value of the field's type. Raises ConfigError that names the field."""
    default = next(item.default for item in fields(GatewayConfig) if item.name == name)
    if name in _LISTS:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{name} must be a list of addresses")
    if name == "classes":
        if isinstance(value, dict) and all(isinstance(item, int) for item in value.values()):
            return value
        raise ConfigError("classes must be a table of NAME = BYTE")
    if isinstance(default, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, int) and isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(default, int | float) and isinstance(value, str):
        return value
    raise ConfigError(f"{name} = {value!r} has the wrong type")
