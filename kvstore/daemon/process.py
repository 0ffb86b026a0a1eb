"""One daemon process: node, data plane, admin endpoint, signals.

Owns the order of starting and stopping. Does not know what any part does. Invariants: ``endpoints.json`` exists only
while the daemon serves; SIGTERM, SIGINT and SIGHUP (not under nohup) stop accepting, let requests in flight finish,
close the node, and exit 0.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from kvstore import wire
from kvstore.access import read_token
from kvstore.config import StoreConfig, host_and_port
from kvstore.daemon.admin import AdminServer, EventFeed, create_app
from kvstore.daemon.catch_up import catch_up
from kvstore.daemon.cipher import Keyring
from kvstore.daemon.clock import SteadyClock
from kvstore.daemon.keyring import KeyringSource, KeyringWatch
from kvstore.daemon.metrics import ServerMetrics, StatsCollector
from kvstore.daemon.node import Node, NodeConfig
from kvstore.daemon.server import Server, ServerConfig
from kvstore.daemon.tokens import Tokens
from kvstore.signals import stop_signals
from kvstore.store import SystemClock
from kvstore.traffic import ClassRules

ENDPOINTS_FILE = "endpoints.json"
SWITCH_S = 0.0001
"""How long a thread that computes keeps one waiting that was woken by a request; the interpreter's own 5 ms is longer
than most requests take.
"""

log = logging.getLogger("kvstore.daemon")


def run(config: StoreConfig, rules: ClassRules, policy_text: str, tokens: Tokens) -> None:
    """Serve until a signal comes. Raises StoreError, ValueError or OSError if the daemon cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.setswitchinterval(SWITCH_S)
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in stop_signals():
        signal.signal(number, on_signal)
    began_s = time.monotonic()
    with ExitStack() as parts:
        source = KeyringSource(config.encryption_keys, config.encryption_command)
        keyring = source.read()
        clock = SteadyClock(SystemClock())
        node = Node.open(_node_config(config, keyring), clock, rules, policy_text)
        parts.callback(node.close)
        clock.judge(node.latest_use_s())
        watch = KeyringWatch(source, keyring, node.set_keyring)
        watch.start()
        parts.callback(watch.stop)
        catch_up(node, config.peers, read_token(config.peer_token))
        if stop.is_set():
            return
        metrics = ServerMetrics()
        metrics.registry.register(StatsCollector(node.stats))
        server = Server.start(_server_config(config, tokens), node, metrics)
        parts.callback(server.stop, config.drain_s)
        admin = _start_admin(config, node, metrics, stop, tokens)
        if admin is not None:
            parts.callback(admin.stop)
        path = config.data[0] / ENDPOINTS_FILE
        endpoints = _endpoints(config, server, admin)
        write_endpoints(path, endpoints)
        parts.callback(path.unlink, missing_ok=True)
        ready = {"event": "store_ready", **endpoints, "blocks": node.stats().get("blocks", 0)}
        print(json.dumps({**ready, "started_s": round(time.monotonic() - began_s, 3)}), flush=True)
        stop.wait()
        log.info("draining for at most %.0f s", config.drain_s)
    with suppress(OSError):  # the terminal may be gone
        print(json.dumps({"event": "store_stopped"}), flush=True)


def _node_config(config: StoreConfig, keyring: Keyring) -> NodeConfig:
    return NodeConfig(
        directories=config.data,
        capacity_bytes=config.capacity_bytes,
        segment_bytes=config.segment_bytes,
        state_pool_bytes=config.state_pool_bytes,
        state_ttl_s=config.state_ttl_s,
        sweep_interval_s=config.sweep_every_s,
        background=True,
        scrub_bytes_per_s=config.scrub_bytes_per_s,
        free_min_bytes=config.free_min_bytes,
        overwrite_aged=config.overwrite_aged,
        pin_quota_bytes=config.capacity_bytes // 4 if config.pin_quota_bytes is None else config.pin_quota_bytes,
        keyring=keyring,
        bypass_page_cache=config.page_cache == "bypass",
    )


def _server_config(config: StoreConfig, tokens: Tokens) -> ServerConfig:
    return ServerConfig(
        name=f"{os.uname().nodename}:{config.data[0].name}",
        tcp=host_and_port(config.listen),
        unix_path=config.unix_path,
        tokens=tokens,
        connections_max=config.connections_max,
        same_host=config.same_host,
    )


def _start_admin(
    config: StoreConfig, node: Node, metrics: ServerMetrics, stop: threading.Event, tokens: Tokens
) -> AdminServer | None:
    address = host_and_port(config.admin)
    if address is None:
        return None

    def may_see(token: bytes) -> bool:
        found = tokens.find(token)
        return found is not None and "stats" in found.grant.verbs

    def may_follow(token: bytes) -> bool:
        found = tokens.find(token)
        return found is not None and wire.Opcode.LOOKUP in found.grant.opcodes and not found.grant.salts

    feed = EventFeed(node.events, lambda: node.policy().rules, node.spaces, may_follow)
    app = create_app(node.stats, metrics.registry, lambda: not stop.is_set(), feed, may_see)
    return AdminServer.start(app, *address)


def _endpoints(config: StoreConfig, server: Server, admin: AdminServer | None) -> dict[str, object]:
    """What others need to find this daemon; addresses with the ports that were really taken."""
    tcp = next((address for address in server.addresses if not address.startswith("unix:")), None)
    return {
        "pid": os.getpid(),
        "listen": tcp,
        "unix": str(config.unix_path),
        "admin": admin.address if admin is not None else None,
    }


def write_endpoints(path: Path, endpoints: dict[str, object]) -> None:
    """Appear whole or not at all: somebody waits for this file."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(endpoints) + "\n")
    draft.replace(path)
