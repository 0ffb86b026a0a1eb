"""The tier under vLLM's own ``TieringOffloadingManager``, over a real node, beside vLLM's own ``fs`` tier."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key

from kvstore.client import StoreClient
from kvstore.store import GetStatus, PutOutcome
from kvstore.traffic import AGENT, CHAT
from ops.bench.tier_drive import TIER_MODULE, WEIGHTS_DIGEST, Drive, open_drive
from tests.support.disk import disk_bytes
from tests.support.store_process import StoreProcess
from tests.support.waiting import WAIT_S
from workers.adapters import pinned_puts
from workers.adapters.attachment import OptionError

CHUNKS = 40
CHUNK_BYTES = 10_000
"""Not a multiple of the page that rows are padded to."""

Open = Callable[..., Drive]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    store = StoreProcess(tmp_path_factory.mktemp("node"))
    store.begin()
    yield store
    store.end()


@pytest.fixture
def open_tier(node: StoreProcess) -> Iterator[Open]:
    """A manager whose secondary tier is ours."""
    with ExitStack() as stack:

        def opened(*, store: str = node.address, drive: dict[str, Any] | None = None, **options: Any) -> Drive:
            tier = {"type": "RepriseTier", "module_path": TIER_MODULE, "store": store, "lookup_deadline_s": 5.0}
            tier |= {"weights_digest": WEIGHTS_DIGEST, **options}
            made = open_drive(tier, **{"chunks": CHUNKS, "chunk_bytes": CHUNK_BYTES, **(drive or {})})
            stack.callback(made.close)
            return made

        yield opened


@pytest.fixture
def fs_tier(tmp_path: Path) -> Iterator[Drive]:
    drive = open_drive({"type": "fs", "root_dir": str(tmp_path / "fs")}, chunks=CHUNKS, chunk_bytes=CHUNK_BYTES)
    yield drive
    drive.close()


def fresh_keys(count: int, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(os.urandom(32), group) for _ in range(count)]


def payloads_of(keys: Sequence[OffloadKey]) -> list[npt.NDArray[np.uint8]]:
    """Bytes that only this chunk has."""
    return [np.frombuffer(random.Random(key).randbytes(CHUNK_BYTES), np.uint8) for key in keys]


def keep(drive: Drive, keys: Sequence[OffloadKey], **params: Any) -> None:
    """Store chunks through the manager, and empty the primary tier."""
    request = drive.request(params)
    assert drive.store(request, keys, payloads_of(keys)) == len(keys)
    drive.settle()
    drive.finish(request)
    drive.forget()


def recall(drive: Drive, keys: Sequence[OffloadKey], **params: Any) -> int:
    """How many chunks, from the first on, a new request gets, each checked byte by byte."""
    request = drive.request(params)
    [hits] = drive.look_up([(request, keys)])
    for row, payload in zip(drive.read(request, keys[:hits]), payloads_of(keys[:hits]), strict=True):
        assert np.array_equal(row[:CHUNK_BYTES], payload)
    drive.finish(request)
    return hits


def test_it_says_and_returns_what_the_file_tier_does(open_tier: Open, fs_tier: Drive) -> None:
    """The same jobs: stores in several requests, prefixes that are there in whole, in part and not at all."""
    ours, keys = open_tier(), fresh_keys(24)
    absent = fresh_keys(3)
    for drive in (ours, fs_tier):
        keep(drive, keys[:10])
        keep(drive, keys[10:20])
    questions = [keys[:10], keys, keys[5:15] + absent, absent, keys[18:], [absent[0], *keys]]
    verdicts = [[recall(drive, asked) for asked in questions] for drive in (ours, fs_tier)]
    assert verdicts[0] == verdicts[1] == [10, 20, 10, 0, 2, 0]


def test_chunks_survive_the_engine(open_tier: Open) -> None:
    """Another engine with empty memory finds them; its primary tier lies elsewhere and hands out other chunks."""
    keys = fresh_keys(12)
    keep(open_tier(), keys)
    other = open_tier(drive={"chunks": 13})
    assert recall(other, keys) == 12
    assert recall(other, keys[3:6]) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"weights_digest": "cd" * 32},
        {"epoch": 1},
        {"tenant": "somebody"},
        {"drive": {"layout": "HND"}},
        {"drive": {"tensor_size": 2}},
        {"drive": {"model": "another"}},
        {"drive": {"groups": 2}},
    ],
)
def test_what_makes_other_bytes_makes_other_names(open_tier: Open, change: dict[str, Any]) -> None:
    """Other weights, layout, ranks or tenant: the same keys of the engine find nothing."""
    keys = fresh_keys(2)
    keep(open_tier(), keys)
    assert recall(open_tier(**change), keys) == 0
    assert recall(open_tier(), keys) == 2


def test_the_space_tells_what_differs(open_tier: Open, node: StoreProcess) -> None:
    """An operator reads in the space which engine, ranks and chunk it is, and that no tokens lead to its blocks."""
    keep(open_tier(drive={"tensor_size": 2, "model": "who-is-it"}), fresh_keys(1))
    client = StoreClient.connect([node.address])
    [space] = [space for space in client.spaces().values() if space.model == "who-is-it"]
    client.close()
    assert space.is_opaque
    assert "tp2 pp1" in space.layout
    assert "NHD" in space.layout
    assert f"{CHUNK_BYTES}-bytes" in space.layout
    assert (space.block_tokens, space.kv_dtype, space.groups[0].layers) == (16, "bfloat16", (0, 1))


def test_class_and_tenant_come_from_the_request(open_tier: Open, node: StoreProcess) -> None:
    """Never from the key: one tenant's chunks are a miss for others, and each class makes its own promise."""
    drive, keys = open_tier(), fresh_keys(3)
    keep(drive, keys, reprise_tenant="alice", reprise_class="agent")
    assert recall(drive, keys) == 0
    drive.forget()
    assert recall(drive, keys, reprise_tenant="bob") == 0
    drive.forget()
    assert recall(drive, keys, reprise_tenant="alice", reprise_class="chat") == 3
    client = StoreClient.connect([node.address])
    space = drive.tier._attachment.spaces.of("alice").id
    ends_s = time.monotonic() + WAIT_S
    while any(set(block.touches) != {AGENT, CHAT} for block in client.scan(space)[0]):
        assert time.monotonic() < ends_s, "the use by the other class was not counted"
        time.sleep(0.01)
    client.close()


