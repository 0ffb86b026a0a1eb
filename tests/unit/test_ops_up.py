"""Settings of ``reprise up``, the command lines of its children, and the lock on the data directory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.up import (
    UNIX_PATH_BYTES_MAX,
    DataInUse,
    DataUnusable,
    UpConfig,
    app,
    check,
    load_config,
    lock_data,
    specs,
    unix_path,
)
from tests.support.checkpoints import checkpoint

ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    """Three layers, the nearest to the operator first."""
    text = 'model = "demo-swa"\ncapacity = "1GiB"\nworker_options = ["--chunk-tokens", "64"]\n'
    file = write(tmp_path / "up.toml", text)
    config = load_config(file, {"capacity": "2GiB", "keys": None})
    assert (config.model, config.capacity, config.listen) == ("demo-swa", "2GiB", "127.0.0.1:8000")
    assert config.worker_options == ("--chunk-tokens", "64")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("modle = 'demo'", "unknown key 'modle'"),
        ("capacity = 20", "capacity must be a string"),
        ("capacity = '20'", "no unit"),
        ("threads = '2'", "threads must be a whole number"),
        ("threads = true", "threads must be a whole number"),
        ("listen = 'localhost'", "listen: 'localhost' is not HOST:PORT"),
        ("listen = '127.0.0.1:70000'", "a port is at most 65535"),
        ("store_options = [1]", "store_options must be a list of strings"),
        ("model = ", "cannot read"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    """A wrong key, type, unit or address is refused at start with its name."""
    with pytest.raises(ValueError, match=complaint):
        load_config(write(tmp_path / "up.toml", text), {})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--dtype", "fp32"], "dtype: 'fp32' is not one of float32, bfloat16, float16"),
        (["--fidelity", "best"], "fidelity: 'best' is not one of bounded, exact"),
        (["--kv-memory", "2"], "kv_memory: size '2' has no unit"),
        (["--replay-windows", "0"], "replay_windows: 0 is neither"),
        (["--model", "nosuch"], "model nosuch: 'nosuch' is neither a demo model"),
        (["--policy", "nofile"], "the policy file nofile cannot be read"),
        (["--keys", "nofile"], "--keys: cannot read nofile"),
        (["--capacity", "1MiB"], "less than 8 MiB"),
        (["--listen", "0.0.0.0:0"], "without --keys the gateway listens on loopback only"),
        (["--prefill-listen", "0.0.0.0:0"], "listen: 0.0.0.0:0 can be reached from other machines"),
        (["--encryption-keys", "nofile"], "nofile"),
        (["--encryption-keys", "nofile", "--encryption-command", "cat nofile"], "give one of the two"),
        (["--tokens", "nofile"], "goes with --token-file"),
        (["--tokens", "nofile", "--token-file", "nofile"], "nofile"),
        (["--config", "up.toml"], "worker: No such option: --chunk-tokns"),
    ],
)
def test_what_a_child_would_refuse_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], complaint: str
) -> None:
    """In the child's own words, with status 2 and nothing made."""
    monkeypatch.chdir(tmp_path)
    model = str(checkpoint("llama"))
    file = write(tmp_path / "up.toml", 'worker_options = ["--chunk-tokns", "64"]')
    result = CliRunner().invoke(app, ["--model", model, *options])
    assert result.exit_code == 2
    assert complaint in result.output
    assert list(tmp_path.iterdir()) == [file]


def test_settings_that_children_take_pass(tmp_path: Path) -> None:
    """Options that are handed through count: they may allow what would be refused without them. A class that only the
    store's policy may have is left to the gateway."""
    token = write(tmp_path / "token", "0123456789abcdef")
    keys = write(tmp_path / "keys.toml", '[[keys]]\nkey = "sk-12345678"\ntenant = "a"\nclass = "of-the-policy"\n')
    config = UpConfig(
        data=tmp_path / ("x" * 200) / "absent",
        model=str(checkpoint("llama")),
        listen="0.0.0.0:0",
        store_listen="0.0.0.0:0",
        prefill_listen="127.0.0.1:0",
        decode_listen="[::1]:0",
        keys=str(keys),
        store_options=("--token-file", str(token)),
        worker_options=("--chunk-tokens", "64"),
    )
    check(config)
    with pytest.raises(ValueError, match="give --token-file"):
        check(replace(config, store_options=()))


