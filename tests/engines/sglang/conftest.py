"""Tests inside SGLang's own modules; where there are none, tests/engines/test_engines_absent.py says so."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["*"]
