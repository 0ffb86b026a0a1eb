"""The workers that a gateway knows: who they are, whether they answer, and how loaded they are.

Owns polling and the counts of what was sent since a worker's last report. Does not choose (``routing.py``) and does not
know requests. Invariants: a worker that failed is not usable until it has answered a later poll; after an outage its
model is asked again, since another process may have taken its address; every poll has a deadline; who waits for a
worker that has answered no poll for ``stalled_s`` waits no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from gateway.routing import WorkerView, choose_decode, choose_prefill
from workers.client import WorkerClient
from workers.errors import WorkerError
from workers.protocol import DecodeRequest, Finished, FirstToken, HandedOff, Load, ModelInfo, PrefillRequest, Tokens

POLL_S_MAX = 5.0
STALLED_S_DEFAULT = 30.0
FAILED_POLLS_MIN = 2
"""Failed polls in a row before a worker counts as stalled: after a pause of our own one fails, however well it is."""


class Client(Protocol):
    """What the gateway uses of a worker's client."""

    def prefill(self, request: PrefillRequest) -> AsyncIterator[FirstToken | HandedOff]: ...

    def decode(self, request: DecodeRequest) -> AsyncIterator[Tokens | Finished]: ...

    async def model(self) -> ModelInfo: ...

    async def load(self) -> Load: ...

    async def aclose(self) -> None: ...


class Worker:
    """One worker as the gateway last saw it. ``sent_*`` count requests of this gateway that are under way there."""

    __slots__ = (
        "_failed_polls",
        "_failed_s",
        "_seen_s",
        "_sent_pairs",
        "_sent_running",
        "_sent_tokens",
        "_waits",
        "client",
        "info",
        "load",
        "poller",
        "roles",
        "url",
    )

    def __init__(self, url: str, roles: frozenset[str], client: Client, poller: Client) -> None:
        self.url = url
        self.roles = roles
        self.client = client
        self.poller = poller
        self.info: ModelInfo | None = None
        self.load: Load | None = None
        self._seen_s = -2.0
        self._failed_s = -1.0
        self._sent_pairs = 0.0
        self._sent_running = 0
        self._sent_tokens = 0
        self._failed_polls = 0
        self._waits: set[asyncio.Timeout] = set()

    @property
    def usable(self) -> bool:
        """Whether it answered since it last failed, and takes requests."""
        return self.load is not None and not self.load.draining and self._seen_s > self._failed_s

    def seen(self, load: Load, now_s: float) -> None:
        self.load = load
        self._seen_s = now_s
        self._failed_polls = 0

    def failed(self, now_s: float) -> None:
        """Not usable until a poll that begins later has succeeded."""
        self._failed_s = now_s

    def missed(self, now_s: float, stalled_s: float) -> None:
        """A poll failed; whoever waits for the worker is told once it has answered none for ``stalled_s``."""
        self.failed(now_s)
        self._failed_polls += 1
        if self._failed_polls >= FAILED_POLLS_MIN and now_s - self._seen_s > stalled_s:
            for wait in self._waits:
                if not wait.expired():
                    wait.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def waited_for(self, wait_s_max: float) -> AsyncGenerator[None]:
        """Wait for the worker within: TimeoutError past ``wait_s_max``, and earlier when it is found stalled."""
        async with asyncio.timeout(wait_s_max) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    def seen_since(self, time_s: float) -> bool:
        return self.usable and self._seen_s > time_s

    @contextmanager
    def busy(self, *, pairs: float = 0.0, tokens: int = 0) -> Iterator[None]:
        """Count one request while it is under way."""
        self._sent_running += 1
        self._sent_pairs += pairs
        self._sent_tokens += tokens
        try:
            yield
        finally:
            self._sent_running -= 1
            self._sent_pairs -= pairs
            self._sent_tokens -= tokens

    def view(self) -> WorkerView | None:
        """What routing sees; None before the worker was ever reached.

        Its own report and our count describe the same requests, so the larger one is taken, not the sum.
        """
        info, load = self.info, self.load
        if info is None or load is None:
            return None
        return WorkerView(
            url=self.url,
            model=info.name,
            space_id=info.space_id,
            prefills="prefill" in self.roles and info.role in ("prefill", "both"),
            decodes="decode" in self.roles and info.role in ("decode", "both"),
            usable=self.usable,
            queued_pairs=max(load.queued_pairs, self._sent_pairs),
            running=max(load.running + load.waiting, self._sent_running),
            kv_tokens=max(load.kv_tokens, self._sent_tokens),
            kv_tokens_max=load.kv_tokens_max,
        )


