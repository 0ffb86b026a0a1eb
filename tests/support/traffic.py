"""Made-up traffic: conversations that take turns, grow, branch and pause, of two classes."""

from __future__ import annotations

import random

from kvstore.traffic import AGENT, CHAT
from retention.trace import Prompt, runs_of
from retention.workload import Workload, make_workload


def made_up_prompts(
    seed: int, *, requests: int, conversations: int = 12, grow_max: int = 12, gap_s: float = 600.0, begin_s: float = 0.0
) -> list[tuple[Prompt, int]]:
    """Prompts with their class bytes. Each repeats what its conversation said, or a part of it, and adds something;
    some conversations are of both classes, some share their beginning.
    """
    chance = random.Random(seed)
    said: dict[int, list[int]] = {number: [*range(chance.randrange(6))] for number in range(conversations)}
    fresh = 1000
    at_s = begin_s
    prompts: list[tuple[Prompt, int]] = []
    for _ in range(requests):
        at_s += chance.choice([0.0, 1.5, gap_s / 10, gap_s, 10 * gap_s]) * chance.random()
        number = chance.randrange(conversations)
        content = said[number]
        if chance.random() < 0.15:
            content = content[: chance.randrange(len(content) + 1)]
        grown = chance.randrange(grow_max + 1)
        content = said[number] = [*content, *range(fresh, fresh + grown)]
        fresh += grown + chance.randrange(2)
        scope = number % 3 if number < 6 else number
        class_byte = AGENT if number % 2 or chance.random() < 0.2 else CHAT
        prompts.append((Prompt(at_s, scope, 64 * len(content) + chance.randrange(64), runs_of(content)), class_byte))
    return prompts


def made_up_workload(seed: int, *, requests: int, gap_s: float = 600.0, begin_s: float = 0.0) -> Workload:
    return make_workload(made_up_prompts(seed, requests=requests, gap_s=gap_s, begin_s=begin_s), 64)
