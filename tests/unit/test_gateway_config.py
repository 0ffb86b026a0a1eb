"""Settings: unknown names and wrong values are told at start; without keys only loopback is listened on."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config import GatewayConfig, load_config, parse_classes, parse_listen
from gateway.errors import ConfigError

WORKERS = {"prefill": ["http://127.0.0.1:1"], "decode": ["http://127.0.0.1:2"]}


def test_flags_override_the_file(tmp_path: Path) -> None:
    """A file gives the settings; flags that were given win; the rest has defaults."""
    path = tmp_path / "gateway.toml"
    path.write_text(
        'prefill = ["http://p"]\ndecode = ["http://d"]\nlisten = "127.0.0.1:1"\ndrain_s = 5\n[classes]\nbatch = 16\n'
    )
    config = load_config(path, {"listen": "127.0.0.1:2", "requests_max": None})
    assert config.address == ("127.0.0.1", 2)
    assert config.prefill == ("http://p",)
    assert config.drain_s == 5.0
    assert config.requests_max == 256
    assert config.class_names == {"agent": 1, "chat": 2, "batch": 16}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"prefill": []}, "at least one"),
        ({"decode": []}, "at least one"),
        ({"prefil": ["x"]}, "unknown settings: prefil"),
        ({"requests_max": "8"}, "wrong type"),
        ({"requests_max": True}, "wrong type"),
        ({"requests_max": 0}, "above zero"),
        ({"drain_s": -1.0}, "above zero"),
        ({"prefill": "http://x"}, "list of addresses"),
        ({"prefill": ["127.0.0.1:7"]}, "is not http://HOST:PORT"),
        ({"decode": ["http://:7"]}, "is not http://HOST:PORT"),
        ({"decode": ["http://h:99999"]}, "is not http://HOST:PORT"),
        ({"decode": ["http://h:7 "]}, "is not http://HOST:PORT"),
        ({"listen": 8000}, "wrong type"),
        ({"listen": "8000"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "--listen '127.0.0.1:99999': a port is at most 65535"),
        ({"listen": "0.0.0.0:80"}, "without --keys"),
        ({"listen": "example.org:80"}, "without --keys"),
        ({"listen": "[::]:80"}, "without --keys"),
        ({"classes": {"agent": 20}}, "built in"),
        ({"classes": {"batch": 3}}, "needs a byte of 16..255"),
        ({"classes": {"batch": 256}}, "needs a byte of 16..255"),
        ({"classes": ["batch"]}, "table"),
    ],
)
def test_settings_that_cannot_be_used(values: dict[str, Any], complaint: str) -> None:
    """Each has a sentence that says what is wrong."""
    with pytest.raises(ConfigError, match=complaint):
        load_config(None, WORKERS | values)


def test_beyond_loopback_with_keys(tmp_path: Path) -> None:
    """With API keys any address may be listened on."""
    assert load_config(None, WORKERS | {"listen": "0.0.0.0:80", "keys": str(tmp_path)}).address == ("0.0.0.0", 80)


@pytest.mark.parametrize("text", ["nothing", "[[", 'listen = "x"\nlisten = "y"', "\udcff"])
def test_files_that_are_not_toml(tmp_path: Path, text: str) -> None:
    """A file that cannot be read names itself."""
    path = tmp_path / "x.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(path, WORKERS)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.toml", WORKERS)


def test_addresses_and_classes() -> None:
    """The small parsers, right and wrong."""
    assert parse_listen("[::1]:0") == ("::1", 0)
    assert parse_classes("batch=16,scratch=17") == {"batch": 16, "scratch": 17}
    for wrong in ("batch", "batch=x", "=,"):
        with pytest.raises(ConfigError):
            GatewayConfig(**WORKERS, classes=parse_classes(wrong))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def torch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command makes torch unimportable in its process; here that would be the process of all tests."""
    monkeypatch.setattr("gateway.cli._leave_torch_out", lambda: None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "at least one --prefill"),
        (["--listen", "0.0.0.0:0"], "without --keys"),
        (["--keys", "/nowhere/keys.toml"], "cannot read /nowhere/keys.toml"),
        (["--worker-token-file", "/nowhere"], "token file /nowhere cannot be read"),
        (["--policy-classes", "x"], "NAME=BYTE"),
        (["--store", "nonsense"], "--store"),
        (["--drain", "12"], "--drain: '12' is not a waiting time"),
        (["--drain", "0s"], "drain_s = 0.0 must be above zero"),
    ],
)
def test_command_says_what_to_do_and_exits_2(arguments: list[str], complaint: str) -> None:
    """A wrong setting ends the process with status 2 and one sentence, never a traceback."""
    workers = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"] if arguments else []
    result = CliRunner().invoke(app, [*workers, *arguments])
    assert result.exit_code == 2
    assert complaint in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_an_address_that_is_taken_is_no_wrong_setting() -> None:
    """It may be free later: status 1, where a wrong setting ends with 2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        workers = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--drain", "250ms"]
        result = CliRunner().invoke(app, [*workers, "--listen", address])
    assert result.exit_code == 1
    assert f"cannot listen on {address}: Address already in use" in result.output


def test_help_lists_every_option() -> None:
    """The command explains itself."""
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for option in ("--prefill", "--decode", "--listen", "--keys", "--policy-classes", "--store", "--data", "--config"):
        assert option in result.output
