"""The whole service with sliding windows: states, bounded replay that says so, exact replay on request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.stack import Stack, running_stack

OFF = {"x-reprise-cache": "off"}
EXACT = {"x-reprise-fidelity": "exact"}


@pytest.fixture(scope="module", params=["gemma3", "gptoss"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(checkpoint(request.param), tmp_path_factory.mktemp(request.param) / "data") as running:
        yield running


def prompt_of(name: str, length: int = 900) -> str:
    text = " ".join(f"{name} {number} is number {number * number % 97}." for number in range(length // 16))
    return text[:length]


def test_a_state_resumes_exactly(stack: Stack) -> None:
    """Turn 2 resumes from the state that turn 1 left: nearly all hits, nothing approximate, equal answers."""
    prompt = prompt_of("state")
    cold = stack.stream(prompt, max_tokens=10)
    longer = f"{prompt}{cold.text} next"
    warm = stack.stream(longer, max_tokens=10)
    assert warm.reuse["way"] == "state"
    assert warm.reuse["exact"] is True
    assert warm.hit >= 0.9 * warm.prompt
    assert warm.text == stack.stream(longer, max_tokens=10, headers=OFF).text


def test_after_kill_9_windows_are_replayed_and_it_is_said(stack: Stack) -> None:
    """States are gone with the process: bounded replay is flagged, exact fidelity equals the cold answer."""
    prompt = prompt_of("replay")
    cold = stack.complete(prompt)
    stack.kill("store")
    # The first answer after the restart must not persist anything approximate that the second would find.
    exact = stack.complete(prompt, headers=EXACT)
    assert exact.status == 200
    assert exact.reuse["exact"] is True
    assert exact.text == cold.text
    assert exact.hit + exact.miss == exact.prompt
    stack.kill("store")
    bounded = stack.complete(prompt)
    assert bounded.hit >= 0.8 * bounded.prompt
    assert bounded.reuse["way"] in ("replay", "exact_replay")
    assert bounded.reuse["exact"] is (bounded.reuse["way"] == "exact_replay")
    assert 0 < bounded.reuse["replayed_tokens"] <= bounded.hit


def test_lengths_around_block_and_window_borders(stack: Stack) -> None:
    """Whatever the length, hit and miss add up to the prompt and an exact answer equals the one without a cache."""
    for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193):
        prompt = [4 + (index * 17) % 250 for index in range(tokens)]
        for _ in range(2):
            reply = stack.complete(prompt, max_tokens=2)
            assert reply.hit + reply.miss == reply.prompt == tokens
            if reply.reuse["exact"]:
                assert reply.text == stack.complete(prompt, max_tokens=2, headers=OFF).text
