"""The ``reprise`` command: a table of subcommands, each loaded only when it is asked for.

Owns the table and nothing else. Does not know any subcommand's options. Invariant: ``reprise store ...`` and
``reprise retention ...`` never import torch, so that they run on a storage node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ops import completion

EXIT_USAGE = 2
EXIT_NOT_INSTALLED = 3

HELP = frozenset({"-h", "--help"})
COMPLETION = "completion"
COMPLETION_SUMMARY = "Let bash, zsh or fish complete all of this: source <(reprise completion bash)"

App = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One entry: its help line, how its typer app is loaded, and the extra that brings the modules that it needs.

    Help is given without them; they are looked for, not imported.
    """

    summary: str
    load: Callable[[], App]
    extra: str = ""
    needs: tuple[str, ...] = ()


def _typer_app(module: str, name: str = "app") -> Callable[[], App]:
    def load() -> App:
        app: App = getattr(import_module(module), name)
        return app

    return load


def _store_app() -> App:
    """The store's commands, with retention's policy loader handed in: the store never imports retention."""
    build_app = import_module("kvstore.cli").build_app
    app: App = build_app(import_module("retention.policy").load_class_rules)
    return app


WORKER_NEEDS = ("torch", "transformers", "safetensors")
GATEWAY_NEEDS = ("transformers", "jinja2")

SUBCOMMANDS: dict[str, Subcommand] = {
    "up": Subcommand(
        "Run a store node, workers and the gateway on this machine.",
        _typer_app("ops.up"),
        "all",
        (*WORKER_NEEDS, "jinja2"),
    ),
    "store": Subcommand("Serve, inspect, check and explain a block store.", _store_app),
    "worker": Subcommand("Run a prefill or decode worker.", _typer_app("workers.cli"), "workers", WORKER_NEEDS),
    "gateway": Subcommand("Run the OpenAI-compatible gateway.", _typer_app("gateway.cli"), "gateway", GATEWAY_NEEDS),
    "retention": Subcommand("Show and steer what is kept, and for how long.", _typer_app("retention.cli")),
    "bench": Subcommand("Measure the store, restore fidelity and kernels.", _typer_app("ops.bench.cli")),
}


def installed_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("reprise-kv")
    except PackageNotFoundError:
        return "0+source"


def _summaries() -> dict[str, str]:
    return {name: entry.summary for name, entry in SUBCOMMANDS.items()} | {COMPLETION: COMPLETION_SUMMARY}


def usage() -> str:
    """Help text of the command itself."""
    rows = "\n".join(f"  {name:<11}{summary}" for name, summary in _summaries().items())
    return (
        "Usage: reprise [--version] [--help] COMMAND [ARGS]...\n\n"
        "A storage-centric KV-cache service for LLM inference.\n\n"
        f"Commands:\n{rows}\n\n"
        "'reprise COMMAND --help' tells the options of each."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Dispatch; returns the exit status (a subcommand exits with its own)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [COMPLETION] or completion.VARIABLE in os.environ:
        return _complete(given[1:])
    if not given or given[0] in HELP:
        print(usage())
        return 0
    if given[0] == "--version":
        print(f"reprise {installed_version()}")
        return 0
    entry = SUBCOMMANDS.get(given[0])
    if entry is None:
        print(f"reprise: there is no command {given[0]!r}.\n\n{usage()}", file=sys.stderr)
        return EXIT_USAGE
    rest = given[1:]
    missing = [name for name in entry.needs if find_spec(name) is None]
    if missing and not HELP.intersection(rest):
        install = f"pip install '.[{entry.extra}]' in Reprise's folder"
        print(f"reprise {given[0]} needs {', '.join(missing)}, not installed here: {install}", file=sys.stderr)
        return EXIT_NOT_INSTALLED
    entry.load()(args=rest, prog_name=f"reprise {given[0]}")
    return 0


def _complete(given: Sequence[str]) -> int:
    """Answer a shell, or print the script by which one asks."""
    if completion.VARIABLE not in os.environ:
        if len(given) != 1 or given[0] not in completion.SHELLS:
            shells = "|".join(completion.SHELLS)
            print(f"Usage: reprise {COMPLETION} {shells}", file=sys.stderr)
            return EXIT_USAGE
        os.environ[completion.VARIABLE] = f"source_{given[0]}"
    completion.answer(_summaries(), {name: entry.load for name, entry in SUBCOMMANDS.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
