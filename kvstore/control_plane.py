"""What operators ask of a fleet: the control verbs, over all of its nodes.

Owns which nodes are asked and how their answers become one. Does not know frames, connections, or what moves payload.
Invariants: what removes or pins is acknowledged by every node, or an error names those that did not answer; what only
tells says which nodes are missing from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvstore import control, limits
from kvstore.errors import DeadlineExceeded, PolicyConflict, ProtocolError, StoreError, Unavailable
from kvstore.fleet import Fleet, first, job, raise_loud
from kvstore.keys import BlockKey, BlockName, Space, SpaceId, space_id
from kvstore.purges import (
    ByNode,
    Leftovers,
    PurgeOrder,
    PurgeReport,
    leftovers_from_json,
    order_from_json,
    order_to_json,
    report_from_json,
)
from kvstore.sightings import best_sighting, named_by_key
from kvstore.store import BlockInfo, Effect, Pin, Policy, Presence, Sighting
from kvstore.traffic import ClassRules
from kvstore.values import whole

T = TypeVar("T")


class ControlPlane:
    """The control half of a client of several nodes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def scan(
        self,
        space_id: SpaceId | None = None,
        *,
        cursor: bytes = b"",
        limit: int = limits.SCAN_PAGE_MAX,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> tuple[list[BlockInfo], bytes]:
        """One page: node after node, in key order within each. Raises Unavailable for a node that does not answer."""
        if not 1 <= limit <= limits.SCAN_PAGE_MAX:
            raise ValueError(f"a page of a scan has 1..{limits.SCAN_PAGE_MAX} blocks, not {limit}")
        ends_s = self._fleet.ends_s(deadline_s)
        node = int.from_bytes(cursor[:2], "little") if cursor else 0
        if node >= len(self._fleet.links) or len(cursor) == 1:
            raise ValueError("this cursor comes from another scan")
        inner = cursor[2:]
        while True:
            args = {"space_id": space_id.hex() if space_id else None, "cursor": inner.hex(), "limit": limit}
            result = self._fleet.control(node, "scan", args, ends_s)
            page, inner = control.reading("scan answer", lambda result=result: _page(result))  # type: ignore[misc]
            at_end = not inner and node + 1 == len(self._fleet.links)
            if inner:
                return page, node.to_bytes(2, "little") + inner
            if page or at_end:
                return page, b"" if at_end else (node + 1).to_bytes(2, "little")
            node += 1

    def spaces(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> dict[SpaceId, Space]:
        rows = [row for answer in self._fleet.control_every("spaces", {}, deadline_s).values() for row in answer]
        spaces = control.reading("spaces answer", lambda: [control.space_from_json(row) for row in rows])
        return {space_id(space): space for space in spaces}

    def delete(
        self, space_id: SpaceId, keys: Sequence[BlockKey], *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> int:
        """Purge on every node (a block may lie on an earlier owner too). Raises Unavailable unless all acknowledged."""
        return self._sum_over_keys("delete", space_id, keys, deadline_s)

    def delete_space(self, space_id: SpaceId, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> int:
        return _total(self._fleet.control_every("delete_space", {"space_id": space_id.hex()}, deadline_s))

    def purge(self, order: PurgeOrder, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> ByNode[PurgeReport]:
        answers, failures = self._fleet.control_all("purge", {"order": order_to_json(order)}, deadline_s)
        return self._by_node("purge report", report_from_json, answers, failures)

    def purges(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> list[tuple[PurgeOrder, PurgeReport]]:
        """Of every node that answers, each node's own report."""
        answers, failures = self._fleet.control_all("purges", {}, deadline_s)
        if not answers:
            raise first(failures)
        rows = [row for node in sorted(answers) for row in answers[node]]
        return control.reading(
            "purges", lambda: [(order_from_json(order), report_from_json(report)) for order, report in rows]
        )

    def leftovers(
        self, order: PurgeOrder, until_s: Mapping[str, int], *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> ByNode[Leftovers]:
        ends_s = self._fleet.ends_s(deadline_s)
        answers: dict[int, Any] = {}
        failures: dict[int, StoreError] = {}

        def ask(node: int) -> None:
            args = {"order": order_to_json(order), "until_s": until_s.get(self._fleet.name(node), order.until_s)}
            try:
                answers[node] = self._fleet.control(node, "leftovers", args, ends_s)
            except (Unavailable, DeadlineExceeded) as error:
                failures[node] = error

        others = self._fleet.run([job(ask, node) for node in range(len(self._fleet.links))], ends_s)
        raise_loud(others)
        return self._by_node("leftovers", leftovers_from_json, answers, failures)

    def _by_node(
        self,
        what: str,
        read: Callable[[Mapping[str, Any]], T],
        answers: Mapping[int, Any],
        failures: Mapping[int, StoreError],
    ) -> ByNode[T]:
        read_answers = control.reading(
            what, lambda: {self._fleet.name(node): read(answers[node]) for node in sorted(answers)}
        )
        return ByNode(read_answers, {self._fleet.name(node): str(error) for node, error in failures.items()})

    def pin(self, pins: Sequence[Pin], *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> int:
        ends_s = self._fleet.ends_s(deadline_s)
        total = 0
        for begin in range(0, len(pins), control.PINS_PER_CALL_MAX):
            rows = [control.pin_to_json(pin) for pin in pins[begin : begin + control.PINS_PER_CALL_MAX]]
            total += _total(self._fleet.control_every("pin", {"pins": rows}, self._fleet.left_s(ends_s)))
        return total

    def unpin(
        self,
        space_id: SpaceId,
        keys: Sequence[BlockKey],
        *,
        owner: str | None = None,
        holds: bool = False,
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> int:
        return self._sum_over_keys("unpin", space_id, keys, deadline_s, owner=owner, holds=holds)

    def pins(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> list[Pin]:
        rows = [row for answer in self._fleet.control_every("pins", {}, deadline_s).values() for row in answer]
        return control.reading("pins answer", lambda: [control.pin_from_json(row) for row in rows])

    def policy(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> Policy:
        """The newest policy that a node has."""
        return max(self._policies(deadline_s).values(), key=lambda policy: policy.version)

    def policy_history(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> list[Policy]:
        """The history of a node that has the newest policy."""
        answers, failures = self._fleet.control_all("policy_history", {}, deadline_s)
        if not answers:
            raise first(failures)
        histories = [
            control.reading("policy history", lambda rows=rows: [control.policy_from_json(row) for row in rows])  # type: ignore[misc]
            for rows in answers.values()
        ]
        if not all(histories):
            raise ProtocolError("a node answered a history without the policy in force")
        newest: list[Policy] = max(histories, key=lambda history: (history[-1].version, len(history)))
        return newest

    def _policies(self, deadline_s: float) -> dict[int, Policy]:
        answers, failures = self._fleet.control_all("policy", {}, deadline_s)
        if not answers:
            raise first(failures)
        return {
            node: control.reading("policy answer", lambda answer=answer: control.policy_from_json(answer))  # type: ignore[misc]
            for node, answer in answers.items()
        }

    def set_policy(
        self,
        rules: ClassRules,
        text: str,
        *,
        expected_version: int,
        apply: bool,
        author: str = "",
        deadline_s: float = limits.DEADLINE_S_DEFAULT,
    ) -> Effect:
        """Change the rules on every node that answers; one that missed an earlier change catches up with this one."""
        ends_s = self._fleet.ends_s(deadline_s)
        policies = self._policies(self._fleet.left_s(ends_s))
        newest = max(policy.version for policy in policies.values())
        if newest != expected_version:
            raise PolicyConflict(f"the policy is at version {newest}, not {expected_version}: read it again")
        effects: list[Effect] = []
        failed = {link.name: "did not answer" for at, link in enumerate(self._fleet.links) if at not in policies}
        for node, policy in policies.items():
            args = {
                "rules": rules.to_json(),
                "text": text,
                "expected_version": policy.version,
                "apply": apply,
                "author": author,
            }
            try:
                answer = self._fleet.control(node, "set_policy", args, ends_s)
                effects.append(control.reading("policy effect", lambda answer=answer: control.effect_from_json(answer)))  # type: ignore[misc]
            except (Unavailable, DeadlineExceeded) as error:
                failed[self._fleet.name(node)] = str(error)
        if not effects:
            raise Unavailable(f"no node took the policy: {failed}")
        return control.merge_effects(effects, failed)

    def sweep(self, *, apply: bool, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> Effect:
        answers, failures = self._fleet.control_all("sweep", {"apply": apply}, deadline_s)
        if not answers:
            raise first(failures)
        effects = control.reading("sweep answer", lambda: [control.effect_from_json(row) for row in answers.values()])
        return control.merge_effects(effects, {self._fleet.name(node): str(error) for node, error in failures.items()})

    def sight(
        self, space_id: SpaceId | None, names: Sequence[BlockName], *, deadline_s: float = limits.DEADLINE_S_DEFAULT
    ) -> list[Sighting]:
        """What the owners remember; which other spaces have the same tokens is asked of every node.

        Without a space nothing says who the owner is: then what any node remembers.
        """
        if len(names) > limits.BATCH_BLOCKS_MAX:
            raise ValueError(f"sight takes at most {limits.BATCH_BLOCKS_MAX} blocks, not {len(names)}")
        rows = [control.name_to_json(name) for name in names]
        args = {"space_id": None if space_id is None else space_id.hex(), "names": rows, "blocks": True}
        ends_s = self._fleet.ends_s(deadline_s)
        answers, failures = self._fleet.control_all("sight", args, deadline_s)
        seen = {
            node: control.reading("sight answer", lambda rows=rows: [control.sighting_from_json(row) for row in rows])  # type: ignore[misc]
            for node, rows in answers.items()
        }
        if any(len(rows) != len(names) for rows in seen.values()):
            raise ProtocolError("a node answered another number of blocks than asked")
        if space_id is None:
            unheard = [Sighting(Presence.UNREACHABLE, 0, 0, ())] if failures else []
            best = [best_sighting([*(rows[at] for rows in seen.values()), *unheard]) for at in range(len(names))]
            return [self._with_other_spaces(sighting, ends_s) for sighting in best]
        return [_merged_sighting(self._fleet.placement.owner(name.route), at, seen) for at, name in enumerate(names)]

    def _with_other_spaces(self, sighting: Sighting, ends_s: float) -> Sighting:
        """Once its tokens are known, by the node that has the block, the others can tell of the same tokens."""
        block, digest = sighting.block, sighting.token_digest
        if block is None or digest is None or len(self._fleet.links) == 1:
            return sighting
        named = named_by_key(block.key, digest)
        again = self.sight(block.space_id, [named], deadline_s=self._fleet.left_s(ends_s))
        return replace(sighting, other_spaces=again[0].other_spaces)

    def stats(self, *, deadline_s: float = limits.DEADLINE_S_DEFAULT) -> dict[str, Any]:
        """Sums over the nodes that answer, with each node's own under ``nodes``."""
        answers, failures = self._fleet.control_all("stats", {}, deadline_s)
        nodes: dict[str, Any] = {self._fleet.name(node): answer for node, answer in answers.items()}
        nodes |= {self._fleet.name(node): {"error": str(error)} for node, error in failures.items()}
        if not answers:
            raise first(failures)
        sums: dict[str, Any] = {}
        for answer in answers.values():
            for key, value in answer.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    sums[key] = sums.get(key, 0) + value
        return {**sums, "nodes": nodes}

    def _sum_over_keys(
        self, verb: str, space_id: SpaceId, keys: Sequence[BlockKey], deadline_s: float, **more: object
    ) -> int:
        ends_s = self._fleet.ends_s(deadline_s)
        unique = list(dict.fromkeys(keys))
        total = 0
        for begin in range(0, len(unique), limits.LOOKUP_KEYS_MAX):
            rows = [key.hex() for key in unique[begin : begin + limits.LOOKUP_KEYS_MAX]]
            args = {"space_id": space_id.hex(), "keys": rows, **more}
            total += _total(self._fleet.control_every(verb, args, self._fleet.left_s(ends_s)))
        return total


def _page(result: Any) -> tuple[list[BlockInfo], bytes]:
    return [control.info_from_json(row) for row in result["blocks"]], bytes.fromhex(result["cursor"])


def _total(answers: Mapping[int, Any]) -> int:
    return sum(control.reading("count", lambda: [whole(answer) for answer in answers.values()]))


def _merged_sighting(owner: int, at: int, seen: Mapping[int, Sequence[Sighting]]) -> Sighting:
    others = {space for rows in seen.values() for space in rows[at].other_spaces}
    if owner not in seen:
        return Sighting(Presence.UNREACHABLE, 0, 0, tuple(sorted(others)))
    mine = seen[owner][at]
    return replace(mine, other_spaces=tuple(sorted(others)))
