"""Tokens and loopback: one rule for every server and client."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.access import TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, is_loopback, read_token, split_host_port


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("localhost", "is not HOST:PORT"),
        (":1", "is not HOST:PORT"),
        ("h:", "is not HOST:PORT"),
        ("h:x", "is not HOST:PORT"),
        ("h:\u0661", "is not HOST:PORT"),
        ("h:65536", "a port is at most 65535"),
        ("h:" + "9" * 5000, "a port is at most 65535"),
    ],
)
def test_what_is_no_host_and_port_is_refused_with_the_bound(address: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        split_host_port(address)
    assert split_host_port("[::1]:65535") == ("::1", 65_535)


def test_a_token_is_one_line_without_its_end(tmp_path: Path) -> None:
    """The longest and the shortest token are read; no file is no token."""
    path = tmp_path / "token"
    for token in ("t" * TOKEN_BYTES_MIN, "a token/with+signs==", "t" * TOKEN_BYTES_MAX):
        path.write_text(token + "\r\n")
        assert read_token(path) == token
    assert read_token(None) is None


@pytest.mark.parametrize(
    "content",
    [b"", b" \n", b"short\n", b"x" * (TOKEN_BYTES_MAX + 1), b"\xff" * 20, "ü".encode() * 20, b"two\nlines of a token"],
)
def test_what_is_no_token_is_refused_with_advice(tmp_path: Path, content: bytes) -> None:
    """Also bytes that an HTTP header cannot carry: a token that the store takes must be good for every server."""
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="token file"):
        read_token(path)


def test_an_absent_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent cannot be read"):
        read_token(tmp_path / "absent")


def test_only_this_machine_is_loopback() -> None:
    """A name that merely begins like a loopback number is somebody else's machine."""
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "10.1.1.1", "::", "127.example.com", "loopback", ""):
        assert not is_loopback(host)
