"""What the nodes hold together, node by node, so that one that is down hides no other.

Owns the merging of nodes' answers. Does not show anything. Invariant: a node that did not answer is named, and nothing
of it is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.errors import StoreError
from kvstore.keys import Space, SpaceId
from kvstore.store import Clock, Policy, Store
from retention.planner import Totals, add_totals, summarise
from retention.purge import match_space
from retention.scan import scan_blocks


@dataclass(frozen=True, slots=True)
class Survey:
    """``policy``: the newest one met. ``nodes_failed``: error by name of each node that did not answer."""

    policy: Policy
    spaces: Mapping[SpaceId, Space]
    totals: Totals
    nodes_failed: Mapping[str, str]


def survey_nodes(nodes: Mapping[str, Store], *, space: str | None, clock: Clock, deadline_s: float) -> Survey:
    """Usage per class and space over all nodes, each seen through its own policy; of one ``space`` (id digits) or all.

    ``deadline_s`` is for each node. Raises the node's error when none answers.
    """
    policies: dict[str, Policy] = {}
    spaces: dict[SpaceId, Space] = {}
    failed: dict[str, str] = {}
    errors: list[StoreError] = []
    for name, node in nodes.items():
        try:
            spaces |= node.spaces(deadline_s=deadline_s)
            policies[name] = node.policy(deadline_s=deadline_s)
        except StoreError as error:
            errors.append(error)
            failed[name] = f"{type(error).__name__}: {error}"
    if not policies:
        raise errors[0]
    only = match_space(space, spaces) if space else None
    totals: Totals = {}
    for name, policy in policies.items():
        try:
            blocks = scan_blocks(nodes[name], only, deadline_s=deadline_s)
            totals = add_totals(totals, summarise(blocks, policy.rules, clock.now_s()))
        except StoreError as error:
            failed[name] = f"{type(error).__name__}: {error}"
    newest = max(policies.values(), key=lambda policy: policy.version)
    return Survey(newest, spaces, totals, failed)
