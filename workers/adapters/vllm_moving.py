"""A worker's half of the vLLM connector: bytes between its pages and the store.

Owns the loads under way and the copies that wait to be put. Does not know requests beyond their ids. Invariants: a page
that is loaded is written only with verified bytes; a page that is saved was copied out before the next forward; loads
that failed are told of, with the pages that hold nothing; what waits to be put is bounded, and more is shed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvstore.keys import TokenChain, encode_space
from kvstore.limits import MIB, PAYLOAD_BYTES_MAX, STATE_BYTES_MAX
from kvstore.store import GetStatus
from workers.adapters.attachment import Attachment, OptionError, Settings
from workers.adapters.vllm_pages import Pages
from workers.adapters.vllm_space import layout_of, make_space
from workers.adapters.vllm_stats import Interval, RepriseStats
from workers.adapters.vllm_step import Move, Rank, window_name
from workers.spaces import TenantSpace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)

CLOSE_S = 5.0
BATCH_BYTES = 32 * MIB
"""What a load or a save moves at a time."""


class Moving:
    """On the worker's thread, but for ``_load`` and ``_offer``."""

    def __init__(self, settings: Settings, config: VllmConfig, caches: KVCacheConfig) -> None:
        self._settings = settings
        self._config = config
        self._caches = caches
        self._one_group = len(caches.kv_cache_groups) == 1
        self._loads: dict[str, tuple[Move, Future[int]]] = {}
        self._bad_pages: set[int] = set()
        self._namer = ThreadPoolExecutor(1, "reprise-save")
        self._buffers = threading.local()
        self._lock = threading.Lock()
        self._copied_bytes = 0
        self._copies_shed = 0
        self._interval = Interval()
        self._opened = False

    def open(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The KV memory is there: name it, and attach."""
        self._pages = Pages.of(tensors, self._caches, self._config.cache_config.block_size)
        if self._pages.block_bytes > PAYLOAD_BYTES_MAX:
            raise OptionError(
                f"--block-size: a block has {self._pages.block_bytes} bytes, more than {PAYLOAD_BYTES_MAX}"
            )
        layouts = {
            layer.name: layout_of(self._config, layer.name, tuple(layer.pages.shape[1:]))
            for layer in self._pages.blocks + self._pages.windows
        }
        self._space = make_space(self._config, self._caches, layouts, self._settings)
        self._attached = Attachment.open(self._settings, self._space)
        self._opened = True
        self._attached.warm()

    def introduce(self) -> Rank:
        return Rank(encode_space(self._space))

    def close(self) -> None:
        """Put what was copied, for a while."""
        self._namer.shutdown(wait=True)
        if self._opened:  # else vLLM ends because it could not start
            log.info("reprise: worker_closed counts=%s", self._attached.stats())
            self._attached.close(CLOSE_S)

    def stats(self) -> RepriseStats | None:
        """What was counted since it was last asked."""
        if not self._interval.due:
            return None
        return self._interval.take({**self._attached.stats(), "copies_shed": self._copies_shed})

    # --- loads --------------------------------------------------------------------------------------------------------

    def load(self, moves: Sequence[Move]) -> None:
        """Begin loads; each fills pages that nobody reads before ``results`` names its request."""
        for move in moves:
            self._loads[move.request_id] = (
                move,
                self._attached.load_soon(partial(self._load, move)),
            )

    def results(self) -> KVConnectorTransferResults:
        """The loads that ended since the last call."""
        results = KVConnectorTransferResults()
        for request_id in [name for name, (_, future) in self._loads.items() if future.done()]:
            move, future = self._loads.pop(request_id)
            results.finished_recving.add(request_id)
            good = _blocks_loaded(future)
            if good == len(move.blocks):
                continue
            if self._one_group:
                self._bad_pages.update(move.tables[0][block] for block in move.blocks[good:])
            else:
                results.failed_recving.add(request_id)
        return results

    def take_bad_pages(self) -> set[int]:
        """Pages that the loads of the last ``results`` left without their bytes."""
        pages, self._bad_pages = self._bad_pages, set()
        return pages

    def _load(self, move: Move, left_s: float) -> int:
        """How many of its blocks are in their pages, from the first on; with a window to load: all or none."""
        until_s = time.monotonic() + left_s
        space = move.prefix.space_in(self._attached.spaces, self._space)
        chain = move.prefix.chain_in(space)
        if not all(self._load_state(move, stop, space, chain, left_s) for stop in move.states):
            return 0
        size = self._pages.block_bytes
        at_once = max(1, BATCH_BYTES // size)
        memory = self._buffer(min(at_once, len(move.blocks)) * size)
        good = 0
        while good < len(move.blocks):
            blocks = move.blocks[good : good + at_once]
            rows = [memory[at * size : (at + 1) * size] for at in range(len(blocks))]
            left_s = max(until_s - time.monotonic(), 1e-3)
            statuses = self._attached.load(space, [chain.names[at] for at in blocks], rows, deadline_s=left_s)
            whole = next((at for at, status in enumerate(statuses) if status != GetStatus.OK), len(statuses))
            if whole:
                self._pages.write_blocks(move.tables, blocks[:whole], memory[: whole * size])
            good += whole
            if whole < len(blocks):
                break
        return good

    def _load_state(self, move: Move, stop: int, space: TenantSpace, chain: TokenChain, left_s: float) -> bool:
        if move.kept:
            memory = self._buffer(self._pages.state_bytes(stop))
            status = self._attached.load(space, [window_name(chain, stop)], [memory], deadline_s=left_s)[0]
            got: memoryview | None = memory if status == GetStatus.OK else None
        else:
            state = chain.state_name(stop * chain.block_tokens)
            got = self._attached.load_state(space, state, deadline_s=left_s)
        return got is not None and self._pages.write_state(move.tables, move.blocks[0], stop, got)

    def _buffer(self, size: int) -> memoryview:
        """Memory of this thread's own, kept from load to load: new memory costs more than what is done with it."""
        memory: bytearray | None = getattr(self._buffers, "memory", None)
        if memory is None or len(memory) < size:
            memory = self._buffers.memory = bytearray(max(size, BATCH_BYTES))
        return memoryview(memory)[:size]

    # --- saves --------------------------------------------------------------------------------------------------------

    def save(self, moves: Sequence[Move]) -> None:
        """Copy blocks out of their pages; they are named and put later, by other threads."""
        at_once = max(1, BATCH_BYTES // self._pages.block_bytes)
        for move in moves:
            for first in range(0, len(move.blocks), at_once):
                blocks = move.blocks[first : first + at_once]
                memory = self._room(len(blocks) * self._pages.block_bytes)
                if memory is not None:
                    self._pages.read_blocks(move.tables, blocks, memory)
                    self._later(move, blocks, memory)
            for stop in move.states:
                self._save_state(move, stop)

    def _save_state(self, move: Move, stop: int) -> None:
        size = self._pages.state_bytes(stop)
        if size > STATE_BYTES_MAX or not self._pages.has_state(move.tables, stop):
            return
        memory = self._room(size)
        if memory is not None:
            self._pages.read_state(move.tables, stop, memory)
            self._later(replace(move, states=(stop,)), None, memory)

    def _room(self, size: int) -> memoryview | None:
        """Memory for a copy; None where too much waits already."""
        with self._lock:
            if self._attached.publisher.queue_bytes + self._copied_bytes + size > self._settings.queue_bytes:
                self._copies_shed += 1
                return None
            self._copied_bytes += size
        return self._attached.memory(size)

    def _later(self, move: Move, blocks: Sequence[int] | None, memory: memoryview) -> None:
        self._namer.submit(self._offer, move, blocks, memory)

    def _offer(self, move: Move, blocks: Sequence[int] | None, memory: memoryview) -> None:
        """Name what was copied, and queue it to be put. ``blocks``: None for a state."""
        try:
            self._queue(move, blocks, memory)
        except Exception:  # the seam: what cannot be put is a later miss, and the next copies are put
            log.exception("save_broke")
        finally:
            with self._lock:
                self._copied_bytes -= len(memory)

    def _queue(self, move: Move, blocks: Sequence[int] | None, memory: memoryview) -> None:
        space = move.prefix.space_in(self._attached.spaces, self._space)
        chain = move.prefix.chain_in(space)
        tokens, size = space.space.block_tokens, self._pages.block_bytes
        publisher, ticket = self._attached.publisher, self._attached.ticket(space, move.prefix.terms.traffic_class)
        if blocks is None and self._settings.keep_windows and len(memory) <= PAYLOAD_BYTES_MAX:
            publisher.offer_block(ticket, window_name(chain, move.states[0]), tokens, memory, 0)
        elif blocks is None:
            publisher.offer_state(ticket, chain.state_name(move.states[0] * tokens), memory, 0)
        for row, block in enumerate(blocks or ()):
            publisher.offer_block(ticket, chain.names[block], tokens, memory[row * size : (row + 1) * size], 0)


def _blocks_loaded(future: Future[int]) -> int:
    """Blocks that a load brought; none where it broke. The seam: no fault may leave a request waiting for its load."""
    try:
        return future.result()
    except Exception:
        log.exception("load_broke")
        return 0
