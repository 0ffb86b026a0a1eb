"""What a node makes of a clock that was set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.daemon.clock import JUMP_S, SETTLE_S, TIME_S_MAX, BoundedClock, ClockWatch, SteadyClock
from kvstore.store import Pin
from kvstore.testing import T0_S, TEST_RULES, ManualClock
from kvstore.traffic import AGENT, CHAT, ClassRules
from tests.support.nodes import open_node, puts_of
from tests.support.spaces import a_chain, a_space

DAY_S = 86_400
YEAR_S = 365 * DAY_S


@pytest.mark.parametrize(("told_s", "said_s"), [(-5.0, 0.0), (1.8e9, 1.8e9), (1e12, TIME_S_MAX)])
def test_a_time_fits_a_record(told_s: float, said_s: float) -> None:
    assert BoundedClock(ManualClock(told_s)).now_s() == said_s


@pytest.mark.parametrize("jump_s", [-5e8, -JUMP_S - 1, JUMP_S + 1, 5e8])
def test_a_jump_is_not_believed_until_the_clock_has_settled(jump_s: float) -> None:
    """Small corrections are; a jump is counted once, and the jump back is one too."""
    clock, elapsed_s = ManualClock(), [100.0]
    watch = ClockWatch(clock, lambda: elapsed_s[0])

    def pass_by(seconds: float, correction_s: float = 0.0) -> bool:
        elapsed_s[0] += seconds
        clock._now_s += seconds + correction_s
        return watch.is_believed()

    assert pass_by(300)
    assert pass_by(300, 50.0)
    assert pass_by(50_000), "a long pause is no jump"
    assert not pass_by(300, jump_s)
    assert not pass_by(300)
    assert not pass_by(300, -jump_s)
    assert not pass_by(SETTLE_S - 1)
    assert pass_by(1)
    assert watch.jumps == 2


class Hands:
    """A clock that anybody may set, and the time that nobody does."""

    def __init__(self) -> None:
        self.clock, self.at_s = ManualClock(), 100.0
        self.steady = SteadyClock(self.clock, lambda: self.at_s)

    def pass_by(self, seconds: float, set_by_s: float = 0.0) -> float:
        """How far the steady clock is from the one that is told."""
        self.at_s += seconds
        self.clock._now_s += seconds + set_by_s
        return self.steady.now_s() - self.clock.now_s()


@pytest.mark.parametrize("jump_s", [-10 * YEAR_S, -JUMP_S - 1, JUMP_S + 1, 10 * YEAR_S])
def test_a_steady_clock_goes_on_while_the_clock_is_wrong_for_less_than_an_hour(jump_s: float) -> None:
    """It follows small corrections at once, and another time once that has stood for an hour."""
    hands = Hands()
    assert hands.pass_by(300) == hands.pass_by(300, 50.0) == hands.pass_by(50_000) == 0
    assert hands.pass_by(10, jump_s) == hands.pass_by(SETTLE_S - 20) == -jump_s
    assert hands.pass_by(5, -jump_s) == 0
    assert hands.pass_by(10, jump_s) == hands.pass_by(SETTLE_S - 1) == -jump_s
    assert hands.pass_by(1) == hands.pass_by(50_000) == 0
    assert hands.pass_by(1, -jump_s) == jump_s
    assert hands.pass_by(SETTLE_S) == 0


@pytest.mark.parametrize("wrong_s", [-10 * YEAR_S, 10 * YEAR_S])
def test_a_clock_that_was_wrong_at_the_start_is_followed_when_it_is_set_right(wrong_s: float) -> None:
    """It cannot have been right: blocks were used much later or earlier. From then on it is steady."""
    hands = Hands()
    hands.steady.judge(hands.clock.now_s() - wrong_s - 60)
    assert hands.pass_by(10, -wrong_s) == 0
    assert hands.pass_by(10, wrong_s) == -wrong_s


@pytest.mark.parametrize("jump_s", [-10 * YEAR_S, 10 * YEAR_S])
def test_whatever_is_done_while_a_clock_is_wrong_is_done_in_the_right_time(tmp_path: Path, jump_s: float) -> None:
    """Puts, touches, pins, a change of policy, a maximum age and a sweep: none is lost, none outlives its promise."""
    hands = Hands()
    aged = tuple(replace(rule, max_age_s=5 * DAY_S) if rule.class_byte == AGENT else rule for rule in TEST_RULES.rules)
    node = open_node(tmp_path, hands.steady, rules=ClassRules(aged))
    space = node.register_space(a_space())
    chains = [list(a_chain(space, 3, seed=seed).names) for seed in range(5)]
    before, touched, pinned, during, chats = chains
    for names in (before, touched, pinned):
        node.put(space, puts_of(names, 1000), traffic_class=AGENT)
    hands.pass_by(2 * DAY_S)
    hands.pass_by(10, jump_s)
    node.put(space, puts_of(during, 1000), traffic_class=AGENT)
    node.put(space, puts_of(chats, 1000), traffic_class=CHAT)
    node.touch(space, touched, traffic_class=AGENT)
    node.pin([Pin(space, name.key, "operator", "needed", int(node._clock.now_s()) + DAY_S) for name in pinned])
    node.set_policy(ClassRules(aged), "again", expected_version=1, apply=True)
    assert node.sweep(apply=True).blocks == 0
    hands.pass_by(600, -jump_s)
    assert [node.lookup(space, names).prefix_blocks() for names in chains] == [3] * 5
    for days, alive in ((1.01, [0, 3, 0, 3, 3]), (3.01, [0, 0, 0, 0, 3]), (7.01, [0] * 5)):
        hands.pass_by(T0_S + (2 + days) * DAY_S - hands.clock.now_s())
        assert [node.lookup(space, names).prefix_blocks() for names in chains] == alive, days
    node.close()


@pytest.mark.parametrize(("ahead_s", "is_doubted"), [(10 * YEAR_S, True), (20 * DAY_S, False), (-10 * YEAR_S, True)])
def test_a_start_with_a_clock_that_cannot_be_right_sweeps_nothing_by_itself(
    tmp_path: Path, ahead_s: float, is_doubted: bool
) -> None:
    """Blocks are there again when it has been set right; after a pause of weeks a clock is believed."""
    clock = ManualClock()
    node = open_node(tmp_path, clock)
    space = node.register_space(a_space())
    names = list(a_chain(space, 3).names)
    node.put(space, puts_of(names, 1000), traffic_class=AGENT)
    node.close()
    node = open_node(tmp_path, ManualClock(T0_S + ahead_s))
    assert node._clock_watch.is_believed() is not is_doubted
    assert node.stats()["clock_jumps"] == is_doubted
    node.close()
    node = open_node(tmp_path, clock)
    assert node.lookup(space, names).prefix_blocks() == 3
    node.close()
