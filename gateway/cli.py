"""``reprise gateway``: flags, files and secrets of one gateway process.

Owns reading them. Does not serve (``server.py``). Invariant: every setting that cannot be used ends the process with
status 2 and one sentence that says what to do; an address that is taken, which may pass, with status 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.classes import PolicySource
from gateway.config import GatewayConfig, load_config, parse_classes
from gateway.edge import print_line
from gateway.errors import CannotListen, ConfigError
from gateway.tenants import KeyRing, load_keys
from kvstore.access import read_token
from kvstore.traffic import TrafficClass
from kvstore.units import parse_seconds

EXIT_FAILED, EXIT_USAGE = 1, 2

app = typer.Typer(
    add_completion=False,
    help="Run the OpenAI-compatible gateway in front of prefill and decode workers.",
    rich_markup_mode=None,
)


@app.command()
def gateway(
    prefill: Annotated[list[str] | None, typer.Option(help="Prefill worker, http://HOST:PORT; repeatable.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="Decode worker, http://HOST:PORT; repeatable.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT; port 0 lets the kernel choose. [127.0.0.1:8000]")
    ] = None,
    keys: Annotated[str | None, typer.Option(help="TOML file of API keys; needed to listen beyond loopback.")] = None,
    policy_classes: Annotated[
        str | None, typer.Option(help="Operator classes and bytes, such as batch=16,scratch=17.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="Store node, to read the operator classes from its policy; repeatable.")
    ] = None,
    store_token_file: Annotated[str | None, typer.Option(help="File with the store's token.")] = None,
    worker_token_file: Annotated[str | None, typer.Option(help="File with the workers' token.")] = None,
    data: Annotated[str | None, typer.Option(help="Directory for endpoints.json, which names the address.")] = None,
    access_log: Annotated[
        str | None, typer.Option(help="File that is told which prefixes are asked for, by digests, for simulations.")
    ] = None,
    requests_max: Annotated[int | None, typer.Option(help="Requests in work at once; the next gets 503. [256]")] = None,
    drain: Annotated[str | None, typer.Option(help="SIGTERM: time for requests in work. [30s]")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the settings; flags override it.")] = None,
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models, /healthz and /metrics."""
    given = dict(locals())
    try:
        _run(config_of(given))
    except CannotListen as error:
        typer.echo(f"reprise gateway: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    except ConfigError as error:
        typer.echo(f"reprise gateway: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None


def config_of(given: Mapping[str, Any]) -> GatewayConfig:
    """The settings that the command's parameters make (None or empty: not given). Raises ConfigError."""
    flags = {name: value for name, value in given.items() if value not in (None, [], ())}
    path = flags.pop("config", None)
    if "policy_classes" in flags:
        flags["classes"] = parse_classes(flags.pop("policy_classes"))
    if "drain" in flags:
        try:
            flags["drain_s"] = parse_seconds(flags.pop("drain"))
        except ValueError as error:
            raise ConfigError(f"--drain: {error}") from error
    return load_config(path, flags)


def _run(config: GatewayConfig) -> None:
    _leave_torch_out()
    from gateway.server import serve  # the HTTP stack is loaded only to serve

    policy = _policy_source(config)
    serve(
        config,
        keys=_keys(config, policy),
        policy=policy,
        worker_token=_token(config.worker_token_file),
        now_s=time.monotonic,
        log=print_line,
    )


def _leave_torch_out() -> None:
    """Tokenizers need no torch, but transformers loads it where it is installed: seconds and 300 MB for nothing."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: as if it were not installed
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would recommend installing it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _policy_source(config: GatewayConfig) -> PolicySource | None:
    """A client of the named store; it need not be up."""
    if not config.store:
        return None
    from kvstore.client import StoreClient

    try:
        return StoreClient.connect(list(config.store), token=_token(config.store_token_file))
    except ValueError as error:
        raise ConfigError(f"--store: {error}") from error


def _keys(config: GatewayConfig, policy: PolicySource | None) -> KeyRing | None:
    """The key ring, whose default classes may be the store's."""
    if config.keys is None:
        return None
    from gateway.classes import POLICY_S_MAX, ClassNames
    from kvstore.errors import StoreError

    classes = ClassNames(config.class_names)
    if policy is not None:
        try:
            classes.adopt(policy.policy(deadline_s=POLICY_S_MAX))
        except StoreError as error:
            print_line({"event": "store_classes_unread", "error": str(error)})
    return read_keys(config.keys, classes.names)


def read_keys(path: str, classes: Mapping[str, TrafficClass]) -> KeyRing:
    """The key ring in a file. Raises ConfigError."""
    try:
        return load_keys(Path(path), classes)
    except OSError as error:
        raise ConfigError(f"--keys: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--keys: {error}") from error


def _token(path: str | None) -> str | None:
    """The secret in a file, for a worker or a store."""
    try:
        return read_token(Path(path) if path is not None else None)
    except ValueError as error:
        raise ConfigError(str(error)) from error
