"""The command retention, over two nodes on disk behind sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from kvstore.daemon.node import Node
from kvstore.keys import tenant_salt
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from retention.cli import build_app
from retention.receipt import write_key
from tests.support.spaces import a_chain, a_space, put_chain
from tests.support.stores import client_of, open_node, served

BLOCKS = 256
"""Sixteen stripes: some for each node."""


class Shop:
    """Two nodes behind Unix sockets, a tenant's blocks on both, and the command."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.stack = stack
        self.servers = [stack.enter_context(self.up(number)) for number in (0, 1)]
        self.key = folder / "key"
        write_key(self.key)
        self.receipt = folder / "receipt.json"
        with client_of(*self.addresses) as client:
            self.acme = a_chain(client.register_space(a_space(tenant_salt=tenant_salt("acme"))), BLOCKS)
            self.other = a_chain(client.register_space(a_space()), BLOCKS)
            put_chain(client, self.acme, AGENT)
            put_chain(client, self.other, AGENT)

    @contextmanager
    def up(self, number: int) -> Iterator[Node]:
        """A node under its address, for as long as the context lasts."""
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        node = open_node(folder / "data", self.clock)
        try:
            with served(node, folder):
                yield node
        finally:
            node.close()

    @property
    def addresses(self) -> list[str]:
        return [f"{name}=unix:{self.folder / str(number) / 'store.sock'}" for number, name in enumerate(("one", "two"))]

    def run(self, *arguments: str) -> Result:
        stores = [part for address in self.addresses for part in ("--store", address)]
        result = CliRunner().invoke(build_app(clock=self.clock), [*arguments, *stores])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def purge(self, *more: str) -> Result:
        proof = ("--apply", "--yes", "--proof", str(self.receipt), "--sign-key", str(self.key))
        return self.run("purge", "--tenant", "acme", *proof, *more)
