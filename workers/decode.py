"""The decode role: going on from a prefill's state, or from whatever of it the store still has.

Owns the events Tokens and Finished. Does not know batching or restoring (scheduler, plan, engine do). A request names
all tokens so far, so that any decode worker can continue another one's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from workers.errors import Rejected
from workers.protocol import DecodeRequest, Finished, Tokens
from workers.sequence import Event, LiveSequence
from workers.spaces import Spaces


class DecodeRole:
    """Events of a decode."""

    name = "decode"

    def token_chosen(self, sequence: LiveSequence, token: int) -> None:
        """Stream each token as it is chosen."""
        assert sequence.reuse is not None
        sequence.emit(Tokens(tokens=[token], exact=sequence.reuse.exact))

    def ended(self, sequence: LiveSequence, published: bool) -> None:
        """Say why the answer ended, and how it was resumed."""
        assert sequence.reuse is not None
        reason: Literal["stop", "length"] = "stop" if sequence.end_reason == "stop" else "length"
        sequence.emit(Finished(reason=reason, resumed=sequence.reuse))


DECODE = DecodeRole()


def decode_sequence(request: DecodeRequest, spaces: Spaces, emit: Callable[[Event], None]) -> LiveSequence:
    """The engine's sequence for a decode. Raises Rejected when the first token is missing."""
    if request.prompt_tokens >= len(request.tokens):
        raise Rejected(
            400,
            f"a decode starts from the prompt and at least one generated token, but of {len(request.tokens)} tokens "
            f"{request.prompt_tokens} are the prompt: send the first token too",
            code="bad_request",
        )
    return LiveSequence(
        request,
        DECODE,
        spaces.of(request.tenant),
        emit,
        generate_max=request.max_tokens,
        stop_token_ids=frozenset(request.stop_token_ids),
    )