def test_two_tiers_of_one_engine_are_two(open_tier: Open) -> None:
    """Of two stores, or two tenants: what one told a request is not what the other tells."""
    mine, theirs, keys = open_tier(), open_tier(tenant="erin"), fresh_keys(1)
    keep(mine, keys)
    request = mine.request()
    theirs.manager.on_new_request(request)
    assert mine.look_up([(request, keys)]) == [1]
    assert theirs.look_up([(request, keys)]) == [0]
    mine.finish(request)
    theirs.finish(request)


def test_hints_of_an_orchestrator_count_like_parameters(open_tier: Open) -> None:
    """What the request itself says goes first."""
    drive, keys = open_tier(), fresh_keys(1)
    keep(drive, keys, reprise_tenant="carol")
    hints = KvHintsEnvelope("1", "m", [KvHintAction("a", "reprise", "1", {"reprise_tenant": "carol"})])
    for params, hits in ((None, 1), ({"reprise_tenant": "dave"}, 0)):
        drive.forget()
        request = ReqContext("hinted", kv_transfer_params=params, kv_hints=hints)
        drive.manager.on_new_request(request)
        assert drive.look_up([(request, keys)]) == [hits]
        drive.finish(request)


def test_a_request_may_stay_out(open_tier: Open) -> None:
    """What is not to be cached, or says nonsense of itself, is neither stored nor looked up."""
    drive, keys = open_tier(), fresh_keys(1)
    for params in ({"reprise_cache": "off"}, {"reprise_tenant": 7}, {"reprise_tennant": "alice"}):
        keep(drive, keys, **params)
        assert recall(drive, keys) == 0
    keep(drive, keys)
    assert recall(drive, keys, reprise_cache="off") == 0
    assert recall(drive, keys) == 1


