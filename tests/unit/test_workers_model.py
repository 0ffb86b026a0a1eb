"""The packed forward against transformers' own, and exactness of every way to restore: both sides of each bound."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kernels.attention import attend
from tests.support.checkpoints import MAKERS, checkpoint
from workers import attention
from workers.attention import plan_sliding
from workers.batch import Slice
from workers.geometry import UnsupportedModel
from workers.layout import KvMemory
from workers.model import Model
from workers.slots import Slots, SlotTable

BLOCK = 8
HYBRID = ("gemma3", "gemma2", "gptoss")
PREFIX = 150
"""Beyond every tiny model's exact replay length (30..92)."""


@functools.cache
def model(kind: str, dtype: str = "float32") -> Model:
    return Model.load(checkpoint(kind), dtype)


@functools.cache
def eager_logits(kind: str, tokens: tuple[int, ...]) -> torch.Tensor:
    """transformers' own eager forward, without our attention or cache."""
    network = AutoModelForCausalLM.from_pretrained(
        checkpoint(kind), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return network(torch.tensor([tokens])).logits[0]


def text(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(4, 260), k=count)


class Worker:
    """A memory with its tables, scattered pages where asked."""

    def __init__(self, kind: str, dtype: str = "float32", scattered: bool = False) -> None:
        self.model = model(kind, dtype)
        self.slots = Slots(160, BLOCK)
        if scattered:
            tables = [self.slots.allocate(BLOCK) for _ in range(160)]
            random.Random(3).shuffle(tables)
            for table in tables[:90]:
                self.slots.free(table)
        self.memory = KvMemory(self.model.geometry, self.slots, dtype)

    def table(self, tokens: int) -> SlotTable:
        return self.slots.allocate(tokens)

    def run(self, *slices: Slice) -> torch.Tensor:
        return self.model.forward(self.memory, slices)

    def blocks(self, table: SlotTable, position: int) -> list[bytes]:
        """Payloads of all blocks that hold a position below ``position``."""
        payloads = []
        for index in range(-(-position // BLOCK)):
            payload = bytearray(self.model.geometry.block_payload_bytes(BLOCK))
            self.memory.export_block(table, index, memoryview(payload))
            payloads.append(bytes(payload))
        return payloads

    def load(self, table: SlotTable, payloads: Sequence[bytes]) -> None:
        for index, payload in enumerate(payloads):
            self.memory.import_block(table, index, memoryview(payload))


@functools.cache
def cold_run(kind: str, dtype: str) -> tuple[Worker, SlotTable, list[int], torch.Tensor]:
    """An uninterrupted run over PREFIX tokens, then 12 more whose logits are what every restored run must give."""
    worker, tokens = Worker(kind, dtype), text(1, PREFIX + 12)
    table = worker.table(len(tokens))
    worker.run(Slice(tokens[:PREFIX], 0, table, logits="none"))
    return worker, table, tokens, worker.run(Slice(tokens[PREFIX:], PREFIX, table, logits="all"))


def restored(kind: str, dtype: str, scattered: bool = False) -> tuple[Worker, SlotTable]:
    """Another worker that has loaded the prefix's blocks, and nothing else."""
    source, source_table, tokens, _ = cold_run(kind, dtype)
    target = Worker(kind, dtype, scattered)
    table = target.table(len(tokens))
    assert (table.first_slot(0, len(tokens)) is None) is scattered
    target.load(table, source.blocks(source_table, PREFIX))
    return target, table


# --- the forward ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("scattered", [False, True])
def test_chunked_prefill_equals_transformers_own_forward(kind: str, scattered: bool) -> None:
    """Prefill in uneven chunks over views or gathered slots gives transformers' eager logits."""
    tokens, worker = text(2, 130), Worker(kind, scattered=scattered)
    table = worker.table(130)
    edges = [0, 1, 38, 39, 100, 130]
    parts = [
        worker.run(Slice(tokens[begin:end], begin, table, logits="all")) for begin, end in itertools.pairwise(edges)
    ]
    assert torch.allclose(torch.cat(parts), eager_logits(kind, tuple(tokens)), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_mixed_batch_equals_each_sequence_alone(kind: str) -> None:
    """Prefill chunks and decode steps of several sequences in one forward do not see one another."""
    worker = Worker(kind, scattered=True)
    texts = [text(seed, count) for seed, count in ((3, 70), (4, 41), (5, 90))]
    tables = [worker.table(len(tokens)) for tokens in texts]
    worker.run(*(Slice(tokens[:-5], 0, table, logits="none") for tokens, table in zip(texts, tables, strict=True)))
    step = worker.run(
        Slice(texts[0][-5:-1], len(texts[0]) - 5, tables[0], logits="all"),
        Slice(texts[1][-5:-4], len(texts[1]) - 5, tables[1]),
        Slice(texts[2][-5:], len(texts[2]) - 5, tables[2]),
    )
    alone = [eager_logits(kind, tuple(tokens)) for tokens in texts]
    wanted = torch.cat([alone[0][-5:-1], alone[1][-5:-4], alone[2][-1:]])
    assert torch.allclose(step, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", MAKERS)
def test_greedy_decode_equals_transformers_own_choice(kind: str) -> None:
    """40 greedy tokens, past every window, are those of a forward without any cache."""
    worker, tokens = Worker(kind), text(6, 20)
    table = worker.table(60)
    row = worker.run(Slice(tokens, 0, table))
    for _ in range(40):
        tokens.append(int(row[0].argmax()))
        if len(tokens) < 60:
            row = worker.run(Slice(tokens[-1:], len(tokens) - 1, table))
    assert eager_logits(kind, tuple(tokens))[19:-1].argmax(-1).tolist() == tokens[20:]


def test_logits_come_in_slice_order_and_only_where_wanted() -> None:
    """Rows: all of the first slice, none of the second, the last of the third."""
    worker, tokens = Worker("llama"), text(7, 12)
    first, second, third = (worker.table(12) for _ in range(3))
    rows = worker.run(
        Slice(tokens, 0, first, logits="all"), Slice(tokens, 0, second, logits="none"), Slice(tokens, 0, third)
    )
    assert rows.shape == (13, worker.model.vocabulary)
    assert torch.equal(rows[11], rows[12])
    assert worker.run(Slice(tokens[:1], 0, first, logits="none")).shape == (0, worker.model.vocabulary)


def test_bfloat16_logits_are_float32() -> None:
    """A bf16 model keeps bf16 KV, but rows are chosen from float32."""
    worker = Worker("llama", "bfloat16")
    rows = worker.run(Slice([5, 6], 0, worker.table(2)))
    assert rows.dtype == torch.float32
    assert worker.memory.keys(0).dtype == torch.bfloat16


# --- restoring: states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("scattered", [False, True])
def test_a_state_resumes_bit_exactly_and_serves_the_position_before(kind: str, scattered: bool) -> None:
    """From position p the resumed logits are identical bits; from p-1 (identical resend) they are equal."""
    source, source_table, tokens, wanted = cold_run(kind, "float32")
    payload = memoryview(source.memory.export_state(source_table, PREFIX))
    for position in (PREFIX, PREFIX - 1):
        worker, table = restored(kind, "float32", scattered)
        floor = worker.memory.import_state(table, position, payload, PREFIX)
        got = worker.run(Slice(tokens[position:], position, table, PREFIX, floor, "all"))[PREFIX - position :]
        if position == PREFIX and not scattered:
            assert torch.equal(got, wanted)
        assert torch.allclose(got, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 24, 25, 47])
def test_short_prompts_resume_from_their_state_alone(kind: str, length: int) -> None:
    """Prompts shorter than a window or a block: blocks and the state carry all, at p and at p-1."""
    source, tokens = Worker(kind), text(8, length + 4)
    table = source.table(length + 4)
    source.run(Slice(tokens[:length], 0, table, logits="none"))
    state, blocks = source.memory.export_state(table, length), source.blocks(table, length - length % BLOCK)
    wanted = source.run(Slice(tokens[length:], length, table, logits="all"))
    for position in (length, length - 1):
        target = Worker(kind)
        at = target.table(length + 4)
        target.load(at, blocks)
        floor = target.memory.import_state(at, position, memoryview(state), length)
        got = target.run(Slice(tokens[position:], position, at, length, floor, "all"))[length - position :]
        assert torch.allclose(got, wanted, atol=2e-5, rtol=0)


# --- restoring: replay ----------------------------------------------------------------------------------------------


def replayed(kind: str, count: int, scattered: bool = False) -> torch.Tensor:
    """Logits after a rectangular replay of ``count`` tokens in one pass with the suffix, in float64."""
    worker, table = restored(kind, "float64", scattered)
    tokens, start = cold_run(kind, "float64")[2], PREFIX - count
    return worker.run(Slice(tokens[start:], start, table, PREFIX, start, "all"))[count:]


@pytest.mark.parametrize("kind", HYBRID)
def test_replay_is_exact_at_the_bound_and_not_one_token_below_it(kind: str) -> None:
    """S x (W-1) tokens rebuild every window exactly (float64); one fewer does not. Both sides are asserted."""
    wanted, bound = cold_run(kind, "float64")[3], model(kind, "float64").geometry.exact_replay_tokens
    assert bound < PREFIX
    assert (replayed(kind, bound) - wanted).abs().max() < 1e-12
    assert (replayed(kind, bound - 1) - wanted).abs().max() > 1e-5


@pytest.mark.parametrize("kind", HYBRID)
def test_a_replay_of_one_window_is_approximate_and_more_windows_are_nearer(kind: str) -> None:
    """The fidelity knob turns the right way: the error of 0, 1, 2 windows falls, and one window is not exact."""
    wanted, window = cold_run(kind, "float64")[3], model(kind, "float64").geometry.window
    errors = [float((replayed(kind, count * window) - wanted).pow(2).mean()) for count in (0, 1, 2)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] > 1e-6


@pytest.mark.parametrize("kind", HYBRID)
@pytest.mark.parametrize(("chunk", "scattered"), [(512, False), (17, True), (40, False)])
def test_triangular_replay_is_exact(kind: str, chunk: int, scattered: bool) -> None:
    """Half the layer-tokens, the same exactness (float64), in any chunks."""
    _, _, tokens, wanted = cold_run(kind, "float64")
    worker, table = restored(kind, "float64", scattered)
    floor = worker.model.triangular_replay(worker.memory, tokens[:PREFIX], table, PREFIX, chunk)
    assert floor == PREFIX - (worker.model.geometry.window - 1)
    got = worker.run(Slice(tokens[PREFIX:], PREFIX, table, window_floor=floor, logits="all"))
    assert (got - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("kind", HYBRID)
def test_triangular_replay_rebuilds_each_window_bit_near_to_the_cold_one(kind: str) -> None:
    """The last W-1 keys of every sliding layer are those of the uninterrupted run: nothing hides behind the logits."""
    source, source_table, tokens, _ = cold_run(kind, "float64")
    worker, table = restored(kind, "float64")
    floor = worker.model.triangular_replay(worker.memory, tokens, table, PREFIX)
    group = worker.model.geometry.sliding_group
    assert group is not None
    for layer in group.layers:
        mine = worker.memory.keys(layer)[table.slots(floor, PREFIX)]
        theirs = source.memory.keys(layer)[source_table.slots(floor, PREFIX)]
        assert (mine - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("kind", HYBRID)
def test_triangular_replay_of_a_short_prefix_is_a_cold_run_of_the_windows(kind: str) -> None:
    """Below the bound the triangle is cut off at position 0 and stays exact."""
    tokens, source = text(9, 40), Worker(kind, "float64")
    table = source.table(40)
    source.run(Slice(tokens[:30], 0, table, logits="none"))
    wanted = source.run(Slice(tokens[30:], 30, table, logits="all"))
    target = Worker(kind, "float64")
    at = target.table(40)
    target.load(at, source.blocks(table, 30))
    floor = target.model.triangular_replay(target.memory, tokens, at, 30)
    got = target.run(Slice(tokens[30:], 30, at, window_floor=floor, logits="all"))
    assert (got - wanted).abs().max() < 1e-12


def test_triangular_replay_runs_fewer_rows_as_layers_rise() -> None:
    """The triangle is real: rows a layer runs, counted, are n(l) x (W-1), and the last global layer runs none."""
    worker, table = restored("gemma3", "float64")
    counts: list[int] = []
    layers = worker.model._decoder.layers
    hooks = [layer.register_forward_hook(lambda _m, _i, out: counts.append(out.shape[1])) for layer in layers]
    worker.model.triangular_replay(worker.memory, cold_run("gemma3", "float64")[2], table, PREFIX)
    for hook in hooks:
        hook.remove()
    reach = worker.model.geometry.window - 1
    assert counts == [4 * reach, 3 * reach, 2 * reach, 2 * reach, reach]


def test_a_model_without_sliding_layers_has_nothing_to_replay() -> None:
    """Full attention: the blocks are all there is."""
    worker, table = restored("llama", "float32")
    _, _, tokens, wanted = cold_run("llama", "float32")
    assert worker.model.triangular_replay(worker.memory, tokens, table, PREFIX) == PREFIX
    got = worker.run(Slice(tokens[PREFIX:], PREFIX, table, logits="all"))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", HYBRID)
@pytest.mark.parametrize("way", ["rectangular", "triangular"])
def test_replay_leaves_the_stored_global_kv_byte_identical(kind: str, way: str) -> None:
    """Replayed positions serve the stored blocks and never overwrite them."""
    worker, table = restored(kind, "float32")
    tokens = cold_run(kind, "float32")[2]
    before = worker.blocks(table, PREFIX - PREFIX % BLOCK)
    if way == "triangular":
        worker.model.triangular_replay(worker.memory, tokens, table, PREFIX)
    else:
        start = PREFIX - worker.model.geometry.window
        worker.run(Slice(tokens[start:], start, table, PREFIX, start))
    assert worker.blocks(table, PREFIX - PREFIX % BLOCK) == before


@pytest.mark.parametrize("kind", HYBRID)
def test_overwriting_stored_kv_during_replay_would_not_be_exact(kind: str) -> None:
    """Why the write floor is there: without it even the full bound changes the output."""
    worker, table = restored(kind, "float64")
    _, _, tokens, wanted = cold_run(kind, "float64")
    start = PREFIX - worker.model.geometry.exact_replay_tokens
    got = worker.run(Slice(tokens[start:], start, table, 0, start, "all"))[PREFIX - start :]
    assert (got - wanted).abs().max() > 1e-5


@pytest.mark.parametrize("kind", HYBRID)
def test_absent_keys_are_masked_not_zero_filled(kind: str) -> None:
    """What lies before the window floor does not matter at all, whatever its slots hold; a zero key would."""
    wanted = replayed(kind, 2)
    worker, table = restored(kind, "float64")
    tokens, start = cold_run(kind, "float64")[2], PREFIX - 2
    group = worker.model.geometry.sliding_group
    assert group is not None
    for layer in group.layers:
        worker.memory.keys(layer).normal_(0, 3)
        worker.memory.values(layer).normal_(0, 3)
    got = worker.run(Slice(tokens[start:], start, table, PREFIX, start, "all"))[2:]
    assert torch.equal(got, wanted)
    for layer in group.layers:
        worker.memory.keys(layer).zero_()
        worker.memory.values(layer).zero_()
    zero_filled = worker.run(Slice(tokens[start:], start, table, PREFIX, 0, "all"))[2:]
    assert (zero_filled - wanted).abs().max() > 1e-3


def test_a_query_sees_exactly_its_window() -> None:
    """[max(floor, i-W+1), i], by the mask itself: W=4, floor 3, queries 5..8."""
    table = Slots(4, BLOCK).allocate(16)
    span = plan_sliding([Slice([9] * 4, 5, table, window_floor=3)], 4, torch.device("cpu")).spans[0]
    assert span.key_count == 6
    assert span.first_slot == 3
    assert span.mask is not None
    seen = [[3 + key for key in range(6) if span.mask[row, key]] for row in range(4)]
    assert seen == [[3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]]


# --- bad input ------------------------------------------------------------------------------------------------------


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    """An id that the model does not have is an error, not a crash inside the embedding."""
    worker = Worker("llama")
    with pytest.raises(ValueError, match=r"0\.\.319"):
        worker.run(Slice([320], 0, worker.table(4)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "at least one"),
        ({"start": 15}, "beyond"),
        ({"window_floor": 3}, "window_floor"),
        ({"write_floor": -1}, "write_floor"),
    ],
)
def test_an_impossible_slice_is_refused(changes: dict[str, object], message: str) -> None:
    """Slices are checked when they are made."""
    values: dict[str, object] = {"tokens": [1, 2], "start": 0, "table": Slots(2, BLOCK).allocate(16), **changes}
    with pytest.raises(ValueError, match=message):
        Slice(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gemma2", "float32"), ("gptoss", "float32"), ("gptoss", "bfloat16"), ("llama", "bfloat16")]
)
def test_attention_that_is_not_understood_is_refused_at_load(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If softcap, sinks or causality were missing, the load would fail: wrong KV is never stored under right keys."""
    model(kind, dtype).check_attention()

    def deaf(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
        return attend(
            query, keys, values, **{**options, "softcap": None, "sinks_H": None, "causal": dtype == "float32"}
        )

    monkeypatch.setattr(attention, "attend", deaf)
    with pytest.raises(UnsupportedModel, match="eager attention"):
        model(kind, dtype).check_attention()
    monkeypatch.undo()
    model(kind, dtype).check_attention()


SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def random_model(family: str, directory: Path, **changes: Any) -> Model:
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **changes}))
    network.save_pretrained(directory)
    return Model.load(directory, "float64")


@pytest.mark.parametrize("family", ["qwen3", "phi3", "mixtral", "olmo3", "cohere2"])
def test_other_families_load_and_replay_exactly(family: str, tmp_path: Path) -> None:
    """Norms on queries, fused projections, experts, layers without rope: equal to eager at load, replay exact."""
    kinds = ["sliding_attention", "full_attention"] * 2
    slides = family in ("olmo3", "cohere2")
    hybrid = {"layer_types": kinds, "sliding_window": 12} if slides else {"sliding_window": None}
    loaded, tokens = random_model(family, tmp_path, **hybrid), [(31 * step) % 200 for step in range(60)]
    slots = Slots(8, 16)
    memory, cold, warm = KvMemory(loaded.geometry, slots, "float64"), slots.allocate(60), slots.allocate(60)
    loaded.forward(memory, [Slice(tokens[:48], 0, cold, logits="none")])
    wanted = loaded.forward(memory, [Slice(tokens[48:], 48, cold, logits="all")])
    payload = bytearray(loaded.geometry.block_payload_bytes(16))
    for index in range(3):
        memory.export_block(cold, index, memoryview(payload))
        memory.import_block(warm, index, memoryview(payload))
    floor = loaded.triangular_replay(memory, tokens, warm, 48)
    got = loaded.forward(memory, [Slice(tokens[48:], 48, warm, window_floor=floor, logits="all")])
    assert (got - wanted).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("family", "message"),
    [("gpt2", "does not run over slots"), ("stablelm", "mask of its own"), ("opt", "projects"), ("mamba", "linear")],
)
def test_families_of_another_build_are_refused_with_the_reason(family: str, message: str, tmp_path: Path) -> None:
    """Nothing is served that was not shown to compute what transformers computes."""
    with pytest.raises(UnsupportedModel, match=message):
        random_model(family, tmp_path)


@pytest.mark.parametrize("device", ["cuda:99", "no-such-device"])
def test_a_device_that_is_not_here_is_refused_before_loading(device: str, tmp_path: Path) -> None:
    """In one sentence that names it, whatever torch raises."""
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used: "):
        Model.load(tmp_path, device=device)


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    """A directory whose config names no known model."""
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        Model.load(tmp_path)
