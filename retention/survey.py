"""What the nodes hold together, node by node, so that one that is down hides no other.

Owns the merging of nodes' answers. Does not show anything. Invariant: a node that did not answer is named, and nothing
of it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import StoreError
from kvstore.keys import Space, SpaceId
from kvstore.purges import ByNode
from kvstore.store import Clock, Policy, Store
from retention.planner import Totals, add_totals, summarise
from retention.purge import match_space
from retention.scan import scan_blocks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PolicySurvey:
    """``history``: of a node that has the newest policy, the one in force last. ``behind``: the version of each node
    that has an older one, and catches up with the next change. ``nodes_failed``: as in ``Survey``.
    """

    history: tuple[Policy, ...]
    behind: Mapping[str, int]
    nodes_failed: Mapping[str, str]

    @property
    def in_force(self) -> Policy:
        """The newest policy."""
        return self.history[-1]


@dataclass(frozen=True, slots=True)
class Survey:
    """``policy``: the newest one met. ``nodes_failed``: error by name of each node that did not answer.

    ``without_key``: blocks on all nodes that no cipher key in force reads, whatever their space.
    """

    policy: Policy
    spaces: Mapping[SpaceId, Space]
    totals: Totals
    nodes_failed: Mapping[str, str]
    without_key: int = 0


def ask_nodes(nodes: Mapping[str, Store], question: Callable[[Store], T]) -> ByNode[T]:
    """What each node answers, and why others did not. Raises the error of one if none answers."""
    answers: dict[str, T] = {}
    errors: dict[str, StoreError] = {}
    for name, node in nodes.items():
        try:
            answers[name] = question(node)
        except StoreError as error:
            errors[name] = error
    if not answers:
        raise next(iter(errors.values()))
    return ByNode(answers, {name: f"{type(error).__name__}: {error}" for name, error in errors.items()})


def survey_policies(nodes: Mapping[str, Store], *, deadline_s: float) -> PolicySurvey:
    """Which policies the nodes have had. Raises the error of one if none answers."""
    asked = ask_nodes(nodes, lambda node: node.policy_history(deadline_s=deadline_s))
    newest = max(asked.answers.values(), key=lambda history: (history[-1].version, len(history)))
    versions = {name: history[-1].version for name, history in asked.answers.items()}
    behind = {name: version for name, version in versions.items() if version < newest[-1].version}
    return PolicySurvey(tuple(newest), behind, asked.failed)


def survey_nodes(nodes: Mapping[str, Store], *, space: str | None, clock: Clock, deadline_s: float) -> Survey:
    """Usage per class and space over all nodes, each seen through its own policy; of one ``space`` (id digits) or all.

    ``deadline_s`` is for each node. Raises the node's error when none answers.
    """
    asked = ask_nodes(nodes, lambda node: (node.spaces(deadline_s=deadline_s), node.policy(deadline_s=deadline_s)))
    spaces: dict[SpaceId, Space] = {}
    for known, _ in asked.answers.values():
        spaces |= known
    policies = {name: policy for name, (_, policy) in asked.answers.items()}
    failed = dict(asked.failed)
    only = match_space(space, spaces) if space else None
    totals: Totals = {}
    without_key = 0
    for name, policy in policies.items():
        try:
            blocks = scan_blocks(nodes[name], only, deadline_s=deadline_s)
            totals = add_totals(totals, summarise(blocks, policy.rules, clock.now_s()))
            without_key += int(nodes[name].stats(deadline_s=deadline_s).get("blocks_without_key", 0))
        except StoreError as error:
            failed[name] = f"{type(error).__name__}: {error}"
    newest = max(policies.values(), key=lambda policy: policy.version)
    return Survey(newest, spaces, totals, failed, without_key)
