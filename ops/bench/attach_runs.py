"""What the attach bench does: the same prompts through engines attached in different ways, with a restart in between.

Owns the parts that run whole engines, and their samples. Does not know figures or bars. Invariants: all ways answer a
prompt one after another, beginning with another one each time; nothing is asked while something is still being saved; a
way that fails is left out from then on, with the reason, and the others go on; what found no time is named.

    prompts  engines start | each prompt, by each way: cold | more prompts, by no connector and ours: the store tax |
             engines are killed, and start | one half of the prompts again: restart | the other half, the page cache
             dropped before each: chilled
    replay   engines start | requests of conversations, in order, by each way | killed, and start | the next requests
    long     as prompts, one of each length, in every way for which the time is enough
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ops.bench.attach_parts import LONG, PARTS, PROMPTS, REPLAY, Timetable
from ops.bench.attach_prompts import TAIL_TOKENS, Conversations, conversations, length_of, reusable, stretch
from ops.bench.attach_ways import BARE, EXAMPLE, REPRISE, EngineProcess, Way, options_of
from ops.bench.baselines import device_read_bytes
from ops.bench.child import ChildFailed

Phase = Literal["cold", "restart", "chilled", "replay"]
PHASES: tuple[Phase, Phase] = ("restart", "chilled")
"""How a prompt is asked again: by engines that were killed meanwhile; what they saved is in the page cache, or not."""
Progress = Callable[[str], None]

USUAL_TOKENS_MAX = 4096
"""Longer prompts are the last part: one takes half a minute to compute here."""
PAIRS_MIN, PAIRS_MAX = 5, 9
"""Prompts of each length that no connector and ours answer cold: fewer are said to be too few, more are not asked."""
GROWTH = 1.6
"""What a prompt takes grows with its length to this power, as far as it has to be guessed."""
AGAIN_S = 1.5
"""What one answer after a restart takes at most, as far as time is kept for it."""
STARTS, REQUESTS_MIN = 2, 4
"""Of the engines, in the replay: before its first half and before its second; requests of each, however late it is."""


class BenchFailed(Exception):
    """There is nothing to compare with: vLLM without a connector did not run."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. ``lengths``: of prompts, in tokens. ``block_tokens``: of vLLM's blocks (128 on a CPU).

    ``pairs_max``: cold prompts of each length. ``requests_max``: of the replay.
    """

    python: Path
    directory: Path
    lengths: tuple[int, ...]
    context_tokens: int
    document: str
    seconds_max: float
    trace: Path | None = None
    parts: tuple[str, ...] = PARTS
    replay_tokens_max: int = 4096
    answer_tokens: int = 8
    pairs_max: int = PAIRS_MAX
    requests_max: int = 400
    block_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. ``prompt`` numbers the prompt; ``nominal``: its length as asked for. Hits are tokens.

    ``device_bytes``: read from a device meanwhile by the engine and by what serves it.
    """

    way: str
    phase: Phase
    prompt: int
    nominal: int
    tokens: int
    ttft_s: float
    ttft_cpu_s: float
    hit: int
    external: int
    answer: tuple[int, ...]
    device_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt that was answered cold, and how it is asked again."""

    again: Phase
    number: int
    nominal: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Runs:
    """The bench at work: what it stands on, and what it found so far."""

    settings: Settings
    timetable: Timetable
    ways: dict[str, Way]
    logs: Path
    progress: Progress
    samples: list[Sample] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    replayed: Conversations | None = None
    before_restart: int = 0
    reusable_tokens: int = 0
    _text: list[int] = field(default_factory=list)
    _asked: Counter[int] = field(default_factory=Counter)
    """Prompts so far, by nominal length."""
    _took_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """What the last cold answer took with all that belongs to it, by way and nominal length."""
    _start_s: float = 0.0

    def run(self) -> None:
        """All parts that are wanted, in their order. Raises BenchFailed."""
        for name, part in ((PROMPTS, self.prompts), (REPLAY, self.replay), (LONG, self.long)):
            if name in self.settings.parts:
                with self.timetable.part(name) as ends_s:
                    part(ends_s)
                self.progress(f"part {name}: {self.timetable.spent_s[name]:.0f} s")

    def prompts(self, ends_s: float) -> None:
        """Prompts of usual lengths, and the store tax, by as many pairs as there is time for. Raises BenchFailed."""
        lengths = sorted((nominal for nominal in self.settings.lengths if nominal <= USUAL_TOKENS_MAX), reverse=True)
        plan: list[tuple[int, Phase]] = [(nominal, phase) for phase in PHASES for nominal in lengths]
        with self._engines() as engines:
            until_s = ends_s - self._start_s - AGAIN_S * len(self.ways) * len(plan)
            asked = self._ask_cold(engines, plan, until_s)
            for number in range(len(plan) // max(len(lengths), 1), self.settings.pairs_max):
                for nominal in lengths:
                    if self._fits(nominal, (BARE, REPRISE), until_s - AGAIN_S * len(asked)):
                        asked.append(self._ask_new(engines, nominal, (BARE, REPRISE), PHASES[number % 2]))
        for nominal in lengths:
            if (pairs := self._asked[nominal]) < min(PAIRS_MIN, self.settings.pairs_max):
                self.skipped[f"store tax, {nominal} tokens"] = f"time for {pairs} of {PAIRS_MIN} pairs"
        self._ask_again(asked)

    def long(self, ends_s: float) -> None:
        """Prompts that take long, each in as many ways as there is time for. Raises BenchFailed."""
        lengths = sorted(nominal for nominal in self.settings.lengths if nominal > USUAL_TOKENS_MAX)
        if not lengths:
            return
        if not self._fits(lengths[0], (BARE, REPRISE), ends_s - 2 * self._start_s):
            self.skipped.update({f"{nominal} tokens": "no time left" for nominal in lengths})
            return
        with self._engines() as engines:
            until_s = ends_s - self._start_s - AGAIN_S * len(self.ways) * 2 * len(lengths)
            asked = self._ask_cold(engines, [(nominal, "restart") for nominal in lengths], until_s)
        self._ask_again([*asked, *(_Asked("chilled", one.number, one.nominal, one.tokens) for one in asked)])

    def replay(self, ends_s: float) -> None:
        """The conversations, in their order, until the time is over, with a restart halfway. Raises BenchFailed."""
        settings = self.settings
        room = min(settings.replay_tokens_max, settings.context_tokens - settings.answer_tokens)
        made, done = Conversations("", "", ()), 0
        for starts_left in range(STARTS, 0, -1):
            until_s = time.monotonic() + max(ends_s - time.monotonic(), 0.0) / starts_left
            self.before_restart, least = done, done + REQUESTS_MIN
            with self._engines() as engines:
                made = made if made.turns else conversations(settings.trace, self._text, room)
                turns = made.turns[: settings.requests_max]
                last = done + (len(turns) - done) // starts_left
                while done < last and (done < least or time.monotonic() < until_s):
                    self._ask_all(engines, "replay", done, len(turns[done].tokens), turns[done].tokens)
                    done += 1
        self.replayed = Conversations(made.name, made.how, made.turns[:done])
        self.reusable_tokens = reusable(made.turns[:done], settings.block_tokens)

    # --- one prompt ---------------------------------------------------------------------------------------------------

    def _ask_cold(
        self, engines: dict[str, EngineProcess], plan: Sequence[tuple[int, Phase]], until_s: float
    ) -> list[_Asked]:
        """New prompts, in all ways, or without the example connector where the time is short; the first in any case."""
        asked: list[_Asked] = []
        for nominal, again in plan:
            names = next(
                (names for names in (tuple(engines), (BARE, REPRISE)) if self._fits(nominal, names, until_s)), ()
            )
            if not names and not asked:
                names = (BARE, REPRISE)
            if not names:
                self.skipped[f"{nominal} tokens, {again}"] = "no time left"
                continue
            if EXAMPLE in engines and EXAMPLE not in names:
                self.skipped[f"{nominal} tokens, {again}, {EXAMPLE}"] = "no time left"
            asked.append(self._ask_new(engines, nominal, names, again))
        return asked

    def _ask_new(self, engines: dict[str, EngineProcess], nominal: int, names: Sequence[str], again: Phase) -> _Asked:
        """One prompt that nobody has seen."""
        number = 100 * self.settings.lengths.index(nominal) + self._asked[nominal]
        self._asked[nominal] += 1
        tokens = stretch(self._text, self._length(nominal), number)
        self._ask_all(engines, "cold", number, nominal, tokens, names)
        return _Asked(again, number, nominal, tokens)

    def _ask_again(self, asked: Sequence[_Asked]) -> None:
        """After a restart, what is in the page cache first."""
        if not asked:
            return
        with self._engines(leave_out=BARE) as engines:
            for one in sorted(asked, key=lambda one: PHASES.index(one.again)):
                had = {sample.way for sample in self.samples if (sample.prompt, sample.phase) == (one.number, "cold")}
                self._ask_all(engines, one.again, one.number, one.nominal, one.tokens, tuple(had))

    def _fits(self, nominal: int, names: Sequence[str], until_s: float) -> bool:
        """Whether there is time for a new prompt, by what the last of its length took, or one of another length."""
        return time.monotonic() + sum(self._expected_s(name, nominal) for name in names) <= until_s

    def _expected_s(self, way: str, nominal: int) -> float:
        known = [(abs(nominal - other), other) for name, other in self._took_s if name == way]
        if not known:
            return 0.0
        _, nearest = min(known)
        return self._took_s[way, nearest] * float((nominal / nearest) ** GROWTH)

    def _length(self, nominal: int) -> int:
        room = self.settings.context_tokens - self.settings.answer_tokens
        return length_of(nominal, self.settings.block_tokens, room)

    def _ask_all(
        self,
        engines: dict[str, EngineProcess],
        phase: Phase,
        prompt: int,
        nominal: int,
        tokens: Sequence[int],
        wanted: Sequence[str] | None = None,
    ) -> None:
        names = [name for name in engines if name not in self.skipped and (wanted is None or name in wanted)]
        turn = prompt % max(len(names), 1)
        for name in (*names[turn:], *names[:turn]):
            with self._leaving_out(name):
                began_s = time.monotonic()
                self._ask(engines[name], phase, prompt, nominal, tokens)
                if phase == "cold":
                    self._took_s[name, nominal] = time.monotonic() - began_s
        said = ", ".join(
            f"{one.way} {one.ttft_s:.2f} s"
            for one in self.samples[-len(names) :]
            if one.prompt == prompt and one.phase == phase
        )
        self.progress(f"{phase}, {len(tokens)} tokens: {said}")

    def _ask(self, engine: EngineProcess, phase: Phase, prompt: int, nominal: int, tokens: Sequence[int]) -> None:
        way, pids = engine.way, (engine.pid, *engine.way.pids())
        if phase == "chilled":  # also of a prompt that it was asked before, restarted
            engine.forget()
            way.chill()
        before = device_read_bytes(pids)
        found = engine.ask(tokens, self.settings.answer_tokens)
        self.samples.append(
            Sample(
                way=way.name,
                phase=phase,
                prompt=prompt,
                nominal=nominal,
                tokens=len(tokens),
                ttft_s=found["ttft_s"],
                ttft_cpu_s=found["ttft_cpu_s"],
                hit=found["hit"],
                external=found["external"],
                answer=tuple(found["tokens"]),
                device_bytes=device_read_bytes(pids) - before,
            )
        )
        way.settle()

    # --- engines ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _engines(self, leave_out: str = "") -> Iterator[dict[str, EngineProcess]]:
        """An engine for every way that still runs, started at once and warmed up; killed at the end."""
        options = options_of(self.settings.directory, self.settings.context_tokens)
        started = {
            name: EngineProcess(way, self.settings.python, options, self.logs / f"{name.replace(' ', '-')}.log")
            for name, way in self.ways.items()
            if name not in self.skipped and name != leave_out
        }
        began_s = time.monotonic()
        try:
            for engine in started.values():
                engine.begin()
            for name, engine in started.items():
                with self._leaving_out(name):
                    engine.wait_ready()
                    self._warm_up(engine)
            self._start_s = time.monotonic() - began_s
            self.progress(f"{len(started)} engines started in {self._start_s:.0f} s")
            yield started
        finally:
            for engine in started.values():
                engine.kill()

    def _warm_up(self, engine: EngineProcess) -> None:
        """The first request of an engine is slower than all others."""
        if not self._text:
            self._text = engine.tokens(self.settings.document)
        engine.ask(stretch(self._text, self.settings.block_tokens + TAIL_TOKENS, 9999), 2)
        engine.way.settle()

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """A way that fails is left out from then on. Raises BenchFailed if it is the one that all are compared with."""
        try:
            yield
        except ChildFailed as error:
            if name == BARE:
                raise BenchFailed(str(error)) from error
            self.skipped[name] = str(error)
            self.progress(f"{name} is left out: {error}")
