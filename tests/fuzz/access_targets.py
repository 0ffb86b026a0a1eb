"""Fuzzing targets of who may speak to a daemon: the tokens file, and HELLO before a daemon that asks for a token."""

from __future__ import annotations

from kvstore import limits, wire
from kvstore.daemon.admission import Admission
from kvstore.daemon.request import SCRATCH_BYTES, Connection
from kvstore.daemon.rights import OPCODES, Role
from kvstore.daemon.session import Session
from kvstore.daemon.tokens import Tokens, decode_tokens
from kvstore.errors import ProtocolError, StoreError
from kvstore.framing import Channel
from kvstore.keys import KEY_ALGORITHM
from kvstore.testing import TEST_RULES, ManualClock, MemoryStore
from tests.fuzz.wire_targets import METRICS, Wire

TOKEN = "sixteen letters!"
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
