"""Tiny random checkpoints with a byte tokenizer: Llama-, Gemma-3-, Gemma-2- and gpt-oss-shaped, made without downloads.

Owns their making. They are for exactness, not quality: a random net's logits are near-tied.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "head_dim": 16,
    "hidden_size": 64,
    "tie_word_embeddings": False,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 byte tokens and 4 special ones."""
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {"intermediate_size": 128, "num_hidden_layers": 3, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**_COMMON, **sizes, **changes}))


def tiny_gemma3(window: int = 24, layers: int = 6, **changes: Any) -> Gemma3ForCausalLM:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * (layers // 3)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            intermediate_size=128,
            num_hidden_layers=layers,
            num_key_value_heads=1,
            sliding_window=window,
            query_pre_attn_scalar=16,
            layer_types=kinds,
            **{**_COMMON, **changes},
        )
    )


def tiny_gemma2(window: int = 24, **changes: Any) -> Gemma2ForCausalLM:
    return Gemma2ForCausalLM(
        Gemma2Config(
            intermediate_size=128,
            num_hidden_layers=4,
            num_key_value_heads=2,
            sliding_window=window,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=10.0,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **{**_COMMON, **changes},
        )
    )


def tiny_gptoss(window: int = 16, layers: int = 4, **changes: Any) -> GptOssForCausalLM:
    model = GptOssForCausalLM(
        GptOssConfig(
            intermediate_size=64,
            num_hidden_layers=layers,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=window,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
            **{**_COMMON, **changes},
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_(0, 1)
    return model


MAKERS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "gemma3": tiny_gemma3,
    "gemma2": tiny_gemma2,
    "gptoss": tiny_gptoss,
}
"""Every shape by name, with small windows (16..24) that tests can cross."""


def make_checkpoint(kind: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random checkpoint of ``kind`` with its tokenizer into ``directory``; equal seeds give equal weights.

    ``changes``: of the model's configuration, such as ``head_dim=32``, the least that vLLM computes on a CPU.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = MAKERS[kind](**changes)
    _sharpen(model)
    torch.random.set_rng_state(state)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@functools.cache
def checkpoint(kind: str) -> Path:
    """A checkpoint of ``kind`` (a key of MAKERS), made once in this process in a temporary folder."""
    root = tempfile.TemporaryDirectory(prefix=f"tiny-{kind}-")
    _KEPT.append(root)
    return make_checkpoint(kind, Path(root.name) / f"tiny-{kind}")


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that live as long as the process."""


def _sharpen(model: PreTrainedModel) -> None:
    """Scale the projections so that attention is not uniform: only then does a wrong key change the output."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(8)
            elif name.endswith(("v_proj.weight", "o_proj.weight")):
                parameter.mul_(4)
            elif name == "lm_head.weight":
                parameter.mul_(10)
