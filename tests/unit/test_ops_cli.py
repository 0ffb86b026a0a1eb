"""The ``reprise`` command: what it lists, and what it says when something is wrong or missing."""

from __future__ import annotations

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


def test_a_missing_extra_names_the_package_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage node that runs `reprise worker` is told which extra it lacks."""

    def load() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setitem(SUBCOMMANDS, "worker", Subcommand("", "workers", load))
    assert main(["worker"]) == EXIT_NOT_INSTALLED
    assert "pip install 'reprise-kv[workers]'" in capsys.readouterr().err


def test_a_module_missing_from_the_project_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what an extra brings is explained away; anything else is a bug and keeps its traceback."""

    def load() -> None:
        raise ModuleNotFoundError("No module named 'workers.gone'", name="workers.gone")

    monkeypatch.setitem(SUBCOMMANDS, "worker", Subcommand("", "workers", load))
    with pytest.raises(ModuleNotFoundError):
        main(["worker"])
