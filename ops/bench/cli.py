"""``reprise bench``: the store's speed, vLLM attached to it, replay fidelity, and the speed of the kernels.

Owns options and tables. Does not measure. Invariant: ``store`` runs without torch, as a storage node
does. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import json
import logging
import secrets
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstore.signals import stop_signals
from ops.bench.attach_parts import PARTS
from ops.bench.command import command_of

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the store, attached engines, restore fidelity and kernels.",
    add_completion=False,
)

SIZES_DEFAULT = "64KiB,256KiB,1MiB,4MiB"
WINDOWS_DEFAULT = "0,1,2"
LENGTHS_DEFAULT = "1024,2048,4096,8192"
PARTS_DEFAULT = ",".join(PARTS)
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
EXIT_NOT_INSTALLED = 3
TABLE_COLUMNS = 112
"""Columns of the widest table; a narrower terminal wraps it, which is better than cut figures."""


@app.command()
def store(
    peers: Annotated[
        str, typer.Option(help="Compare with: redis, valkey, lmcache, mooncake, files, rocksdb; comma-separated.")
    ] = "",
    sizes: Annotated[str, typer.Option(help="Block sizes with units, comma-separated.")] = SIZES_DEFAULT,
    groups: Annotated[
        str,
        typer.Option(
            help="get, put, disk, cold, lookup, beside, mixed, restart, sweep, trace; comma-separated. [default: all]"
        ),
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Folder on the volume to measure; emptied afterwards. [default: the system's]")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=1440.0, help="Begin nothing after this time.")] = 20.0,
    blocks: Annotated[
        int | None, typer.Option(min=1024, max=16_000_000, help="Blocks stored for look-ups, restarts and sweeps.")
    ] = None,
    peers_python: Annotated[
        Path | None, typer.Option(help="Python that has ops/bench/requirements-peers.txt. [default: this one]")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture there (extra bench).")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for table, line of JSON and picture, named by date (extra bench).")
    ] = None,
    soak: Annotated[
        str, typer.Option(help="Watch the daemon's memory so long, like 30m, besides --minutes. [default: not]")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="An access pattern to replay: JSON lines, gzipped or not. [default: made up]")
    ] = None,
    trace_requests: Annotated[int | None, typer.Option(min=1, max=10_000_000, help="Of the trace's requests.")] = None,
    trace_block: Annotated[str, typer.Option(help="Bytes of a block in the trace. [default: 256KiB]")] = "",
    trace_capacity: Annotated[str, typer.Option(help="The store's capacity for the trace. [default: 8GiB]")] = "",
    is_quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows that it works, measures nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON; the table goes to stderr.")] = False,
) -> None:
    """Measure a store beside the limits of this machine and beside other stores, all in turns in one run."""
    from ops.bench import plot, results, tables
    from ops.bench.store import measure, settings_of

    try:
        settings = settings_of(
            sizes=_words(sizes),
            groups=_words(groups),
            peers=_words(peers),
            peers_python=str(peers_python or sys.executable),
            seconds_max=60 * minutes,
            blocks=blocks,
            is_quick=is_quick,
            trace=trace,
            trace_requests=trace_requests,
            trace_block=trace_block,
            trace_capacity=trace_capacity,
            soak_for=soak,
        )
        if png is not None or out is not None:
            plot.check()
        command = command_of(sys.argv, "store")
        report = measure(settings, data=data, command=command, is_quick=is_quick, progress=_progress)
        if png is not None:
            plot.draw(report, png)
        if out is not None:
            results.write(report, out)
    except (plot.PlotUnavailable, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    tables.print_report(report, Console(stderr=as_json))
    if as_json:
        print(json.dumps(report.to_json()))


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.command()
def attach(
    vllm_python: Annotated[
        Path, typer.Option(help="Python of vLLM's environment, which make test-engines makes.")
    ] = VLLM_PYTHON,
    model: Annotated[str, typer.Option(help="demo, demo-swa, or a checkpoint directory.")] = "demo",
    lengths: Annotated[str, typer.Option(help="Tokens of prompts, comma-separated.")] = LENGTHS_DEFAULT,
    minutes: Annotated[float, typer.Option(min=0.1, max=1440.0, help="Begin nothing after this time.")] = 15.0,
    trace: Annotated[
        Path | None, typer.Option(help="Conversations to replay: JSON lines, gzipped or not. [default: made up]")
    ] = None,
    parts: Annotated[str, typer.Option(help="What to run, comma-separated; all the time is theirs.")] = PARTS_DEFAULT,
    cache_dir: Annotated[Path | None, typer.Option(help="Where converted models are kept.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for table, line of JSON and picture, named by date (extra bench).")
    ] = None,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="Short prompts: shows that it works, measures nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON; the table goes to stderr.")] = False,
) -> None:
    """Measure vLLM with our connector, with the one that it ships, and with none: cold, saved, and restarted."""
    from ops.bench import attach as bench
    from ops.bench import attach_results, plot
    from ops.bench.attach_ways import EngineMissing
    from workers.weights import ModelUnavailable

    for number in stop_signals():  # as Ctrl-C does: engines, store and what they wrote go with this process
        signal.signal(number, signal.default_int_handler)
    try:
        if out is not None:
            plot.check()
        settings = bench.settings_of(
            python=vllm_python,
            model=model,
            minutes=minutes,
            lengths=_whole_numbers(lengths),
            trace=trace,
            parts=_words(parts),
            cache_dir=cache_dir,
            is_quick=is_quick,
            progress=_progress,
        )
        command = command_of(sys.argv, "attach")
        report = bench.measure(settings, model=model, command=command, is_quick=is_quick, progress=_progress)
        if out is not None:
            attach_results.write(report, out)
    except EngineMissing as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_NOT_INSTALLED) from error
    except (plot.PlotUnavailable, ModelUnavailable, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    attach_results.print_report(report, Console(stderr=as_json))
    if as_json:
        print(json.dumps(report.to_json()))
    raise typer.Exit(0 if report.samples or report.tier else 1)


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Raises ValueError."""
    return tuple(dict.fromkeys(int(word) for word in _words(text)))


