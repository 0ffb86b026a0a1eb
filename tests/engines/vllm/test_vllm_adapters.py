"""LoRA adapters in a real vLLM over one store: each has its own KV, which outlives the engine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest

from ops.bench.attach_engine import Engine
from tests.support.attached_engine import checkpoint, connector, engine, prompt
from tests.support.store_process import StoreProcess
from tests.support.waiting import WAIT_S

LENGTH = 320
ANSWER_TOKENS = 8
RANK = 4
SETTLE_S = WAIT_S
OPTIONS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "enable_prefix_caching": False}


def make_adapter(folder: Path, model: Path, number: int) -> LoRARequest:
    """A random adapter of the queries of every layer, strong enough to change answers."""
    config = json.loads((model / "config.json").read_text())
    hidden, queries = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    draw = torch.Generator().manual_seed(number)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn((RANK, hidden), generator=draw)
        weights[f"{name}.lora_B.weight"] = torch.randn((queries, RANK), generator=draw)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"task_type": "CAUSAL_LM"}))
    return LoRARequest(f"adapter-{number}", number, str(folder))


def ask(one: Engine, adapters: Sequence[LoRARequest | None]) -> tuple[list[list[int]], list[int | None]]:
    """The answers to one prompt with each, and how much of it was not computed."""
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    outputs = [
        one._llm.generate([{"prompt_token_ids": prompt(LENGTH)}], sampling, use_tqdm=False, lora_request=adapter)[0]
        for adapter in adapters
    ]
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def settle() -> None:
    """Until everything that the engine copied out is put."""
    moving, until_s = get_kv_transfer_group().moving, time.monotonic() + SETTLE_S
    while moving._copied_bytes or moving._attached.publisher.queue_bytes:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_adapters_and_none_have_kv_of_their_own(tmp_path: Path, store: StoreProcess) -> None:
    """One prompt, with two adapters and without: none finds what another stored, each finds its own, also in the next
    engine at its first request, and every answer is that of vLLM without a connector.
    """
    model = Path(checkpoint("llama", tmp_path))
    adapters = [None, *(make_adapter(tmp_path / str(number), model, number) for number in (1, 2))]
    with engine(str(model), None, **OPTIONS) as plain:
        expected, _ = ask(plain, adapters)
    assert len({tuple(tokens) for tokens in expected}) == len(adapters)
    attached = connector(store.address)
    with engine(str(model), attached, **OPTIONS) as first:
        cold, found_cold = ask(first, adapters)
        settle()
    with engine(str(model), attached, **OPTIONS) as second:
        warm, found_warm = ask(second, [adapters[2], adapters[0], adapters[1]])
    assert cold == expected
    assert warm == [expected[2], expected[0], expected[1]]
    assert (found_cold, found_warm) == ([0, 0, 0], [LENGTH] * 3)
