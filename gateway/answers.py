"""The OpenAI bodies and stream frames that we send, and the usage in them. Pure.

Owns field names and their order. Does not know workers or HTTP. Invariants: the last frame's usage and the whole body's
usage come from one function; ``prompt_cache_hit_tokens + prompt_cache_miss_tokens == prompt_tokens``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.generate import Job, Progress


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every frame of one answer repeats. ``chat``: chat completion, else text completion."""

    request_id: str
    model: str
    created_s: int
    chat: bool

    def body(self, text: str, finish_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return self._frame("chat.completion" if self.chat else "text_completion", [choice]) | {"usage": usage}

    def opening(self) -> dict[str, Any] | None:
        """The first frame of a chat names the role; a text completion has none."""
        return self._chunk({"role": "assistant", "content": ""}, "", None) if self.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, text, None)

    def closing(self, finish_reason: str | None) -> dict[str, Any]:
        return self._chunk({}, "", finish_reason)

    def usage_frame(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The extra last frame of ``stream_options.include_usage``: no choices."""
        return self._frame(self._chunk_kind, []) | {"usage": usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, delta: dict[str, Any], text: str, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = text
        return self._frame(self._chunk_kind, [choice])

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }


def usage_of(job: Job, progress: Progress, class_name: str) -> dict[str, Any]:
    """Token counts of an answer, from what prefill really reused. ``reprise`` tells how; times in seconds."""
    first = progress.first
    assert first is not None, "usage exists once the first token does"
    reuse = first.reuse
    completion = len(progress.generated)
    return {
        "prompt_tokens": reuse.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": reuse.prompt_tokens + completion,
        "prompt_cache_hit_tokens": reuse.hit_tokens,
        "prompt_cache_miss_tokens": reuse.miss_tokens,
        "prompt_tokens_details": {"cached_tokens": reuse.hit_tokens},
        "reprise": {
            "request_id": job.request_id,
            "way": reuse.way,
            "exact": progress.exact,
            "replayed_tokens": reuse.replayed_tokens,
            "reason": reuse.reason,
            "traffic_class": class_name,
            "cache": job.cache,
            "published": progress.published,
            "continuations": progress.continuations,
            "resumed": None if progress.resumed is None else progress.resumed.way,
            "ttft_s": round(progress.ttft_s, 6),
            "queued_s": round(first.queued_s, 6),
            "load_s": round(first.load_s, 6),
            "compute_s": round(first.compute_s, 6),
        },
    }
