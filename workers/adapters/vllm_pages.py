"""vLLM's paged KV as bytes: the only place of the connector where tensors become payloads, and payloads tensors.

Owns the order of layers in a payload. Does not know spaces, requests or the store. Invariants: what is read out is a
copy, so that pages may be reused at once; only the pages named are written.

    block = for each global layer, by number: the page of one block
    state = for each sliding layer, by number: the pages of its last ceil((W-1)/N) blocks of N tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from workers.adapters.vllm_space import layer_number, layer_specs, window_of

Table = Sequence[Sequence[int]]
"""Of one request, by group: the page of each of its blocks (0: none, it is out of the window)."""


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer's pages: ``pages`` is uint8 [pages, bytes...], a view. ``window_blocks``: 0 for a global layer."""

    name: str
    group: int
    pages: torch.Tensor
    page_bytes: int
    window_blocks: int


class Pages:
    """The KV memory of one worker."""

    def __init__(self, layers: Sequence[PagedLayer]) -> None:
        self.blocks = tuple(layer for layer in layers if not layer.window_blocks)
        self.windows = tuple(layer for layer in layers if layer.window_blocks)
        self.block_bytes = sum(layer.page_bytes for layer in self.blocks)
        device = layers[0].pages.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, caches: Mapping[str, torch.Tensor], config: KVCacheConfig, block_tokens: int) -> Pages:
        """From the tensors that vLLM registers. A layer that shares another's KV is left out."""
        specs, layers, seen = layer_specs(config), [], set()
        for name in sorted(set(caches) & set(specs), key=lambda name: (layer_number(name), name)):
            group, spec = specs[name]
            if (place := (group, caches[name].data_ptr())) in seen:  # layers of other groups have other pages there
                continue
            seen.add(place)
            pages = torch.unflatten(caches[name], 0, (config.num_blocks, -1)).view(torch.uint8)
            window = window_of(spec)
            reach = -(-(window - 1) // block_tokens) if window else 0
            layers.append(PagedLayer(name, group, pages, pages[0].numel(), max(reach, 1) if window else 0))
        return cls(layers)

    def state_bytes(self, stop: int) -> int:
        """Bytes of the state after ``stop`` blocks."""
        return sum(min(layer.window_blocks, stop) * layer.page_bytes for layer in self.windows)

    def read_blocks(self, table: Table, blocks: Sequence[int], out: memoryview) -> None:
        """Copy blocks out, one payload behind another."""
        rows = _bytes_of(out).view(len(blocks), self.block_bytes)
        at = 0
        for layer in self.blocks:
            ids = table[layer.group]
            for row, block in enumerate(blocks):
                self._copy(_page(rows[row, at : at + layer.page_bytes], layer), layer.pages[ids[block]])
            at += layer.page_bytes
        self._settle()

    def write_blocks(self, table: Table, blocks: Sequence[int], data: memoryview) -> None:
        """Put payloads that lie one behind another into the pages of blocks."""
        rows = _bytes_of(data).view(len(blocks), self.block_bytes)
        with torch.cuda.stream(self._stream):
            at = 0
            for layer in self.blocks:
                ids = table[layer.group]
                for row, block in enumerate(blocks):
                    self._copy(layer.pages[ids[block]], _page(rows[row, at : at + layer.page_bytes], layer))
                at += layer.page_bytes
        if self._stream is not None:
            self._stream.synchronize()

    def has_state(self, table: Table, stop: int) -> bool:
        """Whether every window before block ``stop`` is still in its pages."""
        return all(all(table[layer.group][stop - min(layer.window_blocks, stop) : stop]) for layer in self.windows)

    def read_state(self, table: Table, stop: int, out: memoryview) -> None:
        """Copy out the windows before block ``stop``."""
        for part, layer, block in self._state_parts(_bytes_of(out), stop):
            self._copy(part, layer.pages[table[layer.group][block]])
        self._settle()

    def write_state(self, table: Table, first: int, stop: int, data: memoryview) -> bool:
        """Put windows back, but for blocks before ``first``, which are here and maybe shared. False: wrong size."""
        if len(data) != self.state_bytes(stop):
            return False
        with torch.cuda.stream(self._stream):
            for part, layer, block in self._state_parts(_bytes_of(data), stop):
                if block >= first:
                    self._copy(layer.pages[table[layer.group][block]], part)
        if self._stream is not None:
            self._stream.synchronize()
        return True

    def _state_parts(self, whole: torch.Tensor, stop: int) -> list[tuple[torch.Tensor, PagedLayer, int]]:
        """Which bytes of a state are which layer's page of which block."""
        parts, at = [], 0
        for layer in self.windows:
            for block in range(stop - min(layer.window_blocks, stop), stop):
                parts.append((_page(whole[at : at + layer.page_bytes], layer), layer, block))
                at += layer.page_bytes
        return parts

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """On a CPU by this thread alone: torch would share out each page, and spin while the others are busy."""
        if self._stream is None:
            np.copyto(to.numpy(), source.numpy())
        else:
            to.copy_(source, non_blocking=True)

    def _settle(self) -> None:
        """Copies out of a device have arrived when this returns."""
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()


def _bytes_of(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _page(part: torch.Tensor, layer: PagedLayer) -> torch.Tensor:
    return part.view(layer.pages.shape[1:])
