"""What lets a peer in, and each of its requests pass.

Owns the decision for one connection and one request, by the peer's token. Does not know the tables (``rights``), how
tokens are kept (``tokens``), or what a request does. Invariants: what a peer says of itself can only take rights away;
a token that is no longer taken lets nothing more pass; a tenant finds nothing in a space that is not provably its own,
and cannot tell another's from one that does not exist; reports of corrupt blocks, each of which makes the daemon read
one, are bounded in rate by connection and by node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol

from kvstore import control, limits, wire
from kvstore.daemon.admission import Party
from kvstore.daemon.allowance import Allowance
from kvstore.daemon.request import Connection, Request
from kvstore.daemon.rights import OPCODES, SPACED, VERBS, WRITING, Grant, Role
from kvstore.daemon.tokens import Token, Tokens
from kvstore.errors import Overloaded, SpaceUnknown, Unauthorized
from kvstore.keys import Space, SpaceId

_NOWHERE = bytes(limits.KEY_BYTES)
"""The id of a space that nobody has."""


class RegisteredSpaces(Protocol):
    """Who knows which spaces there are."""

    def space_of(self, space_id: SpaceId) -> Space | None: ...


class Gate:
    """Decides for every connection."""

    def __init__(self, tokens: Tokens, spaces: RegisteredSpaces, monotonic: Callable[[], float]) -> None:
        self._tokens = tokens
        self._spaces = spaces
        self._monotonic = monotonic
        self._reports = Allowance(limits.REPORTS_BURST, limits.REPORTS_PER_S)
        self._lock = threading.Lock()

    def admit(self, connection: Connection, hello: wire.Hello) -> None:
        """Take a peer's HELLO: what its token allows is the connection's from now on. Raises Unauthorized."""
        version = self._tokens.version
        token = self._tokens.find(hello.token)
        if token is None:
            raise Unauthorized("the token is wrong" if hello.token else "this node needs a token: give --token-file")
        tenants = token.grant.tenants
        if hello.tenant and tenants and hello.tenant not in tenants:
            raise Unauthorized("the token is another tenant's")
        connection.version, connection.token = version, token
        connection.trusted = self._is_trusted(connection.channel.peer_uid(), hello, token)
        connection.party = Party(hello.tenant or (tenants[0] if tenants else ""), id(connection))

    def _is_trusted(self, uid: int | None, hello: wire.Hello, token: Token) -> bool:
        """Whether a peer may have descriptors, in which every tenant's blocks can be seen: on this host, with a
        worker's token (where none is needed, as the daemon's own user), and not on behalf of one tenant.
        """
        if uid is None or hello.tenant or Role.WORKER not in token.grant.roles:
            return False
        return self._tokens.needed or uid == os.geteuid()

    def check(self, request: Request) -> None:
        """Let a request pass that its peer may make. Raises Unauthorized, SpaceUnknown.

        What a tenant asks of a space that is not provably its own is asked of one that nobody has, where it misses.
        """
        grant, opcode = self._grant_of(request.connection), request.header.opcode
        if opcode not in grant.opcodes:
            raise Unauthorized(grant.refusal(opcode.name, OPCODES[opcode]))
        if not grant.salts or opcode not in SPACED:
            return
        asked = SpaceId(request.body[: limits.KEY_BYTES])
        if self._reaches(grant, asked):
            return
        if opcode in WRITING:
            raise _unknown(asked)
        request.body = _NOWHERE[: len(asked)] + request.body[limits.KEY_BYTES :]

    def check_verb(self, connection: Connection, verb: str, args: control.Json) -> None:
        """As ``check``, for a control verb; one that nobody knows is left to who calls it. Raises Overloaded too."""
        grant = self._grant_of(connection)
        if verb in control.VERBS and verb not in grant.verbs:
            raise Unauthorized(grant.refusal(verb, VERBS.get(verb, frozenset())))
        if verb == "report_corrupt":
            self._bound_reports(connection)
        if not grant.salts:
            return
        if verb == "register_space":
            space = control.reading("a space", lambda: control.space_from_json(args["space"]))
            if not grant.reaches(space):
                raise Unauthorized("the space does not carry the salt of this token's tenant")
        elif "space_id" in args:
            asked = control.reading(verb, lambda: control.space_id_of(args["space_id"]))
            if not self._reaches(grant, asked):
                raise _unknown(asked)

    def _bound_reports(self, connection: Connection) -> None:
        now_s = self._monotonic()
        wait_s = connection.reports.take(now_s)
        if not wait_s:
            with self._lock:
                wait_s = self._reports.take(now_s)
        if wait_s:
            raise Overloaded("so many blocks were reported that no more are looked at for a while", wait_s)

    def _reaches(self, grant: Grant, asked: SpaceId) -> bool:
        space = self._spaces.space_of(asked)
        return space is not None and grant.reaches(space)

    def _grant_of(self, connection: Connection) -> Grant:
        """What the peer may do now. Raises Unauthorized if its token is no longer taken."""
        version = self._tokens.version
        assert connection.token is not None  # there was a HELLO
        if connection.version != version:
            token = self._tokens.known(connection.token.digest)
            if token is None:
                raise Unauthorized("this token is no longer taken")
            connection.version, connection.token = version, token
            connection.trusted = connection.trusted and Role.WORKER in token.grant.roles
        return connection.token.grant


def _unknown(asked: SpaceId) -> SpaceUnknown:
    """What a store says of a space that was never registered: the client registers it, if it may, and tries again."""
    return SpaceUnknown(f"space {asked.hex()} was never registered here: call register_space first")
