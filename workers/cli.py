"""``reprise worker``: run a prefill or decode worker.

Owns the command's options and the order of start. Does not know the engine. Prints one JSON line when it is healthy,
and one for each slow step before (model conversion, load). Exit codes: 0 after a drain, 2 for a configuration that
cannot be used, 3 for a model that cannot be loaded, 1 for a worker that broke, an address that is taken, and anything
else that may pass.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvstore.access import read_token
from workers.config import ConfigError, WorkerConfig, load_config, split_address

app = typer.Typer(add_completion=False, rich_markup_mode=None)

EXIT_FAILED, EXIT_CONFIG, EXIT_MODEL = 1, 2, 3
CLOSE_S = 3.0
"""After the drain: the engine, and what is still queued for the store, get this long each."""


@app.command(help="Run a prefill or decode worker beside a store.")
def worker(
    role: Annotated[str | None, typer.Option(help="prefill, decode or both.")] = None,
    model: Annotated[str | None, typer.Option(help="demo, demo-swa, or a checkpoint's directory.")] = None,
    store: Annotated[list[str] | None, typer.Option(help="Store node: HOST:PORT or unix:/PATH; repeatable.")] = None,
    data: Annotated[Path | None, typer.Option(help="Directory of endpoints.json and the access log.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT; port 0 takes a free one. [127.0.0.1:0]")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these options as keys.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. [float32]")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs. [cpu]")] = None,
    fidelity: Annotated[str | None, typer.Option(help="bounded or exact. [bounded]")] = None,
    replay_windows: Annotated[
        str | None, typer.Option(help="Windows of a bounded replay, or exact. [what the model declares]")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for KV, such as 2GiB. [2GiB]")] = None,
    publish_memory: Annotated[str | None, typer.Option(help="Memory for KV on its way out. [256MiB]")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens of a block; part of the space. [64]")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of one step. [512]")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads. [torch's choice]")] = None,
    requests_max: Annotated[int | None, typer.Option(help="Requests in flight; the next gets 503. [256]")] = None,
    lookup_deadline: Annotated[str | None, typer.Option(help="Longest wait for a lookup. [250ms]")] = None,
    load_deadline: Annotated[str | None, typer.Option(help="Longest wait for a load. [5s]")] = None,
    settle_deadline: Annotated[str | None, typer.Option(help="Longest wait for acknowledgements. [2s]")] = None,
    drain: Annotated[str | None, typer.Option(help="SIGTERM: time for requests in flight. [12s]")] = None,
    epoch: Annotated[int | None, typer.Option(help="Raise it to leave all stored KV of the model behind. [0]")] = None,
    model_cache: Annotated[Path | None, typer.Option(help="Where converted models are kept.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Secret that clients must show.")] = None,
    store_token_file: Annotated[Path | None, typer.Option(help="Secret to show to the store.")] = None,
    access_log_size: Annotated[str | None, typer.Option(help="Bound of the access log's file. [32MiB]")] = None,
) -> None:
    given = dict(locals())
    try:
        settings = config_of(given)
        tokens = read_token(settings.token_file), read_token(settings.store_token_file)
    except (ConfigError, ValueError) as error:
        _give_up(EXIT_CONFIG, str(error))
    raise SystemExit(run(settings, token=tokens[0], store_token=tokens[1]))


def config_of(given: Mapping[str, Any]) -> WorkerConfig:
    """The settings that the command's parameters make (None or empty: not given). Raises ConfigError."""
    values = {name: value for name, value in given.items() if value not in (None, [], ())}
    path = values.pop("config", None)
    return load_config(path, values)


def run(config: WorkerConfig, *, token: str | None, store_token: str | None) -> int:
    """Load, listen, serve, and stop cleanly; returns the exit status."""
    if config.threads is not None:  # before torch starts its pool
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
    from workers.geometry import UnsupportedModel  # torch comes with these, and takes seconds
    from workers.runtime import open_worker
    from workers.server import listen, serve
    from workers.weights import ModelUnavailable, default_cache_dir, resolve_model

    host, port = split_address(config.listen)
    began_s = time.monotonic()
    try:
        listener = listen(host, port)
    except OSError as error:  # it may pass: not a matter of configuration
        _give_up(EXIT_FAILED, f"cannot listen on {config.listen}: {error}")
    try:
        _say("worker_loading", role=config.role, model=config.model)
        resolved = resolve_model(
            config.model, config.model_cache or default_cache_dir(), lambda line: _say("progress", message=line)
        )
        running = open_worker(config, resolved, store_token=store_token)
    except ConfigError as error:
        _give_up(EXIT_CONFIG, str(error))
    except (ModelUnavailable, UnsupportedModel, ValueError, OSError) as error:
        _give_up(EXIT_MODEL, f"model {config.model}: {error}")
    address = f"{config.listen.rpartition(':')[0]}:{listener.getsockname()[1]}"
    running.start()
    write_endpoints(config.endpoints_path, {"listen": address, "role": config.role, "pid": os.getpid()})
    _say(
        "worker_ready",
        address=address,
        role=config.role,
        model=resolved.name,
        load_s=round(time.monotonic() - began_s, 3),
        kv_tokens=running.load().kv_tokens_max,
        space=running.info.space_id,
    )
    try:
        serve(running, listener, token=token, drain_s=config.drain_s)
    finally:
        running.close(CLOSE_S)
    _say("worker_stopped", role=config.role)
    return 1 if running.broken else 0


def write_endpoints(path: Path, endpoints: Mapping[str, Any]) -> None:
    """Say where the worker listens, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(endpoints))
    beside.replace(path)


def _say(event: str, **fields: object) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(json.dumps({"event": event, **fields}, separators=(",", ":")), flush=True)


def _give_up(status: int, message: str) -> NoReturn:
    print(f"reprise worker: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)
