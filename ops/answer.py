"""One streamed request to the public HTTP API, measured as its client sees it.

Owns the reading of server-sent events and the times. Does not know what is asked, or why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from ops.conversation import Conversation

REQUEST_S_MAX = 600.0


class RequestFailed(Exception):
    """The service refused or broke off a request; the message has its own words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it."""

    text: str
    usage: dict[str, Any]
    request_id: str
    ttft_s: float
    tokens_per_s: float

    @property
    def reuse(self) -> dict[str, Any]:
        """The service's own account beside the usual counts: way, exact, replayed tokens."""
        found = self.usage.get("reprise")
        return found if isinstance(found, dict) else {}


def ask(client: httpx.Client, conversation: Conversation, answers: Sequence[str], *, cache: bool) -> Answer:
    """Stream one turn. Raises RequestFailed with the service's own words when it fails."""
    headers = {} if cache else {"x-reprise-cache": "off"}
    begun_s = time.monotonic()
    pieces: list[str] = []
    times: list[float] = []
    usage: dict[str, Any] = {}
    body = conversation.body(answers)
    with client.stream("POST", conversation.path(), json=body, headers=headers, timeout=REQUEST_S_MAX) as response:
        if response.status_code != 200:
            raise RequestFailed(f"HTTP {response.status_code}: {response.read().decode(errors='replace')[:500]}")
        request_id = response.headers.get("x-request-id", "")
        for event in server_sent_events(response):
            if "error" in event:
                raise RequestFailed(f"the stream ended with an error: {event['error']}")
            usage = event.get("usage") or usage
            piece = text_of(event)
            if piece:
                pieces.append(piece)
                times.append(time.monotonic())
    if not times or not usage:
        raise RequestFailed("the stream ended without an answer or without usage")
    rest_s = times[-1] - times[0]
    tokens = int(usage.get("completion_tokens", len(times)))
    return Answer(
        text="".join(pieces),
        usage=usage,
        request_id=request_id,
        ttft_s=times[0] - begun_s,
        tokens_per_s=(tokens - 1) / rest_s if rest_s > 0 else 0.0,
    )


def server_sent_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, up to its [DONE]."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def text_of(event: dict[str, Any]) -> str:
    """What an event adds to the answer, in either API."""
    choices = event.get("choices") or [{}]
    return str(choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or "")
