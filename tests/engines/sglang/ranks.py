"""Two tensor-parallel ranks of one model, each a process with pools of its own, that agree by SGLang's collectives."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.engines.sglang.hybrid import Hybrid
from tests.engines.sglang.rig import ALONE, PAGE, Driven, fill, host, mha, mla, page

from sglang.srt.runtime_context import get_parallel  # isort: skip

JOIN_S = 240.0


def run(address: str, meeting: str) -> list[dict[str, Any]]:
    """What each of two ranks makes of each scenario; ``meeting``: a file that is not there yet, where they meet."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, address, meeting, answers)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        said = dict(answers.get(timeout=JOIN_S) for _ in ranks)
    finally:
        for process in ranks:
            process.join(20.0)
            if process.is_alive():
                process.kill()
    assert all(isinstance(answer, dict) for answer in said.values()), said
    return [said[0], said[1]]


def _rank(rank: int, address: str, meeting: str, answers: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        with get_parallel().override(**(ALONE | {"tp_rank": rank, "tp_size": 2})):
            answers.put((rank, {scenario.__name__: scenario(rank, address) for scenario in SCENARIOS}))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc()))


def a_page_that_one_rank_lost(rank: int, address: str) -> tuple[int, bool]:
    """Both store five pages, rank 1 loses its fourth: tokens that a rank loads then, and whether they are its own."""
    pool, tokens = host(mha()), list(range(5 * PAGE))
    fill(pool, rank)
    engine = Driven(address, mha(), pool, dist.group.WORLD)
    assert engine.backup(tokens, range(5)) == 5 * PAGE
    if rank == 1:
        lose(engine.controller, "kv", tokens, 3)
    dist.barrier()
    done, indices = engine.prefetch(tokens)
    loaded = [] if indices is None else [int(indices[at * PAGE]) // PAGE for at in range(done // PAGE)]
    good = all(torch.equal(page(pool, mine), page(pool, number)) for number, mine in enumerate(loaded))
    dist.barrier()
    engine.close()
    return done, good


def windows_that_end_at_different_places(rank: int, address: str) -> tuple[int, int]:
    """One prefix with windows that end at 2 and 5 pages on rank 0, at 2 and 4 on rank 1: what this rank loads."""
    tokens = list(range(6 * PAGE))
    engine = Hybrid(address, 10 * rank, dist.group.WORLD)
    engine.backup(tokens[: 2 * PAGE], [0, 1], [0, 1])
    end = 5 - rank
    engine.backup(tokens[: end * PAGE], range(end), [end - 2, end - 1])
    engine.backup(tokens, range(6), [])
    dist.barrier()
    done, windows, _, _ = engine.prefetch(tokens)
    dist.barrier()
    engine.controller.detach_storage_backend()
    return done, windows


def pages_that_all_ranks_hold(rank: int, address: str) -> tuple[int, int, bool]:
    """MLA, the same bytes on both: blocks that this rank sent, tokens that it loads, and whether they are right."""
    pool, tokens = host(mla()), list(range(7000, 7000 + 4 * PAGE))
    fill(pool, 77)
    engine = Driven(address, mla(), pool, dist.group.WORLD)
    engine.backup(tokens, range(4))
    dist.barrier()
    done, indices = engine.prefetch(tokens)
    loaded = [] if indices is None else [int(indices[at * PAGE]) // PAGE for at in range(done // PAGE)]
    good = all(torch.equal(page(pool, mine), page(pool, number)) for number, mine in enumerate(loaded))
    sent = engine.controller.storage_backend.stats()["stored"]
    dist.barrier()
    engine.close()
    return sent, done, good


def lose(controller: Any, pool: str, tokens: list[int], number: int) -> None:
    """Take one page of this rank's pool away from the store."""
    backend = controller.storage_backend
    key = controller.get_hash_str(tokens, None, page_size=PAGE)[number]
    registered = backend._pools[pool]
    names = [name.key for name in registered.names([key])]
    assert backend._attachment.store.delete(registered.space.id, names) == len(names)


SCENARIOS = (a_page_that_one_rank_lost, windows_that_end_at_different_places, pages_that_all_ranks_hold)
