"""``reprise store``: serve, stat, fsck, explain, events.

Owns the command line. Does not know what a policy means: the loader of one is handed in. Exit codes: 0 done, 1 the
operation failed or found something, 2 wrong usage or configuration.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvstore.access import read_token, split_host_port
from kvstore.client import StoreClient
from kvstore.config import ADMIN_DEFAULT, LISTEN_DEFAULT, load_config
from kvstore.errors import StoreError
from kvstore.events import Position, follow_events, read_events
from kvstore.explain_cli import add_explain
from kvstore.traffic import ClassRules
from kvstore.units import format_bytes_short, parse_seconds
from kvstore.wording import utc

LoadRules = Callable[[Path | None], tuple[ClassRules, str]]

EXIT_FAILED = 1
EXIT_USAGE = 2
HOUR_S = 3600
HTTP_S_MAX = 1.0
ADMIN_HINT = ": it speaks HTTP, as the admin endpoint of a node does (--admin); name where its store listens (--listen)"
TIMES = frozenset({"scrub_last_pass_s", "written_since_s"})
"""Statistics that are times since the epoch, 0 for never: people are shown the date."""

TokenFile = Annotated[
    Path | None, typer.Option("--token-file", envvar="REPRISE_TOKEN_FILE", help="File that holds the store's token.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Deadline = Annotated[str, typer.Option(help="How long to wait for a node.")]


def build_app(load_rules: LoadRules) -> typer.Typer:
    """The commands. ``load_rules``: from a policy file (None: the built-in policy) to class rules and their text."""
    app = typer.Typer(
        name="store",
        help="Serve, inspect, check, explain and follow a block store.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # it would take [default: ...] for a style
        pretty_exceptions_enable=False,
    )
    _add_serve(app, load_rules)
    app.command()(stat)
    app.command()(fsck)
    add_explain(app, reported)
    app.command("events")(show_events)
    return app


def _add_serve(app: typer.Typer, load_rules: LoadRules) -> None:
    @app.command()
    def serve(
        data: Annotated[list[Path] | None, typer.Option(help="Data directory; repeat for one shard a disk.")] = None,
        capacity: Annotated[str | None, typer.Option(help="Physical bytes on disk in all, such as 20GiB.")] = None,
        listen: Annotated[
            str | None, typer.Option(help=f"HOST:PORT, port 0 for a free one, or off. [default: {LISTEN_DEFAULT}]")
        ] = None,
        unix: Annotated[Path | None, typer.Option(help="Unix socket. [default: DATA/store.sock]")] = None,
        admin: Annotated[
            str | None, typer.Option(help=f"HOST:PORT of health and metrics, or off. [default: {ADMIN_DEFAULT}]")
        ] = None,
        token_file: TokenFile = None,
        tokens: Annotated[
            Path | None, typer.Option(help="TOML file of tokens, each with its roles; read again when it changes.")
        ] = None,
        policy: Annotated[Path | None, typer.Option(help="Retention policy (TOML) for a new store.")] = None,
        segment_bytes: Annotated[
            str | None, typer.Option(help="Size of a segment of a new store, such as 256MiB.")
        ] = None,
        state_pool: Annotated[str | None, typer.Option(help="Memory for states. [default: 512MiB]")] = None,
        state_ttl: Annotated[str | None, typer.Option(help="How long a state lives. [default: 10m]")] = None,
        sweep_every: Annotated[str | None, typer.Option(help="Pause between sweeps. [default: 5m]")] = None,
        scrub_rate: Annotated[
            str | None,
            typer.Option(help="How fast stored blocks are verified in the background; 0: not. [default: 20MiB/s]"),
        ] = None,
        free_min: Annotated[
            str | None,
            typer.Option(help="Left free on each file system; 0: nothing. [default: 1 % of it, at most 10GiB]"),
        ] = None,
        overwrite_aged: Annotated[
            bool | None,
            typer.Option(help="Write zeros over what outlived its maximum age, slowly. [default: mark it as zeros]"),
        ] = None,
        page_cache: Annotated[
            str | None,
            typer.Option(help="keep blocks in the page cache, or bypass it where the disk allows. [default: keep]"),
        ] = None,
        pin_quota: Annotated[
            str | None, typer.Option(help="Bytes that one owner may pin; 0: any. [default: a quarter of the capacity]")
        ] = None,
        peers: Annotated[
            list[str] | None,
            typer.Option("--peer", help="Another node, asked at start which purges this one missed; repeatable."),
        ] = None,
        peer_token: Annotated[Path | None, typer.Option(help="File with an operator's token of the peers.")] = None,
        encryption_keys: Annotated[
            Path | None, typer.Option(help="TOML file of cipher keys by tenant; read again when it changes.")
        ] = None,
        encryption_command: Annotated[
            str | None, typer.Option(help="Command that prints such a file; run again every minute.")
        ] = None,
        drain: Annotated[
            str | None, typer.Option(help="Time for requests in flight at SIGTERM. [default: 10s]")
        ] = None,
        same_host: Annotated[
            bool | None,
            typer.Option(help="Share memory with clients on the Unix socket; they see every block. [default: yes]"),
        ] = None,
        config: Annotated[Path | None, typer.Option(help="TOML file with these settings; options win.")] = None,
    ) -> None:
        """Run a store node until SIGTERM or Ctrl-C."""
        given: dict[str, object] = {
            "data": data or None,
            "capacity": capacity,
            "listen": listen,
            "unix": unix,
            "admin": admin,
            "token_file": token_file,
            "tokens": tokens,
            "policy": policy,
            "segment_bytes": segment_bytes,
            "state_pool": state_pool,
            "state_ttl": state_ttl,
            "sweep_every": sweep_every,
            "scrub_rate": scrub_rate,
            "free_min": free_min,
            "overwrite_aged": overwrite_aged,
            "page_cache": page_cache,
            "pin_quota": pin_quota,
            "peers": peers or None,
            "peer_token": peer_token,
            "encryption_keys": encryption_keys,
            "encryption_command": encryption_command,
            "drain": drain,
            "same_host": same_host,
        }
        with reported():
            settings = load_config(config, given)
            token = read_token(settings.token_file)
            rules, text = load_rules(settings.policy)
            from kvstore.daemon.process import run  # the daemon's packages, for the commands that need them
            from kvstore.daemon.tokens import Tokens

            run(settings, rules, text, Tokens.open(token, settings.tokens))


def stat(
    addresses: Annotated[list[str], typer.Argument(metavar="ADDR", help="unix:/path, host:port or [::1]:7071.")],
    token_file: TokenFile = None,
    as_json: AsJson = False,
    deadline: Deadline = "5s",
) -> None:
    """Show what nodes hold and count. Exit code 1 if one does not answer."""
    with reported():
        token, deadline_s = read_token(token_file), parse_seconds(deadline)
        results = {address: _stats_of(address, token, deadline_s) for address in addresses}
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        for address, stats in results.items():
            _print_stats(address, stats)
    if any("error" in stats for stats in results.values()):
        raise typer.Exit(EXIT_FAILED)


def _stats_of(address: str, token: str | None, deadline_s: float) -> dict[str, Any]:
    client = StoreClient.connect([address], token=token)
    try:
        nodes: Mapping[str, dict[str, Any]] = client.stats(deadline_s=deadline_s)["nodes"]
        return next(iter(nodes.values()))
    except StoreError as error:
        hint = ADMIN_HINT if _speaks_http(address) else ""
        return {"error": f"{error}{hint}"}
    finally:
        client.close()


def _speaks_http(address: str) -> bool:
    """Whether HTTP is answered at an address, as at a node's admin endpoint, within HTTP_S_MAX."""
    try:
        connection = http.client.HTTPConnection(*split_host_port(address), timeout=HTTP_S_MAX)
    except ValueError:
        return False
    with closing(connection):
        try:
            connection.request("GET", "/healthz")
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return False
    return True


