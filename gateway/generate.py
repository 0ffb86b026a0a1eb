"""One request across the workers: prefill, hand-off, decode, and going on elsewhere when a worker is lost.

Owns the order of calls, which failures another worker may cure, and the counting of tokens. Does not know HTTP or JSON.
Invariants: usage is counted from the one prefill whose first token was used; a token is shown once, whatever happens to
the worker that made it; every wait has a deadline; leaving a ``Generation`` closes whatever stream is open, which
cancels the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from gateway.errors import BadRequest, GatewayError, NoCapacity, WorkerLost
from gateway.fleet import Fleet, Worker
from gateway.routing import prefill_pairs
from gateway.stops import StopFilter
from gateway.tokens import Detokenizer
from workers.errors import Failed, ProtocolError, Rejected, Unavailable, WorkerError
from workers.protocol import (
    DecodeRequest,
    Fidelity,
    Finished,
    FirstToken,
    HandedOff,
    ModelInfo,
    PrefillRequest,
    Reuse,
    Sampling,
    Tokens,
)

FinishReason = Literal["stop", "length"]
ATTEMPTS_MAX = 8
"""Workers tried for one phase of one request; then the request fails."""
RETRY_AFTER_S = 2.0
WAIT_STEP_S = 0.1
CLOSE_S_MAX = 5.0

Event = TypeVar("Event", FirstToken | HandedOff, Tokens | Finished)


@dataclass(frozen=True, slots=True)
class Job:
    """A request after all checks: what is asked of the workers."""

    request_id: str
    model: ModelInfo
    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    traffic_class: int
    tenant: str | None
    cache: bool = True
    fidelity: Fidelity | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """Longest waits in seconds; see ``GatewayConfig``."""

    prefill_s_max: float
    event_s_max: float
    hand_off_s_max: float
    continue_s_max: float


@dataclass(slots=True)
class Progress:
    """What happened so far: the numbers behind usage, log line and metrics.

    ``exact``: every token so far is what a cold run would give, whichever worker chose it.
    """

    first: FirstToken | None = None
    exact: bool = True
    ttft_s: float = 0.0
    generated: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    resumed: Reuse | None = None
    published: bool | None = None
    prefill_retries: int = 0
    continuations: int = 0
    prefill_worker: str | None = None
    decode_workers: list[str] = field(default_factory=list)


class Observer(Protocol):
    """Told of what operators count."""

    def worker_failed(self, phase: str, kind: str) -> None: ...


class AnswerText:
    """Tokens of one answer to text that may be shown: detokenised, cut at stop strings."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: StopFilter) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, token: int) -> str:
        return self._stops.push(self._detokenizer.push(token))

    def flush(self) -> str:
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()


