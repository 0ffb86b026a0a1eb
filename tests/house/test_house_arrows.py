"""Who may know whom: import-linter's contracts, and what a storage node can import without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import importlib, pkgutil
for package in {packages!r}:
    module = importlib.import_module(package)
    for item in pkgutil.walk_packages(module.__path__, package + "."):
        if not item.name.endswith("__main__"):
            importlib.import_module(item.name)
print("imported")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_imports_follow_the_arrows() -> None:
    """Every contract of import-linter in pyproject.toml is kept."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(linter), "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("packages", "absent"),
    [
        (["kvstore", "retention"], ["torch", "triton", "transformers", "tokenizers", "jinja2", "safetensors", "gguf"]),
        (["gateway"], ["torch", "triton", "rocksdbpy", "zstandard", "gguf"]),
    ],
    ids=["storage node", "gateway"],
)
def test_it_imports_where_heavy_packages_are_absent(packages: list[str], absent: list[str]) -> None:
    """A storage node installs neither torch nor transformers, a gateway no torch and no RocksDB: each imports whole."""
    done = run(WITHOUT.format(packages=packages, absent=set(absent)))
    assert done.stdout.strip() == "imported", done.stderr


def test_the_workers_contract_imports_without_torch() -> None:
    """What the gateway uses of the workers needs no torch."""
    code = WITHOUT.format(packages=[], absent={"torch", "triton", "transformers"})
    done = run(code + "\nimport workers.protocol, workers.client, workers.errors\n")
    assert done.stdout.strip() == "imported", done.stderr


@pytest.mark.parametrize("command", ["store", "retention"])
def test_commands_of_a_storage_node_need_no_torch(command: str) -> None:
    """`reprise store --help` and `reprise retention --help` work on a base install."""
    code = WITHOUT.format(packages=[], absent={"torch", "triton", "transformers"})
    done = run(code + f"\nfrom ops.cli import main\nmain([{command!r}, '--help'])\n")
    assert done.returncode == 0, done.stderr
    assert f"reprise {command}" in done.stdout
