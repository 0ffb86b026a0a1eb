"""Options that the commands of retention share.

Owns their names, variables and help. Does not know what a command does with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.units import parse_bytes


def bytes_per_token(text: str) -> float:
    """``890``, or a size with its unit, like ``22.5KiB``. Raises typer.BadParameter."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(parse_bytes(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


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
WatchOption = Annotated[
    str | None, typer.Option("--watch", help="Show it again so often, like 5s, until Ctrl-C.", metavar="DURATION")
]
BytesPerToken = Annotated[
    float,
    typer.Option(parser=bytes_per_token, metavar="SIZE", help="Stored bytes a token: KV of the global layers."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask on a terminal.")]
ApplyOption = Annotated[bool, typer.Option("--apply", help="Do it; without, only say what would be done.")]
