"""Who may speak to a server, and where: the secret in a token file, HOST:PORT, and what only this machine reaches.

Owns the rules that every server and client of the project share, so that a token which one takes is good for all.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

TOKEN_BYTES_MIN = 16
TOKEN_BYTES_MAX = 4096
PORT_MAX = 65_535


def read_token(path: Path | None) -> str | None:
    """The token in a file, without the line end; None without a file.

    A token is one line of printable ASCII, since it also travels in HTTP headers. Raises ValueError for anything else.
    """
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX + 3).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the token file {path} cannot be read: {error}") from error
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX or not token.isprintable():
        raise ValueError(
            f"the token file {path} must hold one line of {TOKEN_BYTES_MIN}..{TOKEN_BYTES_MAX} printable "
            f"ASCII characters; make one with: head -c 32 /dev/urandom | base64 > {path}"
        )
    return token


def split_host_port(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of ``HOST:PORT`` or ``[IPV6]:PORT``; ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"{address!r} is not HOST:PORT, such as 127.0.0.1:8000")
    if len(port) > len(str(PORT_MAX)) or int(port) > PORT_MAX:
        raise ValueError(f"{address!r}: a port is at most {PORT_MAX}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name other than localhost counts as reachable from outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
