"""A real vLLM engine in the test's own process, small enough that several live one after another.

Owns how it is started and ended. Needs the environment variables that tests/engines/vllm/conftest.py sets. ``Engine``
is the bench's own: it says of each request what vLLM's metrics say.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ops.bench.attach_engine import Engine
from tests.support.checkpoints import make_checkpoint

BLOCK_TOKENS = 32
WINDOW = 64
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"window": WINDOW},
    "gptoss": {"window": WINDOW},
}
"""Checkpoints by name, and what of them is not as in the other tests: vLLM computes no heads of 16 on a CPU."""
ANSWER_TOKENS = 12


def checkpoint(kind: str, folder: Path) -> str:
    """A tiny checkpoint that vLLM serves; of gpt-oss it wants the position encoding of the real one."""
    path = make_checkpoint(kind, folder / kind, head_dim=32, **SHAPES[kind])
    if kind == "gptoss":
        config = json.loads((path / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
        config["rope_parameters"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 1024}
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def connector(store: str, **options: Any) -> dict[str, Any]:
    """What attaches vLLM. Deadlines are long, since a busy machine is not a miss."""
    return {
        "kv_connector": "RepriseConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "workers.adapters.vllm_connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "lookup_deadline_s": 5.0, "load_deadline_s": 20.0, **options},
    }


def options_of(model: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": BLOCK_TOKENS,
        "seed": 0,
        **changes,
    }


@contextlib.contextmanager
def engine(model: str, attached: dict[str, Any] | None, **changes: Any) -> Iterator[Engine]:
    """An engine that is gone, with all of its memory, when this ends; what it saved is in the store by then."""
    one = Engine(options_of(model, **changes), attached)
    try:
        yield one
    finally:
        one._engine.engine_core.shutdown()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ from those of another seed from the first on."""
    return [4 + (position * 7919 + 31 * seed + position * position * (seed + 1)) % 250 for position in range(length)]


def asks(one: Engine, prompts: Sequence[list[int]], params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """One after another."""
    return [one.ask(tokens, ANSWER_TOKENS, params) for tokens in prompts]


def answers(results: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [result["tokens"] for result in results]
