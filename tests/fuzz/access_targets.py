"""Fuzzing targets of who may speak to a daemon, and of its secrets: the tokens file, the cipher keys, HELLO before a
daemon that asks for a token, and a tenant that asks for another's blocks.
"""

from __future__ import annotations

import contextlib
import hashlib

from kvstore import limits, wire
from kvstore.daemon.admission import Admission
from kvstore.daemon.cipher import NUMBER_MAX, Keyring
from kvstore.daemon.keyring import decode_keyring
from kvstore.daemon.request import SCRATCH_BYTES, Connection
from kvstore.daemon.rights import OPCODES, Role, grant_of
from kvstore.daemon.session import Session
from kvstore.daemon.tokens import Token, Tokens, decode_tokens
from kvstore.errors import ProtocolError, StoreError
from kvstore.framing import Channel
from kvstore.keys import KEY_ALGORITHM, space_id, tenant_salt
from kvstore.store import BlockPut
from kvstore.testing import TEST_RULES, ManualClock, MemoryStore
from kvstore.traffic import TrafficClass
from tests.fuzz.wire_targets import CHAIN, METRICS, SPACE, Wire, conversation_seeds, frames_of
from tests.support.spaces import a_chain, a_space

TOKEN = "sixteen letters!"
SECRET = b"another's"
CIPHER_KEY = "00112233445566778899aabbccddeeff" * 2
OWN = a_space(tenant_salt=tenant_salt("acme"))
_TENANT = Tokens([Token(hashlib.sha256(TOKEN.encode()).digest(), grant_of(["tenant:acme"]))])
_TENANT_HELLO = wire.encode_frame(
    wire.Opcode.HELLO, 1, wire.encode_hello(wire.Hello(wire.VERSION, KEY_ALGORITHM, TOKEN.encode(), ""))
)
_SESSION = Session(
    MemoryStore(ManualClock(), TEST_RULES), Admission(), METRICS, "node", Tokens.open(TOKEN, None), lambda: 0.0
)


def tokens(data: bytes) -> None:
    """Bytes of a tokens file: tokens with roles that are within the table, or a ValueError."""
    try:
        found, _ = decode_tokens(data)
    except ValueError:
        return
    assert 1 <= len(found) <= limits.TOKENS_MAX
    for token in found:
        grant = token.grant
        assert len(token.digest) == 32
        assert grant.roles
        assert bool(grant.salts) == (grant.roles == {Role.TENANT})
        assert all(OPCODES[opcode] & grant.roles for opcode in grant.opcodes)


def tokens_seeds() -> list[bytes]:
    digest = "00112233445566778899aabbccddeeff" * 2
    rows = [
        f'token = "{TOKEN}"\nroles = ["worker", "operator"]',
        f'token_sha256 = "{digest}"\nroles = ["tenant:acme", "tenant:4:acme/5:alice"]',
        f'token_sha256 = "{digest}"\nroles = ["reader"]',
    ]
    return [f"[[tokens]]\n{row}\n".encode() for row in rows] + [b"tokens = [[1]]", b"[tokens]\nroles = []"]


def keyring(data: bytes) -> None:
    """Bytes of a file of cipher keys: keys of slots that a codec byte has room for, the last one the highest; or a
    ValueError, which tells no key.
    """
    found, told = Keyring(), ""
    try:
        found = decode_keyring(data)
    except ValueError as error:
        told = str(error)
    assert CIPHER_KEY not in told
    for salt, keys in (*found.own.items(), (None, found.default)):
        slots = [key.slot for key in keys]
        assert slots == sorted(set(slots))
        assert all(1 <= slot - 32 * (salt is None) <= NUMBER_MAX for slot in slots)
        assert found.writing(salt) == (keys[-1] if keys else None)


def keyring_seeds() -> list[bytes]:
    key = f'key = "{CIPHER_KEY}"'
    rows = [f'tenant = "acme"\nnumber = 1\n{key}', f"number = 30\n{key}", f'tenant = "acme"\nnumber = 2\n{key}']
    return [f"[[keys]]\n{row}\n".encode() for row in rows] + [
        b"keys = []",
        "".join(f"[[keys]]\n{row}\n" for row in rows).encode(),
        f"keys = {CIPHER_KEY}".encode(),
    ]


def trespass(data: bytes) -> None:
    """Frames of a tenant, to a daemon that keeps another's blocks: none of their bytes reaches it, none is changed."""
    store = MemoryStore(ManualClock(), capacity_bytes=limits.MIB, state_pool_bytes=64 * limits.KIB)
    for space, payload in ((a_space(), SECRET), (OWN, b"8 bytes!")):
        chain = a_chain(store.register_space(space), 3)
        store.put(chain.space_id, [BlockPut(name, 4, payload) for name in chain.names], traffic_class=TrafficClass(1))
        store.put_state(chain.space_id, chain.state_name(5), payload)
    before = store.scan(SPACE)[0]
    peer = Wire(_TENANT_HELLO + frames_of(data))
    peer.read = []
    session = Session(store, Admission(), METRICS, "node", _TENANT, lambda: 0.0)
    connection = Connection(Channel(peer, lambda: 0.0), 30.0)  # type: ignore[arg-type]
    assert session.greet(connection)
    with contextlib.suppress(StoreError):
        while session.step(connection, 10.0, 10.0):
            pass
    connection.close()
    assert SECRET not in b"".join(peer.read)
    assert store.scan(SPACE)[0] == before
    assert len(store.lookup(SPACE, CHAIN.names, states=True).states) == 1
    assert not METRICS.registry.get_sample_value("reprise_store_errors_total", {"error": "InternalError"})


def trespass_seeds() -> list[bytes]:
    """What is asked of another's space, and the same of the tenant's own."""
    foreign = conversation_seeds()
    return foreign + [data.replace(SPACE, space_id(OWN)) for data in foreign if SPACE in data]


def greeting(data: bytes) -> None:
    """A body of HELLO: whoever does not name the token is sent away, and nothing large is made room for."""
    peer = Wire(wire.encode_frame(wire.Opcode.HELLO, 1, data[: wire.HELLO_BODY_BYTES_MAX]))
    connection = Connection(Channel(peer, lambda: 0.0), 30.0)  # type: ignore[arg-type]
    try:
        entered = _SESSION.greet(connection)
    except StoreError:
        entered = False
    connection.close()
    try:
        hello = wire.decode_hello(data)
    except ProtocolError:
        assert not entered
        return
    right = (hello.protocol, hello.key_algorithm, hello.token) == (wire.VERSION, KEY_ALGORITHM, TOKEN.encode())
    assert entered == right
    assert (connection.token is not None) == right
    assert peer.allocated_max <= SCRATCH_BYTES


def greeting_seeds() -> list[bytes]:
    def hello(token: str, tenant: str = "", version: int = wire.VERSION, algorithm: str = KEY_ALGORITHM) -> bytes:
        return wire.encode_hello(wire.Hello(version, algorithm, token.encode(), tenant))

    return [
        hello(TOKEN),
        hello(TOKEN, "acme"),
        hello(""),
        hello("sixteen letter!!"),
        hello(TOKEN, version=1),
        hello(TOKEN, algorithm="?"),
    ]
