"""Stop strings: nothing of them is ever shown, and the cut does not depend on how the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.stops import StopFilter


def naive(text: str, stops: list[str]) -> str:
    """Read letter by letter; cut at the first end of a stop string, the longest where several end together."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return text


def stream(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    filter_ = StopFilter(stops)
    shown = "".join([filter_.push(piece) for piece in pieces])
    return shown + filter_.flush(), filter_.stopped


LETTERS = st.text("ab\u00e9", max_size=5)


@given(st.lists(LETTERS, max_size=12), st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4))
@example(["ab", "a", "b"], ["bab"])
@example(["aab"], ["aab", "ab"])
def test_cut_equals_naive_search_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    """For any text, cut into any pieces, the shown text is that of a search over the whole text."""
    text = "".join(pieces)
    shown, stopped = stream(pieces, stops)
    assert shown == naive(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(st.lists(LETTERS, max_size=12), st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4))
def test_nothing_shown_is_taken_back(pieces: list[str], stops: list[str]) -> None:
    """What was shown at any time is a beginning of what is shown in the end, and lags by less than the longest stop."""
    filter_, shown, given_text = StopFilter(stops), "", ""
    final = naive("".join(pieces), stops)
    for piece in pieces:
        shown += filter_.push(piece)
        given_text += piece
        assert final.startswith(shown)
        if not filter_.stopped:
            assert len(given_text) - len(shown) < max((len(stop) for stop in stops), default=1)


def test_an_empty_stop_string_is_refused() -> None:
    """It would stop every answer before its first letter."""
    with pytest.raises(ValueError, match="empty"):
        StopFilter([""])
