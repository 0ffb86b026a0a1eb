"""What the scheduler's and the workers' halves of the vLLM connector tell each other.

Owns these messages, and how a worker names blocks from one. They are pickled, so they hold plain values only; a message
names blocks by tokens, not by keys, since every rank has keys of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from kvstore.keys import Attachment as Input
from kvstore.keys import BlockName, Space, TokenChain, opaque_name
from workers.adapters.attachment import Terms
from workers.spaces import Spaces, TenantSpace

Tables = tuple[tuple[int, ...], ...]
"""Of one request, by group: the page of each of its blocks (0: none, it is out of the window)."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Whose tokens they are. ``inputs``: images and the like; ``adapter``: the digest of a LoRA adapter."""

    tokens: Sequence[int]
    inputs: tuple[Input, ...]
    terms: Terms
    adapter: bytes | None

    def space_in(self, spaces: Spaces, base: Space) -> TenantSpace:
        """The space of one rank for this tenant and adapter."""
        own = base if self.adapter is None else replace(base, adapter_digest=self.adapter)
        return spaces.of(self.terms.tenant, own)

    def chain_in(self, space: TenantSpace) -> TokenChain:
        """The names of the complete blocks in one space."""
        return TokenChain(space.id, space.space.block_tokens, self.tokens, self.inputs)


def window_name(chain: TokenChain, boundary: int) -> BlockName:
    """The name of a window that is kept, before so many blocks of a chain.

    It is a child of the block that it ends with: it lies on the same node, and who purges the prefix purges it.
    """
    last = chain.names[boundary - 1]
    name = opaque_name(chain.space_id, b"window " + chain.state_name(boundary * chain.block_tokens).key)
    return replace(name, parent=last.key, route=last.route, index=boundary)


@dataclass(frozen=True, slots=True)
class Move:
    """Pages of one request that are to be loaded or saved: those of ``blocks``, all of which lie before ``stop``.

    ``states``: boundaries, as numbers of blocks, whose windows are moved too; ``kept``: as blocks that are kept, not
    as states in the store's memory.
    """

    request_id: str
    prefix: Prefix
    tables: Tables
    blocks: Sequence[int]
    stop: int
    states: tuple[int, ...] = ()
    kept: bool = False


@dataclass(slots=True)
class Step(KVConnectorMetadata):
    """What the workers are to do beside one forward."""

    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rank(KVConnectorHandshakeMetadata):
    """How a worker introduces itself to the scheduler: its space, encoded."""

    space: bytes
