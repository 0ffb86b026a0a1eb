"""The real daemon process: start, endpoints, token, admin HTTP, drain, kill, restart, and the commands around it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvstore.cli import build_app
from kvstore.daemon.files import Files
from kvstore.keys import TokenChain, encode_space
from kvstore.limits import MIB
from kvstore.store import BlockPut, GetStatus, PutOutcome
from kvstore.testing import TEST_RULES
from kvstore.traffic import AGENT
from tests.support.spaces import BLOCK_TOKENS, a_chain, a_space, put_chain
from tests.support.stores import client_of
from tests.support.waiting import WAIT_S, wait

TOKEN = "a-token-of-some-length"
ROLES = ("reader", "operator", "tenant:acme")
APP = build_app(lambda path: (TEST_RULES, ""))
SERVE = (
    "import sys; from kvstore.cli import build_app; from kvstore.testing import TEST_RULES; "
    "build_app(lambda path: (TEST_RULES, ''))(['serve', *sys.argv[1:]])"
)


def hear_hangups() -> None:
    """The tests themselves may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-c", SERVE, "--data", str(folder / "data"), "--capacity", "64MiB"),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        preexec_fn=hear_hangups,
    )


@contextmanager
def daemon(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running daemon and what it said when it was ready."""
    process = start(folder, *options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def _lines(*command: str) -> list[str]:
    return CliRunner().invoke(APP, list(command), env={"COLUMNS": "120"}).stdout.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_daemon_lives_and_ends_cleanly(folder: Path, number: signal.Signals) -> None:
    """It says where it listens, answers health, metrics and stats (of promises, that it is too early to tell), drains
    when it is told to stop or its terminal is closed, and exits 0."""
    with daemon(folder) as (process, ready):
        endpoints = json.loads((folder / "data" / "endpoints.json").read_text())
        assert {key: ready[key] for key in endpoints} == endpoints
        assert endpoints["pid"] == process.pid
        with client_of(f"unix:{ready['unix']}") as client:
            put_chain(client, a_chain(client.register_space(a_space()), 5), AGENT)
        with client_of(ready["listen"]) as client:
            assert client.stats()["blocks"] == 5
        base = f"http://{ready['admin']}"
        assert httpx.get(f"{base}/healthz").json() == {"status": "ok"}
        metrics = httpx.get(f"{base}/metrics").text
        assert "reprise_store_blocks 5.0" in metrics
        assert 'reprise_store_requests_total{opcode="put_local"} 1.0' in metrics
        assert 'reprise_store_class_blocks{of="agent"} 5.0' in metrics
        assert httpx.get(f"{base}/v1/stats").json()["blocks"] == 5
        shown = CliRunner().invoke(APP, ["stat", ready["listen"], "--json"])
        assert shown.exit_code == 0
        assert json.loads(shown.stdout)[ready["listen"]]["blocks"] == 5
        (row,) = [line for line in _lines("stat", ready["listen"]) if "promise_ratio agent" in line]
        assert row.rstrip(" │").endswith("(of 0 min: no trend yet)")
        process.send_signal(number)
        out, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert json.loads(out) == {"event": "store_stopped"}
        assert not (folder / "data" / "endpoints.json").exists()
    checked = CliRunner().invoke(APP, ["fsck", str(folder / "data"), "--json"])
    assert checked.exit_code == 0
    assert json.loads(checked.stdout)["live_records"] == 5


def test_a_killed_daemon_comes_back_with_every_acknowledged_block(folder: Path) -> None:
    """kill -9, a stale socket file and endpoints.json left behind: the next start serves all on the same path."""
    space = a_space()
    with daemon(folder) as (process, ready), client_of(f"unix:{ready['unix']}") as client:
        space_id = client.register_space(space)
        chain = a_chain(space_id, 1000)
        for begin in range(0, 1000, 250):
            puts = [BlockPut(name, BLOCK_TOKENS, name.key[:1] * 1000) for name in chain.names[begin : begin + 250]]
            assert set(client.put(space_id, puts, traffic_class=AGENT)) == {PutOutcome.STORED}
        process.kill()
        process.wait(WAIT_S)
        began_s = time.monotonic()
        assert client.lookup(space_id, chain.names, deadline_s=WAIT_S).prefix_blocks() == 0
        assert time.monotonic() - began_s < WAIT_S
        with daemon(folder) as (_, again), client_of(f"unix:{ready['unix']}") as fresh:
            assert again["blocks"] == 1000
            stats = fresh.stats()
            assert 0 < stats["recovery_s"] < again["started_s"]
            assert stats["bytes_written"] == 0, "nothing is written again by a restart"
            assert fresh.spaces() == {space_id: space}
            assert fresh.lookup(space_id, chain.names).prefix_blocks() == 1000
            buffers = [bytearray(1000) for _ in chain.names]
            assert fresh.get_into(space_id, chain.names, buffers) == [GetStatus.OK] * 1000
            assert all(buffer == name.key[:1] * 1000 for buffer, name in zip(buffers, chain.names, strict=True))
            time.sleep(1.2)  # the older client skips the node for a second after its failure
            assert client.lookup(space_id, chain.names).prefix_blocks() == 1000


def test_a_daemon_on_a_full_file_system_is_healthy_and_says_what_it_sheds(folder: Path) -> None:
    """Others have filled the disk beyond the watermark: puts are refused and counted, and nobody restarts the node."""
    free_bytes, usable_bytes = Files().space(folder)
    if usable_bytes - free_bytes < 256 * MIB:
        pytest.skip("this file system is empty")
    free_min_bytes = (free_bytes + usable_bytes) // 2
    with daemon(folder, "--free-min", f"{free_min_bytes}B") as (process, ready), client_of(ready["listen"]) as client:
        space_id = client.register_space(a_space())
        puts = [BlockPut(name, BLOCK_TOKENS, bytes(1000)) for name in a_chain(space_id, 5).names]
        assert client.put(space_id, puts, traffic_class=AGENT, deadline_s=1.0) == [PutOutcome.REFUSED] * 5
        assert httpx.get(f"http://{ready['admin']}/healthz").json() == {"status": "ok"}
        metrics = httpx.get(f"http://{ready['admin']}/metrics").text
        assert f'reprise_store_volume_low_space{{volume="{folder / "data"}"}} 1.0' in metrics
        assert "reprise_store_shed_low_space_total 5.0" in metrics
        assert process.poll() is None


def test_many_times_the_capacity_in_mixed_blocks_leaves_memory_where_it_was(folder: Path) -> None:
    """Blocks and states of every size, put, read, deleted and evicted: the daemon's memory levels off."""
    with daemon(folder) as (process, ready), client_of(f"unix:{ready['unix']}") as client:
        space_id, drawn, resident = client.register_space(a_space()), random.Random(1), []
        statm = Path(f"/proc/{process.pid}/statm")
        for turn in range(240):
            chain, size = a_chain(space_id, 16, seed=turn), drawn.choice([100, 5_000, 60_000, 250_000])
            client.put(
                space_id, [BlockPut(name, BLOCK_TOKENS, bytes(size)) for name in chain.names], traffic_class=AGENT
            )
            client.put_state(space_id, chain.state_name(5), bytes(size // 10))
            client.lookup(space_id, chain.names, states=True)
            client.get_into(space_id, chain.names, [bytearray(size) for _ in chain.names])
            if turn % 5 == 0:
                client.delete(space_id, [name.key for name in chain.names[:8]])
            if turn % 60 == 59:
                resident.append(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        assert client.stats()["evicted"] > 500
        assert resident[-1] - resident[1] < 16 * 2**20, resident


def test_a_token_guards_both_endpoints(folder: Path) -> None:
    """With --token-file the data plane and the admin HTTP ask for it; health alone stays open."""
    token_file = folder / "token"
    token_file.write_text(TOKEN + "\n")
    with daemon(folder, "--token-file", str(token_file)) as (_, ready):
        base = f"http://{ready['admin']}"
        assert httpx.get(f"{base}/healthz").status_code == 200
        for path in ("/metrics", "/v1/stats", "/v1/events?follow=false"):
            assert httpx.get(base + path).status_code == 401
            assert httpx.get(base + path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert httpx.get(base + path, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        refused = CliRunner().invoke(APP, ["stat", ready["listen"]])
        assert refused.exit_code == 1
        assert "needs a token" in refused.output
        assert CliRunner().invoke(APP, ["stat", ready["listen"], "--token-file", str(token_file)]).exit_code == 0


def test_a_file_of_tokens_tells_who_may_what(folder: Path) -> None:
    """A reader's token is refused by the command and the metrics that an operator's is served by; events name the keys
    of all tenants, so a tenant's is refused there too.
    """
    listed = folder / "tokens.toml"
    listed.write_text("".join(f'[[tokens]]\ntoken = "{TOKEN} {role}"\nroles = ["{role}"]\n' for role in ROLES))
    listed.chmod(0o600)
    with daemon(folder, "--tokens", str(listed)) as (_, ready):
        for role in ROLES:
            kind = role.partition(":")[0]
            token_file = folder / kind
            token_file.write_text(f"{TOKEN} {role}\n")
            done = CliRunner().invoke(APP, ["stat", ready["listen"], "--token-file", str(token_file)])
            seen = httpx.get(f"http://{ready['admin']}/metrics", headers={"Authorization": f"Bearer {TOKEN} {role}"})
            assert (done.exit_code, seen.status_code) == ((0, 200) if role == "operator" else (1, 401)), done.output
            assert role == "operator" or f"needs a token with the role operator; this one has {kind}" in done.output
            events = CliRunner().invoke(APP, ["events", ready["admin"], "--token-file", str(token_file)])
            assert events.exit_code == (1 if role == "tenant:acme" else 0), events.output
    listed.chmod(0o644)
    process = start(folder, "--tokens", str(listed))
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "chmod 600" in err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--unix", "/tmp/" + "x" * 120], 2, "107 bytes"),
        (["--segment-bytes", "60MiB"], 1, "segments"),
        (["--capacity", "1EiB"], 1, "capacity of 1EiB is more than the whole file system"),
        (["--data", "/dev/null"], 1, "data directory /dev/null cannot be used: it is no directory"),
        (["--unix", "/nonexistent/s"], 1, "cannot listen on /nonexistent/s: No such file"),
    ],
)
def test_a_daemon_that_cannot_start_says_why(folder: Path, options: list[str], code: int, says: str) -> None:
    """An impossible address exits 2, a directory that cannot be used exits 1, each without a traceback."""
    process = start(folder, *options)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--listen", "0.0.0.0:0"], "give --token-file"),
        (["--admin", "0.0.0.0:0"], "give --token-file"),
        (["--capacity", "64"], "no unit"),
        (["--token-file", "/nonexistent"], "cannot be read"),
        (["--config", "/nonexistent"], "cannot read the config"),
    ],
)
def test_wrong_settings_are_usage_errors(folder: Path, options: list[str], says: str) -> None:
    """They exit 2 with one line before anything is opened."""
    done = CliRunner().invoke(APP, ["serve", "--data", str(folder / "data"), "--capacity", "64MiB", *options])
    assert done.exit_code == 2
    assert says in done.output
    assert not (folder / "data").exists()


def test_a_directory_in_use_or_of_another_kind_is_refused(folder: Path) -> None:
    with daemon(folder) as (first, _):
        second = start(folder, "--unix", str(folder / "other.sock"))
        _, err = second.communicate(timeout=WAIT_S)
        assert second.returncode == 1
        assert str(first.pid) in err
        checked = CliRunner().invoke(APP, ["fsck", str(folder / "data")])
        assert checked.exit_code == 1
        assert "in use" in checked.output or str(first.pid) in checked.output
    (folder / "foreign").mkdir()
    (folder / "foreign" / "family.jpg").write_text("not a store")
    process = start(folder, "--data", str(folder / "foreign"))
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "foreign" in err
    assert os.listdir(folder / "foreign") == ["family.jpg"]


def test_a_cipher_key_that_leaves_its_file_purges_while_the_daemon_runs(folder: Path) -> None:
    """Its blocks were served over the socket, never lent; a file that it cannot use refuses the start."""
    keys = folder / "keys.toml"
    keys.write_text(f'[[keys]]\nnumber = 1\nkey = "{"5a" * 32}"\n')
    refused = start(folder, "--encryption-keys", str(keys))
    assert "chmod 600" in refused.communicate(timeout=WAIT_S)[1]
    keys.chmod(0o600)
    with daemon(folder, "--encryption-keys", str(keys)) as (_, ready), client_of(f"unix:{ready['unix']}") as client:
        chain = a_chain(client.register_space(a_space()), 5)
        put_chain(client, chain, AGENT)
        buffers = [bytearray(1000) for _ in chain.names]
        assert client.get_into(chain.space_id, chain.names, buffers) == [GetStatus.OK] * 5
        assert client.stats()["blocks_encrypted"] == 5
        keys.write_text("keys = []")
        wait(lambda: client.stats()["blocks_without_key"] == 5, "news of the key")
        assert client.get_into(chain.space_id, chain.names, buffers) == [GetStatus.MISS] * 5
        assert client.lookup(chain.space_id, chain.names).prefix_blocks() == 0
        assert client.stats()["quarantined"] == 0


def test_explain_asks_the_store_and_names_the_field(folder: Path) -> None:
    """A request whose weights changed: explain says that the same tokens lie in a space with other weights."""
    old, new = a_space(), a_space(weights_digest=b"new weights")
    log = folder / "access.jsonl"
    with daemon(folder) as (_, ready):
        with client_of(ready["listen"]) as client:
            chain = a_chain(client.register_space(old), 3)
            client.put(
                chain.space_id, [BlockPut(name, BLOCK_TOKENS, b"x") for name in chain.names], traffic_class=AGENT
            )
            other = TokenChain(client.register_space(new), BLOCK_TOKENS, chain.tokens)
        miss = other.names[0]
        record = {
            "request_id": "req-1", "time_s": time.time(), "role": "prefill", "space": encode_space(new).hex(),
            "space_id": other.space_id.hex(), "prompt_tokens": 12, "block_tokens": BLOCK_TOKENS, "hit_tokens": 0,
            "way": "cold", "reason": "never",
            "first_miss": {
                "index": 0, "key": miss.key.hex(), "parent": miss.parent.hex(), "route": miss.route.hex(),
                "token_digest": miss.token_digest.hex(), "presence": "never",
            },
        }  # fmt: skip
        log.write_text(json.dumps(record) + "\n")
        arguments = ["explain", "req-1", "--log", str(log), "--store", ready["listen"]]
        shown = CliRunner().invoke(APP, arguments)
        assert shown.exit_code == 0
        assert "weights_digest" in shown.output
        parsed = json.loads(CliRunner().invoke(APP, [*arguments, "--json"]).stdout)
        assert parsed[0]["cause"] == "another_space"
        assert parsed[0]["other_spaces"] == [{"space_id": chain.space_id.hex(), "fields": ["weights_digest"]}]
        assert CliRunner().invoke(APP, ["explain", "req-2", "--log", str(log)]).exit_code == 1
    gone = CliRunner().invoke(APP, [*arguments, "--deadline", "500ms"])
    assert gone.exit_code == 0
    assert "never_stored" in gone.output
