"""A purge with proof, from the command line through sockets to the disks of two nodes; what its receipt is worth."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.client import StoreClient
from kvstore.daemon.catch_up import catch_up
from kvstore.keys import tenant_salt
from kvstore.traffic import AGENT
from retention.cli import build_app
from retention.errors import ReceiptInvalid
from retention.receipt import read_public_key, read_receipt, read_secret_key, write_key
from retention.session import EXIT_FAILED, EXIT_LEFT, EXIT_NOTHING, EXIT_OK, EXIT_USAGE
from tests.support.shop import BLOCKS, Shop
from tests.support.spaces import a_space, put_chain
from tests.support.stores import client_of, open_node, short_dir


@pytest.fixture
def shop() -> Iterator[Shop]:
    with short_dir() as folder, ExitStack() as stack:
        yield Shop(folder, stack)


def hits(shop: Shop) -> tuple[int, int]:
    with client_of(*shop.addresses) as client:
        return tuple(  # type: ignore[return-value]
            int((client.lookup(chain.space_id, chain.names).presence == 1).sum()) for chain in (shop.acme, shop.other)
        )


def test_a_receipt_says_what_every_node_did_and_verifies(shop: Shop) -> None:
    """All of the tenant is gone from both nodes, nothing of others; the scan of the disks agrees with the receipt."""
    before = hits(shop)
    assert before == (BLOCKS, BLOCKS)
    result = shop.purge("--reason", "contract ended", "--author", "\u00c5sa")
    assert result.exit_code == EXIT_OK, result.output
    assert hits(shop) == (0, BLOCKS)
    receipt = read_receipt(shop.receipt, read_public_key(shop.folder / "key.pub"))
    assert receipt.complete
    assert set(receipt.reports) == {"one", "two"}
    assert sum(report.blocks for report in receipt.reports.values()) == BLOCKS
    assert all(report.blocks for report in receipt.reports.values())
    assert (receipt.order.author, receipt.order.reason, receipt.order.tenant) == ("\u00c5sa", "contract ended", "acme")
    verified = shop.run("verify", str(shop.receipt), "--public-key", str(shop.folder / "key.pub"))
    assert verified.exit_code == EXIT_OK, verified.output
    assert "nothing left" in verified.stdout


@pytest.mark.parametrize(("later_s", "code"), [(10, EXIT_OK), (0, EXIT_LEFT)])
def test_what_came_back_is_found_unless_it_is_newer(shop: Shop, later_s: int, code: int) -> None:
    """Blocks that the tenant stores later are none of the receipt's business; records of then are."""
    shop.purge()
    shop.clock.advance(later_s)
    with client_of(*shop.addresses) as client:
        client.register_space(a_space(tenant_salt=tenant_salt("acme")))
        put_chain(client, shop.acme, AGENT)
    result = shop.run("verify", str(shop.receipt))
    assert result.exit_code == code
    assert ("records left" in result.stdout) is (code == EXIT_LEFT)


def test_a_node_that_is_down_is_named_and_completes_it_when_it_is_back(shop: Shop) -> None:
    """The receipt says so; given again, the order is carried out where it was not, and nowhere twice."""
    shop.stack.close()
    with shop.up(0):
        result = shop.purge("--deadline", "5s")
    assert result.exit_code == EXIT_FAILED
    receipt = read_receipt(shop.receipt)
    assert not receipt.complete
    assert set(receipt.failed) == {"two"}
    with shop.up(0), shop.up(1):
        assert hits(shop)[0] > 0
        assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_LEFT
        resumed = shop.run("resume", str(shop.receipt), "--sign-key", str(shop.key))
        assert resumed.exit_code == EXIT_OK, resumed.output
        assert hits(shop) == (0, BLOCKS)
        again = read_receipt(shop.receipt)
        assert again.complete
        assert again.reports["one"] == receipt.reports["one"]
        assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_OK