def test_it_connects_before_the_first_request(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the first look-ups matter most: they are not late for want of a connection."""
    asked = threading.Event()
    monkeypatch.setattr(StoreClient, "lookup", lambda *args, **kwargs: asked.set())
    open_tier()
    assert asked.wait(WAIT_S)


def test_a_store_that_is_down_costs_misses_and_sheds_stores(open_tier: Open, tmp_path: Path) -> None:
    """No node listens: nothing waits, nothing raises; the engine goes on with its own memory."""
    drive, keys = open_tier(store=f"unix:{tmp_path / 'nobody'}"), fresh_keys(2)
    request = drive.request()
    assert drive.look_up([(request, keys)]) == [0]
    drive.store(request, keys, payloads_of(keys))
    drive.settle()
    assert drive.look_up([(request, keys)]) == [2], "the primary tier keeps what it has"
    drive.finish(request)
    other = fresh_keys(1)
    request = drive.request()
    drive.store(request, other, payloads_of(other))
    drive.settle()
    drive.finish(request)
    stats = drive.manager.get_stats().reduce()
    assert stats["vllm:kv_offload_reprise_blocks:('store_unreachable',)"] == 2
    assert stats["vllm:kv_offload_reprise_blocks:('store_shed',)"] == 1


def test_a_look_up_that_hangs_is_a_miss_at_its_deadline(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is answered RETRY meanwhile, at once, however long the store takes."""
    drive, keys = open_tier(lookup_deadline_s=2.0), fresh_keys(2)
    keep(drive, keys)
    real, go_on, ended = StoreClient.lookup, threading.Event(), threading.Event()

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        go_on.wait(WAIT_S)
        found = real(self, *args, **kwargs)
        ended.set()
        return found

    monkeypatch.setattr(StoreClient, "lookup", slow)
    request = drive.request()
    assert drive.step([(request, keys)]) == [[LookupResult.RETRY] * 2]
    assert drive.look_up([(request, keys)]) == [0]
    drive.finish(request)
    monkeypatch.undo()
    assert not ended.is_set(), "it waited for the store"
    go_on.set()
    assert ended.wait(WAIT_S)
    assert recall(drive, keys) == 2, "another request asks anew"


@pytest.mark.parametrize("failing", [[0], [1, 3], [0, 1, 2, 3]])
def test_a_load_that_fails_is_a_miss_and_not_asked_again(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, failing: list[int]
) -> None:
    """The blocks that came are kept; the others flip to a miss, so the request computes them and does not loop."""
    drive, keys = open_tier(), fresh_keys(4)
    keep(drive, keys)
    real, calls = StoreClient.get_into, []

    def some(self: Any, space: Any, names: Any, buffers: Any, **kwargs: Any) -> list[GetStatus]:
        calls.append(len(names))
        statuses = real(self, space, names, buffers, **kwargs)
        return [GetStatus.CORRUPT if at in failing else status for at, status in enumerate(statuses)]

    monkeypatch.setattr(StoreClient, "get_into", some)
    assert recall(drive, keys) == failing[0]
    assert calls == [4]
    monkeypatch.undo()
    assert recall(drive, keys) == 4


def test_a_fault_in_a_load_costs_a_hit(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the engine, and no request is left waiting."""
    drive, keys = open_tier(), fresh_keys(1)
    keep(drive, keys)
    monkeypatch.setattr(StoreClient, "get_into", lambda *args, **kwargs: 1 / 0)
    assert recall(drive, keys) == 0


def test_a_block_that_was_deleted_meanwhile_is_a_miss(open_tier: Open, node: StoreProcess) -> None:
    """The verdict was a hit, the block is gone when it is loaded; the next look-up says so."""
    drive, keys = open_tier(), fresh_keys(2)
    keep(drive, keys)
    request = drive.request()
    ends_s = time.monotonic() + WAIT_S
    while drive.tier.lookup(keys[0], request) is LookupResult.RETRY:
        drive.tier.on_schedule_end(None)
        assert not list(drive.tier.get_finished_jobs())
        assert time.monotonic() < ends_s
    space = drive.tier._attachment.spaces.of(None).id
    client = StoreClient.connect([node.address])
    assert client.delete(space, [info.key for info in client.scan(space)[0]]) >= 2
    client.close()
    assert drive.look_up([(request, keys)]) == [0]
    drive.finish(request)


def test_an_overloaded_store_sheds_stores_and_serves_loads(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk refuses what comes: stores pause, what is stored is served, and once there is room all goes on."""
    drive, keys, more = open_tier(), fresh_keys(2), fresh_keys(2)
    keep(drive, keys)
    real, calls = StoreClient.put, []
    monkeypatch.setattr(pinned_puts, "PAUSE_S_MIN", 10 * WAIT_S)
    monkeypatch.setattr(pinned_puts, "PAUSE_S_MAX", 10 * WAIT_S)

    def refuse(self: Any, space: Any, blocks: Any, **kwargs: Any) -> list[PutOutcome]:
        calls.append(len(blocks))
        return [PutOutcome.REFUSED] * len(blocks)

    monkeypatch.setattr(StoreClient, "put", refuse)
    keep(drive, more)
    keep(drive, fresh_keys(1))
    assert calls == [2], "the second store was shed without a call"
    assert recall(drive, keys) == 2
    assert recall(drive, more) == 0
    monkeypatch.setattr(StoreClient, "put", real)
    drive.tier._puts._paused_until_s = 0.0
    keep(drive, more)
    assert recall(drive, more) == 2


def test_a_store_keeps_to_its_capacity_where_the_file_tier_grows(open_tier: Open, tmp_path: Path) -> None:
    """Three times the capacity goes through both. After each batch ours is within it and gives back the latest; vLLM's
    own has deleted nothing."""
    store, chunk_bytes, capacity_bytes = StoreProcess(tmp_path, capacity="32MiB"), 1_000_000, 32 * 2**20
    store.begin()
    shape = {"chunks": 20, "chunk_bytes": chunk_bytes}
    try:
        ours = open_tier(store=store.address, drive=shape)
        with closing(open_drive({"type": "fs", "root_dir": str(tmp_path / "fs")}, **shape)) as files:
            for _ in range(5):
                keys = fresh_keys(20)
                payloads = [np.frombuffer(random.Random(key).randbytes(chunk_bytes), np.uint8) for key in keys]
                for drive in (ours, files):
                    request = drive.request({})
                    assert drive.store(request, keys, payloads) == len(keys)
                    drive.settle()
                    drive.finish(request)
                    drive.forget()
                assert disk_bytes(store.folder / "data") <= capacity_bytes
                request = ours.request({})
                assert ours.look_up([(request, keys)]) == [20]
                ours.finish(request)
        assert disk_bytes(tmp_path / "fs") >= 5 * 20 * chunk_bytes > 2.9 * capacity_bytes
    finally:
        store.end()


def test_what_was_not_stored_is_offered_again(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM offers a chunk once, so a refused one would leave a hole for as long as the primary tier has it.

    It comes again, under its own tenant and class, once the store takes blocks; what vLLM dropped meanwhile does not.
    """
    monkeypatch.setattr(pinned_puts, "PAUSE_S_MIN", 0.1)
    drive, keys = open_tier(), fresh_keys(6)
    request = drive.request({"reprise_tenant": "alice"})
    real = StoreClient.put
    monkeypatch.setattr(StoreClient, "put", lambda self, space, blocks, **_: [PutOutcome.REFUSED] * len(blocks))
    for part in (keys[:2], keys[2:4], keys[4:]):
        drive.store(request, part, payloads_of(part))
        drive.settle()
    drive.finish(request)
    monkeypatch.setattr(StoreClient, "put", real)
    ends_s = time.monotonic() + WAIT_S
    while drive.tier._missed:
        assert time.monotonic() < ends_s
        time.sleep(0.01)
        drive.settle()
    drive.forget()
    assert recall(drive, keys, reprise_tenant="alice") == 6
    drive.forget()
    assert recall(drive, keys) == 0
    assert not [name for name in drive.manager._req_state if name.startswith("reprise-again")]


def test_what_is_refused_for_good_is_let_go(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that never takes a chunk is asked for it a few times, not for ever; nor for what vLLM has dropped."""
    monkeypatch.setattr(pinned_puts, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(pinned_puts, "PAUSE_S_MAX", 0.02)
    drive, asked = open_tier(), []

    def refuse(self: Any, space: Any, blocks: Any, **kwargs: Any) -> list[PutOutcome]:
        asked.append(len(blocks))
        return [PutOutcome.REFUSED] * len(blocks)

    monkeypatch.setattr(StoreClient, "put", refuse)
    for drops in (False, True):
        asked.clear()
        request, keys = drive.request(), fresh_keys(2)
        drive.store(request, keys, payloads_of(keys))
        drive.settle()
        drive.finish(request)
        if drops:
            drive.forget()
        ends_s = time.monotonic() + WAIT_S
        while drive.tier._missed:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
            drive.settle()
        assert len(asked) <= 1 if drops else asked == [2, 2, 2]


def test_a_store_never_holds_more_than_half_of_the_primary_tier(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow store must not keep vLLM from evicting: what waits beyond that is shed, and told at once."""
    drive = open_tier()
    real, go_on = StoreClient.put, threading.Event()
    monkeypatch.setattr(StoreClient, "put", lambda *args, **kwargs: go_on.wait(WAIT_S) and real(*args, **kwargs))
    requests = [drive.request() for _ in range(8)]
    for request in requests:
        keys = fresh_keys(5)
        drive.store(request, keys, payloads_of(keys))
    for _ in range(2):  # the manager asks for results once a step, at its beginning
        drive.step()
    held = sum(len(job.transfer_job.keys) for job in drive.manager._jobs.values())
    assert 0 < held <= CHUNKS // 2
    go_on.set()
    drive.settle()
    assert drive.manager.get_stats().reduce()["vllm:kv_offload_reprise_blocks:('store_shed',)"] == CHUNKS // 2
    drive.finish(*requests)


def test_a_slow_load_is_declined(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the store's estimate against what the engine computes in that time."""
    drive, keys = open_tier(compute_tokens_per_s=1e9), fresh_keys(2)
    keep(drive, keys)
    real = StoreClient.lookup
    monkeypatch.setattr(
        StoreClient, "lookup", lambda *args, **kwargs: replace(real(*args, **kwargs), load_s_estimate=0.5)
    )
    assert recall(drive, keys) == 0
    assert drive.manager.get_stats().reduce()["vllm:kv_offload_reprise_blocks:('declined_slow',)"] == 2


def test_draining_leaves_no_job_behind(open_tier: Open) -> None:
    """vLLM resets its cache in mid-transfer: when the call returns, no row is touched and every job was told."""
    drive, keys = open_tier(), fresh_keys(20)
    keep(drive, keys)
    for _ in range(20):
        loading, storing = drive.request(), drive.request()
        while drive.step([(loading, keys)])[0][0] is not LookupResult.HIT_PENDING:
            pass
        more = fresh_keys(10)
        drive.store(storing, more, payloads_of(more))
        drive.step()
        drive.forget()
        assert not drive.manager._jobs
        before = drive.rows.copy()
        time.sleep(0.002)
        assert np.array_equal(before, drive.rows)
        drive.finish(loading, storing)


def test_a_node_that_is_killed_and_comes_back_costs_misses_only(tmp_path: Path, open_tier: Open) -> None:
    """What it had acknowledged is served again; meanwhile look-ups are misses and stores are shed."""
    store = StoreProcess(tmp_path)
    store.begin()
    drive, keys, more = open_tier(store=store.address), fresh_keys(6), fresh_keys(2)
    try:
        keep(drive, keys)
        store.kill()
        assert recall(drive, keys) == 0
        keep(drive, more)
        store.begin()
        ends_s = time.monotonic() + WAIT_S
        while recall(drive, keys) < 6:
            assert time.monotonic() < ends_s
            drive.forget()
            time.sleep(0.05)
        while recall(drive, more) < 2:
            drive.forget()
            keep(drive, more)
            assert time.monotonic() < ends_s
            time.sleep(0.05)
    finally:
        store.kill()


def test_options_are_checked_at_start(open_tier: Open) -> None:
    """A slip of the pen is told by name; a chunk that no block can hold is too."""
    with pytest.raises(OptionError, match="unknown option stroe"):
        open_tier(stroe=1)
    with pytest.raises(OptionError, match="use a smaller block_size"):
        open_tier(drive={"chunks": 1, "chunk_bytes": 65 << 20})
    assert open_tier(locality="REMOTE").tier.locality.value == "REMOTE"


def test_backpressure_of_vllm_goes_with_it(open_tier: Open) -> None:
    """The detector that vLLM makes of the configuration is told of every store that was kept."""
    drive = open_tier(drive={"backpressure": True})
    for _ in range(3):
        keep(drive, fresh_keys(2))
    assert drive.tier.bp_detector is not None
    assert recall(drive, fresh_keys(1)) == 0
