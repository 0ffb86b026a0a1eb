"""What a shell may complete after ``reprise``: its commands, and what follows each of them.

Owns how a shell's question reaches the one subcommand that can answer it. Does not know any subcommand's options, nor
shells: typer does. Invariant: only the subcommand that was typed is loaded, so that completing ``reprise store`` needs
no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping

import typer

VARIABLE = "_REPRISE_COMPLETE"
"""By it a shell asks: ``complete_SHELL`` for what fits, ``source_SHELL`` for the script that it runs at start."""
SHELLS = ("bash", "zsh", "fish")

_BASH_WORDS, _BASH_AT, _WORDS = "COMP_WORDS", "COMP_CWORD", "_TYPER_COMPLETE_ARGS"


def answer(
    summaries: Mapping[str, str],
    loads: Mapping[str, Callable[[], Callable[..., object]]],
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Print what the shell asked for in ``environment``, and exit as typer does.

    ``summaries``: commands and what each does; ``loads``: how the typer application of one is loaded.
    """
    command = _command(environment)
    table = _table(summaries)
    app: Callable[..., object] = table
    typer.main.get_command(table)  # typer knows its shells from the first application that offers completion on
    if command is not None:
        app = loads[command]() if command in loads else typer.Typer(callback=_nothing)
        _step_into(environment)
    app(args=[], prog_name="reprise", complete_var=VARIABLE)


def _command(environment: Mapping[str, str]) -> str | None:
    """The subcommand that was typed before the word to complete, if there is one."""
    if environment.get(VARIABLE, "").startswith("source"):
        return None
    text = environment.get(_BASH_WORDS) or environment.get(_WORDS, "")
    words = text.split()
    at = environment.get(_BASH_AT, "")
    complete = int(at) if at.isdigit() else len(words) - (not text.endswith(" "))
    return words[1] if len(words) > 1 and complete > 1 else None


def _step_into(environment: MutableMapping[str, str]) -> None:
    """As if the subcommand were the program: the first word goes."""
    for name in (_BASH_WORDS, _WORDS):
        if name in environment:
            environment[name] = environment[name].split(maxsplit=1)[1]
    if environment.get(_BASH_AT, "").isdigit():
        environment[_BASH_AT] = str(int(environment[_BASH_AT]) - 1)


def _table(summaries: Mapping[str, str]) -> typer.Typer:
    """The commands alone, without what is in them."""
    table = typer.Typer(rich_markup_mode=None)
    for name, summary in summaries.items():
        table.command(name, help=summary)(_nothing)
    return table


def _nothing() -> None:
    """The body of a command that is only named."""
