"""The tokens file: what it may hold, who may read it, and what becomes of a change while the daemon runs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvstore import limits
from kvstore.daemon.rights import EVERYTHING, Role
from kvstore.daemon.tokens import Tokens, decode_tokens, read_tokens

ONE = "the first token of this file"
TWO = "the second token of this file"


def entry(token: str, *roles: str, clear: bool = True) -> str:
    listed = ", ".join(f'"{role}"' for role in roles)
    what = f'token = "{token}"' if clear else f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"'
    return f"[[tokens]]\n{what}\nroles = [{listed}]\n"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """Replace a file as an editor does."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.chmod(mode)
    draft.replace(path)
    return path


def test_a_token_is_found_by_its_text_however_it_is_listed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t", entry(ONE, "worker", "operator") + entry(TWO, "tenant:acme", "tenant:4:x", clear=False)
    )
    tokens = Tokens.open(None, path)
    assert tokens.needed
    one, two = tokens.find(ONE.encode()), tokens.find(TWO.encode())
    assert one is not None
    assert one.grant.roles == {Role.WORKER, Role.OPERATOR}
    assert two is not None
    assert two.grant.tenants == ("acme", "4:x")
    assert len(two.grant.salts) == 2
    for wrong in (b"", ONE[:-1].encode(), one.digest, one.digest.hex().encode()):
        assert tokens.find(wrong) is None


def test_one_token_of_a_file_of_its_own_allows_everything(tmp_path: Path) -> None:
    """Alone or beside a file of tokens; where there is neither, nobody is asked."""
    tokens = Tokens.open(ONE, write(tmp_path / "t", entry(TWO, "reader")))
    found, other = tokens.find(ONE.encode()), tokens.find(TWO.encode())
    assert found is not None
    assert found.grant == EVERYTHING
    assert other is not None
    assert other.grant.roles == {Role.READER}
    assert Tokens.open(ONE, None).find(TWO.encode()) is None
    anybody = Tokens.open(None, None)
    assert not anybody.needed
    nobody = anybody.find(b"")
    assert nobody is not None
    assert nobody.grant == EVERYTHING
    assert anybody.known(nobody.digest) == nobody


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"1\.\.1024"),
        ("tokens = 1", r"1\.\.1024"),
        ("tokens = [1]", "entry 1"),
        ("[[tokens]", "not TOML"),
        ("a = " + "[" * 100_000, "not TOML"),
        ("a = " + "9" * 5000, "not TOML"),
        (entry(ONE, "worker") + "[more]", "unknown entries 'more'"),
        (entry(ONE, "worker") + "x = 1", "entry 1"),
        ('[[tokens]]\nroles = ["worker"]', "either token or token_sha256"),
        (entry(ONE, "worker") + f'token_sha256 = "{"0" * 64}"', "either token or token_sha256"),
        (f'[[tokens]]\ntoken = "{ONE}"', "needs roles"),
        (f'[[tokens]]\ntoken = "{ONE}"\nroles = "worker"', "needs roles"),
        (f'[[tokens]]\ntoken = "{ONE}"\nroles = [1]', "needs roles"),
        (entry(ONE), "at least one role"),
        (entry(ONE, *["worker"] * 65), "more than 64 roles"),
        (entry(ONE, "root"), "'root' is no role"),
        (entry("short", "worker"), "16"),
        (entry("x" * 4097, "worker"), "4096"),
        (entry("ü" * 20, "worker"), "printable ASCII"),
        (entry(" " + ONE, "worker"), "printable ASCII"),
        ('[[tokens]]\ntoken = 1\nroles = ["worker"]', "printable ASCII"),
        (f'[[tokens]]\ntoken_sha256 = "{"A" * 64}"\nroles = ["worker"]', "64 lower-case hex digits"),
        ('[[tokens]]\ntoken_sha256 = 1\nroles = ["worker"]', "64 lower-case hex digits"),
        (entry(ONE, "worker") + entry(ONE, "reader", clear=False), "listed twice"),
        ("#" * (limits.TOKENS_FILE_BYTES_MAX + 1), "more than"),
        (entry(ONE, "worker") * 1025, r"1\.\.1024"),
    ],
)
def test_what_is_no_tokens_file_is_refused_without_telling_a_token(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        decode_tokens(text.encode())
    assert ONE not in str(caught.value)


def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path) -> None:
    """Digests may be read by all: who can write the file makes tokens of their own."""
    for mode, clear, fine in ((0o600, True, True), (0o640, True, False), (0o644, False, True), (0o660, False, False)):
        path = write(tmp_path / "t", entry(ONE, "worker", clear=clear), mode)
        if fine:
            assert len(read_tokens(path)) == 1
        else:
            with pytest.raises(ValueError, match="chmod 600"):
                read_tokens(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=f"{path.name} cannot be used"):
            Tokens.open(None, path)


def test_a_change_is_taken_over_and_a_bad_one_is_not(tmp_path: Path) -> None:
    """A token that left the file is known no more; a file that became bad, or is gone, leaves all as it was."""
    path = write(tmp_path / "t", entry(ONE, "worker") + entry(TWO, "worker"))
    tokens = Tokens.open(None, path)
    one = tokens.find(ONE.encode())
    assert one is not None
    tokens.refresh()
    assert tokens.version == 0
    write(path, entry(TWO, "reader"))
    tokens.refresh()
    assert tokens.version == 1
    assert tokens.known(one.digest) is None
    for spoil in (lambda: write(path, "[[tokens]"), lambda: write(path, entry(ONE, "worker"), 0o666), path.unlink):
        spoil()
        tokens.refresh()
        two = tokens.find(TWO.encode())
        assert tokens.version == 1
        assert two is not None
        assert two.grant.roles == {Role.READER}
    write(path, entry(ONE, "worker"))
    tokens.refresh()
    assert tokens.version == 2
    assert tokens.known(one.digest) is not None
