"""Who may do what: the roles that a token can have, and which of them may send which message.

Owns the one table of opcodes and control verbs by role. Does not know tokens, sockets or blocks. Invariants: a role
comes from the daemon's tokens, never from what a peer says of itself; what is in neither table is allowed to nobody; a
tenant's grant reaches only registered spaces that carry the salt of one of its names, which the space's id proves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.keys import Space, tenant_salt
from kvstore.wire import Opcode


class Role(StrEnum):
    """What a token's bearer is to the store."""

    WORKER = "worker"
    """The data plane of every space; on the same host also descriptors, in which every tenant's blocks can be seen."""
    READER = "reader"
    """Look-ups and gets in every space, over the socket."""
    OPERATOR = "operator"
    """The control plane, and what a reader may."""
    TENANT = "tenant"
    """The data plane, over the socket, of spaces that carry the salt of one of the grant's tenants."""


_ALL = frozenset(Role)
_WRITERS = frozenset({Role.WORKER, Role.TENANT})
_WORKER = frozenset({Role.WORKER})
_OPERATOR = frozenset({Role.OPERATOR})

OPCODES: Mapping[Opcode, frozenset[Role]] = {
    Opcode.HELLO: _ALL,
    Opcode.LOOKUP: _ALL,
    Opcode.GET: _ALL,
    Opcode.PUT: _WRITERS,
    Opcode.TOUCH: _WRITERS,
    Opcode.PUT_STATE: _WRITERS,
    Opcode.GET_STATE: _ALL,
    Opcode.CONTROL: _ALL,  # the verb decides
    Opcode.SHARE: _ALL,  # anyone may ask; it is granted to workers
    Opcode.EXTENTS: _WORKER,
    Opcode.RELEASE: _WORKER,
    Opcode.PUT_LOCAL: _WORKER,
    Opcode.CONFIRM: _WRITERS,
    Opcode.ERROR: frozenset(),
}
"""Who may send a frame."""

SPACED = frozenset(
    {Opcode.LOOKUP, Opcode.GET, Opcode.PUT, Opcode.TOUCH, Opcode.PUT_STATE, Opcode.GET_STATE, Opcode.CONFIRM}
)
"""Messages of one space, whose id they begin with; what else names a space, a tenant may not send."""

WRITING = frozenset({Opcode.PUT, Opcode.PUT_STATE})
"""Those that need the space to be registered."""

VERBS: Mapping[str, frozenset[Role]] = {
    "register_space": _WRITERS,
    "report_corrupt": _ALL,  # a part of getting; bounded in rate
    "policy": _ALL,  # the gateway asks which classes there are
    "scan": _OPERATOR,
    "spaces": _OPERATOR,
    "delete": _OPERATOR,
    "delete_space": _OPERATOR,
    "pin": _OPERATOR,
    "unpin": _OPERATOR,
    "pins": _OPERATOR,
    "policy_history": _OPERATOR,
    "set_policy": _OPERATOR,
    "purge": _OPERATOR,
    "purges": _OPERATOR,
    "leftovers": _OPERATOR,
    "sweep": _OPERATOR,
    "sight": _OPERATOR,
    "stats": _OPERATOR,
}
"""Who may call a control verb."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What one token allows. ``tenants``: the names that it is bound to, ``salts`` theirs; empty: bound to none."""

    roles: frozenset[Role]
    tenants: tuple[str, ...]
    salts: frozenset[bytes]
    opcodes: frozenset[Opcode]
    verbs: frozenset[str]

    def reaches(self, space: Space) -> bool:
        """Whether blocks of this space may be seen and stored at all."""
        return not self.salts or space.tenant_salt in self.salts

    def refusal(self, what: str, allowed: Iterable[Role]) -> str:
        """One sentence: what was asked, whose it is, and what this token is."""
        needed = " or ".join(sorted(allowed)) or "none"
        return f"{what} needs a token with the role {needed}; this one has {', '.join(sorted(self.roles))}"


def grant_of(texts: Sequence[str]) -> Grant:
    """The grant of roles as people write them: ``worker``, ``reader``, ``operator``, ``tenant:NAME``.

    Raises ValueError for anything else, and for a tenant beside another role: the other would lift its bounds.
    """
    roles: set[Role] = set()
    tenants: list[str] = []
    for text in texts:
        name, colon, tenant = text.partition(":")
        if name not in frozenset(Role) or bool(colon) != (name == Role.TENANT) or (colon and not tenant):
            raise ValueError(f"{text!r} is no role: give worker, reader, operator or tenant:NAME")
        roles.add(Role(name))
        if colon:
            tenants.append(tenant)
    if not roles:
        raise ValueError("a token needs at least one role")
    if tenants and len(roles) > 1:
        raise ValueError("a token of a tenant has no other role: give the others a token of their own")
    return Grant(
        roles=frozenset(roles),
        tenants=tuple(tenants),
        salts=frozenset(map(tenant_salt, tenants)),
        opcodes=frozenset(opcode for opcode, allowed in OPCODES.items() if allowed & roles),
        verbs=frozenset(verb for verb, allowed in VERBS.items() if allowed & roles),
    )


EVERYTHING = grant_of((Role.WORKER, Role.OPERATOR))
"""What a daemon's single token allows, and what anybody may where there is no token at all."""
