"""A store at the other end of a slow line: how often a request waits for it does not grow with the prompt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kvstore.keys import TokenChain
from kvstore.testing import ManualClock
from kvstore.traffic import CHAT
from tests.support.far_away import far_away
from tests.support.spaces import BLOCK_TOKENS, PAYLOAD_BYTES, a_space, put_chain
from tests.support.stores import client_of, open_memory, served, short_dir
from workers.fetch import Fetcher, FetchSettings
from workers.plan import Reach
from workers.spaces import Spaces

STATE_BYTES = 500
REACH = Reach(BLOCK_TOKENS, 4, 3)
DELAY_S = 0.05
"""In each direction."""


@pytest.mark.parametrize(("blocks", "way"), [(8, "state"), (800, "state"), (8, "blocks"), (800, "blocks")])
def test_a_request_waits_twice_for_the_store_however_long_its_prompt(blocks: int, way: str) -> None:
    """Once for the look-up, once for all blocks together with the state, whatever of these there is."""
    backend = open_memory(ManualClock())
    with ExitStack() as stack:
        server = stack.enter_context(served(backend, stack.enter_context(short_dir())))
        proxy = stack.enter_context(far_away(server.addresses[0], DELAY_S))
        client = stack.enter_context(client_of(proxy.address))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        spaces = Spaces(a_space(), client)
        tenant = spaces.of(None)
        chain = TokenChain(tenant.id, BLOCK_TOKENS, range(blocks * BLOCK_TOKENS))
        backend.register_space(tenant.space)
        put_chain(backend, chain, CHAT)
        if way == "state":
            assert backend.put_state(tenant.id, chain.state_name(len(chain)), b"s" * STATE_BYTES)
        settings = FetchSettings(REACH, PAYLOAD_BYTES, lambda position: STATE_BYTES, 10.0, 10.0)
        fetcher = Fetcher(client, spaces, settings, pool, compute_s=lambda tokens: 0.0)
        for together in ({}, {2: 2 if way == "state" else 1}):  # the first one connects
            proxy.begin(together)
            fetched = fetcher.fetch(tenant, chain, "bounded")
        assert len(fetched.blocks) >= blocks - 1
        assert (fetched.state is not None) == (way == "state")
        assert proxy.round_trips == 2
