"""What the children of ``reprise up`` would refuse, found before anything is started.

Owns the reading of their command lines, by their own parsers and in their own words. Does not know what the settings
do. Invariant: nothing is opened but the files that a setting names, nothing is converted, and torch is not imported.
What only a running child can know (memory for the model, a class that only the store's policy has) is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvstore.traffic import TrafficClass

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""What a command line that cannot be parsed raises; typer gives the class itself no name of its own."""


class _AnyClass(dict[str, TrafficClass]):
    """The classes of a store that does not run yet: any name may be one."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> TrafficClass:
        return TrafficClass(0)


def check_command(words: Sequence[str]) -> None:
    """A command line as given to ``reprise``. Raises ValueError that says what the child would say."""
    name, *arguments = words
    {"store": _check_store, "worker": _check_worker, "gateway": _check_gateway}[name](arguments)


def _check_store(arguments: Sequence[str]) -> None:
    from kvstore.access import read_token
    from kvstore.cli import build_app
    from kvstore.config import load_config
    from kvstore.daemon.keyring import read_keyring
    from kvstore.daemon.tokens import Tokens
    from retention.policy import load_class_rules

    group = get_command(build_app(load_class_rules))
    assert isinstance(group, TyperGroup)
    command, *rest = arguments
    given = _parsed(f"store {command}", group.commands[command], rest)
    settings = load_config(given.pop("config", None), given)
    Tokens.open(read_token(settings.token_file), settings.tokens)
    if settings.encryption_keys is not None:
        read_keyring(settings.encryption_keys)
    load_class_rules(settings.policy)


def check_token(tokens: Path, token_file: Path) -> None:
    """Whether a store that knows these tokens would admit a worker with this one. Raises ValueError."""
    from kvstore.access import read_token
    from kvstore.daemon.rights import Role
    from kvstore.daemon.tokens import Tokens

    found = Tokens.open(None, tokens).find((read_token(token_file) or "").encode())
    if found is None:
        raise ValueError(f"{tokens} does not list the token in {token_file}")
    if Role.WORKER not in found.grant.roles:
        raise ValueError(f"the token in {token_file} has no role worker in {tokens}")


def _check_worker(arguments: Sequence[str]) -> None:
    from kvstore.access import read_token
    from workers.cli import app, config_of
    from workers.weights import ModelUnavailable, check_model

    settings = config_of(_parsed("worker", get_command(app), arguments))
    read_token(settings.token_file)
    read_token(settings.store_token_file)
    try:
        check_model(settings.model)
    except ModelUnavailable as error:
        raise ValueError(f"model {settings.model}: {error}") from error


def _check_gateway(arguments: Sequence[str]) -> None:
    from gateway.cli import app, config_of, read_keys
    from kvstore.access import read_token

    settings = config_of(_parsed("gateway", get_command(app), arguments))
    for path in (settings.worker_token_file, settings.store_token_file):
        read_token(None if path is None else Path(path))
    if settings.keys is not None:
        read_keys(settings.keys, _AnyClass())


def _parsed(name: str, command: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """The parameters that were given, by name. Raises ValueError for a command line that cannot be parsed."""
    try:
        context = command.make_context(f"reprise {name}", list(arguments))
    except _USAGE_ERROR as error:
        raise ValueError(f"{name}: {error.format_message()}") from error
    return {key: value for key, value in context.params.items() if value not in (None, [], ())}
