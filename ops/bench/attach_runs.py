"""What the attach bench does: the same prompts through engines attached in different ways, with a restart in between.

Owns rounds, the replay, and their samples. Does not know figures or bars. Invariants: within a round all ways answer a
prompt one after another, beginning with another one each time; nothing is asked while something is still being saved; a
way that fails is left out from then on, with the reason, and the others go on.

    round   engines start | each prompt, by each way: cold | engines are killed, and start |
            one half of the prompts: restart | page cache dropped before each of the other half: chilled
    replay  engines start | requests of conversations, in order, by each way | killed, started, ... every few requests
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ops.bench.attach_prompts import TAIL_TOKENS, Conversations, conversations, length_of, reusable, stretch
from ops.bench.attach_ways import BARE, EngineProcess, Way, options_of
from ops.bench.baselines import device_read_bytes
from ops.bench.child import ChildFailed

Phase = Literal["cold", "restart", "chilled", "replay"]
Progress = Callable[[str], None]

BOTH_TOKENS_MAX = 4096
"""Longer prompts are asked once a round, restarted or chilled by turns: one takes half a minute to compute here."""
ROUNDS_MAX = 20
ROUNDS_SHARE, COLD_SHARE = 0.62, 0.65
"""Of all the time for rounds (the replay has the rest), and of a round's for its first half."""
PER_START = 8
"""Requests of the replay between two restarts."""


class BenchFailed(Exception):
    """There is nothing to compare with: vLLM without a connector did not run."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. ``lengths``: of prompts, in tokens. ``block_tokens``: of vLLM's blocks (128 on a CPU)."""

    python: Path
    directory: Path
    lengths: tuple[int, ...]
    context_tokens: int
    document: str
    seconds_max: float
    trace: Path | None = None
    replay_tokens_max: int = 4096
    answer_tokens: int = 8
    rounds: int = ROUNDS_MAX
    per_start: int = PER_START
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


@dataclass(slots=True)
class Runs:
    """The bench at work: what it stands on, and what it found so far."""

    settings: Settings
    ways: dict[str, Way]
    logs: Path
    progress: Progress
    samples: list[Sample] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    replayed: Conversations | None = None
    reusable_tokens: int = 0
    _text: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Rounds, then the replay, until the time is over. Raises BenchFailed."""
        began_s = time.monotonic()
        rounds_end_s = began_s + ROUNDS_SHARE * self.settings.seconds_max
        last_s = 0.0
        while self.rounds < self.settings.rounds and (not self.rounds or time.monotonic() + last_s <= rounds_end_s):
            round_began_s = time.monotonic()
            self.round(self.rounds, rounds_end_s)
            self.rounds += 1
            last_s = time.monotonic() - round_began_s
        self.replay(began_s + self.settings.seconds_max)

    def round(self, number: int, ends_s: float) -> None:
        """One round; prompts for which the time is too short are left out. Raises BenchFailed."""
        cold_end_s = time.monotonic() + COLD_SHARE * (ends_s - time.monotonic())
        asked: list[tuple[Phase, int, int, tuple[int, ...]]] = []
        with self._engines() as engines:
            for at, (nominal, again) in enumerate(self._prompts(number)):
                if at and time.monotonic() > cold_end_s:
                    self.progress(f"round {number + 1}: no time for a prompt of {nominal} tokens")
                    continue
                prompt = 100 * number + at
                tokens = stretch(self._text, self._length(nominal), prompt)
                self._ask_all(engines, "cold", prompt, nominal, tokens)
                asked.append((again, prompt, nominal, tokens))
        with self._engines() as engines:
            for again, prompt, nominal, tokens in sorted(asked, key=lambda one: one[0], reverse=True):
                self._ask_all(engines, again, prompt, nominal, tokens, leave_out=BARE)

    def replay(self, ends_s: float) -> None:
        """The conversations, in their order, until the time is over. Raises BenchFailed."""
        settings = self.settings
        room = min(settings.replay_tokens_max, settings.context_tokens - settings.answer_tokens)
        made = conversations(settings.trace, self._text, room)
        turns, done = made.turns[: settings.requests_max], 0
        while done < len(turns) and time.monotonic() < ends_s:
            with self._engines() as engines:
                for turn in turns[done : done + settings.per_start]:
                    if time.monotonic() > ends_s:
                        break
                    self._ask_all(engines, "replay", done, len(turn.tokens), turn.tokens)
                    done += 1
        self.replayed = Conversations(made.name, made.how, turns[:done])
        self.reusable_tokens = reusable(turns[:done], settings.block_tokens)

    def _prompts(self, number: int) -> list[tuple[int, Phase]]:
        """Nominal lengths of a round, and how each is asked again; what the bars ask for comes first."""
        both: tuple[Phase, Phase] = ("restart", "chilled")
        usual = sorted((nominal for nominal in self.settings.lengths if nominal <= BOTH_TOKENS_MAX), reverse=True)
        longest = sorted(nominal for nominal in self.settings.lengths if nominal > BOTH_TOKENS_MAX)
        return [(nominal, phase) for phase in both for nominal in usual] + [
            (nominal, both[number % 2]) for nominal in longest
        ]

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
        leave_out: str = "",
    ) -> None:
        names = [name for name in engines if name not in self.skipped and name != leave_out]
        turn = prompt % max(len(names), 1)
        for name in (*names[turn:], *names[:turn]):
            with self._leaving_out(name):
                self._ask(engines[name], phase, prompt, nominal, tokens)
        said = ", ".join(
            f"{one.way} {one.ttft_s:.2f} s"
            for one in self.samples[-len(names) :]
            if one.prompt == prompt and one.phase == phase
        )
        self.progress(f"{phase}, {len(tokens)} tokens: {said}")

    def _ask(self, engine: EngineProcess, phase: Phase, prompt: int, nominal: int, tokens: Sequence[int]) -> None:
        way, pids = engine.way, (engine.pid, *engine.way.pids())
        if phase == "chilled":
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

    @contextmanager
    def _engines(self) -> Iterator[dict[str, EngineProcess]]:
        """An engine for every way that still runs, started at once and warmed up; killed at the end."""
        options = options_of(self.settings.directory, self.settings.context_tokens)
        started = {
            name: EngineProcess(way, self.settings.python, options, self.logs / f"{name.replace(' ', '-')}.log")
            for name, way in self.ways.items()
            if name not in self.skipped
        }
        began_s = time.monotonic()
        try:
            for engine in started.values():
                engine.begin()
            for name, engine in started.items():
                with self._leaving_out(name):
                    engine.wait_ready()
                    self._warm_up(engine)
            self.progress(f"{len(started)} engines started in {time.monotonic() - began_s:.0f} s")
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
