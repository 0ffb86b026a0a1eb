"""Who may do what: every message and control verb, asked under every role, over a real socket."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore import control, sharing, wire
from kvstore.arena import Arena
from kvstore.daemon.rights import OPCODES, VERBS, Role, grant_of
from kvstore.daemon.server import Server
from kvstore.daemon.tokens import Tokens
from kvstore.errors import StoreError, Unauthorized
from kvstore.framing import parse_address
from kvstore.keys import StateName, encode_space, space_id, tenant_salt
from kvstore.link import Call, NodeLink, new_hello
from kvstore.purges import PurgeOrder, order_to_json
from kvstore.testing import TEST_RULES, ManualClock
from kvstore.traffic import AGENT
from kvstore.wire import Opcode
from tests.support.spaces import a_chain, a_space
from tests.support.stores import open_node, served, short_dir

W, R, P, T = Role.WORKER, Role.READER, Role.OPERATOR, Role.TENANT

MAY: dict[str, set[Role]] = {
    "LOOKUP": {W, R, P, T},
    "GET": {W, R, P, T},
    "GET_STATE": {W, R, P, T},
    "PUT": {W, T},
    "TOUCH": {W, T},
    "PUT_STATE": {W, T},
    "SHARE": {W, R, P, T},
    "EXTENTS": {W},
    "RELEASE": {W},
    "PUT_LOCAL": {W},
    "CONFIRM": {W, T},
    "register_space": {W, T},
    "report_corrupt": {W, R, P, T},
    "policy": {W, R, P, T},
    "scan": {P},
    "spaces": {P},
    "delete": {P},
    "delete_space": {P},
    "pin": {P},
    "unpin": {P},
    "pins": {P},
    "policy_history": {P},
    "set_policy": {P},
    "purge": {P},
    "purges": {P},
    "leftovers": {P},
    "sweep": {P},
    "sight": {P},
    "stats": {P},
}
"""Written once more, so that a right is not given by a slip in the daemon's own table."""

TOKENS = {role: f"the token of a {role}, at length" for role in Role}
SPACE = a_space(tenant_salt=tenant_salt("acme"))
SPACE_ID = space_id(SPACE)
NAME = a_chain(SPACE_ID, 1).names[0]
ORDER = PurgeOrder("0" * 32, (SPACE_ID,), None, 0)
STATE = StateName(NAME.key, NAME.key, NAME.key, 4, 0)


def tokens_file(folder: Path) -> Path:
    path = folder / "tokens.toml"
    rows = [
        f'[[tokens]]\ntoken = "{token}"\nroles = ["{role}{":acme" if role is T else ""}"]\n'
        for role, token in TOKENS.items()
    ]
    path.write_text("\n".join(rows))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_dir() as folder:
        node = open_node(folder / "data", ManualClock())
        node.register_space(SPACE)
        with closing(node), served(node, folder, tokens=Tokens.open(None, tokens_file(folder))) as server:
            yield server


def requests() -> dict[str, Call]:
    """A request of every kind that its decoder takes."""
    put = wire.encode_put(SPACE_ID, AGENT, "os", [])
    get = wire.encode_get(SPACE_ID, [NAME], [8])
    state = wire.encode_state(SPACE_ID, STATE)
    calls = {
        "LOOKUP": Call(Opcode.LOOKUP, wire.encode_lookup(SPACE_ID, [NAME], states=True)),
        "GET": Call(Opcode.GET, get),
        "GET_STATE": Call(Opcode.GET_STATE, state),
        "PUT": Call(Opcode.PUT, put),
        "TOUCH": Call(Opcode.TOUCH, wire.encode_touch(SPACE_ID, AGENT, [NAME])),
        "PUT_STATE": Call(Opcode.PUT_STATE, state, (b"state",), 5),
        "SHARE": Call(Opcode.SHARE, sharing.encode_share(4096)),
        "EXTENTS": Call(Opcode.EXTENTS, get),
        "RELEASE": Call(Opcode.RELEASE, b""),
        "PUT_LOCAL": Call(Opcode.PUT_LOCAL, sharing.encode_put_local([], put)),
        "CONFIRM": Call(Opcode.CONFIRM, wire.encode_confirm(SPACE_ID, [NAME.key])),
    }
    space, key, name = SPACE_ID.hex(), NAME.key.hex(), control.name_to_json(NAME)
    args: dict[str, dict[str, Any]] = {
        "register_space": {"space": encode_space(SPACE).hex()},
        "report_corrupt": {"space_id": space, "name": name},
        "scan": {"space_id": space, "cursor": "", "limit": 1},
        "delete": {"space_id": space, "keys": [key]},
        "delete_space": {"space_id": space},
        "pin": {"pins": []},
        "unpin": {"space_id": space, "keys": []},
        "set_policy": {"rules": TEST_RULES.to_json(), "text": "", "expected_version": 1, "apply": False},
        "purge": {"order": order_to_json(ORDER)},
        "leftovers": {"order": order_to_json(ORDER), "until_s": 0},
        "sweep": {"apply": False},
        "sight": {"space_id": space, "names": [name]},
    }
    for verb in sorted(control.VERBS):
        calls[verb] = Call(Opcode.CONTROL, control.encode_request(verb, args.get(verb, {})))
    return calls


