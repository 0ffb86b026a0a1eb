"""What the gateway believes of its workers: only what they answered since they last failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.fleet import Fleet, Worker
from workers.errors import Rejected, Unavailable
from workers.protocol import DecodeRequest, Finished, FirstToken, HandedOff, Load, ModelInfo, PrefillRequest, Tokens


class FakeClient:
    """A worker's client that answers from fields; an exception in a field is raised."""

    def __init__(self, **model: Any) -> None:
        self.info: ModelInfo | Exception = ModelInfo(
            **{
                "name": "m",
                "role": "both",
                "directory": "/m",
                "context_tokens": 100,
                "vocabulary": 10,
                "stop_token_ids": [],
                "block_tokens": 4,
                "space_id": "s",
                "fidelity": "bounded",
            }
            | model
        )
        self.report: Load | Exception = Load(running=1, waiting=1, queued_pairs=5.0, kv_tokens=7, kv_tokens_max=100)
        self.models_asked = 0

    async def model(self) -> ModelInfo:
        self.models_asked += 1
        return _give(self.info)

    async def load(self) -> Load:
        return _give(self.report)

    def prefill(self, request: PrefillRequest) -> AsyncIterator[FirstToken | HandedOff]:
        raise NotImplementedError

    def decode(self, request: DecodeRequest) -> AsyncIterator[Tokens | Finished]:
        raise NotImplementedError

    async def aclose(self) -> None: ...


def _give(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        self.now += 1.0
        return self.now


def make(roles: set[str] | None = None, **model: Any) -> tuple[Fleet, Worker, FakeClient]:
    client = FakeClient(**model)
    worker = Worker("http://w", frozenset(roles or {"prefill", "decode"}), client, client)
    return Fleet([worker], now_s=Clock().now_s, poll_s=1.0), worker, client


@pytest.mark.parametrize(
    "fault",
    [Unavailable("gone"), Rejected(503, "busy"), Rejected(401, "who"), ValueError("not a worker"), TimeoutError()],
)
def test_a_failed_poll_makes_a_worker_unusable_until_the_next_good_one(fault: Exception) -> None:
    """Whatever goes wrong in a poll, the worker is not used; afterwards its model is asked again."""
    fleet, worker, client = make()
    asyncio.run(fleet.poll(worker))
    assert fleet.ready_models() == ["m"]
    asyncio.run(fleet.poll(worker))
    assert client.models_asked == 1
    good, client.report = client.report, fault
    asyncio.run(fleet.poll(worker))
    assert fleet.ready_models() == []
    assert list(fleet.models()) == ["m"]
    client.report = good
    asyncio.run(fleet.poll(worker))
    assert fleet.ready_models() == ["m"]
    assert client.models_asked == 2


def test_a_models_context_is_what_every_usable_worker_can_hold() -> None:
    """A worker with less KV memory than the others bounds what is accepted, for as long as it is used."""
    clients = [FakeClient(context_tokens=tokens) for tokens in (100, 40, 70)]
    workers = [
        Worker(f"http://w{number}", frozenset({"prefill", "decode"}), client, client)
        for number, client in enumerate(clients)
    ]
    fleet = Fleet(workers, now_s=Clock().now_s, poll_s=1.0)
    for worker in workers:
        asyncio.run(fleet.poll(worker))
    assert fleet.models()["m"].context_tokens == 40
    fleet.failed(workers[1])
    assert fleet.models()["m"].context_tokens == 70


def test_a_poll_that_began_before_a_failure_does_not_heal() -> None:
    """A request that finds the worker gone counts more than a poll that was already under way."""
    fleet, worker, client = make()
    asyncio.run(fleet.poll(worker))
    fleet.failed(worker)
    assert isinstance(client.report, Load)
    worker.seen(client.report, 0.5)
    assert not worker.usable
    asyncio.run(fleet.poll(worker))
    assert worker.usable


def test_who_waits_for_a_worker_that_answers_no_poll_is_told() -> None:
    """A stopped process keeps its connections open: only its polls tell. One that answers again is waited for."""
    fleet, worker, client = make()

    async def wait_for_it() -> None:
        async with worker.waited_for(60.0):
            for _ in range(40):  # the clock goes on by a second or more with each
                await fleet.poll(worker)
                await asyncio.sleep(0)

    async def scenario() -> None:
        await fleet.poll(worker)
        await wait_for_it()
        good, client.report = client.report, TimeoutError()
        with pytest.raises(TimeoutError):
            await wait_for_it()
        client.report = good
        await wait_for_it()

    asyncio.run(scenario())


def test_load_is_the_larger_of_report_and_own_count() -> None:
    """Report and own count describe the same requests: the larger is believed, and ours ends with them."""
    fleet, worker, _ = make()
    asyncio.run(fleet.poll(worker))
    with worker.busy(pairs=9.0, tokens=3), worker.busy(tokens=50), worker.busy():
        view = worker.view()
        assert view is not None
        assert (view.queued_pairs, view.running, view.kv_tokens) == (9.0, 3, 53)
    view = worker.view()
    assert view is not None
    assert (view.queued_pairs, view.running, view.kv_tokens) == (5.0, 2, 7)


@pytest.mark.parametrize(
    ("roles", "role", "prefills", "decodes"),
    [
        ({"prefill", "decode"}, "both", True, True),
        ({"prefill"}, "both", True, False),
        ({"prefill", "decode"}, "decode", False, True),
        ({"prefill"}, "decode", False, False),
    ],
)
def test_a_worker_serves_what_it_is_listed_for_and_can(
    roles: set[str], role: str, prefills: bool, decodes: bool
) -> None:
    """Both the configuration and the worker itself must say that it has a role."""
    fleet, worker, _ = make(roles, role=role)
    asyncio.run(fleet.poll(worker))
    view = worker.view()
    assert view is not None
    assert (view.prefills, view.decodes) == (prefills, decodes)
