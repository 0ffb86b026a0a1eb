"""``reprise up``: a store node, a prefill worker, a decode worker and the gateway as supervised child processes.

Owns the children's command lines and the lock on the data directory. Does not know what they do with their options.
Invariants: one ``up`` a data directory; a child's port never changes while ``up`` runs, so that its users find it again
after a restart; what a child logs lies under the data directory, bounded.

    DATA/up.json          what runs where: pids, addresses, logs (also read by the demo)
    DATA/logs/NAME.log    what each child printed (and NAME.log.1, what came before)
    DATA/NAME/            the data of each child: store, prefill, decode, gateway
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.access import split_host_port
from kvstore.units import parse_bytes
from ops.preflight import check_command, check_token
from ops.rotating_log import RotatingLog
from ops.supervisor import Child, ChildSpec, Endpoints, Supervisor

STORE_START_S_MAX = 120.0
"""Recovery of a large volume scans its open segments."""
WORKER_START_S_MAX = 900.0
"""The first start converts a model."""
GATEWAY_START_S_MAX = 120.0
DRAIN_S = 12
"""Time of a worker or the gateway for requests in flight; less than the supervisor's patience."""
UNIX_PATH_BYTES_MAX = 100
"""A Unix socket's path is at most 107 bytes on Linux."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What ``reprise up`` runs. Addresses are HOST:PORT, port 0 a free one. Empty: the child's own default.

    ``tokens``: the file of those whom the store knows; ``token_file``: the one that workers and gateway show.
    """

    data: Path = Path("data")
    model: str = "demo"
    capacity: str = "20GiB"
    listen: str = "127.0.0.1:8000"
    store_listen: str = "127.0.0.1:7071"
    admin_listen: str = "127.0.0.1:7072"
    prefill_listen: str = "127.0.0.1:7081"
    decode_listen: str = "127.0.0.1:7082"
    dtype: str = ""
    fidelity: str = ""
    replay_windows: str = ""
    kv_memory: str = ""
    threads: int = 0
    keys: str = ""
    policy: str = ""
    access_log: str = ""
    tokens: str = ""
    token_file: str = ""
    encryption_keys: str = ""
    encryption_command: str = ""
    store_options: tuple[str, ...] = ()
    worker_options: tuple[str, ...] = ()
    gateway_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parse_bytes(self.capacity)
        for name in ("listen", "store_listen", "admin_listen", "prefill_listen", "decode_listen"):
            try:
                split_host_port(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if bool(self.tokens) != bool(self.token_file):
            raise ValueError("--tokens (whom the store knows) goes with --token-file (what workers and gateway show)")


def load_config(path: Path | None, given: Mapping[str, Any]) -> UpConfig:
    """The defaults, over them the TOML file, over it the options given. Raises ValueError, naming what is wrong."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
    defaults = UpConfig()
    known = {item.name: getattr(defaults, item.name) for item in fields(UpConfig)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{path}: unknown key {name!r}; known are {', '.join(known)}")
        values[name] = convert(name, value, known[name])
    return replace(defaults, **values | {name: value for name, value in given.items() if value is not None})


def convert(name: str, value: object, default: object) -> object:
    """A TOML value in the type of its default. Raises ValueError for another type."""
    if isinstance(default, tuple) and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(default, Path) and isinstance(value, str):
        return Path(value)
    if type(value) is type(default):
        return value
    wanted = {tuple: "a list of strings", Path: "a path in quotes", str: "a string", int: "a whole number"}
    kind = next(text for base, text in wanted.items() if isinstance(default, base))
    raise ValueError(f"{name} must be {kind}, not {value!r}")


# --- the children ---------------------------------------------------------------------------------------------------


def reprise(*arguments: str) -> list[str]:
    """A subcommand run by this very interpreter."""
    return [sys.executable, "-m", "ops.cli", *arguments]


def same_port(address: str, earlier: str | None) -> str:
    """The address asked for; where it asked for any free port, the one that the child took at an earlier start."""
    return earlier if address.endswith(":0") and earlier else address


def unix_path(data: Path) -> Path:
    """Where the store's Unix socket lies; in a folder for run-time files when the data directory's path is too long."""
    path = data.absolute() / "store" / "store.sock"
    if len(os.fsencode(path)) <= UNIX_PATH_BYTES_MAX:
        return path
    stat = data.stat()
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return folder / f"reprise-{stat.st_dev:x}-{stat.st_ino:x}.sock"


def store_spec(config: UpConfig) -> ChildSpec:
    data = config.data / "store"

    def command(_needed: Mapping[str, Endpoints], own: Endpoints | None) -> list[str]:
        earlier = own or {}
        return reprise(
            "store", "serve", "--data", str(data), "--capacity", config.capacity,
            "--listen", same_port(config.store_listen, earlier.get("listen")),
            "--unix", str(unix_path(config.data)),
            "--admin", same_port(config.admin_listen, earlier.get("admin")),
            *option("--policy", config.policy), *option("--tokens", config.tokens),
            *option("--encryption-keys", config.encryption_keys),
            *option("--encryption-command", config.encryption_command), *config.store_options,
        )  # fmt: skip

    return ChildSpec(
        name="store",
        data=data,
        command=command,
        health_url=lambda endpoints: f"http://{endpoints['admin']}/healthz",
        describe=lambda endpoints: f"{endpoints['listen']} and unix:{endpoints['unix']}",
        start_s_max=STORE_START_S_MAX,
    )


def worker_spec(config: UpConfig, role: str, listen: str) -> ChildSpec:
    data = config.data / role

    def command(needed: Mapping[str, Endpoints], own: Endpoints | None) -> list[str]:
        return reprise(
            "worker", "--role", role, "--model", config.model, "--data", str(data),
            "--store", f"unix:{needed['store']['unix']}",
            "--listen", same_port(listen, listen_of(own)), "--drain", f"{DRAIN_S}s",
            *option("--dtype", config.dtype), *option("--fidelity", config.fidelity),
            *option("--replay-windows", config.replay_windows), *option("--kv-memory", config.kv_memory),
            *option("--threads", str(config.threads or "")),
            *option("--store-token-file", config.token_file), *config.worker_options,
        )  # fmt: skip

    return ChildSpec(
        name=role,
        data=data,
        command=command,
        health_url=lambda endpoints: f"{http_url(endpoints)}/healthz",
        describe=http_url,
        depends_on=("store",),
        start_s_max=WORKER_START_S_MAX,
    )


def gateway_spec(config: UpConfig) -> ChildSpec:
    data = config.data / "gateway"

    def command(needed: Mapping[str, Endpoints], own: Endpoints | None) -> list[str]:
        return reprise(
            "gateway", "--prefill", http_url(needed["prefill"]), "--decode", http_url(needed["decode"]),
            "--store", f"unix:{needed['store']['unix']}",  # the policy's class names
            "--listen", same_port(config.listen, listen_of(own)), "--data", str(data), "--drain", f"{DRAIN_S}s",
            *option("--keys", config.keys), *option("--access-log", config.access_log),
            *option("--store-token-file", config.token_file), *config.gateway_options,
        )  # fmt: skip

    return ChildSpec(
        name="gateway",
        data=data,
        command=command,
        health_url=lambda endpoints: f"{http_url(endpoints)}/healthz",
        describe=http_url,
        depends_on=("store", "prefill", "decode"),
        start_s_max=GATEWAY_START_S_MAX,
    )


def option(flag: str, value: str) -> list[str]:
    return [flag, value] if value else []


def http_url(endpoints: Endpoints) -> str:
    """Where a worker or the gateway answers."""
    return str(endpoints.get("url") or f"http://{endpoints['listen']}")


def listen_of(endpoints: Endpoints | None) -> str | None:
    """HOST:PORT of an earlier start, or None before the first."""
    return http_url(endpoints).removeprefix("http://") if endpoints else None


def specs(config: UpConfig) -> list[ChildSpec]:
    """The children in order of start."""
    return [
        store_spec(config),
        worker_spec(config, "prefill", config.prefill_listen),
        worker_spec(config, "decode", config.decode_listen),
        gateway_spec(config),
    ]


def check(config: UpConfig) -> None:
    """Raises ValueError for what a child would refuse, in its words."""
    somewhere = {"unix": "/store.sock", "listen": "127.0.0.1:1"}  # where they really are is known once they run
    addresses = {"store": somewhere, "prefill": somewhere, "decode": somewhere}
    for spec in specs(replace(config, data=Path("/data"))):  # which may not be there yet, and is not looked at
        check_command(spec.command(addresses, None)[len(reprise()) :])
    if config.tokens:
        check_token(Path(config.tokens), Path(config.token_file))


# --- the command ----------------------------------------------------------------------------------------------------


class DataUnusable(Exception):
    """The data directory cannot be made or written."""


class DataInUse(DataUnusable):
    """Another ``reprise up`` runs on the data directory."""


def lock_data(data: Path) -> int:
    """Hold the data directory until this process ends; returns the descriptor.

    Raises DataInUse, naming the holder; DataUnusable, naming the operating system's reason.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataUnusable(f"{data} cannot be used as data directory: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise DataInUse(
            f"{data} is in use by another 'reprise up' (pid {holder}); stop it or choose another --data"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def run(config: UpConfig) -> int:
    """Run all children until a signal comes; returns the exit status."""
    descriptor = lock_data(config.data)
    try:
        children = [Child(spec, RotatingLog.open(config.data / "logs" / f"{spec.name}.log")) for spec in specs(config)]
        facts = {"model": config.model, "ready": f"model {config.model}"}
        supervisor = Supervisor(children, state_path=config.data / "up.json", facts=facts, say=say)
        return supervisor.run()
    finally:
        os.close(descriptor)


def say(line: str) -> None:
    """One line for the operator, who may have gone (a closed terminal): the service goes on without."""
    with contextlib.suppress(OSError):
        print(f"[up] {line}", flush=True)


@app.command(help="Run a store node, a prefill worker, a decode worker and the gateway on this machine, supervised.")
def up(
    data: Annotated[Path | None, typer.Option(help="Where blocks, logs and state lie.  [default: data]")] = None,
    model: Annotated[str | None, typer.Option(help="demo, demo-swa, or a directory.  [default: demo]")] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Bytes on disk that the store may use, such as 20GiB.  [default: 20GiB]")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="Gateway address; port 0 takes a free one.")] = None,
    store_listen: Annotated[str | None, typer.Option(help="Store address.")] = None,
    admin_listen: Annotated[str | None, typer.Option(help="Store administration address (health, metrics).")] = None,
    prefill_listen: Annotated[str | None, typer.Option(help="Prefill worker address.")] = None,
    decode_listen: Annotated[str | None, typer.Option(help="Decode worker address.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    fidelity: Annotated[str | None, typer.Option(help="bounded or exact.")] = None,
    replay_windows: Annotated[str | None, typer.Option(help="Windows to replay: a number, or exact.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV memory of each worker, such as 2GiB.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Compute threads of each worker.")] = None,
    keys: Annotated[str | None, typer.Option(help="API keys file of the gateway.")] = None,
    policy: Annotated[str | None, typer.Option(help="Retention policy (TOML) for a new store.")] = None,
    access_log: Annotated[str | None, typer.Option(help="File that is told what was asked for, by digests.")] = None,
    tokens: Annotated[str | None, typer.Option(help="TOML file of those whom the store knows, by token.")] = None,
    token_file: Annotated[str | None, typer.Option(help="The token that workers and gateway show to it.")] = None,
    encryption_keys: Annotated[str | None, typer.Option(help="TOML file of cipher keys by tenant.")] = None,
    encryption_command: Annotated[str | None, typer.Option(help="Command that prints such a file.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these settings; options win over it.")] = None,
) -> None:
    given = {
        name: value
        for name, value in locals().items()
        if name in {item.name for item in fields(UpConfig)} and value is not None
    }
    try:
        settings = load_config(config, given)
        check(settings)
    except ValueError as error:
        typer.echo(f"reprise up: {error}", err=True)
        raise typer.Exit(2) from error
    try:
        status = run(settings)
    except DataUnusable as error:
        typer.echo(f"reprise up: {error}", err=True)
        status = 1
    raise typer.Exit(status)
