"""A worker under tokens of other roles than its own: it reuses what it may, and answers rightly whatever it may not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from kvstore.client import StoreClient
from kvstore.daemon.rights import grant_of
from kvstore.daemon.server import Server
from kvstore.daemon.tokens import Token, Tokens
from kvstore.testing import ManualClock
from tests.support.fake_model import FakeModel, fake_choose, fake_memory
from tests.support.stores import client_of, open_node, served, short_dir
from tests.support.worker_bench import Bench

MODEL = FakeModel("ggg")
PROMPT = random.Random(7).choices(range(1000), k=100)
ROLES = ("worker", "reader", "operator", "tenant:acme")


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        folder = stack.enter_context(short_dir())
        node = stack.enter_context(closing(open_node(folder / "data", ManualClock())))
        tokens = Tokens([Token(hashlib.sha256(role.encode()).digest(), grant_of([role])) for role in ROLES])
        yield stack.enter_context(served(node, folder, tokens=tokens))


def hit_tokens(store: StoreClient, tenant: str | None) -> tuple[int, bool]:
    """What a fresh worker reuses of the prompt, and whether it could store; its answer is right in any case."""
    with Bench(store, MODEL, fake_memory, fake_choose) as worker:
        answer = worker.prefill(PROMPT, tenant=tenant)
        assert answer.tokens == MODEL.expected(PROMPT, 1)
        assert answer.reuse.hit_tokens + answer.reuse.miss_tokens == len(PROMPT)
        return answer.reuse.hit_tokens, answer.handed_off.published


@pytest.mark.parametrize(
    ("role", "tenant", "stores", "reuses"),
    [
        ("worker", None, True, True),
        ("worker", "bolt", True, True),
        ("tenant:acme", "acme", True, True),
        ("tenant:acme", "bolt", False, False),
        ("tenant:acme", None, False, False),
        ("reader", "bolt", False, True),
    ],
)
def test_what_a_worker_may_not_is_computed(
    server: Server, role: str, tenant: str | None, stores: bool, reuses: bool
) -> None:
    with client_of(server.addresses[1], token=role) as store:
        first, published = hit_tokens(store, tenant)
        assert (first, published) == (0, stores)
        with client_of(server.addresses[1], token="worker") as other:
            assert hit_tokens(other, tenant)[1]
        assert (hit_tokens(store, tenant)[0] > 90) == reuses