def test_tokens_reach_the_store_and_their_bearers(tmp_path: Path) -> None:
    """The store is told whom it knows, workers and gateway what to show; a token that is not listed, or is no worker's,
    would be refused by the store later and is refused at once.
    """
    token = write(tmp_path / "worker.token", "0123456789abcdef\n")
    tokens = write(tmp_path / "tokens.toml", '[[tokens]]\ntoken = "0123456789abcdef"\nroles = ["worker"]\n')
    tokens.chmod(0o600)
    config = UpConfig(model=str(checkpoint("llama")), tokens=str(tokens), token_file=str(token))
    check(config)
    assert {name: {"--tokens", "--store-token-file"} & set(words) for name, words in commands(config).items()} == {
        "store": {"--tokens"},
        "prefill": {"--store-token-file"},
        "decode": {"--store-token-file"},
        "gateway": {"--store-token-file"},
    }
    write(tokens, '[[tokens]]\ntoken = "0123456789abcdef"\nroles = ["operator"]\n')
    with pytest.raises(ValueError, match="no role worker"):
        check(config)
    write(tokens, '[[tokens]]\ntoken = "fedcba9876543210"\nroles = ["worker"]\n')
    with pytest.raises(ValueError, match="does not list"):
        check(config)


def test_the_access_log_and_cipher_keys_reach_who_uses_them(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.toml", f'[[keys]]\ntenant = "acme"\nnumber = 1\nkey = "{"ab" * 32}"\n')
    keys.chmod(0o600)
    log = tmp_path / "asked.jsonl"
    config = UpConfig(model=str(checkpoint("llama")), access_log=str(log), encryption_keys=str(keys))
    check(config)
    given = commands(config)
    assert given["gateway"][-2:] == ["--access-log", str(log)]
    assert given["store"][-2:] == ["--encryption-keys", str(keys)]
    other = replace(config, encryption_keys="", encryption_command=f"cat {keys}")
    assert commands(other)["store"][-2:] == ["--encryption-command", f"cat {keys}"]
    check(other)
    write(keys, "keys = 1")
    with pytest.raises(ValueError, match=r"keys\.toml"):
        check(config)


def commands(config: UpConfig) -> dict[str, list[str]]:
    """The command line of each child."""
    here = {"unix": "/store.sock", "listen": "127.0.0.1:1"}
    needed = {"store": here, "prefill": here, "decode": here}
    return {spec.name: spec.command(needed, None) for spec in specs(config)}


def test_a_restarted_child_keeps_a_chosen_port(tmp_path: Path) -> None:
    """Port 0 is resolved once; a fixed port is asked for as it is."""
    store = specs(UpConfig(data=tmp_path, store_listen="127.0.0.1:0"))[0]
    first = store.command({}, None)
    again = store.command({}, {"listen": "127.0.0.1:4321", "admin": "127.0.0.1:7072"})
    assert first[first.index("--listen") + 1] == "127.0.0.1:0"
    assert again[again.index("--listen") + 1] == "127.0.0.1:4321"
    assert again[again.index("--admin") + 1] == "127.0.0.1:7072"


def test_a_long_data_path_still_gets_a_usable_socket(tmp_path: Path) -> None:
    """A Unix socket's path is short whatever the data directory's is, and the same each time."""
    deep = tmp_path / ("x" * 90) / ("y" * 90)
    deep.mkdir(parents=True)
    assert len(str(unix_path(deep))) <= UNIX_PATH_BYTES_MAX
    assert unix_path(deep) == unix_path(deep)
    assert unix_path(Path("data")).name == "store.sock"


def test_a_second_up_on_the_same_data_is_refused(tmp_path: Path) -> None:
    """The refusal names the holder; after the holder is gone the directory is free."""
    held = lock_data(tmp_path)
    with pytest.raises(DataInUse, match=f"pid {os.getpid()}"):
        lock_data(tmp_path)
    os.close(held)
    os.close(lock_data(tmp_path))


def test_a_data_directory_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataUnusable, match="file/data cannot be used as data directory: Not a directory"):
        lock_data(tmp_path / "file" / "data")


def test_a_closed_terminal_does_not_stop_the_service() -> None:
    """`reprise up | head` and a hung-up terminal: nobody reads what is said, and it goes on."""
    code = "import sys; from ops.up import say\nfor _ in range(3): say('x')\nprint('alive', file=sys.stderr)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"alive" in process.stderr.read()
