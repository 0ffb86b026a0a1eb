"""The spaces that a worker or an engine reads and writes: one a tenant, made from the model's own, registered once.

Owns the salt's way into the space and the memory of what is registered. Does not know tokens or tensors. Thread-safe.
Bound: ``TENANTS_MAX`` spaces are remembered; the least recently used is forgotten (and registered again when it comes
back, which is idempotent). Fidelity does not enter a space: provenance flags keep exact and approximate apart.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from kvstore.keys import Space, SpaceId, space_id, tenant_salt
from kvstore.store import Store

TENANTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class TenantSpace:
    """A space and its id."""

    space: Space
    id: SpaceId


class Spaces:
    """Spaces by tenant. ``store`` is told of a space before the first put into it."""

    def __init__(self, base: Space, store: Store) -> None:
        self._base = base
        self._store = store
        self._by_tenant: OrderedDict[tuple[str | None, Space], TenantSpace] = OrderedDict()
        self._registered: OrderedDict[SpaceId, None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def base(self) -> Space:
        """The space of all who have no tenant (unless the worker was given another salt)."""
        return self._base

    def of(self, tenant: str | None, base: Space | None = None) -> TenantSpace:
        """A tenant's space; None: the shared one. Raises ValueError for a name that is too long.

        ``base``: another than this model's own, such as of another rank, or with an adapter's digest.
        """
        base = base or self._base
        with self._lock:
            known = self._by_tenant.get((tenant, base))
            if known is None:
                space = base if tenant is None else replace(base, tenant_salt=tenant_salt(tenant))
                known = self._by_tenant[tenant, base] = TenantSpace(space, space_id(space))
            self._by_tenant.move_to_end((tenant, base))
            while len(self._by_tenant) > TENANTS_MAX:
                self._by_tenant.popitem(last=False)
            return known

    def ensure_registered(self, wanted: TenantSpace, *, deadline_s: float) -> None:
        """Register with the store unless that was done before. Raises StoreError; then it is tried again next time."""
        with self._lock:
            if wanted.id in self._registered:
                self._registered.move_to_end(wanted.id)
                return
        self._store.register_space(wanted.space, deadline_s=deadline_s)
        with self._lock:
            self._registered[wanted.id] = None
            while len(self._registered) > TENANTS_MAX:
                self._registered.popitem(last=False)

    def forget_registration(self, wanted: TenantSpace) -> None:
        """The store said that it does not know the space (its data was wiped): register again next time."""
        with self._lock:
            self._registered.pop(wanted.id, None)