class Generation:
    """One answer. ``start`` returns with the first token chosen; ``deltas`` gives the text; ``aclose`` in any case."""

    def __init__(
        self, job: Job, fleet: Fleet, text: AnswerText, waits: Waits, observer: Observer, now_s: Callable[[], float]
    ) -> None:
        self.job = job
        self.progress = Progress()
        self._fleet = fleet
        self._text = text
        self._waits = waits
        self._observer = observer
        self._now_s = now_s
        self._open = AsyncExitStack()
        self._prefill: tuple[Worker, AsyncIterator[FirstToken | HandedOff]] | None = None
        self._tried_s: dict[str, float] = {}
        self._stalled_s: float | None = None
        self._failures = 0

    @property
    def ended(self) -> bool:
        return self.progress.finish_reason is not None

    async def aclose(self) -> None:
        """Close the streams that are open; the workers drop the request."""
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._open.aclose()
        except TimeoutError:
            pass

    async def start(self, began_s: float) -> None:
        """Have some prefill worker choose the first token. Raises GatewayError when none can."""
        excluded: list[str] = []
        last: WorkerError | None = None
        while len(excluded) < ATTEMPTS_MAX:
            worker = self._fleet.prefill_worker(
                self.job.model.name, decode_follows=self.job.max_tokens > 1, excluded=excluded
            )
            if worker is None:
                break
            excluded.append(worker.url)
            try:
                await self._prefill_on(worker)
            except WorkerError as error:
                await self.aclose()
                last = error
                self._judge(worker, error, "prefill")
                self.progress.prefill_retries += 1
                continue
            self.progress.ttft_s = self._now_s() - began_s
            return
        raise _no_prefill(self.job.model.name, last)

    async def deltas(self) -> AsyncIterator[str]:
        """Text as it becomes sure. Raises WorkerLost or NoCapacity when nobody can finish the answer."""
        assert self.progress.first is not None, "start() comes first"
        if piece := self._accept(self.progress.first.token):
            yield piece
        await self._hand_off()
        while not self.ended:
            worker = await self._decode_worker()
            self.progress.decode_workers.append(worker.url)
            try:
                async with aclosing(self._decode_on(worker)) as pieces:
                    async for piece in pieces:
                        yield piece
            except WorkerError as error:
                self._judge(worker, error, "decode")
                self._stall(worker, error)
        if piece := self._text.flush():
            yield piece

    # --- prefill ----------------------------------------------------------------------------------------------------

    async def _prefill_on(self, worker: Worker) -> None:
        job = self.job
        self._open.enter_context(worker.busy(pairs=prefill_pairs(len(job.tokens)), tokens=len(job.tokens)))
        request = PrefillRequest(
            request_id=job.request_id,
            tokens=job.tokens,
            traffic_class=job.traffic_class,
            tenant=job.tenant,
            cache=job.cache,
            fidelity=job.fidelity,
            sampling=job.sampling,
        )
        stream = worker.client.prefill(request)
        self._open.push_async_callback(_close, stream)
        event = await _next(worker, stream, self._waits.prefill_s_max)
        if not isinstance(event, FirstToken):
            raise ProtocolError("a prefill stream must begin with the first token")
        self._check_token(event.token)
        _check_reuse(event.reuse, len(job.tokens))
        self._prefill = (worker, stream)
        self.progress.first = event
        self.progress.exact = event.reuse.exact
        self.progress.prefill_worker = worker.url

    async def _hand_off(self) -> None:
        """Wait until the prompt's blocks are stored. Without them decode computes again: no failure of ours."""
        assert self._prefill is not None
        try:
            event = await _next(*self._prefill, self._waits.hand_off_s_max)
            self.progress.published = isinstance(event, HandedOff) and event.published
        except WorkerError as error:
            self.progress.published = False
            self._observer.worker_failed("hand_off", type(error).__name__)
        await self.aclose()

    # --- decode -----------------------------------------------------------------------------------------------------

    async def _decode_on(self, worker: Worker) -> AsyncGenerator[str]:
        job, progress = self.job, self.progress
        tokens = job.tokens + progress.generated
        request = DecodeRequest(
            request_id=job.request_id,
            tokens=tokens,
            traffic_class=job.traffic_class,
            tenant=job.tenant,
            cache=job.cache,
            fidelity=job.fidelity,
            sampling=job.sampling,
            prompt_tokens=len(job.tokens),
            max_tokens=job.max_tokens - len(progress.generated),
            stop_token_ids=list(job.stop_token_ids),
        )
        stream = worker.client.decode(request)
        with worker.busy(tokens=len(tokens)):
            try:
                while not self.ended:
                    event = await _next(worker, stream, self._waits.event_s_max)
                    if isinstance(event, Finished):
                        progress.resumed = progress.resumed or event.resumed
                        progress.finish_reason = event.reason
                        return
                    for token in event.tokens:
                        self._check_token(token)  # all before any: a counted token's text is never dropped
                    self._stalled_s = None
                    progress.exact &= event.exact
                    if piece := "".join([self._accept(token) for token in event.tokens]):
                        yield piece
                await self._finish(worker, stream)
            finally:
                await _close(stream)

    async def _finish(self, worker: Worker, stream: AsyncIterator[Tokens | Finished]) -> None:
        """The last token was counted here before the worker said so: let it store the end of the answer."""
        if self._text.stopped:
            return
        try:
            event = await _next(worker, stream, self._waits.hand_off_s_max)
        except WorkerError:
            return  # the answer is complete without it
        if isinstance(event, Finished):
            self.progress.resumed = self.progress.resumed or event.resumed

    def _stall(self, worker: Worker, error: WorkerError) -> None:
        """Remember a worker that could not go on. A busy one may be asked again and again, until ``continue_s_max``."""
        now_s = self._now_s()
        self._tried_s[worker.url] = now_s
        self._stalled_s = now_s if self._stalled_s is None else self._stalled_s
        if isinstance(error, Rejected) and error.retryable:
            return
        self._failures += 1
        self.progress.continuations += 1
        if self._failures >= ATTEMPTS_MAX:
            raise _lost(error) from error

    async def _decode_worker(self) -> Worker:
        """A decode worker for what is left; waits a while for one to come back. Raises WorkerLost or NoCapacity."""
        space_id = self._space_id()
        length = len(self.job.tokens) + len(self.progress.generated)
        began_s = self._now_s() if self._stalled_s is None else self._stalled_s
        while True:
            for worker in self._fleet.workers:
                if worker.url in self._tried_s and worker.seen_since(self._tried_s[worker.url]):
                    del self._tried_s[worker.url]  # it has answered since it failed
            found = self._fleet.decode_worker(self.job.model.name, space_id, length, excluded=self._tried_s)
            if found is not None:
                return found
            if self._now_s() - began_s > self._waits.continue_s_max:
                raise self._no_decode()
            await asyncio.sleep(WAIT_STEP_S)

    def _no_decode(self) -> GatewayError:
        if self._failures:
            return WorkerLost("no decode worker can go on with this answer; send it again", retry_after_s=RETRY_AFTER_S)
        return NoCapacity("all decode workers are busy or gone", retry_after_s=RETRY_AFTER_S)

    def _space_id(self) -> str:
        for worker in self._fleet.workers:
            if worker.url == self.progress.prefill_worker and worker.info is not None:
                return worker.info.space_id
        return self.job.model.space_id

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _accept(self, token: int) -> str:
        """Count one token; returns the text that it makes sure. Tokens after the end are dropped."""
        if self.ended:
            return ""
        self._check_token(token)
        progress = self.progress
        progress.generated.append(token)
        if token in self.job.stop_token_ids:
            progress.finish_reason = "stop"
            return ""
        piece = self._text.push(token)
        if self._text.stopped:
            progress.finish_reason = "stop"
        elif len(progress.generated) >= self.job.max_tokens:
            progress.finish_reason = "length"
        return piece

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.job.model.vocabulary:
            raise ProtocolError(f"a worker chose token {token}, outside the vocabulary of {self.job.model.vocabulary}")

    def _judge(self, worker: Worker, error: WorkerError, phase: str) -> None:
        """Count a failure; raises GatewayError when no other worker could do better."""
        self._observer.worker_failed(phase, type(error).__name__)
        if isinstance(error, Unavailable):
            self._fleet.failed(worker)
        if isinstance(error, Rejected) and error.status in (400, 413):
            raise BadRequest(error.message, code=error.code) from error
        if isinstance(error, Failed) and not error.retryable:
            raise _lost(error) from error


