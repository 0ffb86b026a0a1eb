"""Where a daemon's cipher keys come from: a file, or what a command prints; read again while it runs.

Owns their format and the reading. Does not know what is encrypted with them. Invariants: a file that others may read is
refused; what cannot be used is logged and changes nothing, without telling a key; a command that does not end in time,
or while the daemon stops, is killed.

    [[keys]]
    tenant = "acme"     # whose blocks; without it: of everybody who has no key of his own
    number = 2          # 1..30; new blocks take the highest, the others are still read
    key = "<64 hex digits>"

``keys = []`` says that there are none (any more).
"""

from __future__ import annotations

import logging
import re
import threading
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore import limits
from kvstore.daemon.cipher import CIPHER_KEY_BYTES, NUMBER_MAX, CipherKey, Keyring
from kvstore.daemon.command import output_of
from kvstore.daemon.secret_file import read_secret_file, stamp_of
from kvstore.keys import tenant_salt

FILE_EVERY_S = 0.5
"""A file is looked at this often ..."""
COMMAND_EVERY_S = 60.0
"""... and a command run again."""
STOP_S_MAX = 10.0
_SECRET = re.compile(rf"[0-9a-f]{{{2 * CIPHER_KEY_BYTES}}}\Z")
_FIELDS = frozenset({"tenant", "number", "key"})

log = logging.getLogger("kvstore.daemon")


class KeyringSource:
    """A file or a command that cipher keys are read from; or neither, and there are none."""

    def __init__(self, path: Path | None = None, command: Sequence[str] = ()) -> None:
        self._path = path
        self._command = tuple(command)
        self._stamp: tuple[int, ...] = ()
        self._stopping = threading.Event()

    @property
    def every_s(self) -> float:
        """How often ``changed`` is worth asking; 0: never."""
        if self._path is not None:
            return FILE_EVERY_S
        return COMMAND_EVERY_S if self._command else 0.0

    def read(self) -> Keyring:
        """The cipher keys as they are now. Raises ValueError that names file or command, never a key."""
        if self._path is not None:
            self._stamp = stamp_of(self._path)
            return read_keyring(self._path)
        return run_command(self._command, stopping=self._stopping) if self._command else Keyring()

    def stop(self) -> None:
        """End a command that runs, and read no more: thread-safe."""
        self._stopping.set()

    def changed(self) -> bool:
        """Whether it is worth reading again."""
        return bool(self._command) or (self._path is not None and stamp_of(self._path) != self._stamp)


class KeyringWatch:
    """Reads a source again on a thread of its own, and applies what is new."""

    def __init__(self, source: KeyringSource, keyring: Keyring, apply: Callable[[Keyring], None]) -> None:
        self._source = source
        self._keyring = keyring
        self._apply = apply
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keyring", daemon=True)

    def start(self) -> None:
        if self._source.every_s:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._source.stop()
        if self._thread.is_alive():
            self._thread.join(STOP_S_MAX)

    def refresh(self) -> None:
        """Read again if that may bring something new; what cannot be used is logged, and the keys before it stay."""
        if not self._source.changed():
            return
        try:
            keyring = self._source.read()
        except ValueError as error:
            if not self._stopping.is_set():
                log.warning("cipher_keys_kept: %s", error)
            return
        if keyring != self._keyring:
            self._keyring = keyring
            self._apply(keyring)
            log.info("cipher_keys_read tenants=%d default=%d", len(keyring.own), len(keyring.default))

    def _run(self) -> None:
        while not self._stopping.wait(self._source.every_s):
            self.refresh()


def read_keyring(path: Path) -> Keyring:
    """The cipher keys of a file. Raises ValueError."""
    try:
        data, mode = read_secret_file(path, limits.CIPHER_KEYS_BYTES_MAX)
        if mode & 0o077:
            raise ValueError("others may read or write it: chmod 600 it")
        return decode_keyring(data)
    except (OSError, ValueError) as error:
        raise ValueError(f"the file of cipher keys {path} cannot be used: {error}") from error


def run_command(
    command: Sequence[str],
    deadline_s: float = limits.CIPHER_COMMAND_S_MAX,
    stopping: threading.Event | None = None,
) -> Keyring:
    """The cipher keys that a command prints; its errors go to the daemon's log. Raises ValueError."""
    try:
        printed = output_of(command, limits.CIPHER_KEYS_BYTES_MAX, deadline_s, stopping or threading.Event())
        return decode_keyring(printed)
    except (OSError, ValueError) as error:
        raise ValueError(f"the command of cipher keys {command[0]} cannot be used: {error}") from error


def decode_keyring(data: bytes) -> Keyring:
    """Cipher keys from TOML. Raises ValueError, which never tells a key."""
    if len(data) > limits.CIPHER_KEYS_BYTES_MAX:
        raise ValueError(f"it has more than {limits.CIPHER_KEYS_BYTES_MAX} bytes")
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        raise ValueError("it is not TOML") from None  # the parser's message may quote a key
    rows = document.pop("keys", None)
    if document:
        raise ValueError("it has entries beside [[keys]]")  # unnamed: one may be a key in a wrong place
    if not isinstance(rows, list) or len(rows) > limits.CIPHER_KEYS_MAX:
        raise ValueError(f"it must list at most {limits.CIPHER_KEYS_MAX} [[keys]]; keys = [] says that there are none")
    found: defaultdict[str | None, dict[int, CipherKey]] = defaultdict(dict)
    for entry, row in enumerate(rows, start=1):
        tenant, number, secret = _parse(entry, row)
        if number in found[tenant]:
            raise ValueError(f"entry {entry} of [[keys]]: its number is listed twice for one tenant")
        found[tenant][number] = CipherKey.make(number, secret, default=tenant is None)
    ordered = {tenant: tuple(keys[number] for number in sorted(keys)) for tenant, keys in found.items()}
    default = ordered.pop(None, ())
    return Keyring({tenant_salt(tenant): keys for tenant, keys in ordered.items() if tenant is not None}, default)


def _parse(entry: int, row: Any) -> tuple[str | None, int, bytes]:
    """Tenant (None: the default), number and key of one entry."""
    if not isinstance(row, dict) or set(row) - _FIELDS:
        raise ValueError(f"entry {entry} of [[keys]] has tenant (or not), number and key; nothing else")
    tenant, number, secret = row.get("tenant"), row.get("number"), row.get("key")
    if tenant is not None and (not isinstance(tenant, str) or not tenant):
        raise ValueError(f"entry {entry} of [[keys]]: tenant is a name in quotes")
    if type(number) is not int or not 1 <= number <= NUMBER_MAX:
        raise ValueError(f"entry {entry} of [[keys]]: number is a whole number from 1 to {NUMBER_MAX}")
    if not isinstance(secret, str) or not _SECRET.match(secret):
        raise ValueError(f"entry {entry} of [[keys]]: key has {2 * CIPHER_KEY_BYTES} lower-case hex digits")
    return tenant, number, bytes.fromhex(secret)
