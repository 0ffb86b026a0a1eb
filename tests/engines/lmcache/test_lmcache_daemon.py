"""LMCache's multiprocess daemon with the adapter, and an engine's paged KV on its other side, all on a CPU."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from kvstore.client import StoreClient
from tests.engines.lmcache.rig import plugin, wait
from tests.support.store_process import StoreProcess

CHUNK_TOKENS = 16
START_S = 300.0
CALL_S = 120.0


class Daemon:
    """``lmcache``'s server process, and one engine that talks to it as vLLM's worker does where it has no GPU."""

    def __init__(self, store: StoreProcess, log: Path, name: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", "0.03", "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", "", "--prometheus-port", "0"]
        command += ["--l2-adapter", json.dumps(plugin(store.address))]
        with (log / name).open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ})
        self.client = RequestClientFactory.create(f"127.0.0.1:{port}", context=zmq.Context.instance())
        assert self.client.get_chunk_size().result(timeout=START_S) == CHUNK_TOKENS
        self.engine = EngineDrivenTransferContext(1, self.client)
        self.kv: dict[str, torch.Tensor] = {}
        self._requests = itertools.count()

    def serve(self, kv: dict[str, torch.Tensor]) -> None:
        """Register the engine's pages: ``[K and V, page, token of the page, head, dimension]`` by layer."""
        self.kv = kv
        self.engine.register(kv, "tiny", 1, 1, CALL_S)

    def store(self, tokens: range, pages: list[int], salt: str = "") -> bool:
        request = self._request()
        key = self._key(request, tokens, 0, salt)
        return bool(self.engine.submit_store(request, key, self.kv, [pages], None, 1).result(timeout=CALL_S))

    def load(self, tokens: range, pages: list[int], salt: str = "") -> int:
        """Chunks of the prefix that were found; they are in the engine's pages then."""
        request = self._request()
        self.client.lookup(self._key(request, tokens, None, salt), 1).result(timeout=CALL_S)
        chunks = self.client.wait_prefetch_status(request, CALL_S).result(timeout=2 * CALL_S)
        if chunks:
            key = self._key(request, tokens[: chunks * CHUNK_TOKENS], 0, salt)
            loading = self.engine.submit_retrieve(request, key, self.kv, [pages[:chunks]], None, 1)
            assert loading.result(timeout=CALL_S)
        return int(chunks)

    def kill(self) -> None:
        """The daemon as a crash does; and the engine is gone too."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(20)
            self.client.close()

    def _request(self) -> str:
        """An id of its own: the daemon remembers the tokens of each."""
        return f"request-{next(self._requests)}"

    @staticmethod
    def _key(request: str, tokens: range, worker: int | None, salt: str) -> IPCCacheServerKey:
        ends = {"start": 0, "end": len(tokens), "request_id": request}
        return IPCCacheServerKey("tiny", 1, worker, tuple(tokens), **ends, cache_salt=salt, num_kv_readers=1)


@pytest.fixture
def kv() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"layer.{at}": torch.randn(2, 9, CHUNK_TOKENS, 2, 8, generator=generator) for at in range(3)}


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def blocks(store: StoreProcess) -> int:
    client = StoreClient.connect([store.address])
    found, _ = client.scan()
    client.close()
    return len(found)


def test_an_engines_pages_come_back_after_everything_was_killed(
    store: StoreProcess, kv: dict[str, torch.Tensor], running: ExitStack, tmp_path: Path
) -> None:
    """Engine, daemon and node die; the next ones find every chunk, and the pages are the same to the last bit.

    A node that dies under them costs hits and no request, and another tenant finds nothing at all.
    """
    tokens, pages = range(100, 100 + 4 * CHUNK_TOKENS), [1, 2, 3, 4]
    first = Daemon(store, tmp_path, "first.log")
    running.callback(first.kill)
    first.serve(kv)
    assert first.load(tokens, pages, "alice") == 0
    assert first.store(tokens, pages, "alice")
    wait(lambda: blocks(store) == 4, "store")
    first.kill()
    store.kill()
    store.begin()

    second = Daemon(store, tmp_path, "second.log")
    running.callback(second.kill)
    second.serve({name: torch.zeros_like(layer) for name, layer in kv.items()})
    assert second.load(tokens, pages, "bob") == 0
    assert second.load(tokens, pages, "alice") == 4
    for name, layer in second.kv.items():
        assert torch.equal(layer[:, 1:5], kv[name][:, 1:5])
        assert not layer[:, [0, 5, 6, 7, 8]].any()

    store.kill()
    other = range(900, 900 + 4 * CHUNK_TOKENS)
    assert second.load(other, pages, "alice") == 0
    assert second.store(other, pages, "alice")
    store.begin()

    def more(fresh: Iterator[int]) -> bool:
        at = 10_000 * next(fresh)
        return second.store(range(at, at + CHUNK_TOKENS), pages[:1], "alice") and blocks(store) > 4

    fresh = itertools.count(1)
    wait(lambda: more(fresh), "store after the node came back")
