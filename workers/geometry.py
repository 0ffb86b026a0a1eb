"""What a model's KV looks like: attention groups, byte sizes, and the space they make.

Owns the reading of a Hugging Face config into numbers. Does not know about tensors (torch-free), slots or requests.
Invariants: every layer is in exactly one group; the first group is global attention (window 0); a model without global
layers, or with attention of another kind, is refused here by name, before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.keys import AttentionGroup, Space, tenant_salt

LAYOUT = "planes-1"
"""Byte layout of blocks and states: [layers of the group, key then value, tokens, heads, head dim], little-endian."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""KV dtypes by name, and bytes of one element."""

STATE_HEADER_BYTES = 40

_GLOBAL, _SLIDING = "full_attention", "sliding_attention"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class UnsupportedModel(Exception):
    """The checkpoint's attention is of a kind whose KV this worker cannot store."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of one model's KV.

    ``global_group`` has window 0; ``sliding_group`` is None for a model of full attention only.
    """

    global_group: AttentionGroup
    sliding_group: AttentionGroup | None
    dtype: str

    @classmethod
    def from_config(cls, config: Any, dtype: str) -> Geometry:
        """From a transformers config (a multimodal one is asked for its text part). Raises UnsupportedModel."""
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        config = config.get_text_config(decoder=True)
        _refuse_unsupported(config)
        kinds = _layer_types(config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        full = tuple(index for index, kind in enumerate(kinds) if kind == _GLOBAL)
        sliding = tuple(index for index, kind in enumerate(kinds) if kind == _SLIDING)
        if not full:
            raise UnsupportedModel(
                "all layers slide: without a global-attention layer there is nothing durable to store"
            )
        window = int(config.sliding_window) if sliding else 0
        return cls(
            global_group=AttentionGroup(0, full, heads, dim),
            sliding_group=AttentionGroup(window, sliding, heads, dim) if sliding else None,
            dtype=dtype,
        )

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        return (self.global_group, self.sliding_group) if self.sliding_group else (self.global_group,)

    @property
    def layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def window(self) -> int:
        """Tokens of the sliding window W, the query's own included; 0 without sliding layers."""
        return self.sliding_group.window if self.sliding_group else 0

    @property
    def sliding_layers(self) -> int:
        """S, the number of sliding layers."""
        return len(self.sliding_group.layers) if self.sliding_group else 0

    @property
    def exact_replay_tokens(self) -> int:
        """Tokens whose replay rebuilds every window exactly: S x (W-1); one fewer is already not exact."""
        return self.sliding_layers * max(self.window - 1, 0)

    @property
    def block_token_bytes(self) -> int:
        """Bytes that one token adds to a block."""
        return self._token_bytes(self.global_group)

    @property
    def window_token_bytes(self) -> int:
        """Bytes that one position adds to a state's windows."""
        return self._token_bytes(self.sliding_group) if self.sliding_group else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the worker's own KV memory for one slot, all layers."""
        return self.block_token_bytes + self.window_token_bytes

    def block_payload_bytes(self, block_tokens: int) -> int:
        return self.block_token_bytes * block_tokens

    def state_payload_bytes(self, position: int, block_tokens: int) -> int:
        """Bytes of a whole state after ``position`` tokens: header, the last W positions' windows, the tail block."""
        tail = position % block_tokens
        return STATE_HEADER_BYTES + min(self.window, position) * self.window_token_bytes + tail * self.block_token_bytes

    def _token_bytes(self, group: AttentionGroup) -> int:
        return 2 * len(group.layers) * group.kv_heads * group.head_dim * DTYPE_BYTES[self.dtype]


def make_space(
    geometry: Geometry,
    *,
    model: str,
    weights_digest: bytes,
    block_tokens: int,
    revision: str | None = None,
    tenant: str | None = None,
    epoch: int = 0,
) -> Space:
    """The space of this model's blocks for one tenant; None is the space of all who have no tenant."""
    return Space(
        model=model,
        weights_digest=weights_digest,
        kv_dtype=geometry.dtype,
        layout=LAYOUT,
        block_tokens=block_tokens,
        groups=geometry.groups,
        revision=revision,
        tenant_salt=None if tenant is None else tenant_salt(tenant),
        epoch=epoch,
    )


def _layer_types(config: Any) -> Sequence[str]:
    """Kind of every layer; older configs name none, then a sliding window means that every layer slides."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = [_SLIDING if sliding else _GLOBAL] * config.num_hidden_layers
    other = sorted(set(kinds) - {_GLOBAL, _SLIDING})
    if other:
        raise UnsupportedModel(
            f"layers of type {', '.join(other)} are not supported (only {_GLOBAL} and {_SLIDING} are)"
        )
    return list(kinds)


def _refuse_unsupported(config: Any) -> None:
    """Name what else would make stored KV wrong."""
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModel("layers of different head counts or dims within one model are not supported")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel("layers that share another layer's KV are not supported")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("bidirectional attention is not supported: KV would depend on later tokens")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel("multi-head latent attention (kv_lora_rank) is not supported")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("chunked attention is not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type", "default")
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModel(
                f"rope type {kind!r} is not supported: it changes stored keys with the sequence's length"
            )
