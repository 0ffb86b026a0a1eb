"""vLLM's tiers on a machine without a GPU: its own spec, with copies by the CPU in place of its copy worker.

Owns the copies between a model's KV memory and the primary tier. Everything else is vLLM's: scheduler, manager, memory
of the primary tier, connector. Copies are done when they are submitted, so a job has always ended.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuCopies(OffloadingWorker):
    """Copies pages between blocks of the model's tensors and chunks of the primary tier."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._blocks, self._chunks = [], []
        for item in kv_caches.tensors:
            page = item.page_size_bytes
            self._blocks.append(item.tensor.view(torch.int8).view(-1, page))
            self._chunks.append(region.create_next_worker_view(page * blocks_per_chunk))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        size = 0
        for block, page in self._pairs(src_spec, dst_spec):
            page.copy_(block)
            size += block.numel()
        return self._end(job_id, size)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        size = 0
        for block, page in self._pairs(dst_spec, src_spec):
            block.copy_(page)
            size += block.numel()
        return self._end(job_id, size)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._blocks, self._chunks = [], []
        self._region.cleanup()

    def _end(self, job_id: int, size: int) -> bool:
        self._finished.append(TransferResult(job_id, True, size, 1e-9))
        return True

    def _pairs(self, model: GPULoadStoreSpec, primary: CPULoadStoreSpec) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each page of each block, and its place in a chunk; a group's first block may lie within its chunk."""
        blocks, chunks = iter(model.block_ids.tolist()), np.asarray(primary.chunk_ids).tolist()
        first = 0
        for group, (count, index) in enumerate(zip(model.group_sizes, model.block_indices, strict=True)):
            skipped = index % self._per_chunk
            for at in range(skipped, skipped + count):
                block, chunk, place = next(blocks), chunks[first + at // self._per_chunk], at % self._per_chunk
                for ref in self._groups[group]:
                    tensor, size = self._blocks[ref.tensor_idx], ref.page_size_bytes
                    begin = place * tensor.shape[1]
                    yield tensor[block, :size], self._chunks[ref.tensor_idx][chunk, begin : begin + size]
            first += -(-(skipped + count) // self._per_chunk) if count else 0
        assert first == len(chunks)


class CpuTieringSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` but for the copies."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopies(kv_caches, self.blocks_per_chunk, region)
        return self._worker