def test_a_node_that_asks_its_peers_serves_nothing_that_they_have_purged(shop: Shop) -> None:
    """Before it serves anybody, a node that was down carries out what it missed; once, and nothing else."""
    shop.stack.close()
    with shop.up(0):
        shop.purge("--deadline", "5s")
        peer = shop.addresses[0].partition("=")[2]
        node = open_node(shop.folder / "1" / "data", shop.clock)
        try:
            assert catch_up(node, ["unix:/nowhere/store.sock"], None) == 0
            before = node.stats()["blocks"]
            assert catch_up(node, ["unix:/nowhere/store.sock", peer], None) == 1
            assert node.stats()["blocks"] < before
            assert catch_up(node, [peer], None) == 0
        finally:
            node.close()
    with shop.up(0), shop.up(1):
        assert hits(shop) == (0, BLOCKS)
        assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_FAILED
        shop.run("resume", str(shop.receipt), "--sign-key", str(shop.key))
        assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_OK


def test_a_prefix_leaves_no_byte_and_its_ancestors_stay(shop: Shop) -> None:
    root = shop.acme.names[90].key.hex()
    proof = ("--apply", "--yes", "--proof", str(shop.receipt), "--sign-key", str(shop.key))
    result = shop.run("purge", "--prefix", root, *proof)
    assert result.exit_code == EXIT_OK, result.output
    assert hits(shop) == (90, BLOCKS)
    assert read_receipt(shop.receipt).order.keys is not None
    assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_OK


def test_without_apply_nothing_is_removed_and_no_receipt_written(shop: Shop) -> None:
    result = shop.run("purge", "--tenant", "acme", "--proof", str(shop.receipt), "--sign-key", str(shop.key))
    assert result.exit_code == EXIT_OK
    assert "nothing was changed" in result.stdout
    assert not shop.receipt.exists()
    assert hits(shop) == (BLOCKS, BLOCKS)


def test_wrong_use_is_told(shop: Shop) -> None:
    """A proof needs a key; a tenant without spaces, a key that is none and a receipt that is none are refused."""
    assert shop.run("purge", "--tenant", "acme", "--apply", "--proof", "x").exit_code == EXIT_USAGE
    assert shop.run("purge", "--tenant", "nobody", "--apply").exit_code == EXIT_NOTHING
    shop.key.write_text("no key")
    assert "keygen" in shop.purge().stderr
    assert hits(shop) == (BLOCKS, BLOCKS)
    shop.receipt.write_text("{}")
    assert shop.run("verify", str(shop.receipt)).exit_code == EXIT_USAGE
    assert shop.run("verify", str(shop.folder / "none")).exit_code == EXIT_USAGE


def test_a_changed_receipt_does_not_verify(shop: Shop) -> None:
    """Not one value of it may differ from what was signed; nor may another key have signed it."""
    shop.purge()
    document = json.loads(shop.receipt.read_text())
    for path in (("order", "until_s"), ("order", "tenant"), ("nodes", "one", "blocks"), ("signed_s",), ("signature",)):
        changed = json.loads(json.dumps(document))
        place = changed
        for step in path[:-1]:
            place = place[step]
        value = place[path[-1]]
        place[path[-1]] = value + 1 if isinstance(value, int) else "ab" * 64 if path == ("signature",) else value + "x"
        shop.receipt.write_text(json.dumps(changed))
        with pytest.raises(ReceiptInvalid, match="changed"):
            read_receipt(shop.receipt)
    shop.receipt.write_text(json.dumps(document))
    public = write_key(shop.folder / "another")
    with pytest.raises(ReceiptInvalid, match="not by the one given"):
        read_receipt(shop.receipt, read_public_key(public))


def test_keys_are_made_once_and_kept_secret(tmp_path: Path) -> None:
    path = tmp_path / "key"
    result = CliRunner().invoke(build_app(), ["keygen", str(path)])
    assert result.exit_code == EXIT_OK
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read_secret_key(path)
    read_public_key(tmp_path / "key.pub")
    before = path.read_bytes()
    assert CliRunner().invoke(build_app(), ["keygen", str(path)]).exit_code == EXIT_FAILED
    assert path.read_bytes() == before


def test_the_client_does_not_need_a_receipt_to_search(shop: Shop) -> None:
    """The search is a question like any other, node by node."""
    shop.purge()
    order = read_receipt(shop.receipt).order
    client: StoreClient
    with client_of(*shop.addresses) as client:
        found = client.leftovers(order, {})
    assert set(found.answers) == {"one", "two"}
    assert not found.failed
