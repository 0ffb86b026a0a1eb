"""An engine with its parts, for tests: a tiny checkpoint or the fake model, a store of the test's choice, no server.

Owns the composition and the collecting of events. Everything runs on the test's own thread but fetches and puts; with
``fetch_inline`` fetches do too, so that each takes exactly a step, however busy the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvstore.keys import Space
from tests.support.waiting import WAIT_S
from workers.decode import decode_sequence
from workers.engine import Engine, EngineSettings, Parts
from workers.fetch import Fetcher, FetchSettings
from workers.geometry import Geometry, make_space
from workers.plan import Reach
from workers.prefill import prefill_sequence
from workers.protocol import (
    DecodeRequest,
    Fidelity,
    Finished,
    FirstToken,
    HandedOff,
    PrefillRequest,
    Reuse,
    Tokens,
    WorkerFailure,
)
from workers.publish import Publisher
from workers.scheduler import Attention, Limits
from workers.sequence import Event, LiveSequence
from workers.slots import Slots
from workers.spaces import Spaces

CHAT = 2


@dataclass
class Answer:
    """The events of one request."""

    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def first(self) -> FirstToken:
        return self.of(FirstToken)[0]  # type: ignore[no-any-return]

    @property
    def reuse(self) -> Reuse:
        return self.first.reuse if self.of(FirstToken) else self.of(Finished)[0].resumed  # type: ignore[no-any-return]

    @property
    def handed_off(self) -> HandedOff:
        return self.of(HandedOff)[0]  # type: ignore[no-any-return]

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.of(FirstToken)] + [
            token for event in self.of(Tokens) for token in event.tokens
        ]

    @property
    def finished(self) -> bool:
        return bool(self.of(Finished) or self.of(HandedOff)) and not self.of(WorkerFailure)


class Inline(Executor):
    """Does at once what it is given."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given, **named))
        return done


class Bench:
    """One worker without its server. ``close`` ends its threads."""

    def __init__(
        self,
        store: Any,
        model: Any,
        make_memory: Callable[[Geometry, Slots], Any],
        choose: Callable[..., int],
        *,
        block_tokens: int = 16,
        pages: int = 96,
        chunk_tokens: int = 64,
        fidelity: Fidelity = "bounded",
        replay_windows: int | None = 1,
        space: Space | None = None,
        queue_bytes_max: int = 64 << 20,
        lookup_deadline_s: float = WAIT_S,
        load_deadline_s: float = WAIT_S,
        requests_max: int = 64,
        settle_deadline_s: float = WAIT_S,
        fetch_inline: bool = False,
        dtype: str = "float32",
        epoch: int = 0,
    ) -> None:
        geometry: Geometry = model.geometry
        self.store = store
        self.block_tokens = block_tokens
        base = space or make_space(
            geometry, model="tiny", weights_digest=model.weights_digest, block_tokens=block_tokens, epoch=epoch
        )
        self.spaces = Spaces(base, store)
        self.slots = Slots(pages, block_tokens)
        self.publisher = Publisher(store, self.spaces, queue_bytes_max=queue_bytes_max)
        self.publisher.start()
        self._pools = (Inline() if fetch_inline else ThreadPoolExecutor(2, "fetch"), ThreadPoolExecutor(2, "state"))
        reach = Reach(block_tokens, geometry.window, geometry.sliding_layers, replay_windows)
        self.fetcher = Fetcher(
            store,
            self.spaces,
            FetchSettings(
                reach=reach,
                block_payload_bytes=geometry.block_payload_bytes(block_tokens),
                state_payload_bytes=lambda position: geometry.state_payload_bytes(position, block_tokens),
                lookup_deadline_s=lookup_deadline_s,
                load_deadline_s=load_deadline_s,
            ),
            self._pools[1],
            compute_s=lambda tokens: self.engine.compute_s(tokens),
        )
        self.outcomes: list[tuple[LiveSequence, str]] = []
        self.engine = Engine(
            Parts(
                model=model,
                memory=make_memory(geometry, self.slots),
                slots=self.slots,
                choose=choose,
                fetcher=self.fetcher,
                publisher=self.publisher,
                fetch_pool=self._pools[0],
            ),
            EngineSettings(
                limits=Limits(max(chunk_tokens, geometry.window + block_tokens), block_tokens, geometry.window),
                attention=Attention(
                    geometry.layers - geometry.sliding_layers, geometry.sliding_layers, geometry.window
                ),
                block_tokens=block_tokens,
                block_payload_bytes=geometry.block_payload_bytes(block_tokens),
                context_tokens=model.context_tokens,
                vocabulary=model.vocabulary,
                fidelity=fidelity,
                requests_max=requests_max,
                settle_deadline_s=settle_deadline_s,
            ),
            observe=lambda sequence, outcome: self.outcomes.append((sequence, outcome)),
        )
        self._count = 0

    def close(self) -> None:
        self.publisher.close(WAIT_S)
        for pool in self._pools:
            pool.shutdown(wait=True)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_prefill(self, tokens: Sequence[int], **options: Any) -> tuple[LiveSequence, Answer]:
        """Submit a prefill; ``options`` are fields of the request."""
        request = PrefillRequest(request_id=self._name(), tokens=list(tokens), **({"traffic_class": CHAT} | options))
        answer = Answer()
        sequence = prefill_sequence(request, self.spaces, answer.events.append)
        self.engine.submit(sequence)
        return sequence, answer

    def start_decode(
        self, tokens: Sequence[int], prompt_tokens: int, max_tokens: int, stop: Sequence[int] = (), **options: Any
    ) -> tuple[LiveSequence, Answer]:
        request = DecodeRequest(
            request_id=self._name(),
            tokens=list(tokens),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            stop_token_ids=list(stop),
            **({"traffic_class": CHAT} | options),
        )
        answer = Answer()
        sequence = decode_sequence(request, self.spaces, answer.events.append)
        self.engine.submit(sequence)
        return sequence, answer

    def prefill(self, tokens: Sequence[int], **options: Any) -> Answer:
        """Run one prefill to its end."""
        answer = self.start_prefill(tokens, **options)[1]
        self.settle()
        return answer

    def decode(self, tokens: Sequence[int], prompt_tokens: int, max_tokens: int, **options: Any) -> Answer:
        """Run one decode to its end."""
        answer = self.start_decode(tokens, prompt_tokens, max_tokens, **options)[1]
        self.settle()
        return answer

    def answer(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        """Prefill and decode one after another, on this worker: the generated tokens."""
        first = self.prefill(prompt, **options).first.token
        if max_tokens == 1:
            return [first]
        rest = self.decode([*prompt, first], len(prompt), max_tokens - 1, **options)
        return [first, *rest.tokens]

    def settle(self, timeout_s: float = WAIT_S) -> None:
        """Run until nothing is left, then check that nothing is held."""
        self.engine.run_until_idle(timeout_s)
        self.engine.check_integrity()
        assert self.slots.free_tokens == self.slots.total_tokens

    def _name(self) -> str:
        self._count += 1
        return f"request-{self._count}"
