"""The whole promise in one life of a store: over sockets and the command line, with a restart before every look."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.client import StoreClient
from kvstore.keys import TokenChain, tenant_salt
from kvstore.store import BlockPut, GetStatus
from kvstore.testing import DAY_S, T0_S, ManualClock
from kvstore.traffic import AGENT, CHAT, TrafficClass
from retention.cli import build_app
from retention.policy import load_class_rules
from retention.receipt import write_key
from retention.session import EXIT_OK
from tests.support.nodes import payload_of
from tests.support.spaces import a_chain, a_space
from tests.support.stores import client_of, open_node, served, short_dir

SIZE = 3000
BLOCKS = 5


class Service:
    """A node that is restarted before every use, on a clock that is moved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()

    @contextmanager
    def up(self) -> Iterator[StoreClient]:
        node = open_node(self.folder / "data", self.clock, rules=load_class_rules(None)[0])
        with ExitStack() as stack:
            stack.callback(node.close)
            server = stack.enter_context(served(node, self.folder))
            yield stack.enter_context(client_of(server.addresses[1], same_host=False))

    def at_day(self, days: float) -> None:
        self.clock.advance(T0_S + days * DAY_S - self.clock.now_s())

    def put(self, seed: int, traffic_class: TrafficClass, tenant: str | None = None) -> TokenChain:
        with self.up() as client:
            space = a_space(tenant_salt=None if tenant is None else tenant_salt(tenant))
            chain = a_chain(client.register_space(space), BLOCKS, seed=seed)
            puts = [BlockPut(name, chain.block_tokens, payload_of(name, SIZE)) for name in chain.names]
            client.put(chain.space_id, puts, traffic_class=traffic_class, ack="disk")
        return chain

    def touch(self, chain: TokenChain, traffic_class: TrafficClass) -> None:
        with self.up() as client:
            assert client.touch(chain.space_id, chain.names, traffic_class=traffic_class) == BLOCKS

    def whole(self, *chains: TokenChain) -> list[bool]:
        """Of each chain, whether all of it is read as it was written; otherwise none of it is."""
        found: list[bool] = []
        with self.up() as client:
            for chain in chains:
                buffers = [bytearray(SIZE) for _ in chain.names]
                statuses = set(client.get_into(chain.space_id, chain.names, buffers))
                assert statuses in ({GetStatus.OK}, {GetStatus.MISS})
                assert client.lookup(chain.space_id, chain.names).prefix_blocks() in (0, BLOCKS)
                found.append(statuses == {GetStatus.OK})
                if found[-1]:
                    assert buffers == [payload_of(name, SIZE) for name in chain.names]
        return found

    def run(self, *arguments: str) -> Any:
        """What a command of retention says, as JSON."""
        with self.up():
            app = build_app(clock=self.clock)
            store = ("--store", f"unix:{self.folder / 'store.sock'}")
            result = CliRunner().invoke(app, [*arguments, *store, "--json"])
        assert result.exit_code == EXIT_OK, result.output
        return json.loads(result.stdout)

    def found_on_disk(self, chains: Sequence[TokenChain]) -> int:
        """Traces of blocks in all files of the data directory."""
        data = [path.read_bytes() for path in (self.folder / "data").rglob("*") if path.is_file()]
        payloads = [payload_of(name, SIZE) for chain in chains for name in chain.names]
        keys = [bytes(name.key) for chain in chains for name in chain.names]
        traces = [*keys, *(payload[at : at + 40] for payload in payloads for at in (0, 1500, SIZE - 40))]
        return sum(any(trace in one for one in data) for trace in traces)


@pytest.fixture
def service() -> Iterator[Service]:
    with short_dir() as folder:
        yield Service(folder)


def test_what_was_promised_is_kept_and_what_must_go_is_gone(service: Service) -> None:
    """Agents three days, chats seven, touched ones on from the touch, shared ones to the longest; a shorter policy
    drops what it said; of a purged tenant no byte is left.
    """
    agent, chat, shared, touched = (service.put(seed, AGENT if seed != 2 else CHAT) for seed in (1, 2, 3, 4))
    service.touch(shared, CHAT)
    service.at_day(2)
    service.touch(touched, AGENT)
    service.at_day(2.9)
    assert service.whole(agent, chat, shared, touched) == [True] * 4
    service.at_day(3.1)
    assert service.whole(agent, chat, shared, touched) == [False, True, True, True]
    service.run("sweep", "--apply")
    service.at_day(4.9)
    assert service.whole(agent, chat, shared, touched) == [False, True, True, True]
    service.at_day(5.1)
    assert service.whole(chat, shared, touched) == [True, True, False]
    service.at_day(6.9)
    assert service.whole(chat, shared) == [True, True]
    young = service.put(5, CHAT)
    service.run("sweep", "--apply")
    service.at_day(7.1)
    assert service.whole(chat, shared, young) == [False, False, True]

    old = service.put(6, CHAT)
    service.at_day(9)
    fresh = service.put(7, CHAT)
    shorter = ("policy", "set", "--keep", "chat=2d")
    said = service.run(*shorter)["effect"]["blocks"]
    assert (said, service.whole(young, old, fresh)) == (BLOCKS, [True] * 3)
    assert service.run(*shorter, "--apply")["effect"]["blocks"] == said
    assert service.whole(young, old, fresh) == [False, True, True]
    assert service.run("policy", "get")["version"] == 2

    mine, gone = service.put(8, AGENT, "acme"), service.put(9, CHAT, "acme")
    service.at_day(11.5)
    assert service.whole(mine, gone, fresh) == [True, False, False]
    theirs = service.put(10, AGENT, "other")
    assert service.found_on_disk([mine, gone]) > 0
    write_key(service.folder / "key")
    proof = ("--proof", str(service.folder / "receipt"), "--sign-key", str(service.folder / "key"))
    service.run("purge", "--tenant", "acme", "--apply", "--yes", *proof)
    assert service.whole(mine, gone, theirs) == [False, False, True]
    assert service.found_on_disk([mine, gone]) == 0
    assert service.run("verify", str(service.folder / "receipt"))
