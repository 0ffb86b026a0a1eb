"""The ``reprise`` command: a table of subcommands, each loaded only when it is asked for.

Owns the table and nothing else. Does not know any subcommand's options. Invariant: ``reprise store ...`` and
``reprise retention ...`` never import torch, so that they run on a storage node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

EXIT_USAGE = 2
EXIT_NOT_INSTALLED = 3

App = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One entry: its help line, the extra that it needs, and how its typer app is loaded."""

    summary: str
    extra: str | None
    load: Callable[[], App]


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


SUBCOMMANDS: dict[str, Subcommand] = {
    "up": Subcommand("Run a store node, workers and the gateway on this machine.", "all", _typer_app("ops.up")),
    "store": Subcommand("Serve, inspect, check and explain a block store.", None, _store_app),
    "worker": Subcommand("Run a prefill or decode worker.", "workers", _typer_app("workers.cli")),
    "gateway": Subcommand("Run the OpenAI-compatible gateway.", "gateway", _typer_app("gateway.cli")),
    "retention": Subcommand("Show and steer what is kept, and for how long.", None, _typer_app("retention.cli")),
    "bench": Subcommand("Measure restore fidelity and kernels.", "workers", _typer_app("ops.bench.cli")),
}

OPTIONAL_PACKAGES = frozenset(
    {"torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "jinja2"}
)
"""Top-level modules that an extra brings; any other missing module is a bug and keeps its traceback."""


def installed_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("reprise-kv")
    except PackageNotFoundError:
        return "0+source"


def usage() -> str:
    """Help text of the command itself."""
    rows = "\n".join(f"  {name:<10} {entry.summary}" for name, entry in SUBCOMMANDS.items())
    return (
        "Usage: reprise [--version] [--help] COMMAND [ARGS]...\n\n"
        "A storage-centric KV-cache service for LLM inference.\n\n"
        f"Commands:\n{rows}\n\n"
        "'reprise COMMAND --help' tells the options of each."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Dispatch; returns the exit status (a subcommand exits with its own)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0
    if given[0] == "--version":
        print(f"reprise {installed_version()}")
        return 0
    entry = SUBCOMMANDS.get(given[0])
    if entry is None:
        print(f"reprise: there is no command {given[0]!r}.\n\n{usage()}", file=sys.stderr)
        return EXIT_USAGE
    try:
        # Loading needs no extra for some commands: torch is first met when a worker really starts.
        entry.load()(args=given[1:], prog_name=f"reprise {given[0]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL_PACKAGES:
            raise
        print(missing_extra(given[0], entry.extra or "all", error.name or ""), file=sys.stderr)
        return EXIT_NOT_INSTALLED
    return 0


def missing_extra(command: str, extra: str, module: str) -> str:
    """What to install when a subcommand's optional packages are absent."""
    return f"reprise {command} needs {module}, which is not installed here: pip install 'reprise-kv[{extra}]'"


if __name__ == "__main__":
    sys.exit(main())
