"""The scheduler's half of the vLLM connector: what is stored of each request's prefix, what to load, what to save.

Owns one entry for each request that may be cached, from its arrival to its end. Does not know tensors. Invariants: no
method waits; what was found counts only where every rank has it; a request whose load failed is not looked up again;
blocks are saved once all of their tokens are known and computed, so drafts that are rejected never are.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvstore.keys import Attachment as Input
from kvstore.keys import BlockName, Space, decode_space, opaque_name
from kvstore.limits import LOOKUP_KEYS_MAX
from kvstore.store import Presence
from workers.access_log import AccessLog
from workers.adapters.attachment import Asked, Attachment, OptionError, Settings
from workers.adapters.vllm_accesses import REASON_WINDOW, Reuse, access_record, uncached_record
from workers.adapters.vllm_space import AdapterDigests, layer_specs, window_of
from workers.adapters.vllm_stats import Interval, RepriseStats
from workers.adapters.vllm_step import Move, Prefix, Rank, Step, window_name
from workers.adapters.vllm_wishes import Complaints, Unclear, read_wishes
from workers.spaces import TenantSpace

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

CLOSE_S = 5.0
GREET_S = 5.0
_INPUT_CONTEXT = "reprise-kv 2026 engine input digest"
_SALT_CONTEXT = "reprise-kv 2026 engine salt digest"


@dataclass(frozen=True, slots=True)
class Have:
    """What one rank has of one prefix: of each block asked for, and of windows that are kept, by boundary."""

    space: TenantSpace
    names: Sequence[BlockName]
    presence: npt.NDArray[np.uint8]
    kept: Mapping[int, BlockName]


@dataclass(frozen=True, slots=True)
class Found:
    """What every rank has of one prefix: which blocks, and before which of them the window.

    ``states``: windows in the store's memory; ``kept``: those that are stored as blocks. ``declined``: computing is
    faster than loading.
    """

    present: npt.NDArray[np.bool_]
    states: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    ranks: tuple[Have, ...] = ()
    declined: bool = False

    @property
    def prefix_blocks(self) -> int:
        return self.present.size if self.present.all() else int(self.present.argmin())

    def usable(self, blocks_max: int, *, windows: bool) -> int:
        """Blocks of the longest prefix that a request can go on from."""
        whole = min(self.prefix_blocks, blocks_max)
        if self.declined:
            return 0
        return max((at for at in self.states | self.kept if at <= whole), default=0) if windows else whole


NOTHING = Found(np.zeros(0, np.bool_))


@dataclass(slots=True)
class Tracked:
    """One request. ``first``: blocks that vLLM had itself when it asked; ``saved``: blocks that were offered or found.

    ``state``: the latest boundary whose window was offered or found. ``failed``: a load of it did. ``reuse``: what its
    prompt reused. ``load_s``: how long it waited for loads, if for any.
    """

    request: Request
    prefix: Prefix
    asked: Asked[Found] | None = None
    found: Found = NOTHING
    first: int = 0
    loading: Move | None = None
    load_began_s: float = 0.0
    load_s: float | None = None
    failed: bool = False
    saved: int = 0
    state: int = 0
    reuse: Reuse | None = None


class Scheduling:
    """On the scheduler's thread, but for ``_find``."""

    def __init__(
        self, settings: Settings, caches: KVCacheConfig, block_tokens: int, *, loads: bool = True, saves: bool = True
    ) -> None:
        self._settings = settings
        self._may_load = loads
        self._may_save = saves
        self._block_tokens = block_tokens
        window = max((window_of(spec) for _, spec in layer_specs(caches).values()), default=0)
        self._window_blocks = max(-(-(window - 1) // block_tokens), 1) if window else 0
        self._ranks: tuple[Space, ...] = ()
        self._attached: Attachment | None = None
        self._adapters = AdapterDigests()
        self._complaints = Complaints()
        self._windows_missed = 0
        self._reset: tuple[Input, ...] = ()
        self._interval = Interval()
        self._log = AccessLog.open(settings.access_log) if settings.access_log is not None else None
        self._requests: dict[str, Tracked] = {}
        self._uncached: dict[str, tuple[Unclear, ...]] = {}
        """Requests that are not cached, since they said so or since of what is unclear: kept for the access log."""
        self._unnamed: dict[str, float] = {}
        """Requests whose adapter is being hashed, and until when they wait for that."""
        self._loads: list[Move] = []

    def meet(self, ranks: Sequence[KVConnectorHandshakeMetadata]) -> None:
        """All workers are there, and said what their spaces are. Raises OptionError if another connector spoke."""
        self._ranks = tuple(decode_space(rank.space) for rank in ranks if isinstance(rank, Rank))
        if not self._ranks or len(self._ranks) != len(ranks):
            raise OptionError("connectors: name RepriseConnector first, since vLLM hands on what the first one says")
        self._attached = attached = Attachment.open(self._settings, self._ranks[0])
        space = attached.spaces.of(None)
        # Connect now, so that the first request's look-up need not: a restart is when hits matter.
        attached.ask(lambda _: attached.look_up(space, [opaque_name(space.id, b"-")], deadline_s=GREET_S))

    def close(self) -> None:
        if self._log is not None:
            self._log.close(CLOSE_S)
        if self._attached is not None:
            log.info("reprise: scheduler_closed counts=%s", self._counts(self._attached))
            self._attached.close(CLOSE_S)

    def stats(self) -> RepriseStats | None:
        """What was counted since it was last asked."""
        if self._attached is None or not self._interval.due:
            return None
        return self._interval.take(self._counts(self._attached))

    def _counts(self, attached: Attachment) -> dict[str, int]:
        own = {"parameters_unclear": self._complaints.count, "windows_missed": self._windows_missed}
        return {**attached.stats(), **own}

    def reset(self) -> None:
        """What was cached is not to be used any more (the weights were changed in place, say): begin a world apart.

        Nobody else names blocks so. Other processes are as before, and so is this one after a restart.
        """
        self._reset = (Input(0, os.urandom(32)),)

    # --- one request, in the order in which vLLM calls ----------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Begin to look it up; one that cannot be cached is not remembered."""
        if request.lora_request is not None and self._adapters.hashing(request.lora_request):
            self._unnamed[request.request_id] = time.monotonic() + self._settings.lookup_deadline_s
        else:
            self._begin(request)

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond ``computed`` that can be loaded; None: it is not known yet."""
        if request.lora_request is not None and self._waits_for_name(request):
            return None, False
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.first = computed // self._block_tokens
        if tracked.failed or request.skip_reading_prefix_cache or not self._may_load:
            return 0, False
        if tracked.asked is None:  # it was preempted and begins anew
            tracked.asked = self._ask(replace(tracked.prefix, tokens=list(request.all_token_ids)))
        if not tracked.asked.settled:
            return None, False
        tracked.found = tracked.asked.answer() or NOTHING
        stop = tracked.found.usable(self._usable_max(request.num_tokens), windows=self._window_blocks > 0)
        return (stop * self._block_tokens - computed, True) if stop > tracked.first else (0, False)

    def admit(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """It has pages now, and ``tokens`` are to be loaded. Called again, without any, once they are."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.asked is None:
            return
        tracked.asked = None
        stop = tracked.first + tokens // self._block_tokens
        self._touch(tracked, stop)
        tracked.state = max(tracked.found.states | tracked.found.kept, default=0)
        if tracked.reuse is None:
            tracked.reuse = self._reuse(tracked, stop)
            self._windows_missed += tracked.reuse.reason == REASON_WINDOW
        if tokens > 0:
            states = (stop,) if self._window_blocks else ()
            move = self._move(tracked, blocks.get_block_ids(), range(tracked.first, stop), stop, states)
            move = replace(move, kept=stop in tracked.found.kept)
            tracked.loading, tracked.load_began_s = move, time.monotonic()
            self._loads.append(move)

    def step(self, output: SchedulerOutput) -> Step:
        """The loads that were admitted, and the blocks that this step completes."""
        step, self._loads = Step(loads=self._loads), []
        pages = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or pages is None or not self._may_save:
                continue
            before = tracked.request.num_computed_tokens
            computed = min(before + scheduled, len(tracked.request.all_token_ids))
            blocks, states = self._due(tracked, before, computed)
            tables = pages.get_block_ids(request_id) if blocks or states else None
            if tables is not None:
                stop = computed // self._block_tokens
                step.saves.append(self._move(tracked, tables, blocks, stop, states))
        return step

    def hear(self, output: KVConnectorOutput) -> None:
        """Workers say which loads ended, and which failed: those are computed, and offered again."""
        if output.invalid_block_ids or output.failed_recving:
            for request_id, tracked in self._requests.items():
                load = tracked.loading
                if load is not None and (good := _blocks_good(load, request_id, output)) < load.stop:
                    if not tracked.failed:
                        tracked.reuse = replace(self._reuse(tracked, good), failed=True)
                    tracked.failed, tracked.found, tracked.saved, tracked.state = True, NOTHING, 0, 0
        for request_id in output.finished_recving or ():
            waited = self._requests.get(request_id)
            if waited is not None and waited.loading is not None:
                waited.loading = None
                waited.load_s = (waited.load_s or 0.0) + time.monotonic() - waited.load_began_s

    def leave(self, request: Request) -> None:
        """It ended: the access log is told what it reused, and why not more."""
        self._unnamed.pop(request.request_id, None)
        tracked = self._requests.pop(request.request_id, None)
        unclear = self._uncached.pop(request.request_id, None)
        if self._log is None or self._attached is None:
            return
        if unclear is not None:
            shared = self._attached.spaces.of(None, self._ranks[0])
            self._log.append(uncached_record(request, shared, unclear, time.time()))
        elif tracked is not None and tracked.reuse is not None:
            self._log.append(access_record(request, tracked.reuse, time.time(), tracked.load_s))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        prefix = self._prefix_of(request)
        if prefix is not None and self._attached is not None:
            self._requests[request.request_id] = Tracked(request, prefix, self._ask(prefix))

    def _waits_for_name(self, request: Request) -> bool:
        """Whether its adapter is still hashed, and in time; once it is not, its look-up begins."""
        assert request.lora_request is not None
        until_s = self._unnamed.get(request.request_id)
        if until_s is None:
            return False
        if self._adapters.hashing(request.lora_request) and time.monotonic() < until_s:
            return True
        del self._unnamed[request.request_id]
        self._begin(request)
        return False

    def _usable_max(self, tokens: int) -> int:
        """Blocks that can be loaded of so many tokens. vLLM computes the last one in any case, which looks back a token
        further than a window that ends behind it.
        """
        return (tokens - (self._window_blocks > 0)) // self._block_tokens

    def _prefix_of(self, request: Request) -> Prefix | None:
        """What names its blocks; None where something has no name that holds in another process."""
        wishes = read_wishes(self._settings, request.kv_transfer_params, request.kv_hints)
        if wishes.unclear:
            self._complaints.add(wishes.unclear)
        if wishes.terms is None and self._log is not None:
            self._uncached[request.request_id] = wishes.unclear
        terms, tokens, lora = wishes.terms, request.prompt_token_ids, request.lora_request
        if terms is None or tokens is None or request.prompt_embeds is not None or request.resumable:
            return None
        adapter = self._adapters.of(lora) if lora is not None else None
        inputs = _inputs_of(request)
        if (lora is not None and adapter is None) or inputs is None:
            return None
        return Prefix(list(tokens), (*self._reset, *inputs), terms, adapter)

    def _ask(self, prefix: Prefix) -> Asked[Found]:
        assert self._attached is not None
        return self._attached.ask(lambda left_s: self._find(prefix, left_s))

    def _find(self, prefix: Prefix, left_s: float) -> Found:
        """Ask for every rank, on a thread that may wait. One that fails makes the whole a miss."""
        until_s = time.monotonic() + left_s
        whole: Found | None = None
        for base in self._ranks:
            mine = self._find_rank(prefix, base, until_s)
            if mine is None:
                return NOTHING
            whole = mine if whole is None else _both(whole, mine)
        return whole or NOTHING

    def _find_rank(self, prefix: Prefix, base: Space, until_s: float) -> Found | None:
        attached = self._attached
        assert attached is not None
        space = prefix.space_in(attached.spaces, base)
        chain = prefix.chain_in(space)
        names = chain.names[:LOOKUP_KEYS_MAX]
        windows = self._window_blocks > 0
        found = attached.look_up(space, names, states=windows, deadline_s=max(until_s - time.monotonic(), 1e-3))
        if found is None:
            return None
        blocks = found.prefix_blocks()
        states = frozenset(
            entry.block_index + 1
            for entry in found.states
            if entry.tail_tokens == 0
            and chain.state_name((entry.block_index + 1) * self._block_tokens).key == entry.key
        )
        kept: dict[int, BlockName] = {}
        if windows and blocks and self._settings.keep_windows:
            boundaries = {at: window_name(chain, at) for at in range(1, blocks + 1)}
            left_s = max(until_s - time.monotonic(), 1e-3)
            ends = attached.look_up(space, list(boundaries.values()), deadline_s=left_s)
            if ends is not None:
                here = (ends.presence == int(Presence.PRESENT)).nonzero()[0] + 1
                kept = {at: boundaries[at] for at in here.tolist()}
        declined = attached.declines(found, blocks * self._block_tokens)
        have = Have(space, names, found.presence, kept)
        return Found(found.presence == int(Presence.PRESENT), states, frozenset(kept), (have,), declined)

    def _reuse(self, tracked: Tracked, stop: int) -> Reuse:
        """What a prompt reuses of ``stop`` blocks, as the first rank has them; the first of them vLLM had itself."""
        found, attached = tracked.found, self._attached
        assert attached is not None
        have = found.ranks[0] if found.ranks else None
        engine = min(tracked.first, stop)
        usable_max = self._usable_max(tracked.request.num_prompt_tokens)
        behind = have is not None and stop < min(len(have.names), usable_max)
        return Reuse(
            space=tracked.prefix.space_in(attached.spaces, self._ranks[0]),
            answered=have is not None,
            declined=found.declined,
            failed=False,
            engine=engine,
            reused=stop,
            stored=min(found.prefix_blocks, usable_max),
            missed=(have.names[stop], Presence(int(have.presence[stop]))) if have is not None and behind else None,
            last=have.names[stop - 1] if have is not None and engine < stop <= len(have.names) else None,
        )

    def _touch(self, tracked: Tracked, stop: int) -> None:
        """What is used counts as used, also where vLLM had it in memory."""
        assert self._attached is not None
        for have in tracked.found.ranks:
            names = [*have.names[: tracked.found.prefix_blocks], *([have.kept[stop]] if stop in have.kept else [])]
            if names:
                ticket = self._attached.ticket(have.space, tracked.prefix.terms.traffic_class)
                self._attached.publisher.offer_touch(ticket, names)

    def _due(self, tracked: Tracked, before: int, computed: int) -> tuple[list[int], tuple[int, ...]]:
        """Which blocks to save of a request that will be ``computed``, and the boundaries whose windows to save.

        A window is saved by the step that comes to its boundary, since the next one may let its pages go: where a
        prompt ends, and then once for each window that was generated. Where a prompt ends with a block, also a block
        before: the same prompt, sent again, has its last token computed.
        """
        stop, present = computed // self._block_tokens, tracked.found.present
        blocks = [at for at in range(tracked.saved, stop) if not (at < present.size and present[at])]
        tracked.saved = max(tracked.saved, stop)
        prompt = tracked.request.num_prompt_tokens
        if not self._window_blocks:
            return blocks, ()
        ends = {(prompt - 1) // self._block_tokens, prompt // self._block_tokens}
        wanted = {at for at in ends if before < at * self._block_tokens <= computed}
        if computed > prompt and stop - max(tracked.state, *ends) >= self._window_blocks:
            wanted.add(stop)
        have = tracked.found.kept if self._settings.keep_windows else tracked.found.states
        states = tuple(sorted(wanted - have - {0}))
        tracked.state = max(tracked.state, *wanted, 0)
        return blocks, states

    def _move(
        self,
        tracked: Tracked,
        tables: Sequence[Sequence[int]],
        blocks: Sequence[int],
        stop: int,
        states: tuple[int, ...],
    ) -> Move:
        tokens = tracked.request.all_token_ids[: stop * self._block_tokens]
        prefix = replace(tracked.prefix, tokens=list(tokens))
        return Move(
            tracked.request.request_id, prefix, tuple(tuple(pages[:stop]) for pages in tables), blocks, stop, states
        )


def _both(one: Found, other: Found) -> Found:
    """What two ranks both have."""
    return Found(
        one.present & other.present,
        one.states & other.states,
        one.kept & other.kept,
        one.ranks + other.ranks,
        one.declined or other.declined,
    )


def _blocks_good(load: Move, request_id: str, output: KVConnectorOutput) -> int:
    """Blocks that a request still has of a load: all before ``stop``, if it did not fail."""
    if request_id in output.failed_recving:
        return 0
    bad = output.invalid_block_ids
    return min((at for at in load.blocks if any(pages[at] in bad for pages in load.tables)), default=load.stop)


def _inputs_of(request: Request) -> tuple[Input, ...] | None:
    """Images and the like by their digests, and the salt; None where a digest is not one of the content."""
    inputs = []
    if request.cache_salt:
        inputs.append(
            Input(
                0,
                blake3(request.cache_salt.encode("utf-8", "surrogatepass"), derive_key_context=_SALT_CONTEXT).digest(),
            )
        )
    for feature in request.mm_features:
        name = feature.identifier
        if len(name) < 64 or not all(character in "0123456789abcdef" for character in name[-64:]):
            return None
        digest = blake3(f"{feature.modality} {name}".encode(), derive_key_context=_INPUT_CONTEXT).digest()
        inputs.append(Input(feature.mm_position.offset, digest))
    return tuple(inputs)
