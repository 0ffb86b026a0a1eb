"""The tokens that a daemon takes and what each allows, read again when their file changes.

Owns the format of the tokens file and the comparison. Does not know what a role may do. Invariants: tokens are kept and
compared by digest, all of them, in constant time; a file that others may write is refused, and one with a token in
clear also if others may read it; a file that became unreadable changes nothing until it is mended.

    [[tokens]]
    token_sha256 = "<64 hex digits>"        # or token = "..." in clear
    roles = ["worker"]                      # worker, reader, operator; or tenant:NAME, once or more
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore import limits
from kvstore.access import TOKEN_BYTES_MAX, TOKEN_BYTES_MIN
from kvstore.daemon.rights import EVERYTHING, Grant, grant_of
from kvstore.daemon.secret_file import read_secret_file, stamp_of

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_FIELDS = frozenset({"token", "token_sha256", "roles"})
_NOBODY = b""
"""The digest of a peer where no token is needed."""

log = logging.getLogger("kvstore.daemon")


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its SHA-256 and what it allows."""

    digest: bytes
    grant: Grant


class Tokens:
    """The tokens in force. Read by every connection's thread; ``refresh`` is called by one.

    ``version`` counts up with every change.
    """

    def __init__(self, fixed: Sequence[Token] = (), path: Path | None = None) -> None:
        self._fixed = tuple(fixed)
        self._path = path
        self._listed: tuple[Token, ...] = ()
        self._stamp: tuple[int, ...] = ()
        self.version = 0

    @classmethod
    def open(cls, token: str | None, path: Path | None) -> Tokens:
        """``token``: one that allows everything; ``path``: a file of more. Raises ValueError for a bad file."""
        tokens = cls([Token(_digest(token.encode()), EVERYTHING)] if token else [], path)
        if path is not None:
            tokens._stamp = stamp_of(path)
            tokens._listed = read_tokens(path)
        return tokens

    @property
    def needed(self) -> bool:
        """Whether a peer must name a token; else everybody who reaches the daemon may do everything."""
        return bool(self._fixed) or self._path is not None

    def find(self, token: bytes) -> Token | None:
        """What a peer's token is, or None. Takes as long for a wrong token as for a right one."""
        return self.known(_digest(token)) if self.needed else Token(_NOBODY, EVERYTHING)

    def known(self, digest: bytes) -> Token | None:
        """The token of a digest that was found before, if it is still taken."""
        found = None if self.needed else Token(_NOBODY, EVERYTHING)
        for item in (*self._fixed, *self._listed):
            if hmac.compare_digest(item.digest, digest):
                found = item
        return found

    def refresh(self) -> None:
        """Read the file again if it changed; what cannot be used is logged, and the tokens before it stay."""
        if self._path is None:
            return
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._listed = read_tokens(self._path)
        except ValueError as error:
            log.warning("tokens_kept: %s", error)
            return
        self.version += 1
        log.info("tokens_read count=%d", len(self._listed))


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Raises ValueError that names the file and the entry at fault, never a token."""
    try:
        data, mode = read_secret_file(path, limits.TOKENS_FILE_BYTES_MAX)
        tokens, in_clear = decode_tokens(data)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokens file {path} cannot be used: {error}") from error
    if mode & (0o077 if in_clear else 0o022):
        raise ValueError(
            f"others may {'read' if in_clear else 'write'} the tokens file {path}: chmod 600 it"
            + (", or list tokens by token_sha256" if in_clear else "")
        )
    return tokens


def decode_tokens(data: bytes) -> tuple[tuple[Token, ...], bool]:
    """The tokens of a file, and whether one of them stands there in clear. Raises ValueError."""
    if len(data) > limits.TOKENS_FILE_BYTES_MAX:
        raise ValueError(f"it has more than {limits.TOKENS_FILE_BYTES_MAX} bytes")
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not TOML: {error}") from error
    rows = document.pop("tokens", None)
    if document:
        raise ValueError(f"unknown entries {', '.join(map(repr, sorted(document)[:8]))}; only [[tokens]] is known")
    if not isinstance(rows, list) or not 1 <= len(rows) <= limits.TOKENS_MAX:
        raise ValueError(f"it must list 1..{limits.TOKENS_MAX} [[tokens]]")
    tokens = tuple(_parse_token(number, row) for number, row in enumerate(rows, start=1))
    if len({item.digest for item in tokens}) != len(tokens):
        raise ValueError("a token is listed twice: give one entry all its roles")
    return tokens, any("token" in row for row in rows)


def _parse_token(number: int, row: Any) -> Token:
    if not isinstance(row, dict) or set(row) - _FIELDS or ("token" in row) == ("token_sha256" in row):
        raise ValueError(f"entry {number} of [[tokens]] has roles, and either token or token_sha256; nothing else")
    roles = row.get("roles")
    if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise ValueError(f'entry {number} of [[tokens]] needs roles, such as roles = ["worker"]')
    if len(roles) > limits.TOKEN_ROLES_MAX:
        raise ValueError(f"entry {number} of [[tokens]] has more than {limits.TOKEN_ROLES_MAX} roles")
    try:
        return Token(_digest_of(row), grant_of(roles))
    except ValueError as error:
        raise ValueError(f"entry {number} of [[tokens]]: {error}") from error


def _digest_of(row: dict[str, Any]) -> bytes:
    if "token_sha256" in row:
        if not isinstance(row["token_sha256"], str) or not _DIGEST.match(row["token_sha256"]):
            raise ValueError("token_sha256 has 64 lower-case hex digits")
        return bytes.fromhex(row["token_sha256"])
    token = row["token"]
    if not isinstance(token, str) or not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ValueError("a token is printable ASCII, without spaces around it")
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise ValueError(f"a token has {TOKEN_BYTES_MIN}..{TOKEN_BYTES_MAX} characters")
    return _digest(token.encode())


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
