"""The forecast: what it says of a node is what then happens there, and what it proposes mends it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from kvstore.daemon.metrics import StatsCollector
from kvstore.daemon.node import Node, NodeConfig
from kvstore.errors import Unavailable
from kvstore.limits import MIB
from kvstore.promises import DAY_S, ClassIngest, Room, forecast, ingest_from_json, ingest_json
from kvstore.store import Store
from kvstore.testing import ManualClock, MemoryStore
from kvstore.traffic import AGENT, CHAT, ClassRule, ClassRules
from retention.cli import build_app
from retention.forecast import NodeForecast, forecast_nodes
from retention.policy import replace_keep_for
from retention.session import EXIT_FAILED, EXIT_OK
from tests.support.node_traffic import Traffic, Unsynced
from tests.support.spaces import a_chain, a_space, put_chain

RULES = ClassRules(
    (ClassRule(AGENT, "agent", 3 * DAY_S, priority=100), ClassRule(CHAT, "chat", 7 * DAY_S, priority=200))
)


@contextmanager
def a_node(path: Path, clock: ManualClock, rules: ClassRules = RULES) -> Iterator[Node]:
    """60 MiB of segments of 1 MiB."""
    node = Node.open(NodeConfig((path / "volume",), 64 * MIB, segment_bytes=MIB), clock, rules, "", files=Unsynced())
    try:
        with node.events.listening():
            yield node
    finally:
        node.close()


def predicted(node: Store) -> NodeForecast:
    return forecast_nodes({"node": node}, window_s=DAY_S, deadline_s=5).nodes["node"]


def lasts_s(found: NodeForecast, name: str) -> float:
    return next(item.lasts_s for item in found.forecast.classes if item.name == name)


def test_a_month_goes_as_forecast(tmp_path: Path) -> None:
    """30 days on a node that is too small: when the first promise breaks, and how long each class lasts, to 10 %."""
    clock = ManualClock()
    with a_node(tmp_path, clock) as node:
        began_s = clock.now_s()
        traffic = Traffic(node, clock, {AGENT: 10 * MIB, CHAT: 5 * MIB})
        traffic.run(2)
        early = predicted(node)
        assert early.forecast.breaks_in_s is not None
        said_s = clock.now_s() - began_s + early.forecast.breaks_in_s
        traffic.run(28)
        assert traffic.first_evicted_s is not None
        assert said_s == pytest.approx(traffic.first_evicted_s - began_s, rel=0.1)
        settled_s = began_s + 15 * DAY_S
        for found in (early, predicted(node)):
            assert lasts_s(found, "agent") == pytest.approx(traffic.mean_life_s(AGENT, settled_s), rel=0.1)
            assert lasts_s(found, "chat") == 7 * DAY_S
        assert CHAT not in traffic.lives_s
        assert predicted(node).forecast.breaks_in_s == 0


def test_a_touched_month_goes_as_forecast(tmp_path: Path) -> None:
    """The same where three of ten chains are used again, and both classes are of one priority."""
    clock = ManualClock()
    rules = ClassRules(tuple(ClassRule(rule.class_byte, rule.name, rule.keep_for_s, 100) for rule in RULES.rules))
    with a_node(tmp_path, clock, rules) as node:
        traffic = Traffic(node, clock, {AGENT: 12 * MIB, CHAT: 5 * MIB}, again=0.3)
        traffic.run(3)
        found = predicted(node)
        began_s = clock.now_s()
        traffic.run(15)
        for traffic_class, name in ((AGENT, "agent"), (CHAT, "chat")):
            assert lasts_s(found, name) == pytest.approx(
                traffic.mean_life_s(traffic_class, began_s + 7 * DAY_S), rel=0.1
            )


def test_small_blocks_go_as_forecast(tmp_path: Path) -> None:
    """Blocks so small that the index is full before the disk: who gives way, and for how long blocks last."""
    clock = ManualClock()
    with a_node(tmp_path, clock) as node:
        traffic = Traffic(node, clock, {AGENT: 4 * MIB, CHAT: MIB}, record_bytes=8192)
        traffic.run(2)
        found = predicted(node)
        began_s = clock.now_s()
        traffic.run(9)
        assert lasts_s(found, "agent") == pytest.approx(traffic.mean_life_s(AGENT, began_s + 7 * DAY_S), rel=0.1)
        assert lasts_s(found, "chat") == 7 * DAY_S


def test_the_proposed_promise_is_kept(tmp_path: Path) -> None:
    """A policy that was proposed, set, and lived with: nothing more is evicted."""
    clock = ManualClock()
    with a_node(tmp_path, clock) as node:
        traffic = Traffic(node, clock, {AGENT: 10 * MIB, CHAT: 5 * MIB})
        traffic.run(9)
        assert traffic.lives_s[AGENT]
        found = predicted(node)
        honest, chat = (mend for mend in found.mends if mend.keep_for_s is not None)
        assert set(honest.keep_for_s or ()) == {"agent"}
        assert set(chat.keep_for_s or ()) == {"chat"}
        node.set_policy(replace_keep_for(RULES, chat.keep_for_s or {}), "", expected_version=1, apply=True)
        node.sweep(apply=True)
        settled = len(traffic.lives_s[AGENT])
        traffic.run(6)
        assert len(traffic.lives_s[AGENT]) - settled <= 16


def test_each_mend_is_enough_alone() -> None:
    """More room, an honest promise, a shorter promise of the other class: with any of them all promises hold."""
    clock = ManualClock()
    ingest, room = ingest_from_json(
        {
            "classes": [
                {"class_byte": byte, "now_s": 10 * DAY_S, "since_s": 0, "stored_bytes": [0, *[size] * 240],
                 "lengthened_byte_s": [], "segments_byte_s": [], "blocks": []}
                for byte, size in ((AGENT, 5 * MIB), (CHAT, 4 * MIB))
            ],
            "room": {"segment_bytes": MIB, "segments_max": 800, "segments_used": 700, "segments_spare": 1},
        }
    )  # fmt: skip
    node = _Told(clock, ingest, room)
    found = predicted(node)
    assert [item.holds for item in found.forecast.classes] == [False, True]
    assert len(found.mends) == 3
    for mend in found.mends:
        rules = replace_keep_for(RULES, mend.keep_for_s or {})
        larger = type(room)(MIB, room.segments_max + mend.add_bytes // MIB, room.segments_used)
        assert all(item.holds for item in forecast(ingest, rules, larger, DAY_S).classes), mend


def test_no_mend_is_proposed_for_a_class_without_a_rule() -> None:
    """A class that a policy dropped takes room, and has no promise that could be set."""
    hours = (0, *[5 * MIB] * 240)
    counts = ClassIngest(hours, (0,), (0,), (0,), 10 * DAY_S, 0)
    node = _Told(ManualClock(), {AGENT: counts, 99: counts}, Room(MIB, 1100, 700))
    found = predicted(node)
    assert [item.name for item in found.forecast.classes if not item.holds] == ["agent"]
    assert {name for mend in found.mends for name in mend.keep_for_s or {}} <= {"agent"}


class _Told(MemoryStore):
    """A store that tells of an ingest."""

    def __init__(self, clock: ManualClock, ingest: Any, room: Any) -> None:
        super().__init__(clock, rules=RULES)
        self._ingest = (ingest, room)

    def stats(self, *, deadline_s: float = 5.0) -> dict[str, Any]:
        return {"nodes": {"it": json.loads(json.dumps({"ingest": ingest_json(*self._ingest)}))}}


# --- a node's numbers -----------------------------------------------------------------------------------------------


def test_ingest_survives_a_restart(tmp_path: Path) -> None:
    """Closed and opened, and killed after a sweep: what came is still known."""
    clock = ManualClock()
    with a_node(tmp_path, clock) as node:
        space_id = node.register_space(a_space())
        put_chain(node, a_chain(space_id, 4), AGENT, payload_bytes=4000)
    with a_node(tmp_path, clock) as node:
        assert node.stats()["ingest"]["classes"][0]["stored_bytes"] == (4 * 8192,)
        put_chain(node, a_chain(space_id, 2, seed=1), AGENT, payload_bytes=100)
        node.sweep(apply=True)
        put_chain(node, a_chain(space_id, 1, seed=2), AGENT, payload_bytes=100)
        node.abandon()
    with a_node(tmp_path, clock) as node:
        assert node.stats()["ingest"]["classes"][0]["stored_bytes"] == (4 * 8192 + 2 * 4096,)


def test_one_block_counts_as_many_do(tmp_path: Path) -> None:
    """Put alone or in a batch, written again (a touch), or moved by a sweep: its record is counted once."""
    clock = ManualClock()
    with a_node(tmp_path, clock) as node:
        space_id = node.register_space(a_space())
        for seed, count in ((0, 1), (1, 3)):
            for _ in range(2):
                put_chain(node, a_chain(space_id, count, seed=seed), AGENT, payload_bytes=100)
        assert node.stats()["ingest"]["classes"][0]["stored_bytes"] == (4 * 4096,)


def test_alerts_name_metrics_that_a_node_has(tmp_path: Path) -> None:
    """The ratio is a gauge by class; every metric of the alert rules is one that a node exports."""
    with a_node(tmp_path, ManualClock()) as node:
        registry = CollectorRegistry()
        registry.register(StatsCollector(node.stats))
        text = generate_latest(registry).decode()
    assert 'reprise_retention_promise_ratio{class="agent"} 100.0' in text
    rules = (Path(__file__).parents[2] / "ops" / "prometheus_alerts.yml").read_text()
    named = set(re.findall(r"reprise_(?:store|retention)_\w+", rules))
    assert len(named) == 2
    for metric in named:
        assert f"\n{metric}" in text, metric


# --- the command ----------------------------------------------------------------------------------------------------


def run(stores: dict[str, Store], *arguments: str) -> Result:
    def open_store(addresses: Sequence[str], token: str | None) -> Store:
        return _Kept(stores[addresses[0]])

    options = [word for name in stores for word in ("--store", name)]
    result = CliRunner().invoke(build_app(open_store, ManualClock()), ["forecast", *arguments, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


class _Kept:
    """A store that a command cannot close."""

    def __init__(self, store: Store) -> None:
        self.policy, self.stats = store.policy, store.stats

    def close(self) -> None:
        pass


class _Down(MemoryStore):
    def policy(self, *, deadline_s: float = 5.0) -> Any:
        raise Unavailable("it is down")


def test_the_command_says_when_and_what_mends_it(tmp_path: Path) -> None:
    """A table of classes, the time, and commands to run; the same as JSON; a node that is down is named."""
    clock = ManualClock()
    with a_node(tmp_path, clock) as node:
        Traffic(node, clock, {AGENT: 10 * MIB, CHAT: 5 * MIB}).run(2)
        text = run({"here": node}).stdout
        document = json.loads(run({"here": node}, "--json").stdout)
        hour = json.loads(run({"here": node}, "--json", "--window", "hour").stdout)
        some = run({"here": node, "there": _Down(clock)}, "--json")
    assert "the first promise breaks in" in text
    assert "counting began" not in text
    assert re.search(r"reprise retention policy set --keep agent=\d", text)
    assert re.search(r"add [\d.]+ MiB of capacity", text)
    assert document["nodes"]["here"]["classes"][0]["name"] == "agent"
    assert 0 < document["breaks_in_s"] < 7 * DAY_S
    assert hour["window"] == "hour"
    assert some.exit_code == EXIT_FAILED
    assert json.loads(some.stdout)["nodes_failed"] == {"there": "Unavailable: it is down"}


def test_a_store_that_tells_nothing_is_named() -> None:
    """An older node is no error of the user."""
    clock = ManualClock()
    result = run({"old": MemoryStore(clock), "new": _Told(clock, {}, ingest_from_json(EMPTY)[1])}, "--json")
    assert result.exit_code == EXIT_FAILED
    assert "older version" in json.loads(result.stdout)["nodes_failed"]["old"]
    fine = run({"new": _Told(clock, {}, ingest_from_json(EMPTY)[1])})
    assert fine.exit_code == EXIT_OK
    assert "new: counting began 0s ago; this will change\nnew: every promise holds" in fine.stdout


EMPTY = {"classes": [], "room": {"segment_bytes": MIB, "segments_max": 8, "segments_used": 0}}
