"""The client against peers that misbehave: every fault is a named error, and nothing unbounded is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from workers.client import LINE_BYTES_MAX, WorkerClient
from workers.errors import Failed, ProtocolError, Rejected, Unavailable, WorkerError
from workers.protocol import DecodeRequest, Finished, PrefillRequest, Reuse, Tokens, WorkerFailure

PREFILL = PrefillRequest(request_id="r", tokens=[1, 2], traffic_class=2)
DECODE = DecodeRequest(request_id="r", tokens=[1, 2], traffic_class=2, prompt_tokens=1, max_tokens=5)
TOKENS = Tokens(tokens=[5]).model_dump_json().encode()
FINISHED = (
    Finished(reason="stop", resumed=Reuse(prompt_tokens=2, hit_tokens=1, miss_tokens=1)).model_dump_json().encode()
)
FAILURE = WorkerFailure(code="internal", message="broke", retryable=True).model_dump_json().encode()


def client_of(reply: Any) -> WorkerClient:
    transport = httpx.MockTransport(reply if callable(reply) else lambda request: reply)
    return WorkerClient(httpx.AsyncClient(transport=transport, base_url="http://worker"))


async def events_of(client: WorkerClient, request: Any = DECODE) -> list[Any]:
    stream = client.prefill(request) if isinstance(request, PrefillRequest) else client.decode(request)
    return [event async for event in stream]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_come_whole_however_the_bytes_are_cut(size: int) -> None:
    """Pieces of any size, blank lines between."""
    body = TOKENS + b"\n\n" + TOKENS + b"\n" + FINISHED + b"\n"

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), size):
            yield body[begin : begin + size]

    events = asyncio.run(events_of(client_of(httpx.Response(200, content=pieces()))))
    assert [event.event for event in events] == ["tokens", "tokens", "finished"]


@pytest.mark.parametrize(
    ("body", "error", "request_"),
    [
        (TOKENS + b"\n" + TOKENS[:10], Failed, DECODE),  # cut in the middle of an event
        (b"", Failed, DECODE),
        (FAILURE + b"\n", Failed, PREFILL),
        (b"garbage\n", ProtocolError, DECODE),
        (b'{"event": "tokens", "tokens": ["x"]}\n', ProtocolError, DECODE),
        (b'{"event": "none"}\n', ProtocolError, DECODE),
        (TOKENS + b"\n", ProtocolError, PREFILL),  # an event of the other role
        (b"x" * (LINE_BYTES_MAX + 2), ProtocolError, DECODE),
    ],
)
def test_streams_that_break_are_named(body: bytes, error: type[WorkerError], request_: Any) -> None:
    """Cut, failed, garbled, endless: never a silent end, never another exception."""
    with pytest.raises(error):
        asyncio.run(events_of(client_of(httpx.Response(200, content=body)), request_))


@pytest.mark.parametrize(
    ("reply", "message", "retryable"),
    [
        (httpx.Response(400, json={"error": {"code": "bad", "message": "too long"}}), "too long", False),
        (httpx.Response(503, json={"error": {"code": "busy", "message": "later"}}), "later", True),
        (httpx.Response(502, content=b"<html>"), "status 502", False),
    ],
)
def test_refusals_carry_status_and_message(reply: httpx.Response, message: str, retryable: bool) -> None:
    """A worker's error body, or any other, becomes Rejected."""
    with pytest.raises(Rejected, match=message) as caught:
        asyncio.run(events_of(client_of(reply)))
    assert (caught.value.status, caught.value.retryable) == (reply.status_code, retryable)


@pytest.mark.parametrize("content", [b"not json", b"{}", b'{"running": "many"}'])
def test_answers_of_another_shape_are_protocol_errors(content: bytes) -> None:
    """A load report that is none."""
    with pytest.raises(ProtocolError):
        asyncio.run(client_of(httpx.Response(200, content=content)).load())


def test_foreign_errors_are_translated_once() -> None:
    """A reset or a timeout is Unavailable, in calls and in streams; health just says no."""

    def reset(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silence", request=request)

    client = client_of(reset)
    with pytest.raises(Unavailable):
        asyncio.run(client.model())
    with pytest.raises(Unavailable):
        asyncio.run(events_of(client))
    assert not asyncio.run(client.healthy())
