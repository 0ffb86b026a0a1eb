"""Who asks: API keys from a file, and the tenant name that isolates a request's blocks.

Owns the file's format, the comparison of keys, and the encoding of (tenant, user) into one name. Does not know spaces
or salts. Invariants: keys are compared by digest, in constant time, all of them, every time; a tenant without a user,
the same tenant with the user ``""``, and two different pairs never give the same name.

    [[keys]]
    key = "sk-..."              # or key_sha256 = "<64 hex digits>"
    tenant = "acme"
    class = "agent"             # optional: default traffic class of this key
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.traffic import TrafficClass

KEYS_MAX = 4096
"""Keys in one file; more is an error at start (every request compares with all of them)."""
KEYS_FILE_BYTES_MAX = 4 << 20
KEY_CHARS_MIN = 8
KEY_CHARS_MAX = 512
USER_BYTES_MAX = 256

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_FIELDS = frozenset({"key", "key_sha256", "tenant", "class"})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key: SHA-256 of its text, whose it is, and its default class."""

    digest: bytes
    tenant: str
    traffic_class: TrafficClass | None = None


class KeyRing:
    """The keys that are accepted."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        if len({key.digest for key in keys}) != len(keys):
            raise ValueError("an API key is listed twice")
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The entry of a presented key, or None. Takes as long for a wrong key as for a right one."""
        digest = hashlib.sha256(presented.encode()).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def bearer(authorization: str | None) -> str | None:
    """The key within an Authorization header, or None if there is no bearer key."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not 0 < len(key) <= KEY_CHARS_MAX:
        return None
    return key


def tenant_name(tenant: str | None, user: str | None) -> str | None:
    """The name under which a request's blocks are isolated; None is the space that all without a tenant share.

    A tenant alone is its own name, so that an operator can purge it by that name. Raises ValueError for a user that is
    too long.
    """
    if user is None:
        return tenant
    size = len(user.encode())
    if size > USER_BYTES_MAX:
        raise ValueError(f"user has {size} bytes; at most {USER_BYTES_MAX} are allowed (send a hash of it instead)")
    owner = "-" if tenant is None else f"{len(tenant)}:{tenant}"
    return f"{owner}/{size}:{user}"


def load_keys(path: Path, classes: Mapping[str, TrafficClass]) -> KeyRing:
    """Read a key file. Raises ValueError that names the entry at fault (never the key), or OSError."""
    data = path.read_bytes()
    if len(data) > KEYS_FILE_BYTES_MAX:
        raise ValueError(f"{path} has more than {KEYS_FILE_BYTES_MAX} bytes")
    try:
        document = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    rows = document.pop("keys", None)
    if document:
        raise ValueError(f"{path} has unknown entries: {', '.join(sorted(document))} (only [[keys]] is known)")
    if not isinstance(rows, list) or not 1 <= len(rows) <= KEYS_MAX:
        raise ValueError(f"{path} must list 1..{KEYS_MAX} [[keys]]")
    try:
        return KeyRing([_parse_key(number, row, classes) for number, row in enumerate(rows, start=1)])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse_key(number: int, row: Any, classes: Mapping[str, TrafficClass]) -> ApiKey:
    if not isinstance(row, dict) or any(not isinstance(value, str) for value in row.values()):
        raise ValueError(f"entry {number} of [[keys]] must have text values only")
    unknown = sorted(set(row) - _FIELDS)
    if unknown:
        raise ValueError(f"entry {number} of [[keys]] has unknown fields: {', '.join(unknown)}")
    tenant = row.get("tenant", "")
    if not _TENANT.match(tenant):
        raise ValueError(f"entry {number} of [[keys]] needs a tenant of 1-64 letters, digits, '_', '.' or '-'")
    name = row.get("class")
    if name is not None and name not in classes:
        raise ValueError(f"entry {number} of [[keys]] has class {name!r}; known are {', '.join(sorted(classes))}")
    return ApiKey(_digest(number, row), tenant, None if name is None else classes[name])


def _digest(number: int, row: Mapping[str, str]) -> bytes:
    if ("key" in row) == ("key_sha256" in row):
        raise ValueError(f"entry {number} of [[keys]] needs either key or key_sha256")
    if "key" in row:
        if not KEY_CHARS_MIN <= len(row["key"]) <= KEY_CHARS_MAX:
            raise ValueError(
                f"entry {number} of [[keys]] has a key outside {KEY_CHARS_MIN}..{KEY_CHARS_MAX} characters"
            )
        return hashlib.sha256(row["key"].encode()).digest()
    if not _DIGEST.match(row["key_sha256"]):
        raise ValueError(f"entry {number} of [[keys]] needs key_sha256 as 64 lower-case hex digits")
    return bytes.fromhex(row["key_sha256"])
