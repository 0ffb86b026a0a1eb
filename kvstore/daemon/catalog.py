"""The catalog: what operators said and nothing else can tell again: the policies so far, registered spaces, pins.

Owns one small file, replaced as a whole. Does not know blocks. Invariants: a reader sees the old catalog or the new
one, also after power loss; a catalog that fails its checksum stops the daemon instead of silently forgetting a policy
or a pin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.control import policy_from_json, policy_to_json
from kvstore.daemon.files import write_atomically
from kvstore.daemon.record import checksum_of
from kvstore.errors import Overloaded, VolumeError, VolumeFormat
from kvstore.keys import BlockKey, Space, SpaceId, decode_space, encode_space, space_id
from kvstore.limits import KIB, SPACES_MAX
from kvstore.purges import PurgeOrder, PurgeReport, order_from_json, order_to_json, report_from_json, report_to_json
from kvstore.store import Pin, Policy

CATALOG_VERSION = 1
HISTORY_MAX = 100
"""Earlier policies that are remembered, as far as HISTORY_BYTES_MAX (and their share of the catalog) lets them."""
HISTORY_BYTES_MAX = 256 * KIB
PURGES_MAX = 1000
"""Orders that are remembered, as far as their share of the catalog lets them; one that is not done never gives way."""

PinPlace = tuple[SpaceId, BlockKey, str]
"""Space, key and owner: what a pin is known by."""


@dataclass(frozen=True, slots=True)
class CatalogContent:
    """All of it. One pin an owner of a block. ``earlier``: policies before the one in force, oldest first.
    ``purges``: orders to leave no byte, and what was done about each, the latest last.
    """

    policy: Policy
    spaces: Mapping[SpaceId, Space] = field(default_factory=dict)
    pins: Mapping[PinPlace, Pin] = field(default_factory=dict)
    earlier: Sequence[Policy] = ()
    purges: Sequence[tuple[PurgeOrder, PurgeReport]] = ()


class Catalog:
    """The file and its present content. One writer at a time; ``content`` is replaced, never changed."""

    def __init__(self, path: Path, budget_bytes: int, content: CatalogContent) -> None:
        self._path = path
        self._budget_bytes = budget_bytes
        self.content = content

    @classmethod
    def open(cls, path: Path, budget_bytes: int, initial: Policy | None) -> Catalog:
        """Read the catalog, or begin one with the initial policy. A stored policy wins over the initial one.

        Raises VolumeError if there is neither, or the file is damaged.
        """
        try:
            content = decode_catalog(path.read_bytes())
        except FileNotFoundError:
            if initial is None:
                raise VolumeError(f"{path} does not exist and no class rules were given") from None
            catalog = cls(path, budget_bytes, CatalogContent(initial))
            catalog.save(catalog.content)
            return catalog
        except OSError as error:
            raise VolumeError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise VolumeError(
                f"{path} is damaged ({error}); `reprise store fsck --repair` sets it aside, and policy and pins must "
                "then be given again"
            ) from error
        return cls(path, budget_bytes, content)

    def save(self, content: CatalogContent) -> None:
        """Make this the content, durably. Raises Overloaded if it would not fit its share of the capacity."""
        data = encode_catalog(content)
        if len(data) > self._budget_bytes // 2 or len(content.spaces) > SPACES_MAX:
            raise Overloaded(
                f"the catalog is full ({len(content.spaces)} spaces, {len(content.pins)} pins): purge spaces, unpin, "
                "or raise the capacity",
                retry_after_s=60.0,
            )
        try:
            write_atomically(self._path, data)
        except OSError as error:
            raise VolumeError(f"{self._path} cannot be written: {error.strerror}") from error
        self.content = content

    def change_policy(self, policy: Policy) -> None:
        """Put a policy in force, and remember the one before."""
        bytes_max = min(HISTORY_BYTES_MAX, self._budget_bytes // 8)
        earlier = _latest((*self.content.earlier, self.content.policy), bytes_max)
        self.update(policy=policy, earlier=earlier)

    def note_purge(self, order: PurgeOrder, report: PurgeReport) -> None:
        """Remember an order, or how far it has come. Those that are done give way to it, the oldest first.

        Raises Overloaded if there is no room for it.
        """
        earlier = [pair for pair in self.content.purges if pair[0].purge_id != order.purge_id]
        sizes = [len(json.dumps(order_to_json(pair[0]))) for pair in (*earlier, (order, report))]
        over, over_bytes = len(sizes) - PURGES_MAX, sum(sizes) - self._budget_bytes // 8
        kept: list[tuple[PurgeOrder, PurgeReport]] = []
        for pair, size in zip(earlier, sizes, strict=False):
            if pair[1].done and (over > 0 or over_bytes > 0):
                over, over_bytes = over - 1, over_bytes - size
            else:
                kept.append(pair)
        self.update(purges=(*kept, (order, report)))

    def update(self, **changes: Any) -> None:
        """Save the content with some fields replaced."""
        self.save(replace(self.content, **changes))


def encode_catalog(content: CatalogContent) -> bytes:
    """A line with version and checksum, then the content as JSON."""
    body = json.dumps(
        {
            "policy": policy_to_json(content.policy),
            "earlier": [policy_to_json(policy) for policy in content.earlier],
            "purges": [[order_to_json(order), report_to_json(report)] for order, report in content.purges],
            "spaces": [encode_space(space).hex() for space in content.spaces.values()],
            "pins": [
                {
                    "space": pin.space_id.hex(),
                    "key": pin.key.hex(),
                    "owner": pin.owner,
                    "reason": pin.reason,
                    "until_s": pin.until_s,
                    "hold": pin.hold,
                }
                for pin in content.pins.values()
            ],
        },
        indent=1,
    ).encode()
    head = {"catalog": CATALOG_VERSION, "xxh3_64": f"{checksum_of(body):016x}"}
    return json.dumps(head).encode() + b"\n" + body + b"\n"


def decode_catalog(data: bytes) -> CatalogContent:
    """Inverse of ``encode_catalog``. Raises ValueError, KeyError or TypeError; VolumeFormat for another version."""
    first, _, body = data.partition(b"\n")
    head = json.loads(first)
    if head["catalog"] != CATALOG_VERSION:
        raise VolumeFormat(f"the catalog has version {head['catalog']}, this program reads {CATALOG_VERSION}")
    body = body.removesuffix(b"\n")
    if head["xxh3_64"] != f"{checksum_of(body):016x}":
        raise ValueError("its checksum differs")
    content = json.loads(body)
    spaces = [decode_space(bytes.fromhex(text)) for text in content["spaces"]]
    pins = [
        Pin(
            SpaceId(bytes.fromhex(row["space"])),
            BlockKey(bytes.fromhex(row["key"])),
            row["owner"],
            row["reason"],
            row["until_s"],
            row.get("hold", False),
        )
        for row in content["pins"]
    ]
    return CatalogContent(
        policy=policy_from_json(content["policy"]),
        purges=tuple((order_from_json(one), report_from_json(two)) for one, two in content.get("purges", ())),
        earlier=tuple(policy_from_json(row) for row in content.get("earlier", ())),
        spaces={space_id(space): space for space in spaces},
        pins={(pin.space_id, pin.key, pin.owner): pin for pin in pins},
    )


def _latest(policies: Sequence[Policy], bytes_max: int) -> tuple[Policy, ...]:
    """As many of the last policies as may be remembered."""
    kept: list[Policy] = []
    for policy in reversed(policies[-HISTORY_MAX:]):
        bytes_max -= len(json.dumps(policy_to_json(policy)))
        if bytes_max < 0:
            break
        kept.append(policy)
    return tuple(reversed(kept))
