"""The ``reprise`` command: what it lists, and what it says when something is wrong or missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ops.cli import EXIT_NOT_INSTALLED, EXIT_USAGE, SUBCOMMANDS, Subcommand, main


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    """`reprise`, `reprise -h` and `reprise --help` print the table."""
    for arguments in ([], ["-h"], ["--help"]):
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert all(f"  {name} " in printed for name in ("up", "store", "worker", "gateway", "retention", "bench"))


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The status is 2 and the table follows."""
    assert main(["stroe"]) == EXIT_USAGE
    assert "no command 'stroe'" in capsys.readouterr().err


def loaded(said: list[str]) -> Subcommand:
    def load() -> Callable[..., object]:
        return lambda args, prog_name: said.append(f"{prog_name} {' '.join(args)}")

    return Subcommand("", load, "workers", ("no_such_module",))


def test_a_missing_extra_names_the_package_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage node that runs `reprise worker` is told which extra it lacks, and nothing is started."""
    said: list[str] = []
    monkeypatch.setitem(SUBCOMMANDS, "worker", loaded(said))
    assert main(["worker", "--role", "prefill"]) == EXIT_NOT_INSTALLED
    assert "pip install '.[workers]'" in capsys.readouterr().err
    assert said == []


def test_help_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command can do is told everywhere."""
    said: list[str] = []
    monkeypatch.setitem(SUBCOMMANDS, "worker", loaded(said))
    assert main(["worker", "--help"]) == 0
    assert said == ["reprise worker --help"]
