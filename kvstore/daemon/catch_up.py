"""What a node missed while it was down: purges that its peers carried out.

Owns the question to the peers, before the node serves anybody. Does not know how a purge is carried out. Invariant: a
node that could ask a peer serves nothing that the peer has purged; one that could ask nobody says so in its log, and
serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from kvstore.client import StoreClient
from kvstore.errors import StoreError
from kvstore.purges import ByNode, PurgeOrder, PurgeReport

PEER_S_MAX = 10.0
"""How long one peer is waited for."""
PURGE_S_MAX = 3600.0

log = logging.getLogger(__name__)


class Purging(Protocol):
    """What is asked of the node itself."""

    def purge(self, order: PurgeOrder, *, deadline_s: float = ...) -> ByNode[PurgeReport]: ...

    def purges(self, *, deadline_s: float = ...) -> list[tuple[PurgeOrder, PurgeReport]]: ...


def catch_up(node: Purging, peers: Sequence[str], token: str | None) -> int:
    """Carry out what the peers have been ordered and this node has not; how many orders that was.

    Raises StoreError if an order cannot be carried out: the node must not serve then.
    """
    missed: dict[str, PurgeOrder] = {}
    answered = 0
    for peer in peers:
        try:
            orders = _orders_of(peer, token)
        except (StoreError, ValueError) as error:
            log.warning("peer_not_asked peer=%s problem=%s", peer, error)
            continue
        answered += 1
        missed |= {order.purge_id: order for order, _ in orders}
    if peers and not answered:
        log.error("no_peer_answered peers=%d: purges that this node missed are not known", len(peers))
    for order, _ in node.purges():
        missed.pop(order.purge_id, None)
    for order in missed.values():
        log.info("purge_missed id=%s: carried out before serving", order.purge_id)
        node.purge(order, deadline_s=PURGE_S_MAX)
    return len(missed)


def _orders_of(peer: str, token: str | None) -> list[tuple[PurgeOrder, PurgeReport]]:
    client = StoreClient.connect([peer], token=token, same_host=False)
    try:
        return client.purges(deadline_s=PEER_S_MAX)
    finally:
        client.close()
