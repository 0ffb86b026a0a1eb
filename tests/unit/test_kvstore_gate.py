"""What a token lets pass: a tenant's bounds, what HELLO cannot claim, and tokens taken away while connections live."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import limits
from kvstore.client import StoreClient
from kvstore.daemon.gate import Gate
from kvstore.daemon.node import Node
from kvstore.daemon.request import Connection
from kvstore.daemon.server import Server
from kvstore.daemon.tokens import Tokens
from kvstore.errors import Overloaded, SpaceUnknown, StoreError, Unauthorized
from kvstore.framing import Channel
from kvstore.keys import Space, SpaceId, StateName, space_id, tenant_salt
from kvstore.store import GetStatus, PutOutcome
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import payload_of, puts_of
from tests.support.spaces import a_chain, a_space
from tests.support.stores import client_of, open_memory, open_node, served, short_dir
from tests.support.waiting import WAIT_S

SIZE = 3000
MINE, OTHERS, SHARED = (a_space(tenant_salt=salt) for salt in (tenant_salt("acme"), tenant_salt("bolt"), None))


def token_of(role: str) -> str:
    return f"the token with the role {role}"


def write(path: Path, *roles: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text("".join(f'[[tokens]]\ntoken = "{token_of(role)}"\nroles = ["{role}"]\n' for role in roles))
    draft.chmod(0o600)
    draft.replace(path)


@dataclass
class Bench:
    """A node that asks for tokens, and a client of each role."""

    node: Node
    server: Server
    file: Path
    stack: ExitStack

    def client(self, role: str, **options: Any) -> StoreClient:
        return self.stack.enter_context(client_of(self.server.addresses[1], token=token_of(role), **options))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        folder = stack.enter_context(short_dir())
        node = stack.enter_context(closing(open_node(folder / "data", ManualClock())))
        write(folder / "tokens", "worker", "reader", "operator", "tenant:acme")
        server = stack.enter_context(served(node, folder, tokens=Tokens.open(None, folder / "tokens")))
        yield Bench(node, server, folder / "tokens", stack)


def uses(store: StoreClient, space: SpaceId) -> list[Callable[[], object]]:
    """Everything that the data plane does in a space."""
    names = a_chain(space, 2).names
    state = StateName(names[0].key, names[0].key, names[0].key, 4, 0)
    return [
        lambda: store.lookup(space, names, states=True),
        lambda: store.get_into(space, names, [bytearray(SIZE) for _ in names]),
        lambda: store.put(space, puts_of(list(names), SIZE), traffic_class=AGENT),
        lambda: store.touch(space, names, traffic_class=AGENT),
        lambda: store.put_state(space, state, b"state"),
        lambda: store.get_state(space, state),
    ]


def storing(store: StoreClient, space: SpaceId) -> list[Callable[[], object]]:
    _, _, put, _, put_state, _ = uses(store, space)
    return [put, put_state]


def found_nothing(store: StoreClient, space: SpaceId) -> None:
    lookup, get, _, touch, _, get_state = uses(store, space)
    answer: Any = lookup()
    assert (answer.prefix_blocks(), answer.complete, answer.states) == (0, True, ())
    assert get() == [GetStatus.MISS] * 2
    assert (touch(), get_state()) == (0, None)


@pytest.mark.parametrize("foreign", [OTHERS, SHARED], ids=["another tenant's", "nobody's"])
@pytest.mark.parametrize("registered", [True, False])
def test_a_tenant_reaches_its_own_spaces_only(bench: Bench, foreign: Space, registered: bool) -> None:
    """In another's space that is full it finds nothing and changes nothing, just as in one that does not exist."""
    worker, tenant = bench.client("worker"), bench.client("tenant:acme")
    space = space_id(foreign)
    if registered:
        worker.register_space(foreign)
        for use in uses(worker, space):
            use()
    before = bench.node.scan()[0]
    assert len(before) == 2 * registered
    found_nothing(tenant, space)
    with pytest.raises(Unauthorized, match="salt of this token's tenant"):
        tenant.register_space(foreign)
    for use in storing(tenant, space):
        with pytest.raises(Unauthorized, match="salt of this token's tenant"):
            use()
    tenant._spaces.clear()
    for use in storing(tenant, space):
        with pytest.raises(SpaceUnknown, match="never registered here"):
            use()
    refused = tenant._counts["unreachable"]
    tenant._report_corrupt(0, space, a_chain(space, 1).names[0])
    assert tenant._counts["unreachable"] == refused + 1, "a report was taken"
    assert bench.node.scan()[0] == before


