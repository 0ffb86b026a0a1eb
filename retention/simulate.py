"""The command of retention that asks what if: simulate.

Owns its options, its progress on a terminal, and how traces, policy and sizes become a workload and a store. Does not
know how a replay works. Invariants: everything is checked before the first request is replayed; asks no store; the
seed that made arrivals is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvstore.traffic import AGENT, CHAT, ClassRules, TrafficClass
from kvstore.units import parse_bytes, parse_duration_s
from retention import figures
from retention.curve import (
    Axis,
    check_axes,
    check_plot,
    draw,
    draw_points,
    parse_axis,
    parse_capacity,
    rows_of,
    settings_of,
    write_csv,
)
from retention.errors import TraceInvalid
from retention.options import BytesPerToken
from retention.policy import load_class_rules, parse_keep_for, replace_keep_for
from retention.replay import Setting, replay
from retention.session import exit_codes, show
from retention.trace import ARRIVALS_PER_S, Trace, read_trace
from retention.workload import Workload, make_workload

NODES_MAX = 4096
VOLUMES_MAX = 64
BYTES_PER_TOKEN_MAX = 2**30
SEED = 1
SIMULATE_EPILOG = (
    "Examples: reprise retention simulate trace.jsonl --capacity 1.5TiB --nodes 4 --bytes-per-token 890; "
    "reprise retention simulate agent=coding.jsonl.gz chat=talk.jsonl --bytes-per-token 23040 "
    "--sweep keep=5m,1h,1d,3d,7d --png curve.png --csv curve.csv"
)


def add_simulate(app: typer.Typer) -> None:
    @app.command(epilog=SIMULATE_EPILOG)
    def simulate(
        traces: Annotated[
            list[str],
            typer.Argument(
                metavar="TRACE", help="JSON lines, gzipped or not: a public trace or the gateway's log; or CLASS=TRACE."
            ),
        ],
        bytes_per_token: BytesPerToken,
        policy: Annotated[
            Path | None, typer.Option(help="Policy document (TOML). [default: the default policy]")
        ] = None,
        keep: Annotated[
            list[str] | None, typer.Option(help="Instead of the policy's: CLASS=DURATION, like agent=2d (repeatable).")
        ] = None,
        capacity: Annotated[str, typer.Option(help="Of each node, like 1.5TiB, or unlimited.")] = "unlimited",
        nodes: Annotated[int, typer.Option(help="Nodes that blocks are spread over.")] = 1,
        volumes: Annotated[int, typer.Option(help="Data directories of each node, which share its capacity.")] = 1,
        segment: Annotated[
            str | None, typer.Option(help="Size of a segment. [default: as a node of this capacity chooses]")
        ] = None,
        every: Annotated[str, typer.Option(help="Time between the store's sweeps of what expired.")] = "5m",
        sweep: Annotated[
            list[str] | None,
            typer.Option(help="Curve over capacity=SIZE,SIZE,... or keep=DURATION,...; twice: a line a second value."),
        ] = None,
        csv: Annotated[Path | None, typer.Option(help="File for the rows, comma-separated.")] = None,
        png: Annotated[Path | None, typer.Option(help="File for the curve's picture (extra: bench).")] = None,
        seed: Annotated[int, typer.Option(help="Of the arrivals of conversations without a time.")] = SEED,
        arrivals: Annotated[float, typer.Option(help="Such conversations that begin a second.")] = ARRIVALS_PER_S,
        whole_blocks: Annotated[
            bool, typer.Option("--whole-blocks", help="Leave out last blocks that their prompts do not fill.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    ) -> None:
        """What a traffic would find in a store under a policy.

        Replays traces through the store's own placement, policy and eviction, on a clock of their own. Asks no store.
        """
        with exit_codes():
            axes = tuple(parse_axis(text) for text in sweep or ())
            if png is not None and not axes:
                raise ValueError("--png draws a curve: give --sweep too")
            if png is not None:
                check_plot()
            _check_folders(csv, png)
            rules = _rules(policy, keep or (), parse_capacity(capacity))
            named = [_named_trace(text, rules) for text in traces]
            base = Setting(
                rules, 1, parse_capacity(capacity), _count("--nodes", nodes, NODES_MAX),
                parse_bytes(segment) if segment is not None else None, parse_duration_s(every),
                _count("--volumes", volumes, VOLUMES_MAX),
            )  # fmt: skip
            if axes:
                check_axes(axes)
            _check_bytes_per_token(bytes_per_token)
            read = _read(named, seed, arrivals, quiet=as_json)
            block_tokens = read[0][0].block_tokens
            base = replace(base, payload_bytes=max(1, round(bytes_per_token * block_tokens)))
            settings_of(axes, base)
            workload = _workload(read, rules, whole_blocks=whole_blocks)
            source = _source(read, seed, arrivals)
            _simulate(workload, base, axes, source, csv, png, as_json=as_json)


def _simulate(
    workload: Workload,
    base: Setting,
    axes: tuple[Axis, ...],
    source: dict[str, Any],
    csv: Path | None,
    png: Path | None,
    *,
    as_json: bool,
) -> None:
    begin_s = time.process_time()
    replays = len(settings_of(axes, base)) if axes else 1
    with _progress("replaying", replays * len(workload.requests), quiet=as_json) as advance:
        if axes:
            curve = draw_points(axes, base, workload, advance)
            rows = rows_of(curve)
        else:
            outcome = replay(workload, base, advance)
            rows = figures.class_rows(outcome)
    took_s = time.process_time() - begin_s
    speed = {"replay_cpu_s": took_s, "accesses_per_cpu_s": replays * workload.accesses / max(took_s, 1e-9)}
    if csv is not None:
        write_csv(rows, csv)
    lines = [_source_line(source), figures.setting_line(base, [axis.name for axis in axes])]
    if axes:
        document: dict[str, Any] = {"source": source, "setting": figures.setting_json(base), "points": rows, **speed}
        shown: list[Any] = [figures.curve_table(rows, [axis.name for axis in axes])]
        if png is not None:
            draw(curve, "\n".join(lines), png)
    else:
        document = {"source": source, **figures.outcome_json(outcome), **speed}
        shown = [figures.class_table(outcome), figures.node_table(outcome)]
    show(document, *lines, *shown, _speed_line(speed), as_json=as_json)


def _rules(policy: Path | None, keep: Sequence[str], capacity_bytes: int | None) -> ClassRules:
    rules = load_class_rules(policy, capacity_bytes=capacity_bytes)[0]
    keeps: dict[str, int] = {}
    for item in keep:
        name, equals, duration = item.partition("=")
        if not equals or not name or name in keeps:
            raise ValueError(f"--keep {item!r}: write CLASS=DURATION, each class once, like agent=2d")
        keeps[name] = parse_keep_for(duration)
    return replace_keep_for(rules, keeps)


def _named_trace(text: str, rules: ClassRules) -> tuple[Path, TrafficClass | None]:
    """The file, and the class that its requests are of where the command says so: ``CLASS=TRACE``."""
    name, equals, rest = text.partition("=")
    rule = rules.by_name(name) if equals else None
    if equals and rule is None and not Path(text).exists():
        known = ", ".join(rule.name for rule in rules.rules)
        raise ValueError(f"{text!r}: there is no such file, and no class {name!r} (the policy has {known})")
    return (Path(rest), rule.class_byte) if rule is not None else (Path(text), None)


def _read(
    named: Sequence[tuple[Path, TrafficClass | None]], seed: int, arrivals: float, *, quiet: bool
) -> list[tuple[Trace, TrafficClass | None]]:
    """The traces; their blocks must be of one length."""
    read: list[tuple[Trace, TrafficClass | None]] = []
    for path, class_byte in named:
        with _progress(f"reading {path.name}", path.stat().st_size, quiet=quiet) as advance:
            read.append(
                (read_trace(path, seed=seed, arrivals_per_s=arrivals, progress=_differences(advance)), class_byte)
            )
        if read[-1][0].block_tokens != read[0][0].block_tokens:
            lengths = f"{read[0][0].block_tokens} and {read[-1][0].block_tokens}"
            raise TraceInvalid(
                f"{named[0][0].name} and {path.name} have blocks of {lengths} tokens: simulate them apart"
            )
    return read


def _workload(read: Sequence[tuple[Trace, TrafficClass | None]], rules: ClassRules, *, whole_blocks: bool) -> Workload:
    """All requests together; equal numbers of two traces are different content."""
    prompts = []
    scopes = 0
    for trace, class_byte in read:
        default = AGENT if trace.conversations else CHAT
        for prompt in trace.prompts:
            named = rules.by_name(prompt.class_name) if prompt.class_name else None
            if prompt.class_name and class_byte is None and named is None:
                raise TraceInvalid(f"{trace.name} has requests of class {prompt.class_name!r}, which the policy lacks")
            of = class_byte or (named.class_byte if named else default)
            prompts.append((replace(prompt, scope=prompt.scope + scopes), int(of)))
        scopes += 1 + max(prompt.scope for prompt in trace.prompts)
    return make_workload(prompts, read[0][0].block_tokens, whole_blocks=whole_blocks)


def _source(read: Sequence[tuple[Trace, TrafficClass | None]], seed: int, arrivals: float) -> dict[str, Any]:
    """Which requests were replayed. ``seed`` and ``arrivals_per_s`` are null where all had their times."""
    seeded = any(trace.conversations for trace, _ in read)
    return {
        "traces": [trace.name for trace, _ in read],
        "block_tokens": read[0][0].block_tokens,
        "requests": sum(len(trace.prompts) for trace, _ in read),
        "conversations": sum(trace.conversations for trace, _ in read),
        "seed": seed if seeded else None,
        "arrivals_per_s": arrivals if seeded else None,
    }


def _source_line(source: dict[str, Any]) -> str:
    line = f"{' + '.join(source['traces'])}: {source['requests']:,} requests, blocks of {source['block_tokens']} tokens"
    if source["seed"] is None:
        return line
    begun = f"{source['conversations']:,} conversations begun {source['arrivals_per_s']:g} a second"
    return f"{line}; {begun} (Poisson, seed {source['seed']})"


def _speed_line(speed: dict[str, float]) -> str:
    return f"replayed in {speed['replay_cpu_s']:.1f} s of one core, {speed['accesses_per_cpu_s']:,.0f} blocks a second"


def _count(name: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise ValueError(f"{name} {value} is outside 1..{most}")
    return value


def _check_folders(*paths: Path | None) -> None:
    """A file that could not be written is said before anything is replayed."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")


def _check_bytes_per_token(value: float) -> None:
    if not 0 < value <= BYTES_PER_TOKEN_MAX:
        raise ValueError(f"--bytes-per-token {value} is outside 0..{BYTES_PER_TOKEN_MAX}, 0 excluded")


def _differences(advance: Callable[[int], None]) -> Callable[[int], None]:
    """From how far something is to how far it came."""
    before = 0

    def tell(now: int) -> None:
        nonlocal before
        if now > before:
            advance(now - before)
            before = now

    return tell


@contextmanager
def _progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, gone when it is over; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
