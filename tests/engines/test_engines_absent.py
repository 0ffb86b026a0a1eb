"""Which engines' tests this environment does not run, and what does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ENGINES = sorted(path.parent.name for path in Path(__file__).parent.glob("*/conftest.py"))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_not_here_is_tested_elsewhere(engine: str) -> None:
    """Skipped, so that the report says what was not run; the environment that is made for the engine has its needs."""
    if importlib.util.find_spec(engine) is None:
        root = Path(__file__).parents[2]
        assert (root / f"ops/engines/requirements-{engine}.txt").exists()
        pytest.skip(f"{engine} is not installed in this environment: make test-engines ENGINES={engine}")
