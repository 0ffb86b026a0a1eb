"""Shell completion: a real shell, or its variables, are given what may follow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops import completion
from ops.cli import EXIT_USAGE, main
from tests.support.waiting import WAIT_S


def completed(words: str, at: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash is offered for the word number ``at`` of a line."""
    for name, value in ((completion.VARIABLE, "complete_bash"), ("COMP_WORDS", words), ("COMP_CWORD", str(at))):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("words", "at", "wanted"),
    [
        ("reprise ret", 1, ["retention"]),
        ("reprise store ex", 2, ["explain"]),
        ("reprise retention policy ro", 3, ["rollback"]),
        ("reprise retention show --by ", 4, ["class", "space"]),
        ("reprise retention sweep --app", 3, ["--apply"]),
        ("reprise unheard-of --x", 2, []),
        ("reprise ", 1, ["up", "store", "worker", "gateway", "retention", "bench", "completion"]),
    ],
)
def test_each_word_of_a_line_is_completed(
    words: str, at: int, wanted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, the commands of a command, options and their choices; nothing for what does not exist."""
    assert completed(words, at, monkeypatch, capsys) == wanted


def test_zsh_and_fish_ask_by_the_line_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The word to complete is the last one, or the next after a space."""
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    for shell in ("zsh", "fish"):
        for line, wanted in (("reprise retention pol", "policy"), ("reprise retention policy ", "rollback")):
            monkeypatch.setenv(completion.VARIABLE, f"complete_{shell}")
            monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
            with pytest.raises(SystemExit):
                main([])
            assert wanted in capsys.readouterr().out


def test_bash_completes_after_sourcing_the_script(tmp_path: Path) -> None:
    """As a person sets it up: the script is sourced, then a line is completed."""
    program = tmp_path / "reprise"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ops.cli "$@"\n')
    program.chmod(0o755)
    script = (
        "source <(reprise completion bash); COMP_WORDS=(reprise retention fore); COMP_CWORD=2; "
        '_reprise_completion reprise; echo "${COMPREPLY[*]}"'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=WAIT_S, env=environment, check=False
    )
    assert done.stdout.strip() == "forecast", done.stderr


def test_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["tcsh"]):
        assert main(["completion", *arguments]) == EXIT_USAGE
        assert "bash|zsh|fish" in capsys.readouterr().err
