"""Tests inside SGLang's own modules; where there are none, tests/engines/test_engines_absent.py says so."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["*"]


@pytest.fixture
def pool() -> Any:
    """A host pool of keys and values, filled."""
    from tests.engines.sglang.rig import fill, host, mha  # only where there is an SGLang

    made = host(mha())
    fill(made, 1)
    return made