@app.command()
def crash(
    rounds: Annotated[int, typer.Option(min=0, max=100_000, help="How often the daemon is killed.")] = 200,
    cuts: Annotated[
        int | None, typer.Option(min=0, max=100_000, help="How often the power is cut. [default: as the rounds]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeat the choices of an earlier run.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder to work in; emptied afterwards. [default: the system's]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; the table goes to stderr.")] = False,
) -> None:
    """Kill a store at all its moments, cut its power, and judge what is left; 1 if anything is wrong or missing."""
    from ops.bench import crash as bench
    from ops.bench.crash_daemon import DaemonFailed

    chosen = seed if seed is not None else secrets.randbits(32)
    _progress(f"seed {chosen}")
    logging.getLogger("kvstore").setLevel(logging.CRITICAL)  # damage is what is asked for
    try:
        report = bench.run(
            rounds=rounds, cuts=rounds if cuts is None else cuts, seed=chosen, data=data, progress=_progress
        )
    except (DaemonFailed, OSError) as error:
        print(f"error: {error} (seed {chosen})", file=sys.stderr)
        raise typer.Exit(1) from error
    bench.print_report(report, Console(stderr=as_json))
    if as_json:
        print(json.dumps(report.to_json()))
    raise typer.Exit(0 if report.is_clean else 1)


@app.command()
def replay(
    model: Annotated[str, typer.Option(help="demo, demo-swa, or a checkpoint directory.")],
    prompts: Annotated[int, typer.Option(min=1, max=64, help="Stretches of text to measure.")] = 2,
    tokens: Annotated[int, typer.Option(min=128, help="Tokens of the prefix; rounded down to whole blocks.")] = 1500,
    windows: Annotated[str, typer.Option(help="Replays to measure, in windows, comma-separated.")] = WINDOWS_DEFAULT,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the model.")] = 1,
    text: Annotated[Path | None, typer.Option(help="A text file; default: the shipped document.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where converted models are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare every way of restoring a prefix with a cold run: KL, agreement, first-logit difference, seconds."""
    _need("torch", "transformers", "safetensors")
    from ops.bench.replay import run
    from workers.geometry import UnsupportedModel
    from workers.weights import ModelUnavailable

    try:
        chosen = sorted({int(count) for count in windows.split(",")})
        if not all(0 <= count <= 64 for count in chosen):
            raise ValueError(f"--windows takes whole numbers 0..64, not {windows!r}")
        document = (text or Path(__file__).parents[1] / "data" / "document.txt").read_text(encoding="utf-8")
        report = run(
            model,
            text=document,
            prompts=prompts,
            tokens=tokens,
            windows=chosen,
            dtype=dtype,
            threads=threads,
            cache_dir=cache_dir,
            progress=_progress,
        )
    except (ModelUnavailable, UnsupportedModel, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(report.to_json()))
        return
    table = Table(
        title=f"{report.model} {report.dtype}: {report.prompts} prompts of {report.prefix_tokens} tokens, "
        f"W={report.window}, S={report.sliding_layers}, exact replay {report.exact_replay_tokens} tokens, "
        f"cold {report.cold_seconds:.2f} s"
    )
    for heading in ("way", "replayed", "KL mean", "KL max", "agree", "text agree", "first logit", "seconds"):
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(
            row.way,
            str(row.replayed_tokens),
            f"{row.kl_mean:.1e}",
            f"{row.kl_max:.1e}",
            f"{row.agree:.3f}",
            f"{row.text_agree:.3f}",
            f"{row.first_logit_diff:.1e}",
            f"{row.seconds:.3f}",
        )
    console = Console()
    console.width = max(console.width, TABLE_COLUMNS)
    console.print(table)


@app.command()
def kernels(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure gather, scatter and packing on the GPU; says so when there is none."""
    _need("torch")
    from ops.bench.kernels import run

    rows = run()
    if as_json:
        print(json.dumps({"gpu": rows is not None, "rows": [row.to_json() for row in rows or ()]}))
        return
    if rows is None:
        print("no GPU here: the torch reference serves, and there is nothing to measure")
        return
    table = Table(title="moves between slots and payloads")
    for heading in ("op", "by", "blocks", "us a call", "payload GB/s"):
        table.add_column(heading, justify="left" if heading in ("op", "by") else "right")
    for row in rows:
        table.add_row(row.op, row.moves, str(row.blocks), f"{row.call_us:.1f}", f"{row.payload_gb_s:.1f}")
    Console().print(table)


def _need(*modules: str) -> None:
    """End with what to install if one is not there: the store is measured without them."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        print(
            f"this needs {', '.join(missing)}, not installed here: pip install 'reprise-kv[workers]'", file=sys.stderr
        )
        raise typer.Exit(EXIT_NOT_INSTALLED)
