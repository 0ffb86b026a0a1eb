"""What a kept result says of how it was made: the command and reasons, without the folders of the machine.

Owns which words are paths. Does not know what a command means. Invariant: of a path only its last part is kept, so that
a result can be published as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FOLDERS = re.compile(r"(?<![\w./~-])~?/(?:[^\s/'\":,;()]+/)*(?=[^\s/'\":,;()])")
"""The folders of an absolute path within a sentence."""


def command_of(arguments: Sequence[str], verb: str) -> str:
    """The bench command that a process was started with, as ``reprise bench VERB ...``; empty if it was another."""
    if verb not in arguments:
        return ""
    return " ".join(["reprise bench", *map(_name_of, arguments[list(arguments).index(verb) :])])


def without_folders(text: str) -> str:
    """A sentence in which absolute paths are names."""
    return _FOLDERS.sub("", text)


def _name_of(argument: str) -> str:
    """An argument, or the value of ``--option=value``, of which only the last part of a path is kept."""
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    return option + equals + (value.rstrip("/").rpartition("/")[2] or value)
