"""How near each way of restoring a prefix comes to a cold run, and how long it takes.

Owns the experiment: a prefix of text is computed cold; then it is restored in every way that the restore plan knows,
and the same suffix is run on each. Does not know about stores: payloads are held in memory, so times are those of
computing.

    prefix [0, P)         cold: computed; others: blocks imported, windows restored in the way that is measured
    suffix [P, P+16)      real text, then GREEDY_TOKENS that the cold run chose (teacher-forced on every way)
    text   [P, P+128)     real text, for how often the first choice agrees
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from workers.batch import Slice
from workers.layout import KvMemory
from workers.model import Model
from workers.slots import Slots, SlotTable
from workers.weights import default_cache_dir, resolve_model

BLOCK_TOKENS = 64
SUFFIX_TOKENS = 16
GREEDY_TOKENS = 32
TEXT_TOKENS = 128
CHUNK_TOKENS = 512
DEEPSEEK_WINDOW = 128
"""The window of DeepSeek and gpt-oss: what a fixed replay of that length would do to a model with a larger one."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One way of restoring, over all prompts. ``agree`` counts equal first choices among GREEDY_TOKENS."""

    way: str
    replayed_tokens: int
    kl_mean: float
    kl_max: float
    agree: float
    text_agree: float
    first_logit_diff: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """``exact_replay_tokens``: S x (W-1). ``cold_seconds``: what computing the prefix takes, for comparison."""

    model: str
    dtype: str
    prompts: int
    prefix_tokens: int
    window: int
    sliding_layers: int
    exact_replay_tokens: int
    cold_seconds: float
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    model_name: str,
    *,
    text: str,
    prompts: int = 2,
    tokens: int = 1500,
    windows: Sequence[int] = (0, 1, 2),
    dtype: str = "float32",
    threads: int = 1,
    cache_dir: Path | None = None,
    progress: Progress = lambda line: None,
) -> Report:
    """Measure every way on ``prompts`` stretches of ``text`` with a prefix of ``tokens`` (rounded down to blocks).

    Raises ValueError when there is too little text or a prefix is shorter than two blocks.
    """
    from transformers import AutoTokenizer

    resolved = resolve_model(model_name, cache_dir or default_cache_dir(), progress)
    model = Model.load(resolved.directory, dtype, threads=threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(resolved.directory, local_files_only=True)
    position = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    if position < 2 * BLOCK_TOKENS or position + TEXT_TOKENS > model.context_tokens:
        raise ValueError(f"tokens must be {2 * BLOCK_TOKENS}..{model.context_tokens - TEXT_TOKENS} for this model")
    sequences = _stretches(tokenizer, text, prompts, position + TEXT_TOKENS)
    measured: dict[str, list[Row]] = {}
    cold_seconds: list[float] = []
    for number, sequence in enumerate(sequences, 1):
        progress(f"prompt {number} of {prompts}: cold run of {position} tokens")
        cold = _Cold.measure(model, sequence, position)
        cold_seconds.append(cold.seconds)
        for way, count, restore in _ways(model, position, windows):
            progress(f"prompt {number} of {prompts}: {way}")
            measured.setdefault(way, []).append(_measure(cold, way, count, restore))
    geometry = model.geometry
    return Report(
        model=resolved.name,
        dtype=dtype,
        prompts=prompts,
        prefix_tokens=position,
        window=geometry.window,
        sliding_layers=geometry.sliding_layers,
        exact_replay_tokens=geometry.exact_replay_tokens,
        cold_seconds=fmean(cold_seconds),
        rows=tuple(_merge(rows) for rows in measured.values()),
    )


class _Sequence:
    """One sequence in a memory of its own."""

    def __init__(self, model: Model, tokens: Sequence[int], position: int) -> None:
        slots = Slots(-(-len(tokens) // BLOCK_TOKENS) + 2, BLOCK_TOKENS)
        self.model = model
        self.tokens = list(tokens)
        self.position = position
        self.memory = KvMemory(model.geometry, slots, model.geometry.dtype)
        self.table: SlotTable = slots.allocate(len(tokens) + BLOCK_TOKENS)

    def compute(self, begin: int, end: int, chunk: int, write_floor: int = 0, window_floor: int = 0) -> None:
        for first in range(begin, end, chunk):
            last = min(end, first + chunk)
            part = Slice(self.tokens[first:last], first, self.table, write_floor, window_floor, "none")
            self.model.forward(self.memory, [part])

    def rows(self, tokens: Sequence[int], window_floor: int) -> torch.Tensor:
        """Logits of ``tokens`` from the prefix's end on, all in one pass (so that ways differ by the prefix only)."""
        part = Slice(list(tokens), self.position, self.table, 0, window_floor, "all")
        return self.model.forward(self.memory, [part])

    def greedy(self, suffix: Sequence[int], count: int) -> list[int]:
        """The suffix and ``count`` greedy tokens after it."""
        tokens, row = list(suffix), self.rows(suffix, 0)[-1]
        for _ in range(count):
            tokens.append(int(row.argmax()))
            part = Slice(tokens[-1:], self.position + len(tokens) - 1, self.table)
            row = self.model.forward(self.memory, [part])[0]
        return tokens


@dataclass(frozen=True, slots=True)
class _Cold:
    """The cold run: its blocks and state as payloads, and what it answers."""

    sequence: _Sequence
    blocks: tuple[bytearray, ...]
    state: bytes
    forced: tuple[int, ...]
    forced_rows: torch.Tensor
    text_rows: torch.Tensor
    seconds: float

    @classmethod
    def measure(cls, model: Model, tokens: Sequence[int], position: int) -> _Cold:
        sequence = _Sequence(model, tokens, position)
        begun = time.perf_counter()
        sequence.compute(0, position, CHUNK_TOKENS)
        seconds = time.perf_counter() - begun
        blocks = []
        for index in range(position // BLOCK_TOKENS):
            payload = bytearray(model.geometry.block_payload_bytes(BLOCK_TOKENS))
            sequence.memory.export_block(sequence.table, index, memoryview(payload))
            blocks.append(payload)
        state = sequence.memory.export_state(sequence.table, position)
        forced = sequence.greedy(sequence.tokens[position : position + SUFFIX_TOKENS], GREEDY_TOKENS - 1)
        return cls(
            sequence=sequence,
            blocks=tuple(blocks),
            state=state,
            forced=tuple(forced),
            forced_rows=sequence.rows(forced, 0)[SUFFIX_TOKENS - 1 :],
            text_rows=sequence.rows(sequence.tokens[position:], 0),
            seconds=seconds,
        )

    def restored(self) -> _Sequence:
        """A fresh sequence into which the blocks were imported."""
        sequence = _Sequence(self.sequence.model, self.sequence.tokens, self.sequence.position)
        for index, payload in enumerate(self.blocks):
            sequence.memory.import_block(sequence.table, index, memoryview(payload))
        return sequence


Restore = Callable[[_Cold, _Sequence], int]
"""Brings a sequence with blocks to its position; returns the window floor."""


def _ways(model: Model, position: int, windows: Sequence[int]) -> list[tuple[str, int, Restore]]:
    """Name, replayed tokens and function of every way that this model has."""

    def other_chunking(_cold: _Cold, sequence: _Sequence) -> int:
        sequence.compute(0, position, CHUNK_TOKENS * 3 // 4)
        return 0

    def state(cold: _Cold, sequence: _Sequence) -> int:
        return sequence.memory.import_state(sequence.table, position, memoryview(cold.state), position)

    def replay(count: int) -> Restore:
        def restore(_cold: _Cold, sequence: _Sequence) -> int:
            sequence.compute(position - count, position, CHUNK_TOKENS, position, position - count)
            return position - count

        return restore

    def exact(_cold: _Cold, sequence: _Sequence) -> int:
        return model.triangular_replay(sequence.memory, sequence.tokens, sequence.table, position)

    ways: list[tuple[str, int, Restore]] = [("other chunking (noise floor)", position, other_chunking)]
    geometry = model.geometry
    if not geometry.sliding_layers:
        return [*ways, ("blocks (full attention)", 0, lambda _cold, _sequence: 0)]
    ways.append(("state", 0, state))
    lengths = {count * geometry.window: f"replay {count} W" if count else "replay 0 (no windows)" for count in windows}
    if geometry.window > DEEPSEEK_WINDOW:
        lengths[DEEPSEEK_WINDOW] = f"replay {DEEPSEEK_WINDOW} tokens"
    ways += [(lengths[count], count, replay(count)) for count in sorted(lengths) if count <= position]
    return [*ways, ("exact replay (triangular)", min(geometry.exact_replay_tokens, position), exact)]


def _measure(cold: _Cold, way: str, count: int, restore: Restore) -> Row:
    begun = time.perf_counter()
    sequence = cold.restored()
    floor = restore(cold, sequence)
    seconds = time.perf_counter() - begun
    rows = sequence.rows(cold.forced, floor)[SUFFIX_TOKENS - 1 :]
    text_rows = sequence.rows(sequence.tokens[sequence.position :], floor)
    divergence = _kl(cold.forced_rows, rows)
    return Row(
        way=way,
        replayed_tokens=count,
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        agree=_agreement(cold.forced_rows, rows),
        text_agree=_agreement(cold.text_rows, text_rows),
        first_logit_diff=float((cold.forced_rows[0] - rows[0]).abs().max()),
        seconds=seconds,
    )


def _merge(rows: Sequence[Row]) -> Row:
    """Means over prompts; the worst one for what is a maximum."""
    return Row(
        way=rows[0].way,
        replayed_tokens=rows[0].replayed_tokens,
        kl_mean=fmean(row.kl_mean for row in rows),
        kl_max=max(row.kl_max for row in rows),
        agree=fmean(row.agree for row in rows),
        text_agree=fmean(row.text_agree for row in rows),
        first_logit_diff=max(row.first_logit_diff for row in rows),
        seconds=fmean(row.seconds for row in rows),
    )


def _kl(wanted: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """KL(wanted || got) of each row, in double precision; never below zero by rounding."""
    log_p, log_q = (torch.log_softmax(rows.double(), dim=-1) for rows in (wanted, got))
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp_min(0.0)


def _agreement(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float((wanted.argmax(dim=-1) == got.argmax(dim=-1)).double().mean())


def _stretches(tokenizer: Any, text: str, prompts: int, length: int) -> list[list[int]]:
    """``prompts`` stretches of ``length`` tokens, spread evenly over the text, each with the model's first token."""
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    body = length - len(first)
    if prompts < 1 or len(ids) < body:
        raise ValueError(f"{prompts} prompts of {body} tokens cannot be cut from a text of {len(ids)} tokens")
    spare = len(ids) - body
    starts = [spare * number // max(1, prompts - 1) for number in range(prompts)]
    return [first + ids[start : start + body] for start in starts]
