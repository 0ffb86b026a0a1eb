"""Small requests come before bulk ones where processors are short."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvstore import client as client_module
from kvstore import urgency
from kvstore.client import StoreClient
from kvstore.daemon.metrics import ServerMetrics
from kvstore.daemon.server import Server, ServerConfig
from kvstore.keys import SpaceId
from kvstore.testing import ManualClock
from kvstore.traffic import AGENT
from tests.support.nodes import open_node, puts_of
from tests.support.spaces import a_chain, a_space

_GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}


def slice_ns(thread_id: int) -> int:
    """What the kernel has of a thread: the slice of processor time that it gets at once."""
    found = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(_GET_ATTRIBUTES[platform.machine()], thread_id, found, 56, 0) == 0
    return int(struct.unpack_from("<IIQiIQ", found)[5])


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10.0)


def test_a_thread_gets_small_slices_and_its_usual_ones_again() -> None:
    """What is set is the thread's own: nobody else's slices change."""
    seen: list[int] = []

    def work() -> None:
        usual = slice_ns(0)
        if not urgency.run_soon() or slice_ns(0) == usual:
            return
        seen.extend((slice_ns(0), usual))
        assert urgency.run_as_usual()
        seen.append(slice_ns(0))

    mine = slice_ns(0)
    in_a_thread(work)
    assert slice_ns(0) == mine
    if not seen:
        pytest.skip("this kernel has no slices of a thread's own")
    assert seen == [urgency.SLICE_NS, seen[1], seen[1]]


def test_a_thread_is_hurried_only_while_it_asks_and_stays_as_nice_as_it_was() -> None:
    """A look-up hurries the thread that waits for it; a thread of lower priority is not raised by it, nor stopped."""
    seen: list[tuple[int, int]] = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 7)  # of this thread alone
        usual = slice_ns(0)
        for _ in range(2):
            with urgency.Soon():
                seen.append((slice_ns(0), os.getpriority(os.PRIO_PROCESS, 0)))
            assert slice_ns(0) == usual

    in_a_thread(work)
    if not works():
        pytest.skip("this kernel has no slices of a thread's own")
    assert seen == [(urgency.SLICE_NS, 7)] * 2


def test_only_who_waited_long_for_a_look_up_is_hurried_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hurrying costs some microseconds, which a look-up that nobody delays need not spend."""
    hurried: list[bool] = []
    monkeypatch.setattr(client_module, "Soon", lambda: hurried.append(True) or nullcontext())
    node = open_node(tmp_path / "node", ManualClock())
    server = Server.start(ServerConfig("n", unix_path=tmp_path / "s", same_host=False), node, ServerMetrics())
    client = StoreClient.connect([f"unix:{tmp_path / 's'}"])
    try:
        names = list(a_chain(client.register_space(a_space()), 4).names)
        seen = []
        for slow_s in (0.0, 60.0, 60.0, 60.0):
            monkeypatch.setattr(client_module, "LOOKUP_S_SLOW", slow_s)
            client.lookup(client.register_space(a_space()), names)
            seen.append(len(hurried))
        assert seen == [0, 1, 1, 1]
    finally:
        client.close()
        server.stop(1.0)
        node.close()


def test_a_kernel_that_has_no_slices_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urgency.platform, "machine", lambda: "another")
    assert not urgency.run_soon()
    assert not urgency.run_as_usual()


def test_a_connection_hurries_until_it_moves_much_at_once(tmp_path: Path) -> None:
    """Look-ups and single gets do not change that; a get or a put of many does, for this connection alone."""
    node = open_node(tmp_path / "node", ManualClock())
    server = Server.start(ServerConfig("n", unix_path=tmp_path / "s", same_host=False), node, ServerMetrics())
    client = StoreClient.connect([f"unix:{tmp_path / 's'}"])
    try:
        space: SpaceId = client.register_space(a_space())
        names = list(a_chain(space, 4).names)
        client.put(space, puts_of(names, 1000), traffic_class=AGENT)
        client.lookup(space, names)
        assert sorted(each.hurries for each in server._connections) in ([False, True], [False, False])
        hurrying = [each for each in server._connections if each.hurries]
        client.get_into(space, names, [bytearray(1000) for _ in names])
        assert [each for each in server._connections if each.hurries] == hurrying
        assert bool(hurrying) == works()
    finally:
        client.close()
        server.stop(1.0)
        node.close()


def works() -> bool:
    """Whether this kernel takes the setting at all."""
    found: list[bool] = []
    in_a_thread(lambda: found.append(urgency.run_soon()))
    return found == [True]
