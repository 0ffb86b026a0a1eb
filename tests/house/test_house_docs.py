"""The documents are true: the tree is the tree, commands and options exist, no machine of a developer is named."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvstore", "workers", "gateway", "retention", "kernels", "ops")
README = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""


def tracked() -> list[Path]:
    """Files that git tracks; in an unpacked archive without git, all files outside hidden and built folders."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not set(path.parts) & {".venv", "__pycache__"}]


TRACKED = tracked()


RESULT = re.compile(r"ops/bench/results/(store|attach)-[0-9-]+\.(md|json|png)")


def tree_of_readme() -> set[str]:
    """Paths that README's annotated tree names: the two-space-indented lines of its block marked `text tree`."""
    block = re.search(r"```text tree\n(.*?)```", README, re.DOTALL)
    assert block is not None, "README has no block marked 'text tree'"
    paths: set[str] = set()
    folder: list[str] = []
    for line in block.group(1).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in line.split("  # ")[0].split():
            if name.endswith("/"):
                folder = [*folder[:depth], name]
            else:
                paths.add("".join([*folder[:depth], name]))
    return paths


def test_the_tree_in_the_readme_is_the_tree() -> None:
    """Every Python file and document of the packages is in README's tree, and the tree names nothing else.

    What benchmark runs leave behind is data: the tree names its folder, not each file.
    """
    real = {
        str(path.relative_to(ROOT))
        for path in TRACKED
        if path.relative_to(ROOT).parts[0] in PACKAGES
        and path.name != "__init__.py"
        and not RESULT.fullmatch(str(path.relative_to(ROOT)))
    }
    named = {path for path in tree_of_readme() if path.split("/")[0] in PACKAGES}
    assert named == real, f"only in README: {sorted(named - real)}; missing in README: {sorted(real - named)}"


def commands_in(text: str) -> set[tuple[str, ...]]:
    """`reprise a b` at the start of a line in a code block: the words before the first option or value."""
    found = set()
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            match = re.match(r"\s*(?:\S*/)?reprise((?: [a-z]+(?=\s|$))+)", line)
            if match:
                found.add(tuple(match.group(1).split()))
    return found


DOCUMENTS = ("README.md", "ops/RUNBOOK.md")
TEXTS = [(ROOT / name).read_text() for name in DOCUMENTS if (ROOT / name).exists()]
COMMANDS = sorted({command for text in TEXTS for command in commands_in(text)})


@functools.cache
def help_of(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """What `reprise COMMAND --help` prints; each command is asked once."""
    return subprocess.run(
        [sys.executable, "-m", "ops.cli", *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_help_shows_defaults_and_says_once_that_an_argument_repeats() -> None:
    """Square brackets reach the reader, and the dots are the command line's, not ours."""
    assert "[default: 512MiB]" in help_of(("store", "serve")).stdout
    for command in (("store", "stat"), ("retention", "pin")):
        assert help_of(command).stdout.splitlines()[0].count("...") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_of_the_documents_exist(command: tuple[str, ...]) -> None:
    """Each `reprise ...` line of README and RUNBOOK names a subcommand that has help."""
    done = help_of(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Usage: reprise" in done.stdout


def options_in(text: str) -> set[tuple[tuple[str, ...], str]]:
    """(command, --option) pairs of the documents' code blocks, continued lines joined."""
    found = set()
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"\s*(?:\S*/)?reprise((?: [a-z]+(?=\s|$))+)(.*)", line)
            if match:
                command = tuple(match.group(1).split())
                found |= {(command, option) for option in re.findall(r"(?<=\s)--[a-z-]+", match.group(2))}
    return found


OPTIONS = sorted({pair for text in TEXTS for pair in options_in(text)})


def test_options_of_the_documents_exist() -> None:
    """Each option that a document uses is in the help of its command."""
    missing = [(*words, option) for words, option in OPTIONS if option not in help_of(words).stdout]
    assert not missing


@pytest.mark.parametrize(
    "name",
    ["README.md", "LICENSE", "kvstore/FORMAT.md", "ops/RUNBOOK.md", "ops/constraints.txt", ".ci/run", "Makefile"],
)
def test_the_documents_are_there(name: str) -> None:
    """What others look for first exists and is not empty."""
    assert (ROOT / name).stat().st_size > 50


def test_no_path_of_a_machine_stands_in_a_tracked_file() -> None:
    """The project knows nothing of the machine that it was written on."""
    roots = ("work", "farm", "root", "home", "tmp")
    pattern = re.compile(r"(?<![\w.~$}\])-])/(?:" + "|".join(roots) + r")/\w")
    found = []
    for path in TRACKED:
        if path.suffix in {".png", ".gz", ".bin", ".safetensors"}:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert not found


def test_no_tracked_file_is_large() -> None:
    """Models and traces belong elsewhere."""
    assert not [str(path) for path in TRACKED if path.stat().st_size > 2 * 1024 * 1024]


def test_tests_are_not_packages() -> None:
    """An __init__.py under tests would shadow the package that it is named after."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_module_says_what_it_owns() -> None:
    """A module opens with a docstring."""
    modules = [path for path in TRACKED if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES]
    opening = re.compile(r'\s*(#[^\n]*\n\s*)*r?"""')
    assert not [str(path) for path in modules if path.stat().st_size and not opening.match(path.read_text())]


def test_files_stay_readable() -> None:
    """No file of the packages grows beyond what is read in one sitting."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in TRACKED
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES
        if (lines := path.read_text().count("\n")) > 700
    }
    assert not long
