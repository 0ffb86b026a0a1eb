"""Options that the commands of retention share.

Owns their names, variables and help. Does not know what a command does with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--store",
        envvar="REPRISE_STORE",
        help="Address of a node: unix:/path or HOST:PORT (repeatable; in the variable, spaces between).",
    ),
]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", envvar="REPRISE_TOKEN_FILE", help="File that holds the store's token.")
]
DeadlineOption = Annotated[str, typer.Option("--deadline", help="Longest wait for the whole operation, like 30s.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ApplyOption = Annotated[bool, typer.Option("--apply", help="Do it; without, only say what would be done.")]