def test_a_tenant_uses_its_own_spaces_fully(bench: Bench) -> None:
    tenant = bench.client("tenant:acme")
    assert tenant.register_space(MINE) == space_id(MINE)
    _, _, put, touch, put_state, get_state = uses(tenant, space_id(MINE))
    assert put() == [PutOutcome.STORED] * 2
    assert (touch(), put_state(), get_state()) == (2, True, (b"state", 0))
    lookup, get, *_ = uses(tenant, space_id(MINE))
    answer: Any = lookup()
    assert (answer.prefix_blocks(), len(answer.states)) == (2, 1)
    assert get() == [GetStatus.OK] * 2


def test_blocks_that_outlived_the_catalog_are_no_tenants(bench: Bench) -> None:
    """Nothing proves whose they are, until the space is registered again, which the next put does."""
    worker, tenant = bench.client("worker"), bench.client("tenant:acme")
    for space in (MINE, OTHERS):
        worker.register_space(space)
        for use in uses(worker, space_id(space)):
            use()
    bench.node._catalog.content = replace(bench.node._catalog.content, spaces={})
    for space in (MINE, OTHERS):
        found_nothing(tenant, space_id(space))
        assert worker.lookup(space_id(space), a_chain(space_id(space), 2).names).prefix_blocks() == 2
    tenant._spaces[space_id(MINE)] = MINE
    assert uses(tenant, space_id(MINE))[2]() == [PutOutcome.TOUCHED] * 2
    assert tenant.lookup(space_id(MINE), a_chain(space_id(MINE), 2).names).prefix_blocks() == 2


def test_hello_takes_rights_away_and_gives_none(bench: Bench) -> None:
    """Another tenant's name beside a tenant's token is refused; its own is taken, and so is a worker's claim."""
    bench.client("tenant:acme", tenant="acme").register_space(MINE)
    with pytest.raises(Unauthorized, match="another tenant's"):
        bench.client("tenant:acme", tenant="bolt").register_space(OTHERS)
    with pytest.raises(Unauthorized, match="register_space needs a token with the role tenant or worker"):
        bench.client("reader", tenant="acme").register_space(MINE)
    claiming = bench.client("worker", tenant="acme")
    claiming.register_space(MINE)
    claiming.put(space_id(MINE), puts_of(list(a_chain(space_id(MINE), 2).names), SIZE), traffic_class=AGENT)
    assert (
        claiming.get_into(space_id(MINE), a_chain(space_id(MINE), 2).names, [bytearray(SIZE)] * 2) == [GetStatus.OK] * 2
    )
    assert claiming._counts["blocks_got_local"] == 0


def test_a_tenant_borrows_memory_on_its_own_account(bench: Bench) -> None:
    bench.client("tenant:acme").register_space(MINE)
    assert {connection.party.tenant for connection in bench.server._connections} == {"acme"}


def test_readers_get_what_workers_put(bench: Bench) -> None:
    worker = bench.client("worker")
    worker.register_space(SHARED)
    names = list(a_chain(space_id(SHARED), 3).names)
    assert worker.put(space_id(SHARED), puts_of(names, SIZE), traffic_class=AGENT) == [PutOutcome.STORED] * 3
    for role in ("reader", "operator"):
        store, buffers = bench.client(role), [bytearray(SIZE) for _ in names]
        assert store.lookup(space_id(SHARED), names).prefix_blocks() == 3
        assert store.get_into(space_id(SHARED), names, buffers) == [GetStatus.OK] * 3
        assert [bytes(buffer) for buffer in buffers] == [payload_of(name, SIZE) for name in names]


