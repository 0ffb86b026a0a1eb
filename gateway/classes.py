"""The names of traffic classes that clients may use.

Owns the table in force: the built-in classes, the configured ones, and those of the store's policy when a store is
named. Does not know what a class means. Invariant: a store that does not answer leaves the last table as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from kvstore.errors import StoreError
from kvstore.store import Policy
from kvstore.traffic import TrafficClass

POLICY_S_MAX = 5.0
REFRESH_S = 30.0
RETRY_S = 2.0


class PolicySource(Protocol):
    """What is used of a store."""

    def policy(self, *, deadline_s: float = ...) -> Policy: ...

    def close(self) -> None: ...


class ClassNames:
    """Names to bytes, replaced as a whole."""

    def __init__(self, fixed: Mapping[str, TrafficClass]) -> None:
        self._fixed = dict(fixed)
        self.names: Mapping[str, TrafficClass] = dict(fixed)

    def name_of(self, traffic_class: int) -> str:
        """The name of a byte, for logs and metrics."""
        return next((name for name, byte in self.names.items() if byte == traffic_class), f"class-{traffic_class}")

    def adopt(self, policy: Policy) -> None:
        """Take the names of a policy; configured names stay."""
        self.names = {rule.name: rule.class_byte for rule in policy.rules.rules} | self._fixed

    async def follow(self, source: PolicySource) -> None:
        """Read the store's policy now and then, until cancelled. The store's calls block, so they run on a thread."""
        while True:
            try:
                self.adopt(await asyncio.to_thread(source.policy, deadline_s=POLICY_S_MAX))
                await asyncio.sleep(REFRESH_S)
            except StoreError:
                await asyncio.sleep(RETRY_S)
