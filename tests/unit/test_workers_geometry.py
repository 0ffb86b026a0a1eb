"""A config becomes groups and sizes, or is refused by name."""

from __future__ import annotations

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from kvstore.keys import differing_fields, space_id
from workers.geometry import STATE_HEADER_BYTES, Geometry, UnsupportedModel, make_space


def test_known_models_have_their_published_sizes() -> None:
    """Bytes a token and exact replay lengths of Gemma 3 270M, SmolLM2-135M and gpt-oss-20b, in bf16."""
    gemma = Geometry.from_config(
        Gemma3TextConfig(
            num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512
        ),
        "bfloat16",
    )
    assert (gemma.global_group.layers, gemma.sliding_layers, gemma.window) == ((5, 11, 17), 15, 512)
    assert (gemma.bytes_per_token, gemma.block_token_bytes, gemma.exact_replay_tokens) == (18_432, 3_072, 7_665)
    smol = Geometry.from_config(
        LlamaConfig(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576), "bfloat16"
    )
    assert (smol.bytes_per_token, smol.sliding_group, smol.exact_replay_tokens) == (23_040, None, 0)
    oss = Geometry.from_config(GptOssConfig(num_hidden_layers=24), "bfloat16")
    assert (oss.sliding_layers, oss.window, oss.exact_replay_tokens) == (12, 128, 1_524)


def test_state_bytes_are_windows_and_tail() -> None:
    """A state holds at most W positions of windows and the incomplete block."""
    geometry = Geometry.from_config(GptOssConfig(num_hidden_layers=4), "float32")
    window, block = geometry.window_token_bytes, geometry.block_token_bytes
    assert geometry.state_payload_bytes(64, 64) == STATE_HEADER_BYTES + 64 * window
    assert geometry.state_payload_bytes(1000, 64) == STATE_HEADER_BYTES + 128 * window + 40 * block


def _config(base: type[PretrainedConfig], **changes: object) -> PretrainedConfig:
    config = base()
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(LlamaConfig, layer_types=["linear_attention"] * 32), "linear_attention"),
        (MistralConfig(sliding_window=128), "all layers slide"),
        (DeepseekV3Config(), "kv_lora_rank"),
        (_config(Llama4TextConfig), "chunked"),
        (_config(LlamaConfig, num_kv_shared_layers=4), "share"),
        (_config(LlamaConfig, use_bidirectional_attention=True), "bidirectional"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    ],
)
def test_unsupported_attention_is_refused_by_name(config: PretrainedConfig, message: str) -> None:
    """What would be stored wrongly is refused before any weight is loaded, and the message names it."""
    with pytest.raises(UnsupportedModel, match=message):
        Geometry.from_config(config, "float32")


def test_a_window_that_is_switched_off_makes_no_sliding_layers() -> None:
    """Qwen 2 names a window that it does not use."""
    assert Geometry.from_config(Qwen2Config(use_sliding_window=False), "float32").sliding_group is None


def test_an_unknown_dtype_is_refused() -> None:
    """KV dtypes are a closed list."""
    with pytest.raises(ValueError, match="int4"):
        Geometry.from_config(LlamaConfig(), "int4")


def test_a_worker_that_differs_has_another_space() -> None:
    """Weights, dtype, layout, block length, model, revision, tenant and epoch each separate spaces, by field."""
    config = GptOssConfig(num_hidden_layers=4)

    def space(dtype: str = "float32", **changes: object):  # type: ignore[no-untyped-def]
        values = {"model": "m", "weights_digest": b"w", "block_tokens": 64, **changes}
        return make_space(Geometry.from_config(config, dtype), **values)  # type: ignore[arg-type]

    base = space()
    variants = {
        "weights_digest": space(weights_digest=b"v"),
        "kv_dtype": space("bfloat16"),
        "block_tokens": space(block_tokens=32),
        "model": space(model="n"),
        "revision": space(revision=""),
        "tenant_salt": space(tenant=""),
        "epoch": space(epoch=1),
    }
    for field, other in variants.items():
        assert differing_fields(base, other) == (field,)
    assert len({space_id(item) for item in (base, *variants.values())}) == len(variants) + 1
