"""What a request to vLLM says of itself, and what of that is not understood.

Owns the names that may be said. Does not know requests otherwise, nor the store. Invariants: a request of which
anything is not understood is not cached at all, since a tenant that is misspelt is not nobody; what is wrong is told in
the log once for each name and value, shortened and so many times at most, as clients may write any number of them.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.traffic import CLASS_MAX, OPERATOR_CLASS_MIN
from workers.adapters.attachment import CACHE_WISH, CLASS_WISH, TENANT_WISH, Settings, Terms, wishes_of

log = logging.getLogger(__name__)

OURS = frozenset({TENANT_WISH, CLASS_WISH, CACHE_WISH})
OF_OTHERS = frozenset({
    "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_block_ids",
    "remote_num_tokens", "remote_host", "remote_port", "remote_notify_port", "remote_handshake_port",
    "remote_bootstrap_addr", "remote_dp_rank", "remote_dp_size", "tp_size", "pp_size", "transfer_id",
})  # fmt: skip
"""What vLLM's own connectors, beside which ours may run in a MultiConnector, say in the same place."""
TOLD_MAX = 64
NAME_SHOWN = 48
VALUE_SHOWN = 48
EXPECTED_SHOWN = 400
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, VALUE_SHOWN, VALUE_SHOWN


@dataclass(frozen=True, slots=True)
class Unclear:
    """A name, or its value, that is not understood, both shortened; and what would be."""

    name: str
    value: str
    expected: str

    def __str__(self) -> str:
        return f"{self.name!r} was {self.value}, expected is {self.expected}"


@dataclass(frozen=True, slots=True)
class Wishes:
    """``terms``: None where the request is not to be cached, or (``unclear``: what of it) was not understood."""

    terms: Terms | None
    unclear: tuple[Unclear, ...] = ()


def read_wishes(settings: Settings, parameters: Any, hints: Any) -> Wishes:
    """Of a request's ``kv_transfer_params`` and KV hints, as vLLM has them: whatever a client wrote."""
    if not isinstance(parameters, Mapping | None):
        return Wishes(None, (Unclear("kv_transfer_params", _shown(parameters), "an object"),))
    wishes = wishes_of(parameters, hints)
    unclear = tuple(
        Unclear(str(name)[:NAME_SHOWN], _shown(value), _expected(settings, name)[:EXPECTED_SHOWN])
        for name, value in wishes.items()
        if not _is_clear(settings, name, value)
    )
    return Wishes(None, unclear) if unclear else Wishes(settings.terms(wishes))


def _is_clear(settings: Settings, name: Any, value: Any) -> bool:
    if name not in OURS:
        return name in OF_OTHERS
    if name == CACHE_WISH:
        return value in ("on", "off")
    # No tenant is said by silence: what null and "" mean, where the operator named one for those, is a guess.
    return not (name == TENANT_WISH and not value) and settings.terms({name: value}) is not None


def _expected(settings: Settings, name: Any) -> str:
    if name == CLASS_WISH:
        return f"one of {', '.join(sorted(settings.classes))}, or {OPERATOR_CLASS_MIN}..{CLASS_MAX}"
    if name == CACHE_WISH:
        return "on or off"
    return "a tenant's name" if name == TENANT_WISH else f"one of {', '.join(sorted(OURS))}"


def _shown(value: Any) -> str:
    try:
        return _short.repr(value)[:VALUE_SHOWN]
    except ValueError:  # more digits than Python writes
        return "a number that is too long"


class Complaints:
    """What was not understood, told once for each name and value."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self.count = 0

    def add(self, unclear: tuple[Unclear, ...]) -> None:
        """Count a request, and tell what is new of it."""
        self.count += 1
        for item in unclear:
            if (item.name, item.value) not in self._told and len(self._told) < TOLD_MAX:
                self._told.add((item.name, item.value))
                log.warning(
                    "reprise: parameter_not_understood name=%r value=%s expected=%s: such requests are computed, "
                    "neither looked up nor stored, and counted",
                    item.name,
                    item.value,
                    item.expected,
                )
