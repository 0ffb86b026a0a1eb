"""A Hugging Face checkpoint that computes over a worker's slots.

Owns the forward of packed slices and the exact (triangular) replay. Does not know about requests, plans, the store or
text.
Invariants: one forward reads and writes only the slots of its slices; positions are always explicit; all work happens
on one thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from workers.attention import NAME, LayerPlan, plan_global, plan_sliding, register
from workers.batch import Slice
from workers.caches import slot_cache
from workers.geometry import Geometry, UnsupportedModel
from workers.layout import TORCH_DTYPES, KvMemory
from workers.slots import Slots, SlotTable
from workers.weights import weights_digest

REPLAY_CHUNK_TOKENS = 512
"""Tokens that one step of the exact replay runs; its memory grows with this times the window."""

CHECK_TOKENS = 24
"""Tokens of the comparison with transformers' eager attention at every load."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What others must know of a loaded model. ``stop_token_ids`` end an answer; the digest goes into the space."""

    geometry: Geometry
    weights_digest: bytes
    context_tokens: int
    vocabulary: int
    stop_token_ids: tuple[int, ...]


class Model:
    """A loaded model on one device."""

    def __init__(self, network: Any, facts: ModelFacts, device: torch.device) -> None:
        self._network = network
        self._decoder = network.get_decoder()
        self._cache_argument = _cache_argument(network)
        self._device = device
        self.facts = facts

    @classmethod
    def load(cls, directory: Path, dtype: str = "float32", device: str = "cpu", threads: int | None = None) -> Self:
        """Load the checkpoint in ``directory``. Raises UnsupportedModel, or ValueError for an unknown dtype or device.

        Nothing is fetched from a network and no code of the checkpoint's is run.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        home = _usable_device(device)
        register()
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        config = _read_config(directory)
        geometry = Geometry.from_config(config, dtype)
        digest = weights_digest(directory)
        network: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
        if dtype == "float64" and hasattr(network.config, "_experts_implementation"):
            network.config._experts_implementation = "eager"  # grouped_mm has no float64 kernel
        network.to(home).eval().requires_grad_(False)
        _check_projections(network, geometry)
        model = cls(network, _facts(network, geometry, digest), home)
        model.check_attention()
        return model

    @property
    def geometry(self) -> Geometry:
        return self.facts.geometry

    @property
    def weights_digest(self) -> bytes:
        return self.facts.weights_digest

    @property
    def context_tokens(self) -> int:
        return self.facts.context_tokens

    @property
    def vocabulary(self) -> int:
        return self.facts.vocabulary

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.facts.stop_token_ids

    @torch.inference_mode()
    def forward(self, memory: KvMemory, slices: Sequence[Slice]) -> torch.Tensor:
        """Run all slices in one pass; returns logits [rows, vocabulary], float32 or wider, in slice order.

        KV of the tokens is written to the slots on the way. The linear layers see all rows together, attention runs
        sequence by sequence. Two slices of one forward must not be of one sequence.
        """
        tokens = [token for item in slices for token in item.tokens]
        self._check_tokens(tokens)
        positions = [position for item in slices for position in range(item.start, item.end)]
        arguments = self._arguments(memory, self._plans(slices), tokens, positions)
        rows = _logit_rows(slices)
        if not rows:
            self._decoder(**arguments)
            return torch.empty((0, self.vocabulary), dtype=torch.float32, device=self._device)
        wanted = torch.tensor(rows, dtype=torch.long, device=self._device)
        logits: torch.Tensor = self._network(**arguments, logits_to_keep=wanted).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def triangular_replay(
        self,
        memory: KvMemory,
        tokens: Sequence[int],
        table: SlotTable,
        position: int,
        chunk_tokens: int = REPLAY_CHUNK_TOKENS,
    ) -> int:
        """Rebuild all windows exactly, so that computing on from ``position`` equals an uninterrupted run.

        ``tokens`` is the whole prefix [0, position) at least; the global layers' KV of it must be in the slots. Returns
        the ``window_floor`` for what follows.
        """
        return list(self.triangular_steps(memory, tokens, table, position, chunk_tokens))[-1]

    def triangular_steps(
        self,
        memory: KvMemory,
        tokens: Sequence[int],
        table: SlotTable,
        position: int,
        chunk_tokens: int = REPLAY_CHUNK_TOKENS,
    ) -> Iterator[int]:
        """``triangular_replay`` step by step, so that a caller may stop between steps; yields the final window_floor.

        layer l runs positions [position - n(l) x (W-1), position), n(l) = sliding layers at or above l:

        layer 0  ....|##########################|      nothing runs above the last sliding layer, and no LM head;
        layer 1  .........|#####################|      rows are dropped as the layers rise, since a layer's window
        last     ...................|###########|      needs W-1 earlier positions of the layer below, no more
        """
        if not 0 < position <= len(tokens):
            raise ValueError(f"cannot replay up to {position} of {len(tokens)} tokens")
        self._check_tokens(tokens[:position])
        starts = _triangle(self.geometry, position)
        floor = max(0, position - max(self.geometry.window - 1, 0))
        begin = min(starts)
        if begin == position:
            yield floor
        for first in range(begin, position, chunk_tokens):
            self._replay_rows(memory, tokens, table, starts, first, min(position, first + chunk_tokens), position)
            yield floor

    @torch.inference_mode()
    def _replay_rows(
        self,
        memory: KvMemory,
        tokens: Sequence[int],
        table: SlotTable,
        starts: Sequence[int],
        first: int,
        end: int,
        position: int,
    ) -> None:
        """Run positions [first, end), each layer only from its own start on, until no row is left."""
        plans: list[LayerPlan] = []
        rows: list[int] = []
        made: dict[tuple[int, bool], LayerPlan] = {}
        for layer, start in enumerate(starts):
            begin = max(first, start)
            if begin >= end:
                break
            sliding = layer in self._sliding
            if (start, sliding) not in made:
                item = Slice(tokens[begin:end], begin, table, write_floor=position, window_floor=min(start, begin))
                made[start, sliding] = self._plan_of((item,), sliding)
            plans.append(made[start, sliding])
            rows.append(end - begin)
        arguments = self._arguments(memory, plans, tokens[first:end], range(first, end))
        hooks = [
            layer.register_forward_pre_hook(_keep_last_rows(rows[index] if index < len(rows) else 0), with_kwargs=True)
            for index, layer in enumerate(self._decoder.layers)
        ]
        try:
            self._decoder(**arguments)
        except _NoRowsLeft:
            pass
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def check_attention(self) -> None:
        """Compare a short forward with transformers' own eager one. Raises UnsupportedModel when they differ.

        Catches a model whose attention has a part that ours does not know, before wrong KV is stored under right keys.
        """
        tokens = [(7919 * step + 1) % self.vocabulary for step in range(CHECK_TOKENS)]
        slots = Slots(1, CHECK_TOKENS)
        item = Slice(tokens, 0, slots.allocate(CHECK_TOKENS), logits="all")
        memory = KvMemory(self.geometry, slots, self.geometry.dtype, str(self._device))
        try:
            got = self.forward(memory, [item])
        except (RuntimeError, TypeError, AttributeError) as error:
            raise UnsupportedModel(f"{type(self._network).__name__} does not run over slots: {error}") from error
        self._network.set_attn_implementation("eager")
        try:
            ids = torch.tensor([tokens], dtype=torch.long, device=self._device)
            wanted: torch.Tensor = self._network(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._network.set_attn_implementation(NAME)
        if not _same_logits(got, wanted.to(got.dtype), exact=self.geometry.dtype in ("float64", "float32")):
            raise UnsupportedModel(
                f"the model's attention ({type(self._network).__name__}) has a part that is not supported: "
                "its logits differ from those of transformers' eager attention"
            )

    @property
    def _sliding(self) -> tuple[int, ...]:
        group = self.geometry.sliding_group
        return group.layers if group else ()

    def _plans(self, slices: Sequence[Slice]) -> list[LayerPlan]:
        over_all = self._plan_of(slices, sliding=False)
        over_window = self._plan_of(slices, sliding=True) if self._sliding else over_all
        return [over_window if layer in self._sliding else over_all for layer in range(self.geometry.layers)]

    def _plan_of(self, slices: Sequence[Slice], sliding: bool) -> LayerPlan:
        if sliding:
            return plan_sliding(slices, self.geometry.window, self._device)
        return plan_global(slices, self._device)

    def _arguments(
        self, memory: KvMemory, plans: list[LayerPlan], tokens: Sequence[int], positions: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "input_ids": torch.tensor([list(tokens)], dtype=torch.long, device=self._device),
            "position_ids": torch.tensor([list(positions)], dtype=torch.long, device=self._device),
            "use_cache": True,
            "plans": plans,
            self._cache_argument: slot_cache(memory, plans),
        }

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens or not (min(tokens) >= 0 and max(tokens) < self.vocabulary):
            raise ValueError(f"token ids are 0..{self.vocabulary - 1} for this model, and at least one is needed")


class _NoRowsLeft(Exception):
    """Ends a replay's forward below the first layer that has nothing to do."""