def _no_prefill(model: str, last: WorkerError | None) -> GatewayError:
    if last is None:
        return NoCapacity(f"no prefill and decode worker for {model!r} can be reached now", retry_after_s=RETRY_AFTER_S)
    if isinstance(last, Rejected) and last.retryable:
        return NoCapacity("all workers are busy", retry_after_s=last.retry_after_s or RETRY_AFTER_S)
    return NoCapacity(f"no prefill worker could serve this request: {last}", retry_after_s=RETRY_AFTER_S)


def _lost(error: WorkerError) -> WorkerLost:
    return WorkerLost(f"the workers could not finish this answer: {error}", retry_after_s=RETRY_AFTER_S)


def _check_reuse(reuse: Reuse, prompt_tokens: int) -> None:
    whole = reuse.hit_tokens + reuse.miss_tokens == reuse.prompt_tokens == prompt_tokens
    if not whole or min(reuse.hit_tokens, reuse.miss_tokens, reuse.replayed_tokens) < 0:
        raise ProtocolError(
            f"a worker counts {reuse.hit_tokens} + {reuse.miss_tokens} of {prompt_tokens} prompt tokens"
        )


async def _next(worker: Worker, stream: AsyncIterator[Event], wait_s_max: float) -> Event:
    """The next event. Raises Unavailable past the deadline or when the worker stalls, Failed at an unexpected end."""
    try:
        async with worker.waited_for(wait_s_max):
            return await anext(stream)
    except TimeoutError:
        raise Unavailable(f"the worker was silent for {wait_s_max:.0f} s, or does not even answer polls") from None
    except StopAsyncIteration:
        raise Failed("the worker's stream ended early", code="cut") from None


async def _close(stream: AsyncIterator[Event]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
