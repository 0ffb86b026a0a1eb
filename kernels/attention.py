"""Attention of one sequence's queries over its keys: torch only, any device.

Owns the choice between torch's fused attention and an explicit softmax. Does not know about slots, layers or windows:
the mask says what may be seen. Legend: H query heads, K key/value heads (H is a multiple of K), N queries, T keys,
D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional


def attend(
    query_HND: torch.Tensor,
    keys_TKD: torch.Tensor,
    values_TKD: torch.Tensor,
    *,
    scaling: float | None,
    mask_NT: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output [N, H, D]. ``mask_NT`` True where a query may see a key; ``causal`` (N == T) needs no mask.

    Grouped heads share keys without a copy. ``softcap`` bounds scores to +-softcap by tanh (Gemma 2); ``sinks_H`` adds
    one key of that score and no value per head (gpt-oss). Either takes the explicit path, in float32 or wider.
    """
    heads, queries, _ = query_HND.shape
    total, key_heads, _ = keys_TKD.shape
    assert heads % key_heads == 0, f"{heads} query heads do not share {key_heads} key heads"
    assert not causal or queries == total, "plain causal attention needs as many queries as keys"
    if softcap is None and sinks_H is None:
        return functional.scaled_dot_product_attention(
            query_HND[None],
            keys_TKD.transpose(0, 1)[None],
            values_TKD.transpose(0, 1)[None],
            attn_mask=mask_NT,
            is_causal=causal,
            scale=scaling,
            enable_gqa=heads != key_heads,
        )[0].transpose(0, 1)
    if causal:
        mask_NT = torch.ones(queries, total, dtype=torch.bool, device=query_HND.device).tril()
    return _explicit(query_HND, keys_TKD, values_TKD, scaling, mask_NT, softcap, sinks_H)


def _explicit(
    query_HND: torch.Tensor,
    keys_TKD: torch.Tensor,
    values_TKD: torch.Tensor,
    scaling: float | None,
    mask_NT: torch.Tensor | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    heads, queries, dim = query_HND.shape
    key_heads = keys_TKD.shape[1]
    wide = torch.promote_types(query_HND.dtype, torch.float32)
    query_KGND = query_HND.to(wide).view(key_heads, heads // key_heads, queries, dim)
    keys_K1DT = keys_TKD.to(wide).permute(1, 2, 0)[:, None]
    scores_KGNT = (query_KGND @ keys_K1DT) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores_KGNT = torch.tanh(scores_KGNT / softcap) * softcap
    if mask_NT is not None:
        scores_KGNT = scores_KGNT.masked_fill(~mask_NT, float("-inf"))
    if sinks_H is not None:
        sinks_KGN1 = sinks_H.to(wide).view(key_heads, -1, 1, 1).expand(-1, -1, queries, -1)
        scores_KGNT = torch.cat([scores_KGNT, sinks_KGN1], dim=-1)
    weights_KGNT = torch.softmax(scores_KGNT, dim=-1)[..., : keys_TKD.shape[0]]
    out_KGND = weights_KGNT @ values_TKD.to(wide).transpose(0, 1)[:, None]
    return out_KGND.reshape(heads, queries, dim).transpose(0, 1).to(query_HND.dtype)