def test_a_token_taken_away_ends_what_its_connections_may(bench: Bench) -> None:
    """Without a restart: first less, by another role, then nothing; those that stay are not disturbed."""
    worker, operator = bench.client("worker"), bench.client("operator")
    worker.register_space(SHARED)
    use_all = uses(worker, space_id(SHARED))
    for use in use_all:
        use()
    text = bench.file.read_text()
    bench.file.write_text(text.replace('roles = ["worker"]', 'roles = ["reader"]'))
    assert {connection.trusted for connection in bench.server._connections if connection.neighbour} == {True}
    assert until_refused(use_all[2]).endswith("this one has reader")
    demoted = [connection for connection in bench.server._connections if connection.version == 1]
    assert [connection.trusted for connection in demoted] == [False] * len(demoted) != []
    assert bench.client("worker").get_into(space_id(SHARED), a_chain(space_id(SHARED), 1).names, [bytearray(SIZE)]) == [
        GetStatus.OK
    ]
    write(bench.file, "operator")
    assert until_refused(use_all[0]) == "this token is no longer taken"
    with pytest.raises(Unauthorized, match="the token is wrong"):
        bench.client("worker").register_space(SHARED)
    assert operator.stats()["blocks"] == 2


def until_refused(use: Callable[[], object]) -> str:
    """What a refusal says, once the daemon has seen that its file changed."""
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        try:
            use()
        except Unauthorized as error:
            return str(error)
        except StoreError:
            pass
        time.sleep(0.02)
    raise AssertionError("never refused")


def test_reports_of_corrupt_blocks_are_bounded() -> None:
    """Each makes the daemon read a block: of a connection, and of all of them, only so many pass until time goes by."""
    tokens, now_s = Tokens(), [0.0]
    store = open_memory(ManualClock())
    args = {"space_id": bytes(32).hex(), "name": []}
    gate = Gate(tokens, store, lambda: now_s[0])

    def pass_until_refused() -> tuple[int, float]:
        connection = Connection(Channel(socket.socket()), 0.0)
        connection.token = tokens.find(b"")
        for count in range(limits.REPORTS_BURST + 1):
            try:
                gate.check_verb(connection, "report_corrupt", args)
            except Overloaded as error:
                connection.close()
                return count, error.retry_after_s
        raise AssertionError("never refused")

    begun = [pass_until_refused() for _ in range(6)]
    assert begun[:4] == [(limits.REPORTS_BURST_CONNECTION, 1 / limits.REPORTS_PER_S_CONNECTION)] * 4
    assert begun[4:] == [(0, 1 / limits.REPORTS_PER_S)] * 2
    now_s[0] += 0.5
    assert pass_until_refused()[0] == limits.REPORTS_PER_S / 2


def test_a_report_beyond_the_bound_reads_no_block(bench: Bench) -> None:
    """The reader is not disturbed: its block is a miss, and what it does next works."""
    worker = bench.client("worker", connections_per_node=1)
    worker.register_space(SHARED)
    name = a_chain(space_id(SHARED), 1).names[0]
    worker.put(space_id(SHARED), puts_of([name], SIZE), traffic_class=AGENT)
    (connection,) = [item for item in bench.server._connections if item.neighbour is None]
    for _ in range(limits.REPORTS_BURST_CONNECTION):
        connection.reports.take(time.monotonic() + 3600.0)  # so that no time can add any
    assert worker._report_corrupt(0, space_id(SHARED), name), "it was looked at"
    assert worker._counts["overtaken"] == 0
    assert worker.lookup(space_id(SHARED), [name]).prefix_blocks() == 1