def _print_stats(address: str, stats: Mapping[str, Any]) -> None:
    console = Console()
    if "error" in stats:
        Console(stderr=True).print(f"{address}: {stats['error']}", markup=False, highlight=False)
        return
    table = Table(title=address, title_justify="left", show_header=False)
    notes = _notes(stats)
    for name, value in stats.items():
        if name == "volumes":
            continue
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if isinstance(inner, (list, Mapping)):
                    continue  # for programs
                table.add_row(f"{name} {str(key)[:16]}", _shown(name, inner) + notes.get(name, ""))
        else:
            table.add_row(name, _shown(name, value))
    console.print(table)
    _print_volumes(console, stats.get("volumes", {}))


def _notes(stats: Mapping[str, Any]) -> Mapping[str, str]:
    """What is to be said beside a figure: one about promises counts as a trend only after an hour."""
    classes = stats.get("ingest", {}).get("classes", [])
    counted_s = max((item["now_s"] - item["since_s"] for item in classes), default=0)
    if not classes or counted_s >= HOUR_S:
        return {}
    return dict.fromkeys(("promise_ratio", "promise_lasts_s"), f" (of {counted_s // 60} min: no trend yet)")


def _print_volumes(console: Console, volumes: Mapping[str, Mapping[str, Any]]) -> None:
    """A column for each data directory: its state first."""
    table = Table("volume", *volumes)
    for name in next(iter(volumes.values()), {}):
        table.add_row(name, *(_shown(name, row.get(name, "")) for row in volumes.values()))
    if volumes:
        console.print(table)


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
        return format_bytes_short(value)
    if name in TIMES and isinstance(value, (int, float)):
        return utc(int(value)) if value else "never"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