def _keep_last_rows(rows: int) -> Any:
    """A pre-hook of a decoder layer that keeps the last ``rows`` rows of everything that has one row a token."""

    def trim(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(trim(item) for item in value)
        return value[:, -rows:] if isinstance(value, torch.Tensor) else value

    def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not rows:
            raise _NoRowsLeft
        trimmed = {
            name: trim(value) if name in ("hidden_states", "position_embeddings", "position_ids") else value
            for name, value in kwargs.items()
        }
        return (trim(args[0]), *args[1:]) if args else args, trimmed

    return hook


def _same_logits(got: torch.Tensor, wanted: torch.Tensor, exact: bool) -> bool:
    """Within rounding of float32; narrower dtypes round experts' choices too, so there most rows must point one way."""
    if exact:
        return bool((got - wanted).abs().max() <= 1e-3 * wanted.abs().max())
    return bool(torch.nn.functional.cosine_similarity(got, wanted).median() > 0.98)


def _triangle(geometry: Geometry, position: int) -> list[int]:
    """First position that each layer must run: position - n x (W-1), n = sliding layers at or above it."""
    sliding = set(geometry.sliding_group.layers) if geometry.sliding_group else set()
    starts, count = [position] * geometry.layers, 0
    for layer in reversed(range(geometry.layers)):
        count += layer in sliding
        starts[layer] = max(0, position - count * max(geometry.window - 1, 0))
    return starts


def _logit_rows(slices: Sequence[Slice]) -> list[int]:
    rows: list[int] = []
    end = 0
    for item in slices:
        begin, end = end, end + len(item.tokens)
        if item.logits == "all":
            rows.extend(range(begin, end))
        elif item.logits == "last":
            rows.append(end - 1)
    return rows


def _usable_device(name: str) -> torch.device:
    """Raises ValueError, with torch's reason, for a device that is not here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without it
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _read_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(f"the config of {directory} cannot be read: {error}") from error


def _cache_argument(network: Any) -> str:
    """transformers 5.24 renamed ``past_key_values`` to ``cache``; ask the model which one it takes."""
    return "cache" if "cache" in inspect.signature(type(network).forward).parameters else "past_key_values"


def _facts(network: Any, geometry: Geometry, digest: bytes) -> ModelFacts:
    config = network.config.get_text_config(decoder=True)
    stops: set[int] = set()
    for source in (network.generation_config, config):
        ids = getattr(source, "eos_token_id", None)
        stops.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return ModelFacts(
        geometry=geometry,
        weights_digest=digest,
        context_tokens=int(config.max_position_embeddings),
        vocabulary=int(config.vocab_size),
        stop_token_ids=tuple(sorted(stops)),
    )


def _check_projections(network: Any, geometry: Geometry) -> None:
    """Separate projections must have the geometry's widths (fused ones are caught by the forward). UnsupportedModel."""
    widths = {
        int(module.layer_idx): (module.k_proj.out_features, module.v_proj.out_features)
        for module in network.get_decoder().modules()
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj") and hasattr(module, "v_proj")
    }
    for group in geometry.groups:
        width = group.kv_heads * group.head_dim
        for layer in group.layers:
            found = widths.get(layer, (width, width))
            if found != (width, width):
                raise UnsupportedModel(f"layer {layer} projects keys and values to {found}, not to {width} each")
