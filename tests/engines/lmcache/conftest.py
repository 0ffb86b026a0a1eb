"""Tests inside a real LMCache; where there is none, tests/engines/test_engines_absent.py says so."""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["*"]
os.environ["LMCACHE_TRACK_USAGE"] = "false"
