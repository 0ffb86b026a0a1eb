"""Bounds hold together."""

from __future__ import annotations

from kvstore import limits


def test_every_bound_is_a_positive_number() -> None:
    """A bound of nothing would refuse everything."""
    bounds = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert len(bounds) > 30
    assert all(isinstance(value, int | float) and value > 0 for value in bounds.values()), bounds


def test_what_must_fit_fits() -> None:
    """The largest allowed request fits in the frame and the segment that carry it."""
    assert limits.LOOKUP_KEYS_MAX * (limits.KEY_BYTES + limits.TOKEN_DIGEST_BYTES) < limits.BODY_BYTES_MAX
    assert limits.PAYLOAD_BYTES_MAX <= limits.BATCH_BYTES_MAX
    assert limits.STATE_BYTES_MAX <= limits.BATCH_BYTES_MAX
    assert limits.PAYLOAD_BYTES_MAX < limits.SEGMENT_BYTES_DEFAULT <= limits.SEGMENT_BYTES_MAX
    assert limits.SEGMENT_BYTES_MIN < limits.CAPACITY_BYTES_MIN
    assert limits.STRIPE_BLOCKS <= limits.BATCH_BLOCKS_MAX <= limits.LOOKUP_KEYS_MAX
    assert limits.SPACE_BYTES_MAX < limits.BODY_BYTES_MAX
    assert limits.BLOCK_TOKENS_MIN <= limits.BLOCK_TOKENS_DEFAULT <= limits.BLOCK_TOKENS_MAX
    assert limits.DEADLINE_S_DEFAULT <= limits.DEADLINE_S_MAX
    assert limits.HELLO_S_MAX <= limits.FRAME_S_MAX <= limits.IDLE_S_MAX
