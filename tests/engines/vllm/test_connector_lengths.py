"""What the vLLM connector saves, its next process finds: prompts of every length, and blocks that were refused."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstore.keys import TokenChain
from kvstore.store import BlockPut
from kvstore.traffic import CHAT
from tests.support.vllm_halves import TOKENS, Ranks, a_request, config_of, full, sliding
from workers.adapters.attachment import Attachment
from workers.adapters.vllm_step import window_name

LENGTHS = (*range(1, 130), *(at + by for at in range(192, 1025, 64) for by in (-1, 0, 1)))
"""Every one for a while, then those around what a batch or a stripe may end with."""


def prompt(length: int) -> list[int]:
    """One that begins like no other, so that it finds what itself has saved."""
    return [length + token * 7919 for token in range(length)]


def save(ranks: Ranks, tokens: list[int]) -> list[int]:
    """A request comes, is computed in one step, and what it is told to save lies in the store; which blocks that is."""
    request = a_request(tokens, f"saves {len(tokens)}")
    ranks.half.arrive(request)
    ranks.matched(request)
    blocks, ends = ranks.half._due(ranks.half._requests[request.request_id], 0, len(tokens))
    for base in ranks.bases:
        space = ranks.store.register_space(base)
        chain = TokenChain(space, TOKENS, tokens)
        names = [*(chain.names[at] for at in blocks), *(window_name(chain, at) for at in ends)]
        if names:
            ranks.store.put(space, [BlockPut(name, TOKENS, b"x") for name in names], traffic_class=CHAT)
    ranks.half.leave(request)
    return blocks


def found(ranks: Ranks, tokens: list[int]) -> Any:
    """Tokens that another request is promised."""
    request = a_request(tokens, f"finds {len(tokens)}")
    ranks.half.arrive(request)
    matched, _ = ranks.matched(request)
    ranks.half.leave(request)
    return matched


def next_process(ranks: Ranks, caches: KVCacheConfig) -> Ranks:
    """With nothing of its own, over the same store."""
    other = Ranks(caches)
    assert other.half._attached is not None
    settings = other.half._attached.settings
    other.half._attached.close(1.0)
    other.half._attached = Attachment(settings, ranks.store, other.bases[0])
    return other


@pytest.mark.parametrize("slides", [False, True], ids=["full attention", "sliding windows"])
def test_a_prompt_of_any_length_is_found_as_far_as_it_can_be(slides: bool) -> None:
    """Saved as its step says: the next process finds all its whole blocks, but the one that a window looks out of."""
    caches = config_of(a_0=full(), b_1=sliding(9)) if slides else config_of(a_0=full())
    first = Ranks(caches)
    other = next_process(first, caches)
    for length in LENGTHS:
        save(first, prompt(length))
        assert found(other, prompt(length)) == (length - slides) // TOKENS * TOKENS, length
    first.half.close()
    other.half.close()


def test_a_block_that_was_refused_is_saved_by_the_next_request() -> None:
    """The fifth of ten was: a prompt is found up to it, offers that block alone, and is found whole from then on."""
    caches = config_of(a_0=full())
    first = Ranks(caches)
    tokens = prompt(10 * TOKENS)
    for rank in range(2):
        first.put(rank, tokens, [0, 1, 2, 3, 5, 6, 7, 8, 9])
    other = next_process(first, caches)
    assert found(other, tokens) == 4 * TOKENS
    assert save(first, tokens) == [4]
    assert found(other, tokens) == 10 * TOKENS
    first.half.close()
    other.half.close()
