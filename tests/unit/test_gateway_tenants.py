"""API keys and tenants: files are checked, keys compared as a whole, and no two askers share a name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tenants import ApiKey, KeyRing, bearer, load_keys, tenant_name
from kvstore.keys import tenant_salt
from kvstore.traffic import AGENT, BUILT_IN_NAMES

TENANT = st.one_of(st.none(), st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,5}\Z"))
USER = st.one_of(st.none(), st.text("a1:/-\u00e9", max_size=8))


@given(TENANT, USER, TENANT, USER)
def test_different_askers_have_different_names(t1: str | None, u1: str | None, t2: str | None, u2: str | None) -> None:
    """The name of (tenant, user) is one-to-one, whatever separators the user contains; absent and empty differ."""
    assert (tenant_name(t1, u1) == tenant_name(t2, u2)) == ((t1, u1) == (t2, u2))


def test_a_tenant_without_user_keeps_its_name() -> None:
    """So that an operator can purge it by the name in the key file."""
    assert tenant_name("acme", None) == "acme"
    assert tenant_name(None, None) is None


def test_names_fit_the_salt() -> None:
    """The longest tenant and user make a name that the store's salt accepts; a longer user is refused."""
    longest = tenant_name("t" * 64, "\u00e9" * 128)
    assert longest is not None
    assert len(tenant_salt(longest)) == 32
    with pytest.raises(ValueError, match="at most 256"):
        tenant_name("t", "\u00e9" * 129)


def test_file_of_keys(tmp_path: Path) -> None:
    """Keys by text or by digest; wrong, cut and longer keys are not accepted."""
    digest = hashlib.sha256(b"second-key-2").hexdigest()
    (tmp_path / "keys.toml").write_text(
        f'[[keys]]\nkey = "first-key-1"\ntenant = "one"\n'
        f'[[keys]]\nkey_sha256 = "{digest}"\ntenant = "two"\nclass = "agent"\n'
    )
    ring = load_keys(tmp_path / "keys.toml", BUILT_IN_NAMES)
    assert len(ring) == 2
    first, second = ring.find("first-key-1"), ring.find("second-key-2")
    assert first == ApiKey(hashlib.sha256(b"first-key-1").digest(), "one", None)
    assert second is not None
    assert (second.tenant, second.traffic_class) == ("two", AGENT)
    for wrong in ("first-key-", "first-key-11", "FIRST-KEY-1", digest, ""):
        assert ring.find(wrong) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must list"),
        ("keys = []", "must list"),
        ("keys = 3", "must list"),
        ("[[keys]", "not TOML"),
        ('other = 1\n[[keys]]\nkey = "12345678"\ntenant = "a"', "unknown entries: other"),
        ('[[keys]]\nkey = "12345678"\ntenant = "a"\nrole = "x"', "unknown fields: role"),
        ('[[keys]]\ntenant = "a"', "either key or key_sha256"),
        ('[[keys]]\nkey = "12345678"\nkey_sha256 = "00"\ntenant = "a"', "either key or key_sha256"),
        ('[[keys]]\nkey = "short"\ntenant = "a"', "outside 8..512"),
        ('[[keys]]\nkey_sha256 = "ABC"\ntenant = "a"', "64 lower-case hex"),
        ('[[keys]]\nkey = "12345678"', "needs a tenant"),
        ('[[keys]]\nkey = "12345678"\ntenant = "a/b"', "needs a tenant"),
        ('[[keys]]\nkey = "12345678"\ntenant = 5', "text values"),
        ('[[keys]]\nkey = "12345678"\ntenant = "a"\nclass = "gold"', "known are agent, chat"),
        ('[[keys]]\nkey = "12345678"\ntenant = "a"\n[[keys]]\nkey = "12345678"\ntenant = "b"', "listed twice"),
    ],
)
def test_bad_key_files_say_what_is_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    """Each fault of a file has its sentence, which names the entry and never shows a key."""
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_keys(path, BUILT_IN_NAMES)
    assert str(path) in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_bearer() -> None:
    """Only a bearer scheme with a key of sane length counts."""
    assert bearer("Bearer abc") == "abc"
    assert bearer("bearer  abc ") == "abc"
    for wrong in (None, "", "Bearer", "Bearer ", "Basic abc", "abc", "Bearer " + "x" * 600):
        assert bearer(wrong) is None


def test_ring_refuses_doubles() -> None:
    """One key cannot belong to two tenants."""
    key = ApiKey(b"x" * 32, "a")
    with pytest.raises(ValueError, match="twice"):
        KeyRing([key, ApiKey(b"x" * 32, "b")])
