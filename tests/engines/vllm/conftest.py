"""Tests inside a real vLLM; without one, nothing here is collected (tests/engines/test_engines_absent.py says so)."""

from __future__ import annotations

import importlib.util
import os

# Before torch or vllm is imported: the engine in this process, nothing compiled, nothing fetched, a GiB of KV memory.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]
