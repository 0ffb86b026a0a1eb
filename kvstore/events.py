"""What becomes of a node's blocks, as a router follows it: the node's events over HTTP, one JSON document a line.

Owns the connection, and coming back to where it was. Does not know what a reader does with events. Invariants: every
wait is bounded (a node speaks every few seconds, if only to say that it is there); a line is bounded; events come in
their order, and what was missed comes as an event of kind ``gap``.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from kvstore.access import split_host_port
from kvstore.errors import ProtocolError, StoreError, Unauthorized, Unavailable
from kvstore.limits import EVENT_LINE_BYTES_MAX, EVENTS_ALIVE_S

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader is: within one epoch of a node, up to a sequence number."""

    epoch: str
    sequence: int


def read_events(
    address: str, token: str | None = None, position: Position | None = None, *, follow: bool = True
) -> Iterator[dict[str, Any]]:
    """Events of the node whose admin endpoint is at HOST:PORT, from a position on, over one connection.

    Without a position: from now on; without ``follow``: those that the node remembers, and no more. Raises Unavailable
    when the connection ends or says nothing, Unauthorized, ProtocolError, ValueError for another address.
    """
    host, port = split_host_port(address)
    query: dict[str, object] = {"follow": "true" if follow else "false"}
    if position is not None:
        query |= {"epoch": position.epoch, "after": position.sequence}
    connection = http.client.HTTPConnection(host, port, timeout=3 * EVENTS_ALIVE_S)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", f"/v1/events?{urlencode(query)}", headers=headers)
        response = connection.getresponse()
        _check(response, address)
        while line := response.readline(EVENT_LINE_BYTES_MAX + 1):
            yield _event_of(line, address)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"the events of {address} ended: {error!r}") from error
    finally:
        connection.close()
    if follow:
        raise Unavailable(f"the node at {address} ended its events")


def follow_events(
    address: str,
    token: str | None,
    position: Position | None,
    wait: Callable[[float], bool],
    lost: Callable[[StoreError], None],
) -> Iterator[dict[str, Any]]:
    """As ``read_events``, again and again from where it was, until ``wait`` (for so many seconds) says to stop.

    ``lost`` is told of each connection that ended. Raises Unauthorized and ProtocolError.
    """
    while True:
        try:
            for event in read_events(address, token, position):
                position = Position(event["epoch"], event["sequence"])
                yield event
        except Unavailable as error:
            lost(error)
        if wait(RETRY_S):
            return


def _check(response: http.client.HTTPResponse, address: str) -> None:
    if response.status == http.client.OK:
        return
    detail = response.read(1024).decode(errors="replace")
    if response.status == http.client.UNAUTHORIZED:
        raise Unauthorized(f"the node at {address} wants its token: {detail}")
    if response.status == http.client.SERVICE_UNAVAILABLE:
        raise Unavailable(f"the node at {address} takes no reader now: {detail}")
    raise ProtocolError(f"the node at {address} answered {response.status}: {detail}")


def _event_of(line: bytes, address: str) -> dict[str, Any]:
    if len(line) > EVENT_LINE_BYTES_MAX:
        raise ProtocolError(f"an event of {address} has more than {EVENT_LINE_BYTES_MAX} bytes")
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ProtocolError(f"an event of {address} is not JSON: {error}") from error
    known = isinstance(event, dict) and isinstance(event.get("epoch"), str) and type(event.get("sequence")) is int
    if not known:
        raise ProtocolError(f"an event of {address} has no epoch or no sequence number")
    return dict(event)
