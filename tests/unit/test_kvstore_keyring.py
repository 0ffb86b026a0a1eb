"""The file of cipher keys, and the command that prints it: what it may hold, and what becomes of a change."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore import limits
from kvstore.daemon.cipher import CipherKey, Keyring
from kvstore.daemon.keyring import KeyringSource, KeyringWatch, decode_keyring, read_keyring, run_command
from kvstore.keys import tenant_salt
from tests.support.waiting import WAIT_S, wait

ONE, TWO = "11" * 32, "2f" * 32


def entry(key: str, number: object, tenant: str | None = None) -> str:
    whose = f'tenant = "{tenant}"\n' if tenant is not None else ""
    return f'[[keys]]\n{whose}number = {number}\nkey = "{key}"\n'


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """Replace a file as an editor does."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.chmod(mode)
    draft.replace(path)
    return path


def test_the_highest_number_writes_and_all_read() -> None:
    """Whatever the order of the file; who has no key of his own, or no name at all, has the default."""
    keyring = decode_keyring((entry(TWO, 2, "acme") + entry(ONE, 1, "acme") + entry(ONE, 1)).encode())
    acme, other = tenant_salt("acme"), tenant_salt("other")
    assert keyring.writing(acme) == CipherKey.make(2, bytes.fromhex(TWO))
    assert sorted(keyring.readable(acme)) == [1, 2, 33]
    default = CipherKey.make(1, bytes.fromhex(ONE), default=True)
    assert keyring.writing(other) == keyring.writing(None) == default
    assert keyring.readable(other) == {33: default}
    assert decode_keyring(b"keys = []") == Keyring()
    assert Keyring().writing(acme) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "at most"),
        ("keys = 1", "at most"),
        ("keys = [1]", "entry 1"),
        ("[[keys]", "not TOML"),
        (f"keys = {ONE}x", "not TOML"),
        ("a = " + "[" * 100_000, "not TOML"),
        (entry(ONE, 1) + "[more]", "entries beside"),
        (f"{ONE} = 1", "entries beside"),
        (entry(ONE, 1) + "x = 1", "nothing else"),
        (entry(ONE, 0), "from 1 to 30"),
        (entry(ONE, 31), "from 1 to 30"),
        (entry(ONE, "true"), "from 1 to 30"),
        (entry(ONE, '"1"'), "from 1 to 30"),
        (f'[[keys]]\nkey = "{ONE}"', "from 1 to 30"),
        ("[[keys]]\nnumber = 1", "64 lower-case hex digits"),
        (entry(ONE[:-1], 1), "64 lower-case hex digits"),
        (entry("FF" * 32, 1), "64 lower-case hex digits"),
        (entry(ONE, 1, ""), "tenant is a name"),
        (entry(ONE, 1, "x" * 5000), "at most"),
        (entry(ONE, 1, "a") + entry(TWO, 1, "a"), "listed twice"),
        ("#" * (limits.CIPHER_KEYS_BYTES_MAX + 1), "more than"),
    ],
)
def test_what_is_no_file_of_cipher_keys_is_refused_without_telling_one(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        decode_keyring(text.encode())
    assert ONE[:12] not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620])
def test_a_file_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match="chmod 600"):
        read_keyring(write(tmp_path / "k", entry(ONE, 1), mode))
    with pytest.raises(ValueError, match="no file"):
        read_keyring(tmp_path)


def test_a_change_is_applied_and_what_is_unusable_changes_nothing(tmp_path: Path) -> None:
    """Also a file that is gone: only one that says so drops a key."""
    path = write(tmp_path / "k", entry(ONE, 1) + entry(TWO, 2))
    source = KeyringSource(path)
    applied: list[Keyring] = []
    watch = KeyringWatch(source, source.read(), applied.append)
    watch.refresh()
    for text in ("keys = 1", "", entry(ONE, 99)):
        write(path, text)
        watch.refresh()
    path.unlink()
    watch.refresh()
    assert applied == []
    write(path, entry(TWO, 2))
    watch.refresh()
    watch.refresh()
    assert [[key.slot for key in keyring.default] for keyring in applied] == [[34]]
    write(path, "keys = []")
    watch.refresh()
    assert applied[-1] == Keyring()


def test_a_command_prints_keys(tmp_path: Path) -> None:
    """It is run again as it is; none at all means no keys, and nothing to watch."""
    path = write(tmp_path / "k", entry(ONE, 1, "acme"))
    source = KeyringSource(command=("cat", str(path)))
    assert source.read() == read_keyring(path)
    assert source.changed()
    nothing = KeyringSource()
    assert (nothing.read(), nothing.changed(), nothing.every_s) == (Keyring(), False, 0.0)


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("import sys; sys.exit(3)", "exited with 3"),
        (f"print('{ONE}')", "not TOML"),
        ("import time; time.sleep(600)", "did not end within"),
        ("import os, time; os.close(1); time.sleep(600)", "did not end within"),
        ("while True: print('x' * 100)", "more than .* bytes"),
    ],
)
def test_a_command_that_fails_is_named_and_ends_in_time(program: str, complaint: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(ValueError, match=complaint) as caught:
        run_command([sys.executable, "-c", program], deadline_s=1.0 if "sleep" in program else WAIT_S)
    assert ONE not in str(caught.value)
    assert time.monotonic() - began_s < WAIT_S
    with pytest.raises(ValueError, match="cannot be used"):
        run_command(["/nonexistent/command"])


def test_a_daemon_that_stops_waits_for_no_command(tmp_path: Path) -> None:
    """What the command started ends with it."""
    told = tmp_path / "told"
    program = f"sleep 600 & echo $! > {told}.new; mv {told}.new {told}; wait"
    source = KeyringSource(command=("sh", "-c", program))
    watch = KeyringWatch(source, Keyring(), lambda keyring: None)
    refreshing = threading.Thread(target=watch.refresh)
    refreshing.start()
    wait(told.exists)
    watch.stop()
    refreshing.join(8)
    assert not refreshing.is_alive()
    wait(lambda: ended(int(told.read_text())))


def ended(number: int) -> bool:
    """Whether the process is gone, or only waits for somebody to hear of its end."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
