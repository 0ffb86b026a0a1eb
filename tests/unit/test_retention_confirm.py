"""What destroys is asked about on a terminal; elsewhere nobody is there to answer, and the options say it all."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.keys import TokenChain
from kvstore.store import Pin
from kvstore.testing import ManualClock, MemoryStore
from kvstore.traffic import AGENT
from retention.session import EXIT_FAILED, EXIT_OK
from tests.support.spaces import a_chain, a_space, hit_blocks, put_chain
from tests.support.stores import open_memory, served, short_dir
from tests.support.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Node:
    """A node with one chain, whose first block is under a legal hold."""

    store: MemoryStore
    chain: TokenChain
    address: str

    def run(self, *arguments: str, answer: str | None = None) -> subprocess.CompletedProcess[str]:
        """The command; ``answer``: what is typed on its terminal, or None where it has none."""
        command = [sys.executable, "-m", "retention", *arguments, "--store", self.address]
        master, terminal = pty.openpty()
        try:
            os.write(master, (answer or "").encode())
            stdin = subprocess.DEVNULL if answer is None else terminal
            return subprocess.run(
                command, stdin=stdin, capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT, check=False
            )
        finally:
            os.close(master)
            os.close(terminal)


@pytest.fixture
def node() -> Iterator[Node]:
    with ExitStack() as stack:
        store = open_memory(ManualClock())
        server = stack.enter_context(served(store, stack.enter_context(short_dir())))
        chain = a_chain(store.register_space(a_space()), 3)
        put_chain(store, chain, AGENT)
        yield Node(store, chain, server.addresses[1])


def test_releasing_a_hold_is_asked_about(node: Node) -> None:
    """No leaves the hold; yes, --yes, or no terminal at all release it."""
    key, space = node.chain.names[0].key, node.chain.space_id
    release = ("unpin", key.hex(), "--space", space.hex(), "--release-holds")
    for more, answer, code, left in (((), "n\n", EXIT_FAILED, 1), (("--yes",), "", EXIT_OK, 0), ((), None, EXIT_OK, 0)):
        node.store.pin([Pin(space, key, "legal", "case 7", hold=True)])
        done = node.run(*release, *more, answer=answer)
        assert (done.returncode, len(node.store.pins())) == (code, left), done.stderr
        assert ("release every hold" in done.stderr) == (code == EXIT_FAILED)


def test_a_purge_is_asked_about(node: Node) -> None:
    """After what it would remove has been shown; no removes nothing."""
    purge = ("purge", "--space", node.chain.space_id.hex(), "--apply")
    refused = node.run(*purge, answer="n\n")
    assert (refused.returncode, hit_blocks(node.store, node.chain)) == (EXIT_FAILED, 3)
    assert "would purge 3 blocks" in refused.stderr
    assert (node.run(*purge, answer="y\n").returncode, hit_blocks(node.store, node.chain)) == (EXIT_OK, 0)
