"""The prefill role: a prompt's blocks, its end-of-prompt state, and the first token.

Owns the events FirstToken and HandedOff. Does not know how a prompt is restored or computed (plan, fetch, engine do).
The hand-off goes through the store only: HandedOff says whether all of it is acknowledged there.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.protocol import FirstToken, HandedOff, PrefillRequest
from workers.sequence import Event, LiveSequence
from workers.spaces import Spaces


class PrefillRole:
    """Events of a prefill."""

    name = "prefill"

    def token_chosen(self, sequence: LiveSequence, token: int) -> None:
        """Send the first token, with what was reused."""
        assert sequence.reuse is not None
        took = sequence.durations
        sequence.emit(
            FirstToken(
                token=token,
                reuse=sequence.reuse,
                queued_s=took.queued_s,
                load_s=took.load_s,
                compute_s=took.compute_s,
            )
        )

    def ended(self, sequence: LiveSequence, published: bool) -> None:
        """Say that a decode worker can take over."""
        sequence.emit(HandedOff(published=published))


PREFILL = PrefillRole()


def prefill_sequence(request: PrefillRequest, spaces: Spaces, emit: Callable[[Event], None]) -> LiveSequence:
    """The engine's sequence for a prefill: one token is generated, whatever it is."""
    return LiveSequence(request, PREFILL, spaces.of(request.tenant), emit, generate_max=1)
