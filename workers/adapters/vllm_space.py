"""What names the KV of one vLLM worker: its space, from vLLM's own configuration and the tensors that it made.

Owns which models and options can be stored at all, and every field of the space. Does not know requests or the store.
Invariants: whatever changes the meaning of KV bytes is in the space or refused at start, by name; ranks differ in the
space, so one rank's bytes are never another's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore.keys import AttentionGroup, ShardCoordinate, Space
from workers.adapters.attachment import OptionError, Settings

_STORED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
ADAPTERS_MAX = 1024
"""Adapters whose digests are remembered; then all are hashed again."""
_Files = tuple[tuple[str, int, int], ...]
"""Path, size and time of change of each."""
_ADAPTER_CONTEXT = "reprise-kv 2026 adapter digest"
_OVERRIDES_CONTEXT = "reprise-kv 2026 overridden weights digest"


def layer_specs(config: KVCacheConfig) -> dict[str, tuple[int, KVCacheSpec]]:
    """Every layer's group and spec, by the layer's name."""
    found = {}
    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        own = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        for name in group.layer_names:
            found[name] = (number, own.get(name, spec))
    return found


def window_of(spec: KVCacheSpec) -> int:
    """Tokens of a layer's sliding window, the query's own included; 0 where vLLM keeps the whole prefix."""
    return int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else 0


def check_supported(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Refuse, by name, what would be stored wrongly. Raises OptionError."""
    transfer, parallel, speculative = config.kv_transfer_config, config.parallel_config, config.speculative_config
    if transfer.kv_load_failure_policy != "recompute":
        raise OptionError('kv_load_failure_policy: write "recompute", else a block that is gone fails its request')
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise OptionError("context parallelism is not supported: a block would not hold consecutive tokens")
    if speculative is not None and speculative.method != "ngram":
        raise OptionError(f"speculative decoding by {speculative.method!r} is not supported: its layers have KV too")
    block_tokens = config.cache_config.block_size
    for name, (_, spec) in layer_specs(caches).items():
        if type(spec) not in _STORED:
            raise OptionError(f"layer {name}: KV of kind {type(spec).__name__} is not supported")
        if spec.block_size != block_tokens:
            raise OptionError(f"layer {name} has blocks of {spec.block_size} tokens, others of {block_tokens}")
    if caches.kv_cache_groups and all(window_of(spec) for _, spec in layer_specs(caches).values()):
        raise OptionError("all layers slide: without a global-attention layer there is nothing durable to store")


def make_space(config: VllmConfig, caches: KVCacheConfig, layouts: Mapping[str, str], settings: Settings) -> Space:
    """The space of this worker's rank, without tenant or adapter. ``layouts``: by layer, how its pages lie."""
    model, parallel = config.model_config, config.parallel_config
    size, rank = parallel.tensor_parallel_size, parallel.rank
    computed = (str(model.dtype), str(model.quantization), *sorted(set(layouts.values())))
    return Space(
        model=Path(model.model).name,
        weights_digest=_weights(config, settings),
        kv_dtype=str(config.cache_config.cache_dtype) + "/" + "+".join(sorted(set(_dtypes(caches)))),
        layout="vllm-1 " + " ".join(computed),
        block_tokens=config.cache_config.block_size,
        groups=_groups(caches),
        revision=model.revision,
        shard=ShardCoordinate(rank % size, size, rank // size, parallel.pipeline_parallel_size),
        epoch=settings.epoch,
    )


def _weights(config: VllmConfig, settings: Settings) -> bytes:
    """The digest of the weights, and of what the operator overrides in their configuration."""
    model = config.model_config
    if config.load_config.load_format == "dummy" and settings.weights_digest is None:
        raise OptionError("weights_digest: give one, since dummy weights have no files")
    digest = settings.digest_of(model.model)
    if not model.hf_overrides:
        return digest
    if not isinstance(model.hf_overrides, dict):
        raise OptionError("hf_overrides: write them as values, since what a function changes has no name")
    text = json.dumps(model.hf_overrides, sort_keys=True, default=str).encode()
    return blake3(digest + text, derive_key_context=_OVERRIDES_CONTEXT).digest()


def _dtypes(caches: KVCacheConfig) -> list[str]:
    return [str(spec.dtype).removeprefix("torch.") for _, spec in layer_specs(caches).values()]


def _groups(caches: KVCacheConfig) -> tuple[AttentionGroup, ...]:
    """Layers of one shape and reach together, whatever groups vLLM packs them into; global ones first."""
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for name, (_, spec) in layer_specs(caches).items():
        kinds.setdefault((window_of(spec), spec.num_kv_heads, spec.head_size), []).append(layer_number(name))
    return tuple(
        AttentionGroup(window, tuple(sorted(set(layers))), heads, dim)
        for (window, heads, dim), layers in sorted(kinds.items())
    )


def layer_number(name: str) -> int:
    """The number in a layer's name, such as 3 of ``model.layers.3.self_attn.attn``."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if not numbers:
        raise OptionError(f"layer {name!r} has no number in its name")
    return numbers[0]


class AdapterDigests:
    """Digests of LoRA adapters by the content of their files. Asking never waits: hashing happens on a thread here.

    vLLM reads an adapter when it needs it, under a number. Where the files change under one number, nobody knows which
    of them vLLM computes with, so there is no digest from then on.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "reprise-adapter")
        self._lock = threading.Lock()
        self._known: dict[_Files, Future[bytes]] = {}
        self._first: dict[int, _Files] = {}

    def hashing(self, adapter: LoRARequest) -> bool:
        """Whether the digest is under way (from now on, if nobody asked before)."""
        future = self._future(adapter)
        return future is not None and not future.done()

    def of(self, adapter: LoRARequest) -> bytes | None:
        """The digest; None while it is not known (yet), so nothing is cached."""
        future = self._future(adapter)
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def _future(self, adapter: LoRARequest) -> Future[bytes] | None:
        try:
            items = sorted(Path(adapter.lora_path).glob("*")) if adapter.lora_path else []
            paths = [item for item in items if item.is_file()]
            files = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
        except OSError:
            return None
        if not files or self._first.setdefault(adapter.lora_int_id, files) != files:
            return None
        with self._lock:
            if files not in self._known:
                if len(self._known) >= ADAPTERS_MAX:
                    self._known.clear()
                self._known[files] = self._pool.submit(_adapter_digest, paths)
            return self._known[files]


def _adapter_digest(files: list[Path]) -> bytes:
    whole = blake3(b"", derive_key_context=_ADAPTER_CONTEXT)
    for path in files:
        name = path.name.encode()
        whole.update(len(name).to_bytes(4, "little") + name + blake3(path.read_bytes()).digest())
    return whole.digest()


def layout_of(config: VllmConfig, name: str, shape: tuple[int, ...]) -> str:
    """How a layer's page is to be read: its shape, the kernel that wrote it, and the instructions that it packs for."""
    layer: Any = config.compilation_config.static_forward_context.get(name)
    backend = getattr(layer, "attn_backend", None)
    kernel = backend.get_name() if backend is not None else "unknown"
    return f"{kernel}/{getattr(layer, 'isa', '-')}/{'x'.join(map(str, shape))}"
