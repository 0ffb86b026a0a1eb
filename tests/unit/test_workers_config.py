"""The worker's configuration: units required, unknown keys refused, nothing reachable from outside without a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workers.config import ConfigError, WorkerConfig, load_config

GIVEN: dict[str, Any] = {"role": "both", "model": "demo", "store": ["127.0.0.1:7071"], "data": Path("d")}


def test_file_and_options_make_one_value(tmp_path: Path) -> None:
    """Options win over the file; sizes and times carry units."""
    path = tmp_path / "worker.toml"
    path.write_text('role = "prefill"\nmodel = "demo"\nkv_memory = "64MiB"\nlookup_deadline = "100ms"\nepoch = 3\n')
    config = load_config(path, GIVEN | {"replay_windows": "2", "role": None})
    assert (config.role, config.kv_memory_bytes, config.lookup_deadline_s) == ("prefill", 64 << 20, 0.1)
    assert (config.replay_windows, config.epoch, config.stores) == (2, 3, ("127.0.0.1:7071",))
    assert load_config(None, GIVEN | {"replay_windows": "exact"}).replay_windows == 0
    assert load_config(None, GIVEN).replay_windows is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": "red"}, "unknown key colour"),
        ({"kv_memory": 1000}, "has no unit"),
        ({"kv_memory": "1000"}, "has no unit"),
        ({"kv_memory": "5KiB"}, "kv_memory_bytes"),
        ({"lookup_deadline": "250"}, "lookup_deadline"),
        ({"lookup_deadline": "0ms"}, "outside"),
        ({"role": "cook"}, "prefill, decode, both"),
        ({"dtype": "int3"}, "not one of"),
        ({"fidelity": "roughly"}, "bounded, exact"),
        ({"replay_windows": "0"}, "replay_windows"),
        ({"replay_windows": "many"}, "'many' is neither a number of windows from 1 on nor exact"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"threads": True}, "whole number"),
        ({"listen": "127.0.0.1"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "listen: '127.0.0.1:99999': a port is at most 65535"),
        ({"listen": "0.0.0.0:0"}, "token-file"),
        ({"listen": "[::]:0"}, "token-file"),
        ({"store": []}, "store"),
        ({"model": None}, "--model"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    """The message names the key and says what to write."""
    with pytest.raises(ConfigError, match=words):
        load_config(None, GIVEN | changes)


def test_broken_file_is_named(tmp_path: Path) -> None:
    """Absent or not TOML."""
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml", GIVEN)
    (tmp_path / "bad.toml").write_text("role = ")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config(tmp_path / "bad.toml", GIVEN)


def test_listening_beyond_loopback_works_with_a_token() -> None:
    """And loopback without."""
    assert isinstance(load_config(None, GIVEN | {"listen": "0.0.0.0:0", "token_file": Path("t")}), WorkerConfig)
    assert load_config(None, GIVEN | {"listen": "[::1]:0"}).listen == "[::1]:0"
