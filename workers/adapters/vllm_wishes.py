"""What a request to vLLM says of itself, and what of that is not understood.

Owns the names that may be said. Does not know requests otherwise, nor the store. Invariants: a request of which
anything is not understood is not cached at all, since a tenant that is misspelt is not nobody; what is wrong is told in
the log once for each name, as clients may write any number of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.adapters.attachment import CACHE_WISH, CLASS_WISH, TENANT_WISH, Settings, Terms, wishes_of

log = logging.getLogger(__name__)

OURS = frozenset({TENANT_WISH, CLASS_WISH, CACHE_WISH})
OF_OTHERS = frozenset({
    "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_block_ids",
    "remote_num_tokens", "remote_host", "remote_port", "remote_notify_port", "remote_handshake_port",
    "remote_bootstrap_addr", "remote_dp_rank", "remote_dp_size", "tp_size", "pp_size", "transfer_id",
})  # fmt: skip
"""What vLLM's own connectors, beside which ours may run in a MultiConnector, say in the same place."""
NAMES_TOLD_MAX = 64
NAME_SHOWN = 48


@dataclass(frozen=True, slots=True)
class Wishes:
    """``terms``: None where the request is not to be cached, or (``unclear``: what of it) was not understood."""

    terms: Terms | None
    unclear: tuple[str, ...] = ()


def read_wishes(settings: Settings, parameters: Any, hints: Any) -> Wishes:
    """Of a request's ``kv_transfer_params`` and KV hints, as vLLM has them: whatever a client wrote."""
    if not isinstance(parameters, Mapping | None):
        return Wishes(None, ("kv_transfer_params",))
    wishes = wishes_of(parameters, hints)
    unclear = tuple(str(name)[:NAME_SHOWN] for name, value in wishes.items() if not _is_clear(settings, name, value))
    return Wishes(None, unclear) if unclear else Wishes(settings.terms(wishes))


def _is_clear(settings: Settings, name: Any, value: Any) -> bool:
    if name not in OURS:
        return name in OF_OTHERS
    if name == CACHE_WISH:
        return value in ("on", "off")
    # No tenant is said by silence: what null and "" mean, where the operator named one for those, is a guess.
    return not (name == TENANT_WISH and not value) and settings.terms({name: value}) is not None


class Complaints:
    """What was not understood, told once for each name."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self.count = 0

    def add(self, unclear: tuple[str, ...]) -> None:
        """Count a request, and tell what is new of it."""
        self.count += 1
        for name in unclear:
            if name not in self._told and len(self._told) < NAMES_TOLD_MAX:
                self._told.add(name)
                known = ", ".join(sorted(OURS))
                log.warning(
                    "reprise: parameter_not_understood name=%r known=%s: it or its value; such requests are computed, "
                    "neither looked up nor stored, and counted",
                    name,
                    known,
                )
