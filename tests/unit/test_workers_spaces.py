"""Spaces by tenant: different ids, registered once, bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.keys import space_id
from kvstore.testing import MemoryStore
from tests.support.faulty_store import FaultyStore
from tests.support.spaces import a_space
from workers import spaces as module
from workers.spaces import Spaces


def test_tenants_have_spaces_of_their_own() -> None:
    """Absent, empty and named tenants are all different, and the same name is the same space."""
    spaces = Spaces(a_space(), MemoryStore())
    ids = [spaces.of(tenant).id for tenant in (None, "", "a", "b")]
    assert len(set(ids)) == 4
    assert spaces.of("a").id == ids[2]
    assert spaces.of(None).id == space_id(a_space())
    with pytest.raises(ValueError, match="tenant"):
        spaces.of("x" * 513)
    other = spaces.of("a", replace(a_space(), adapter_digest=b"lora"))
    assert other.id not in ids
    assert other.space.tenant_salt == spaces.of("a").space.tenant_salt


def test_a_space_is_registered_once_and_again_when_it_failed() -> None:
    """A store that was down learns of the space at the next try; one that knows it is not asked again."""
    store = FaultyStore(MemoryStore())
    spaces = Spaces(a_space(), store)
    store.down = True
    with pytest.raises(Exception, match="down"):
        spaces.ensure_registered(spaces.of(None), deadline_s=1.0)
    store.down = False
    for _ in range(3):
        spaces.ensure_registered(spaces.of(None), deadline_s=1.0)
    assert store.calls.count("register_space") == 2
    assert set(store.inner.spaces()) == {spaces.of(None).id}


def test_memory_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used tenant is forgotten; coming back, it has the same space."""
    monkeypatch.setattr(module, "TENANTS_MAX", 3)
    spaces = Spaces(a_space(), MemoryStore())
    first = spaces.of("0").id
    for name in "123456":
        spaces.ensure_registered(spaces.of(name), deadline_s=1.0)
    assert len(spaces._by_tenant) == len(spaces._registered) == 3
    assert spaces.of("0").id == first
