"""What operators said survives, or the daemon refuses to guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.daemon.catalog import Catalog, CatalogContent, decode_catalog, encode_catalog
from kvstore.errors import Overloaded, VolumeError
from kvstore.keys import BlockKey, space_id
from kvstore.limits import MIB
from kvstore.store import Pin, Policy
from kvstore.testing import TEST_RULES
from tests.support.spaces import a_space

POLICY = Policy(1, TEST_RULES, "text with \u00fcmlauts")


def some_content() -> CatalogContent:
    spaces = {space_id(a_space(epoch=number)): a_space(epoch=number) for number in range(3)}
    pin = Pin(space_id(a_space()), BlockKey(b"\x01" * 32), "owner", "reason", 7)
    return CatalogContent(POLICY, spaces, {(pin.space_id, pin.key, pin.owner): pin})


def test_round_trip() -> None:
    assert decode_catalog(encode_catalog(some_content())) == some_content()


def test_a_reopened_catalog_keeps_its_policy(tmp_path: Path) -> None:
    """The policy given at a restart does not displace the one in force."""
    path = tmp_path / "catalog.json"
    Catalog.open(path, MIB, POLICY).save(some_content())
    again = Catalog.open(path, MIB, Policy(1, TEST_RULES, "another"))
    assert again.content == some_content()


def test_no_policy_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="no class rules"):
        Catalog.open(tmp_path / "catalog.json", MIB, None)


def test_every_damaged_byte_stops_the_daemon(tmp_path: Path) -> None:
    """Truncated or altered anywhere: an error that says what to do, never a forgotten pin."""
    path = tmp_path / "catalog.json"
    data = encode_catalog(some_content())
    for place in range(0, len(data) - 1, 7):
        for spoiled in (data[:place], data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]):
            path.write_bytes(spoiled)
            with pytest.raises(VolumeError):
                Catalog.open(path, MIB, POLICY)


def test_a_catalog_beyond_its_share_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "catalog.json"
    catalog = Catalog.open(path, 4096, POLICY)
    with pytest.raises(Overloaded, match="catalog is full"):
        catalog.save(CatalogContent(Policy(2, TEST_RULES, "x" * 5000)))
    assert catalog.content.policy == POLICY
    assert Catalog.open(path, 4096, None).content.policy == POLICY


def test_earlier_policies_are_remembered_in_order(tmp_path: Path) -> None:
    """Who changed what, and when, survives a restart; a catalog of before the history has none."""
    path = tmp_path / "catalog.json"
    catalog = Catalog.open(path, MIB, POLICY)
    for version in (2, 3):
        catalog.change_policy(Policy(version, TEST_RULES, f"text {version}", 100 * version, "\u00c5sa@desk"))
    again = Catalog.open(path, MIB, None).content
    assert again.earlier == (POLICY, Policy(2, TEST_RULES, "text 2", 200, "\u00c5sa@desk"))
    assert again.policy == Policy(3, TEST_RULES, "text 3", 300, "\u00c5sa@desk")


def test_the_history_gives_way_before_a_policy_is_refused(tmp_path: Path) -> None:
    """The oldest are forgotten when their share of the catalog is full; the present one never for their sake."""
    catalog = Catalog.open(tmp_path / "catalog.json", 64 * 1024, POLICY)
    for version in range(2, 40):
        catalog.change_policy(Policy(version, TEST_RULES, "x" * 1000))
    versions = [policy.version for policy in catalog.content.earlier]
    assert catalog.content.policy.version == 39
    assert 1 < len(versions) < 37
    assert versions == list(range(versions[0], 39))