def fsck(
    directory: Annotated[Path, typer.Argument(help="Data directory of a store that is not running.")],
    repair: Annotated[bool, typer.Option(help="Drop bad records, and an index that does not fit.")] = False,
    catalog: Annotated[
        Path | None, typer.Option(help="The node's catalog.json, for its policy, if it lies in another directory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every record, the index and the bytes of a data directory.

    Exit code 1 if something was found, repaired or not.
    """
    from kvstore.daemon.fsck import check  # the daemon's packages, for the commands that need them

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{total} segments", end="" if done < total else "\n", file=sys.stderr, flush=True)

    with reported():
        report = check(directory, repair, progress, now_s=int(time.time()), catalog=catalog)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _print_fsck(report.to_json())
    if not report.clean:
        raise typer.Exit(EXIT_FAILED)


def _print_fsck(report: Mapping[str, Any]) -> None:
    for finding in report["findings"]:
        done = " (repaired)" if finding["repaired"] else ""
        print(f"{finding['kind']}: {finding['where']}: {finding['detail']}{done}")
    hidden = sum(report["findings_by_kind"].values()) - len(report["findings"])
    if hidden:
        print(f"... and {hidden} more")
    print(
        f"{report['data_dir']}: {report['live_records']} blocks in {report['segments']} segments; "
        f"{format_bytes_short(report['live_bytes'])} live, {format_bytes_short(report['dead_bytes'])} dead, "
        f"{format_bytes_short(report['free_bytes'])} free; {report['index_entries']} index entries"
    )
    if report["overdue_records"]:
        print(f"{report['overdue_records']} blocks outlived their maximum age on this disk: the next sweep erases them")
    if report["live_records"] and not report["index_entries"]:
        print("no index: the next start rebuilds it from the segments")
    found = ", ".join(f"{count} {kind}" for kind, count in report["findings_by_kind"].items())
    print("clean" if report["clean"] else f"found: {found}")


def show_events(
    address: Annotated[str, typer.Argument(metavar="ADMIN", help="HOST:PORT of the node's health and metrics.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C, also after a restart.")] = False,
    epoch: Annotated[str | None, typer.Option(help="Go on from here: the epoch that an event named, and")] = None,
    after: Annotated[int, typer.Option(min=0, help="its sequence number.")] = 0,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """What becomes of blocks: stored, expired, evicted, purged.

    Without --follow, what the node remembers: it does while somebody listens, and ten minutes after. What was missed is
    an event of kind gap. With --json, one document a line. Example: reprise store events 127.0.0.1:7072 --follow --json
    """

    def lost(error: StoreError) -> None:
        print(f"reprise store: {error}; trying again", file=sys.stderr, flush=True)

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    with reported(), suppress(KeyboardInterrupt):
        token = read_token(token_file)
        position = Position(epoch, after) if epoch is not None else None
        events = (
            follow_events(address, token, position, wait, lost)
            if follow
            else read_events(address, token, position, follow=False)
        )
        for event in events:
            for line in [json.dumps(event)] if as_json else event_lines(event):
                print(line, flush=True)


def event_lines(event: Mapping[str, Any]) -> Iterator[str]:
    """One event for people: a line for each run of blocks."""
    start = f"{event['sequence']:>8} {event['event']:<11}"
    if "runs" not in event:
        yield f"{start} {event.get('reason', '')}".rstrip()
    for run in event.get("runs", ()):
        first, count = run["first_block"], run["blocks"]
        yield (
            f"{start} {run['class']} {run['group']} blocks {first}..{first + count - 1} "
            f"(tokens {run['first_token']}..{run['end_token'] - 1}) of {run['space'][:12]}: {event['reason']}"
        )


@contextmanager
def reported() -> Iterator[None]:
    """One line for what went wrong, and its exit code."""
    try:
        yield
    except ValueError as error:
        print(f"reprise store: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from error
    except (StoreError, OSError) as error:
        print(f"reprise store: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from error