class Fleet:
    """All workers of one gateway. ``run`` polls them until it is cancelled."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        now_s: Callable[[], float],
        poll_s: float,
        stalled_s: float = STALLED_S_DEFAULT,
    ) -> None:
        self._workers = {worker.url: worker for worker in workers}
        self._now_s = now_s
        self._poll_s = poll_s
        self._stalled_s = stalled_s

    @classmethod
    def open(
        cls,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        token: str | None,
        event_s: float,
        now_s: Callable[[], float],
        poll_s: float,
        stalled_s: float = STALLED_S_DEFAULT,
    ) -> Fleet:
        """Clients for the named workers; nothing is connected yet. One worker may be named for both roles."""
        roles: dict[str, set[str]] = {}
        for role, urls in (("prefill", prefill), ("decode", decode)):
            for url in urls:
                roles.setdefault(url.rstrip("/"), set()).add(role)
        # Polls have connections of their own: requests that use all others must not make a worker look dead.
        workers = [
            Worker(
                url,
                frozenset(names),
                client=WorkerClient.open(url, token=token, event_s=event_s),
                poller=WorkerClient.open(url, token=token),
            )
            for url, names in roles.items()
        ]
        return cls(workers, now_s=now_s, poll_s=poll_s, stalled_s=stalled_s)

    @property
    def workers(self) -> Sequence[Worker]:
        return tuple(self._workers.values())

    async def run(self) -> None:
        """Poll every worker, each on its own task."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers.values():
                group.create_task(self._watch(worker))

    async def poll(self, worker: Worker) -> None:
        """Ask one worker for its load, and for its model where that is not known or may have changed."""
        began_s = self._now_s()
        try:
            async with asyncio.timeout(POLL_S_MAX):
                if worker.info is None or not worker.usable:
                    worker.info = await worker.poller.model()
                load = await worker.poller.load()
        except (WorkerError, TimeoutError, ValueError):
            # ValueError: an answer of another shape (another version, or not a worker at all).
            worker.missed(self._now_s(), self._stalled_s)
            return
        worker.seen(load, began_s)

    def models(self) -> dict[str, ModelInfo]:
        """Models by name, as the first worker that serves each tells; also of workers that do not answer now.

        The context is the shortest of the model's usable workers, since any of them may get the request.
        """
        known = [worker for worker in self._workers.values() if worker.info is not None]
        found: dict[str, ModelInfo] = {}
        for worker in sorted(known, key=lambda item: not item.usable):
            info = worker.info
            assert info is not None
            first = found.setdefault(info.name, info)
            if worker.usable and info.context_tokens < first.context_tokens:
                found[info.name] = first.model_copy(update={"context_tokens": info.context_tokens})
        return found

    def ready_models(self) -> list[str]:
        """Models for which a prefill and a decode worker can be used now."""
        views = self._views()
        return [name for name in self.models() if choose_prefill(views, name, decode_follows=True) is not None]

    def prefill_worker(self, model: str, *, decode_follows: bool, excluded: Collection[str] = ()) -> Worker | None:
        return self._worker(choose_prefill(self._views(), model, decode_follows=decode_follows, excluded=excluded))

    def decode_worker(self, model: str, space_id: str, tokens: int, excluded: Collection[str] = ()) -> Worker | None:
        return self._worker(choose_decode(self._views(), model, space_id, tokens, excluded=excluded))

    def failed(self, worker: Worker) -> None:
        """A request found the worker gone."""
        worker.failed(self._now_s())

    async def aclose(self) -> None:
        """Close every client."""
        for worker in self._workers.values():
            await worker.client.aclose()
            await worker.poller.aclose()

    async def _watch(self, worker: Worker) -> None:
        while True:
            await self.poll(worker)
            await asyncio.sleep(self._poll_s)

    def _views(self) -> list[WorkerView]:
        return [view for worker in self._workers.values() if (view := worker.view()) is not None]

    def _worker(self, view: WorkerView | None) -> Worker | None:
        return None if view is None else self._workers[view.url]
