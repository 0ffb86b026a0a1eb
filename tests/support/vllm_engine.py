"""vLLM in this process, on a CPU, in float32: the same tokens in always give the same tokens out.

Owns the making and the ending of an engine. Needs the environment variables that tests/engines/vllm/conftest.py sets.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.inputs import TokensPrompt

BLOCK_TOKENS = 32
"""The smallest that vLLM's attention on a CPU takes."""
NEW_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens that were made, and how many of the prompt's vLLM says it did not compute."""

    tokens: tuple[int, ...]
    cached: int


@dataclass(frozen=True, slots=True)
class Engine:
    """One running vLLM."""

    llm: LLM

    def answer(
        self, prompts: Sequence[Sequence[int]], *, count: int = NEW_TOKENS, params: Mapping[str, Any] | None = None
    ) -> list[Answer]:
        """Greedy answers; ``params``: the requests' ``kv_transfer_params``."""
        extra = {"kv_transfer_params": dict(params)} if params else None
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, extra_args=extra)
        asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        return [Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]

    def forget(self) -> None:
        """Empty the engine's own memory, and that of its connector; what is stored elsewhere stays."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def counted(self, name: str) -> int:
        """A counter of vLLM's metrics, over all of its labels."""
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == name)


@contextmanager
def engine(model: str, connector: KVTransferConfig | None = None, **options: Any) -> Iterator[Engine]:
    """An engine that has ended, threads and memory, when the block does."""
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "block_size": BLOCK_TOKENS}
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        disable_log_stats=False,
        kv_transfer_config=connector,
        **{**settings, **options},
    )
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