def test_every_message_and_verb_has_an_entry() -> None:
    """A new one that nobody thought about is allowed to nobody, and fails here."""
    assert set(OPCODES) == set(Opcode)
    assert set(VERBS) == control.VERBS
    spoken = {opcode.name for opcode in Opcode} - {"HELLO", "CONTROL", "ERROR"}
    assert set(MAY) == set(requests()) == spoken | control.VERBS


@pytest.mark.parametrize("role", list(Role))
def test_a_role_may_what_is_written_and_nothing_else(server: Server, role: Role) -> None:
    """What a role may not is refused with the role that may, on a connection that stays usable."""
    address = parse_address(server.addresses[1])
    for what, call in requests().items():
        with closing(NodeLink(address, new_hello(TOKENS[role], None), 1, same_host=False)) as link:
            refusal = said(link, call)
            assert (refusal is None) == (role in MAY[what]), (what, refusal)
            if refusal is not None:
                assert f"{what} needs a token with the role" in refusal
                assert all(needed in refusal.partition(";")[0] for needed in MAY[what])
                assert refusal.endswith(f"this one has {role}")
                assert said(link, Call(Opcode.LOOKUP, wire.encode_lookup(SPACE_ID, [NAME], states=False))) is None


def said(link: NodeLink, call: Call) -> str | None:
    """Why a request was refused; None if it was let pass, whatever became of it then."""
    ends_s, scratch = time.monotonic() + 5, memoryview(bytearray(65536))

    def talk(hold: Any) -> None:
        if call.opcode is not Opcode.SHARE:
            hold.ask(call, lambda channel, header, body: channel.discard(header.payload_bytes, scratch))
            return
        arena, fd = Arena.create(4096)
        try:
            hold.take(call.opcode, hold.send(call, [fd]), lambda channel, header, body: None)
        finally:
            os.close(fd)
            arena.close()

    try:
        link.converse(call, ends_s, talk)
    except Unauthorized as error:
        return str(error)
    except StoreError:
        pass
    return None


def test_only_a_worker_is_lent_segments(server: Server) -> None:
    """Whoever holds a descriptor sees every tenant's blocks: all other roles are served through the socket."""
    for role, token in TOKENS.items():
        with closing(NodeLink(parse_address(server.addresses[1]), new_hello(token, None), 1)) as link:
            call = Call(Opcode.GET, b"", bulk=True)
            shared = link.converse(call, time.monotonic() + 5, lambda hold: hold.peer is not None)
            assert shared == (role is Role.WORKER), role


@pytest.mark.parametrize(
    "roles",
    [[], ["admin"], ["worker:acme"], ["tenant"], ["tenant:"], ["tenant:acme", "reader"], [""], ["tenant:" + "x" * 513]],
)
def test_what_is_no_role_is_refused(roles: list[str]) -> None:
    """Also a tenant beside another role, which would lift its bounds."""
    with pytest.raises(ValueError, match=r"role|tenant"):
        grant_of(roles)
