"""One vLLM engine, in its own environment, that takes requests as lines of JSON and answers each with what it measured.

Owns the engine. Needs vLLM and the standard library only: ``reprise bench attach`` starts it with the Python of vLLM's
environment. Does not know what is compared. Invariants: standard output carries answers only, one line each, whatever
vLLM prints; an error is an answer.

    {"options": {...}, "connector": null}            -> {"ready_s": ...}
    {"op": "ask", "tokens": [...], "answer": 8}      -> {"ttft_s": ..., "tokens": [...], "hit": ..., "external": ...}
    {"op": "tokens", "text": "..."}                  -> {"tokens": [...]}
    {"op": "forget"}                                 -> {"forgotten": true}
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
ASK_S_MAX = 300.0
IDLE_S = 0.001
"""Between two steps that did nothing, as the loop of vLLM's own engine process does, so that other threads get on."""


class Engine:
    """A vLLM engine in this process. ``options`` are the keyword arguments of ``vllm.LLM``."""

    def __init__(self, options: dict[str, Any], connector: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        attached = {} if connector is None else {"kv_transfer_config": KVTransferConfig(**connector)}
        self._llm = LLM(**options, **attached, disable_log_stats=False)
        self._engine = self._llm.llm_engine
        self._asked = 0

    def ask(self, tokens: list[int], answer: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Greedy tokens that follow a prompt; seconds to the first of them; tokens of the prompt not computed."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=answer,
            ignore_eos=True,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args=extra,
        )
        self._asked += 1
        external = self._external_hits()
        cpu_s, began_s = time.process_time(), time.perf_counter()
        first_s, first_cpu_s = 0.0, 0.0
        self._engine.add_request(str(self._asked), {"prompt_token_ids": tokens}, sampling)
        last: Any = None
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            if not outputs:
                time.sleep(IDLE_S)
            for output in outputs:
                last = output
                if not first_s and output.outputs[0].token_ids:
                    first_s, first_cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
            if time.perf_counter() - began_s > ASK_S_MAX:
                raise TimeoutError(f"no answer to {len(tokens)} tokens in {ASK_S_MAX:.0f} s")
        return {
            "ttft_s": first_s,
            "ttft_cpu_s": first_cpu_s,
            "seconds": time.perf_counter() - began_s,
            "tokens": list(last.outputs[0].token_ids),
            "hit": int(last.num_cached_tokens or 0),
            "external": self._external_hits() - external,
        }

    def tokens(self, text: str) -> list[int]:
        """A text's tokens, without those that mark its ends."""
        return list(self._llm.get_tokenizer().encode(text, add_special_tokens=False))

    def forget(self) -> bool:
        """Empty vLLM's own prefix cache; what a connector saved stays. False: it is in use."""
        return bool(self._llm.reset_prefix_cache())

    def _external_hits(self) -> int:
        return sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == EXTERNAL_HITS)


def serve(engine: Engine, answers: TextIO) -> None:
    """Answer the lines of standard input until it ends."""
    for line in sys.stdin:
        command = json.loads(line)
        operation = command.pop("op")
        try:
            found = _done(engine, operation, command)
        except (RuntimeError, ValueError, TimeoutError, OSError) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


def _done(engine: Engine, operation: str, command: dict[str, Any]) -> dict[str, Any]:
    if operation == "ask":
        return engine.ask(**command)
    return {"forgotten": engine.forget()} if operation == "forget" else {"tokens": engine.tokens(**command)}


def main() -> None:
    """The first line: ``options`` for vLLM, and ``connector``, its kv-transfer-config or null."""
    given = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began_s = time.perf_counter()
    engine = Engine(given["options"], given["connector"])
    print(json.dumps({"ready_s": time.perf_counter() - began_s}), file=answers, flush=True)
    serve(engine, answers)
    answers.close()
    os._exit(0)  # what vLLM leaves running must not hold the bench up


if __name__ == "__main__":
    main()
