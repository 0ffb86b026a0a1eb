"""Settings of the daemon: what is wrong is refused at start, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import StoreConfig, load_config

GIVEN: dict[str, object] = {"data": "/srv/a", "capacity": "1GiB"}


def test_defaults_listen_on_this_machine_only() -> None:
    config = load_config(None, GIVEN)
    assert config.listen.startswith("127.0.0.1:")
    assert config.admin.startswith("127.0.0.1:")
    assert config.unix_path == Path("/srv/a/store.sock")


def test_a_socket_is_told_by_a_path_that_holds_anywhere() -> None:
    assert load_config(None, {**GIVEN, "unix": "a.sock"}).unix_path == Path.cwd() / "a.sock"
    assert load_config(None, {**GIVEN, "data": "a"}).unix_path == Path.cwd() / "a" / "store.sock"


def test_a_directory_with_two_names_is_one(tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(tmp_path / "data")
    with pytest.raises(ValueError, match="twice"):
        load_config(None, {**GIVEN, "data": [str(tmp_path / "data"), str(tmp_path / "other")]})


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.toml"
    path.write_text('data = ["/srv/a", "/srv/b"]\ncapacity = "2GiB"\nlisten = "[::1]:9"\nstate_ttl = "5m"\n')
    config = load_config(path, {"capacity": "3GiB", "listen": None})
    assert config.data == (Path("/srv/a"), Path("/srv/b"))
    assert (config.capacity_bytes, config.listen, config.state_ttl_s) == (3 * 2**30, "[::1]:9", 300.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('capactiy = "1GiB"', "unknown key 'capactiy'"),
        ('capacity = "1000"', "no unit"),
        ("capacity = 1000", "not a text"),
        ('capacity = "1MiB"', "8 MiB"),
        ('state_ttl = "10"', "waiting time"),
        ('listen = "localhost"', "not HOST:PORT"),
        ('listen = "unix:/x"', "--unix"),
        ('listen = "0.0.0.0:7071"', "--token-file"),
        ('admin = "[::]:7072"', "--token-file"),
        ("connections_max = 0", "connections_max"),
        ("connections_max = true", "whole number"),
        ('data = ["/srv/a", "/srv/a"]', "twice"),
        ('data = ["/srv/a", "/srv/b/../a"]', "twice"),
        ("data = []", "--data"),
        ('sweep_every = "0s"', "sweep_every"),
        ('page_cache = "off"', "page_cache: 'off' is neither keep nor bypass"),
        ("page_cache = true", "neither keep nor bypass"),
        ("capacity = [", "cannot read the config"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "store.toml"
    lines = [f'{key} = "{value}"' for key, value in GIVEN.items() if not text.startswith(key)]
    path.write_text("\n".join([*lines, text]))
    with pytest.raises(ValueError, match=says):
        load_config(path, {})


@pytest.mark.parametrize(
    ("text", "free_min_bytes"), [(None, None), ("20GiB", 20 * 2**30), ("0", 0), ("off", 0), ("0B", 0)]
)
def test_space_left_free_is_a_share_unless_told(text: str | None, free_min_bytes: int | None) -> None:
    assert load_config(None, {**GIVEN, "free_min": text}).free_min_bytes == free_min_bytes


def test_the_page_cache_is_kept_unless_told() -> None:
    assert [load_config(None, {**GIVEN, "page_cache": text}).page_cache for text in (None, "keep", "bypass")] == [
        "keep",
        "keep",
        "bypass",
    ]


def test_a_missing_setting_is_asked_for() -> None:
    with pytest.raises(ValueError, match="--data DIR"):
        load_config(None, {"capacity": "1GiB"})
    with pytest.raises(ValueError, match="--capacity 20GiB"):
        load_config(None, {"data": "/srv/a", "capacity": None})
    with pytest.raises(ValueError, match="cannot read"):
        load_config(Path("/nonexistent.toml"), GIVEN)


def test_beyond_loopback_with_a_token_is_allowed() -> None:
    for name in ("token_file", "tokens"):
        config = load_config(None, {**GIVEN, "listen": "0.0.0.0:7071", name: "/etc/token"})
        assert isinstance(config, StoreConfig)


def test_cipher_keys_come_from_a_file_or_from_a_command() -> None:
    """A command is split as a shell would, or given in words; both at once would leave open which one counts."""
    for given in ("show-keys --of 'a b'", ["show-keys", "--of", "a b"]):
        config = load_config(None, {**GIVEN, "encryption_command": given})
        assert config.encryption_command == ("show-keys", "--of", "a b")
    with pytest.raises(ValueError, match="one of the two"):
        load_config(None, {**GIVEN, "encryption_command": "x", "encryption_keys": "/etc/keys"})
    for given in (" ", "'", [], [1]):
        with pytest.raises(ValueError, match="--encryption-command"):
            load_config(None, {**GIVEN, "encryption_command": given})
