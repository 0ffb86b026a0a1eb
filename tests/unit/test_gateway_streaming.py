"""Server-sent events: a client that stops reading is dropped, and whatever feeds a stream is closed in every case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from gateway.errors import ClientGone
from gateway.streaming import EventStream, event, while_connected
from tests.support.waiting import WAIT_S

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


class Peer:
    """The server's side of one connection: a client that reads so many messages, then no more, or leaves."""

    def __init__(self, reads: int, *, leaves: bool) -> None:
        self.reads = reads
        self.leaves = leaves
        self.sent: list[Message] = []
        self._full = asyncio.Event()

    async def send(self, message: Message) -> None:
        if len(self.sent) >= self.reads:
            self._full.set()
            await asyncio.sleep(60)
        self.sent.append(message)

    async def receive(self) -> Message:
        await self._full.wait()
        if not self.leaves:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}


async def run(peer: Peer, count: int, write_s_max: float) -> tuple[bool, bool]:
    """Serve ``count`` frames to a peer; returns whether the feed and the work behind it were closed."""
    closed = {"feed": False, "work": False}

    async def feed() -> AsyncIterator[bytes]:
        try:
            for number in range(count):
                yield event({"n": number})
        finally:
            closed["feed"] = True

    async def close() -> None:
        closed["work"] = True

    stream = EventStream(feed(), close, write_s_max=write_s_max)
    try:
        await stream(SCOPE, peer.receive, peer.send)
    finally:
        result = closed["feed"], closed["work"]
    return result


@pytest.mark.parametrize("leaves", [True, False])
def test_client_that_is_gone_or_reads_nothing(leaves: bool) -> None:
    """Both end the stream as ClientGone, soon, with everything closed."""

    async def go() -> None:
        closed = []

        async def close() -> None:
            closed.append(True)

        async def feed() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: {}\n\n"
            finally:
                closed.append(True)

        stream = EventStream(feed(), close, write_s_max=30.0 if leaves else 0.05)
        peer = Peer(3, leaves=leaves)
        with pytest.raises(ClientGone):
            await asyncio.wait_for(stream(SCOPE, peer.receive, peer.send), WAIT_S)
        assert closed == [True, True]
        assert len(peer.sent) == 3

    asyncio.run(go())


def test_complete_stream_is_closed_too() -> None:
    """A client that reads all gets all, in order, and the work is closed."""

    async def go() -> None:
        peer = Peer(1000, leaves=False)
        assert await run(peer, 20, 5.0) == (True, True)
        bodies = b"".join(message.get("body", b"") for message in peer.sent)
        assert bodies == b"".join(event({"n": number}) for number in range(20))
        assert peer.sent[-1]["more_body"] is False

    asyncio.run(go())


def test_work_is_cancelled_when_the_client_leaves() -> None:
    """``while_connected`` cancels its work at a disconnect, and gives its result or error otherwise."""

    async def go() -> None:
        cancelled = False

        async def forever() -> None:
            nonlocal cancelled
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled = True
                raise

        async def leaves() -> Message:
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def stays() -> Message:
            await asyncio.sleep(60)
            raise AssertionError

        async def fails() -> None:
            raise ValueError("its own error")

        async def answers() -> int:
            return 7

        with pytest.raises(ClientGone):
            await while_connected(leaves, forever())
        assert cancelled
        assert await while_connected(stays, answers()) == 7
        with pytest.raises(ValueError, match="its own error"):
            await while_connected(stays, fails())

    asyncio.run(go())


def test_events_are_one_line() -> None:
    """Newlines of the text are escaped, so a frame cannot be split by them."""
    data = event({"text": "a\n\nb\r\u2028"})
    assert data.count(b"\n") == 2
    assert data.endswith(b"\n\n")
