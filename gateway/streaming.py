"""Server-sent events over one HTTP answer.

Owns framing, the order of frames, and what a stream's end looks like. Does not know workers. Invariants: a complete
stream ends with ``[DONE]``; one that fails ends with an error event and without ``[DONE]``; whatever happens to the
client, ``close`` is awaited, so that no worker goes on for nobody; a client that does not read is dropped after
``write_s_max``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from gateway.answers import Envelope
from gateway.errors import ClientGone, GatewayError
from gateway.generate import Generation

DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class EventStream(StreamingResponse):
    """A streaming response that closes what feeds it and gives up on a client that does not read."""

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], *, write_s_max: float
    ) -> None:
        super().__init__(frames, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._close = close
        self._write_s_max = write_s_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def bounded(message: Message) -> None:
            nonlocal complete
            async with asyncio.timeout(self._write_s_max):
                await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await super().__call__(scope, receive, bounded)
            if not complete:
                raise ClientGone("the client closed the stream")
        except TimeoutError:
            raise ClientGone(f"the client read nothing for {self._write_s_max:.0f} s") from None
        finally:
            aclose = getattr(self.body_iterator, "aclose", None)
            if aclose is not None:
                await aclose()
            await self._close()


def event(value: dict[str, Any]) -> bytes:
    """One data event; JSON never holds a raw newline, so one line is enough."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def frames(
    generation: Generation,
    envelope: Envelope,
    usage: Callable[[], dict[str, Any]],
    *,
    include_usage: bool | None,
    failed: Callable[[GatewayError], None],
) -> AsyncIterator[bytes]:
    """The frames of one answer. ``failed`` is told of an error that the stream ends with."""
    blank = {"usage": None} if include_usage else {}
    opening = envelope.opening()
    if opening is not None:
        yield event(opening | blank)
    try:
        async for text in generation.deltas():
            yield event(envelope.piece(text) | blank)
    except GatewayError as error:
        failed(error)
        yield event(error.body())
        return
    closing = envelope.closing(generation.progress.finish_reason)
    if include_usage is None:
        closing |= {"usage": usage()}
    yield event(closing | blank)
    if include_usage:
        yield event(envelope.usage_frame(usage()))
    yield DONE


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work``, cancelled when the client leaves (ClientGone). The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    finally:
        for item in (task, watch):
            item.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
