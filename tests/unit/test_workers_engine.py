"""The engine on a model of integers: any wrong, missing or misplaced KV would change its tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.store import FLAG_APPROXIMATE, GetStatus
from kvstore.testing import MemoryStore
from tests.support.fake_model import FakeModel, fake_choose, fake_memory
from tests.support.faulty_store import FaultyStore, forget_states
from tests.support.waiting import WAIT_S
from tests.support.worker_bench import Answer, Bench
from workers.batch import Slice
from workers.errors import Rejected
from workers.layout import KvMemory
from workers.protocol import Finished, FirstToken, HandedOff, Tokens, WorkerFailure
from workers.scheduler import CostModel
from workers.slots import Slots

HYBRID = FakeModel("ssgsg", window=8)
FULL = FakeModel("ggg")
TOKENS = random.Random(7).choices(range(1000), k=1200)


def bench(store: Any, model: FakeModel = HYBRID, **options: Any) -> Bench:
    return Bench(store, model, fake_memory, fake_choose, **options)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(state_ttl_s=1e9)


@pytest.fixture
def worker(store: MemoryStore) -> Iterator[Bench]:
    with bench(store) as made:
        yield made


@pytest.mark.parametrize("model", [HYBRID, FULL], ids=["hybrid", "full"])
def test_every_prompt_length_gives_the_cold_answer_and_a_whole_account(model: FakeModel) -> None:
    """Lengths 1..1025 on one growing prefix, states kept or lost by turns: hit + miss == prompt, tokens as computed
    cold wherever the plan was exact, and a hit wherever something is stored."""
    store = MemoryStore(state_ttl_s=1e9)
    cold = FakeModel(model.kinds, model.window)
    with bench(store, model, fidelity="exact") as worker:
        expected = first_tokens(cold, 1025)
        for length in range(1, 1026):
            if length % 7 == 0:
                forget_states(store)
            answer = worker.prefill(TOKENS[:length])
            reuse = answer.reuse
            assert reuse.hit_tokens + reuse.miss_tokens == reuse.prompt_tokens == length
            assert answer.first.token == expected[length - 1], length
            assert reuse.exact
            if length > model.geometry.exact_replay_tokens + 17:
                assert reuse.hit_tokens >= (length - 1) // 16 * 16
            if length % 7 and length > 1:
                assert reuse.hit_tokens == length - 1
            assert answer.handed_off.published


def first_tokens(model: FakeModel, count: int) -> list[int]:
    """The token after every prefix of TOKENS, by one cold forward."""
    slots = Slots(-(-count // 16), 16)
    table = slots.allocate(count)
    return model.forward(fake_memory(model.geometry, slots), [Slice(TOKENS[:count], 0, table, logits="all")])


@settings(max_examples=60)
@given(st.data())
def test_any_sequence_of_requests_and_losses_gives_the_cold_answers(data: st.DataObject) -> None:
    """Prompts that share prefixes, answers resumed as prompts, losses of blocks and states between: exact plans equal
    the cold run, and approximate ones say so."""
    model = data.draw(st.sampled_from([HYBRID, FULL, FakeModel("sgs", window=5)]))
    fidelity = data.draw(st.sampled_from(["bounded", "exact"]))
    store = MemoryStore(state_ttl_s=1e9)
    options = {
        "block_tokens": data.draw(st.sampled_from([4, 16])),
        "chunk_tokens": data.draw(st.sampled_from([20, 64])),
    }
    with bench(store, model, fidelity=fidelity, pages=300, **options) as worker:
        conversations = [TOKENS[:40], TOKENS[100:130]]
        for _ in range(data.draw(st.integers(2, 6))):
            lost = data.draw(st.sampled_from(["nothing", "states", "block"]))
            if lost == "states":
                forget_states(store)
            elif lost == "block" and store._blocks:
                key = data.draw(st.sampled_from(sorted(store._blocks)))
                store.delete(store._blocks[key].space_id, [key])
            at = data.draw(st.integers(0, len(conversations) - 1))
            prompt = conversations[at] + TOKENS[500 : 500 + data.draw(st.integers(0, 40))]
            first = worker.prefill(prompt)
            expected = model.expected(prompt, 6)
            assert first.reuse.hit_tokens + first.reuse.miss_tokens == len(prompt)
            rest = worker.decode([*prompt, first.first.token], len(prompt), 5)
            if first.reuse.exact:
                assert first.tokens == expected[:1]
            if first.reuse.exact and rest.reuse.exact:
                assert rest.tokens == expected[1:]
            if fidelity == "exact":
                assert first.reuse.exact
                assert rest.reuse.exact
            conversations.append([*prompt, *first.tokens, *rest.tokens][:200])
        flags = {block.flags for block in store._blocks.values()} | {state.flags for state in store._states.values()}
        assert fidelity == "bounded" or flags <= {0}


def test_decode_resumes_from_the_prefill_of_another_worker(store: MemoryStore) -> None:
    """Nothing but tokens and the store passes between the two; only the first token's KV is computed."""
    with bench(store) as prefill, bench(store) as decode:
        first = prefill.prefill(TOKENS[:100])
        assert first.handed_off.published
        rest = decode.decode([*TOKENS[:100], first.first.token], 100, 9)
        assert [*first.tokens, *rest.tokens] == HYBRID.expected(TOKENS[:100], 10)
        resumed = rest.of(Finished)[0].resumed
        assert (resumed.way, resumed.miss_tokens, resumed.replayed_tokens) == ("state", 1, 0)


@pytest.mark.parametrize("states_lost", [False, True])
def test_another_worker_continues_an_answer_cut_in_the_middle(store: MemoryStore, states_lost: bool) -> None:
    """A decode worker is gone after some tokens: another one goes on, from what was persisted, with the same tokens."""
    expected = HYBRID.expected(TOKENS[:100], 60)
    with bench(store) as one, bench(store, fidelity="exact") as other:
        first = one.prefill(TOKENS[:100]).first.token
        sequence, cut = one.start_decode([*TOKENS[:100], first], 100, 59)
        while len(cut.tokens) < 40:
            one.engine.step()
        one.engine.cancel(sequence)
        one.settle()
        assert one.publisher.flush(sequence.ticket, WAIT_S)
        if states_lost:
            forget_states(store)
        done = [*TOKENS[:100], first, *cut.tokens]
        rest = other.decode(done, 100, 60 - len(cut.tokens) - 1)
        assert [first, *cut.tokens, *rest.tokens] == expected
        assert rest.reuse.hit_tokens >= 128  # the blocks that filled while decoding were persisted at once


def test_end_of_output_state_serves_the_next_turn(worker: Bench) -> None:
    """Turn 2 begins with turn 1's prompt and answer: all but its last token, whose KV nobody computed, is a hit."""
    answer = worker.answer(TOKENS[:100], 20)
    turn = [*TOKENS[:100], *answer, *TOKENS[300:310]]
    again = worker.prefill(turn)
    assert (again.reuse.hit_tokens, again.reuse.way, again.reuse.exact) == (119, "state", True)
    assert again.tokens == HYBRID.expected(turn, 1)


def test_bounded_replay_is_flagged_wherever_it_goes(store: MemoryStore) -> None:
    """Blocks and states computed downstream of a bounded replay are approximate; an exact request does not see them,
    and what it computes takes their place."""
    with bench(store) as worker:
        worker.prefill(TOKENS[:100])
        forget_states(store)
        bounded = worker.prefill(TOKENS[:200])
        assert (bounded.reuse.way, bounded.reuse.exact, bounded.reuse.replayed_tokens) == ("replay", False, 8)
        flags = [block.flags for block in sorted(store._blocks.values(), key=lambda block: block.name.index)]
        assert flags == [0] * 6 + [FLAG_APPROXIMATE] * 6
        assert {state.flags for state in store._states.values()} == {FLAG_APPROXIMATE}
        onward = worker.prefill(TOKENS[:220])
        assert (onward.reuse.way, onward.reuse.exact) == ("state", False)
        exact = worker.prefill(TOKENS[:220], fidelity="exact")
        assert exact.reuse.exact
        assert exact.reuse.hit_tokens == 96
        assert exact.tokens == HYBRID.expected(TOKENS[:220], 1)
        assert {block.flags for block in store._blocks.values()} == {0}


def test_tokens_chosen_after_a_bounded_resume_are_not_called_exact(store: MemoryStore) -> None:
    """The prompt was exact, its state is gone: what decode chooses after a bounded replay says so, token by token."""
    with bench(store) as worker:
        first = worker.prefill(TOKENS[:100])
        assert first.reuse.exact
        forget_states(store)
        rest = worker.decode([*TOKENS[:100], first.first.token], 100, 5)
        assert rest.reuse.way == "replay"
        assert [event.exact for event in rest.of(Tokens)] == [False] * 5
        assert not rest.reuse.exact
        again = worker.decode([*TOKENS[:100], first.first.token], 100, 5, fidelity="exact")
        assert [event.exact for event in again.of(Tokens)] == [True] * 5


def test_a_preempted_answer_that_comes_back_by_a_bounded_replay_is_not_called_exact(store: MemoryStore) -> None:
    """Exact until it gave way, approximate after: the account of the whole says approximate."""
    with bench(store, pages=14, fetch_inline=True) as worker:
        answers = [worker.start_decode(TOKENS[begin : begin + 41], 40, 120)[1] for begin in range(0, 160, 40)]
        worker.settle()
        assert worker.engine.counts.preemptions > 0
        wrong = [
            answer
            for begin, answer in zip(range(0, 160, 40), answers, strict=True)
            if answer.tokens != HYBRID.expected(TOKENS[begin : begin + 41], 120)
        ]
        assert wrong, "no answer came back by a bounded replay"
        assert not any(answer.reuse.exact for answer in wrong)
        assert all(answer.of(Tokens)[0].exact and not answer.of(Tokens)[-1].exact for answer in wrong)


def test_bounded_replay_serves_stored_global_keys(store: MemoryStore) -> None:
    """The answer is that of a forward over exact global KV whose windows begin at the replay: what the replay computes
    for the global layers is dropped, never put in the place of what was stored."""
    slots = Slots(16, 16)
    memory, table = fake_memory(HYBRID.geometry, slots), slots.allocate(200)
    HYBRID.forward(memory, [Slice(TOKENS[:96], 0, table, logits="none")])
    expected = HYBRID.forward(memory, [Slice(TOKENS[88:100], 88, table, write_floor=96, window_floor=88)])
    with bench(store, chunk_tokens=24) as worker:
        worker.prefill(TOKENS[:96])
        forget_states(store)
        answer = worker.prefill(TOKENS[:100])
        assert (answer.reuse.way, answer.reuse.replayed_tokens) == ("replay", 8)
        assert answer.tokens == expected
        assert answer.tokens != HYBRID.expected(TOKENS[:100], 1)


def test_cache_off_neither_reads_nor_writes(store: MemoryStore) -> None:
    """The store is not called at all, whatever it holds."""
    faulty = FaultyStore(store)
    with bench(faulty) as worker:
        answer = worker.prefill(TOKENS[:100], cache=False)
        assert (answer.reuse.reason, answer.reuse.hit_tokens) == ("off", 0)
        assert not answer.handed_off.published
        assert worker.answer(TOKENS[:100], 5, cache=False) == HYBRID.expected(TOKENS[:100], 5)
        assert faulty.calls == []
        assert not store._blocks


def test_round_trips_of_a_request_are_few(store: MemoryStore) -> None:
    """One lookup, one get and one state, however long the prompt."""
    faulty = FaultyStore(store)
    with bench(faulty) as worker:
        worker.prefill(TOKENS[:1000])
        faulty.calls.clear()
        worker.prefill(TOKENS[:1000])
        assert sorted(call for call in faulty.calls if not call.startswith(("put", "touch"))) == [
            "get_into",
            "get_state",
            "lookup",
        ]


@pytest.mark.parametrize("status", [GetStatus.MISS, GetStatus.CORRUPT, GetStatus.UNREACHABLE, GetStatus.DEADLINE])
@pytest.mark.parametrize("every", [2, 5])
def test_failed_gets_shorten_the_hit_and_never_change_the_answer(
    store: MemoryStore, status: GetStatus, every: int
) -> None:
    """Every n-th get fails: what counts as a hit is what was loaded, and outputs equal those without a cache."""
    faulty = FaultyStore(store)
    faulty.fail_get = lambda number: number % every == 0
    faulty.get_status = status
    with bench(faulty, fidelity="exact") as worker:
        for length in range(30, 400, 37):
            answer = worker.prefill(TOKENS[:length])
            assert answer.tokens == HYBRID.expected(TOKENS[:length], 1)
            assert answer.reuse.hit_tokens + answer.reuse.miss_tokens == length
            assert answer.reuse.hit_tokens <= every * 16 + 15


@pytest.mark.parametrize("states", [True, False])
def test_when_all_gets_fail_nothing_is_a_hit(store: MemoryStore, states: bool) -> None:
    """The lookup says present, the loads fail: hit 0, all computed, and the answer is right."""
    faulty = FaultyStore(store)
    with bench(faulty) as worker:
        worker.prefill(TOKENS[:100])
        faulty.fail_get = lambda number: True
        faulty.fail_state = lambda number: not states
        answer = worker.prefill(TOKENS[:100])
        assert (answer.reuse.hit_tokens, answer.reuse.way, answer.reuse.reason) == (0, "cold", "never")
        assert answer.tokens == HYBRID.expected(TOKENS[:100], 1)


def test_store_that_is_down_costs_misses_only(store: MemoryStore) -> None:
    """Requests are served and say why nothing was reused; when the store is back, the next request is stored again."""
    faulty = FaultyStore(store)
    with bench(faulty) as worker:
        faulty.down = True
        answer = worker.prefill(TOKENS[:100])
        assert (answer.reuse.hit_tokens, answer.reuse.reason) == (0, "unreachable")
        assert not answer.handed_off.published
        assert answer.tokens == HYBRID.expected(TOKENS[:100], 1)
        faulty.down = False
        worker.publisher._paused_until_s = 0.0
        assert worker.prefill(TOKENS[:100]).handed_off.published
        assert worker.prefill(TOKENS[:100]).reuse.hit_tokens == 99


def test_slow_lookup_ends_at_its_deadline(store: MemoryStore) -> None:
    """The request is computed after the lookup's deadline, not after the store's answer."""
    faulty = FaultyStore(store)
    with bench(faulty, lookup_deadline_s=0.05, settle_deadline_s=0.2) as worker:
        faulty.delay_s = 0.5
        answer = worker.prefill(TOKENS[:100])
        assert (answer.reuse.hit_tokens, answer.reuse.reason) == (0, "deadline"), "not what the store had to say"
        assert answer.first.load_s > 0.04


class TickingModel(FakeModel):
    """Every forward takes a second of a clock of its own."""

    now_s = 100.0

    def forward(self, memory: KvMemory, slices: Sequence[Slice]) -> list[int]:
        self.now_s += 1.0
        return super().forward(memory, slices)


@pytest.mark.parametrize("cache", [True, False])
def test_a_short_prompt_overtakes_a_long_one_and_its_wait_is_told(store: MemoryStore, cache: bool) -> None:
    """It is answered a step after it was fetched; queued + load + compute is the time until its first token, and the
    long one's answer does not change."""
    model = TickingModel("ssgsg", 8)
    with bench(store, model, pages=128, fetch_inline=True) as worker:
        worker.engine._monotonic_s = worker.fetcher._monotonic_s = lambda: model.now_s
        _, long = worker.start_prefill(TOKENS)
        while worker.engine.counts.tokens_computed < 200:
            worker.engine.step()
        began_s, steps_before = model.now_s, worker.engine.counts.steps
        _, short = worker.start_prefill(TOKENS[300:330], cache=cache)
        while not short.of(FirstToken):
            worker.engine.step()
        took = short.first
        assert took.queued_s + took.load_s + took.compute_s == pytest.approx(model.now_s - began_s)
        assert 0.0 < took.compute_s < 1.0, "its share of one step"
        assert not long.of(FirstToken)
        assert worker.engine.counts.steps == steps_before + (2 if cache else 1), "while it is fetched another goes on"
        worker.settle()
        assert long.tokens == HYBRID.expected(TOKENS, 1)
        assert short.tokens == HYBRID.expected(TOKENS[300:330], 1)


def test_load_slower_than_computing_is_declined(store: MemoryStore) -> None:
    """The lookup carries the estimate; a request that would lose by loading computes, and says so."""
    faulty = FaultyStore(store)
    with bench(faulty) as worker:
        worker.prefill(TOKENS[:200])
        worker.engine._cost = CostModel(token_s=1e-3)
        faulty.load_s_estimate = 1000.0
        answer = worker.prefill(TOKENS[:200])
        assert (answer.reuse.hit_tokens, answer.reuse.reason) == (0, "declined")
        faulty.load_s_estimate = 1e-9
        assert worker.prefill(TOKENS[:200]).reuse.hit_tokens == 199


def test_spaces_that_differ_share_nothing(store: MemoryStore) -> None:
    """Other weights, dtype, layout (groups), block length, epoch or tenant: no hit, ever."""
    others: list[tuple[FakeModel, dict[str, Any], dict[str, Any]]] = [
        (FakeModel("ssgsg", 8), {"epoch": 1}, {}),
        (FakeModel("ssgsg", 8), {"block_tokens": 8}, {}),
        (FakeModel("ssggg", 8), {}, {}),
        (FakeModel("ssgsg", 9), {}, {}),
        (FakeModel("ssgsg", 8), {}, {"tenant": "b"}),
        (FakeModel("ssgsg", 8), {}, {}),
    ]
    others[-1][0].weights_digest = b"other weights"
    with bench(store) as worker:
        worker.prefill(TOKENS[:100])
        worker.prefill(TOKENS[:100], tenant="a")
    for model, options, request in others:
        with bench(store, model, **options) as other:
            answer = other.prefill(TOKENS[:100], **request)
            assert (answer.reuse.hit_tokens, answer.reuse.reason) == (0, "never")
            assert answer.tokens == model.expected(TOKENS[:100], 1)
    with bench(store) as worker:
        assert worker.prefill(TOKENS[:100], tenant="a").reuse.hit_tokens == 99


def test_refused_puts_leave_a_hole_that_the_next_request_fills(store: MemoryStore) -> None:
    """Block 5 of 10 is refused once: lookup goes as far as 5, then, offered again, as far as 10."""
    faulty = FaultyStore(store)
    faulty.fail_put = lambda number: number == 6
    with bench(faulty, FULL) as worker:
        assert not worker.prefill(TOKENS[:160]).handed_off.published
        forget_states(store)
        second = worker.prefill(TOKENS[:161])
        assert second.reuse.hit_tokens == 80
        assert second.handed_off.published
        forget_states(store)
        assert worker.prefill(TOKENS[:161]).reuse.hit_tokens == 160


def test_full_publish_queue_sheds_and_never_blocks_a_step(store: MemoryStore) -> None:
    """While the store hangs in a put, requests go on; what does not fit is counted, and offered again later."""
    faulty = FaultyStore(store)
    with bench(faulty, queue_bytes_max=4096, settle_deadline_s=0.05, fidelity="exact") as worker:
        faulty.gate.clear()
        answers = [worker.prefill(TOKENS[begin : begin + 200]) for begin in (0, 300, 600)]
        assert [answer.tokens for answer in answers] == [
            HYBRID.expected(TOKENS[begin : begin + 200], 1) for begin in (0, 300, 600)
        ]
        assert worker.publisher.counts.shed > 0
        assert worker.publisher.queue_bytes <= 4096
        assert not any(answer.handed_off.published for answer in answers)
        faulty.gate.set()
        again = worker.prefill(TOKENS[:100])
        assert again.tokens == HYBRID.expected(TOKENS[:100], 1)


def test_hits_are_touched_by_their_class(store: MemoryStore) -> None:
    """A chat's hit on an agent's blocks keeps them for chat's longer time."""
    with bench(store) as worker:
        worker.prefill(TOKENS[:100], traffic_class=1)
        assert {tuple(block.touches) for block in store._blocks.values()} == {(1,)}
        worker.prefill(TOKENS[:100], traffic_class=2)
        assert {tuple(sorted(block.touches)) for block in store._blocks.values()} == {(1, 2)}


def test_many_requests_at_once_are_batched_and_each_gets_its_own_answer(worker: Bench) -> None:
    """Prefills and decodes of mixed sizes share steps; nobody sees another's KV, and all slots come back."""
    drawn = random.Random(3)
    prompts = [TOKENS[begin : begin + drawn.randrange(1, 180)] for begin in range(0, 600, 60)]
    firsts = [worker.start_prefill(prompt)[1] for prompt in prompts]
    worker.settle()
    decodes = [
        worker.start_decode([*prompt, first.first.token], len(prompt), 12)[1]
        for prompt, first in zip(prompts, firsts, strict=True)
    ]
    worker.settle()
    for prompt, first, decode in zip(prompts, firsts, decodes, strict=True):
        assert [*first.tokens, *decode.tokens] == HYBRID.expected(prompt, 13)
    assert max(len(step) for step in HYBRID.forwards[-200:]) > 3


def test_out_of_slots_preempts_the_youngest_and_everybody_finishes(store: MemoryStore) -> None:
    """More decodes than the memory holds: some give way, none is lost, each is counted once."""
    with bench(store, pages=14, fidelity="exact", fetch_inline=True) as worker:
        prompts = [TOKENS[begin : begin + 40] for begin in range(0, 160, 40)]
        starts = [(prompt, HYBRID.expected(prompt, 1)[0]) for prompt in prompts]
        running = [worker.start_decode([*prompt, first], 40, 120)[1] for prompt, first in starts]
        worker.settle()
        for (prompt, first), answer in zip(starts, running, strict=True):
            assert [first, *answer.tokens] == HYBRID.expected(prompt, 121)
            assert len(answer.of(Finished)) == 1
            assert answer.reuse.prompt_tokens == 41
        assert worker.engine.counts.preemptions > 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_cancel_frees_slots_wherever_the_sequence_is(store: MemoryStore, steps: int) -> None:
    """Waiting, loading, in prefill, in replay, finishing: nothing is left, and others go on undisturbed."""
    with bench(store, pages=40, chunk_tokens=24) as worker:
        worker.prefill(TOKENS[:100])
        other = worker.start_prefill(TOKENS[500:620])[1]
        sequence, gone = worker.start_prefill(TOKENS[:300])
        for _ in range(steps):
            worker.engine.step()
            worker.engine.wait(0.05)
        worker.engine.cancel(sequence)
        worker.engine.cancel(sequence)
        worker.settle()
        assert other.tokens == HYBRID.expected(TOKENS[500:620], 1)
        assert not gone.of(HandedOff)
        assert worker.engine.in_flight == 0
        assert [outcome for _, outcome in worker.outcomes].count("cancelled") == 1


def test_ten_thousand_tokens_of_mixed_requests_leave_nothing_behind(store: MemoryStore) -> None:
    """A soak of mixed sizes, half of them cancelled: all slots are free, no request, ticket or byte is left."""
    drawn = random.Random(11)
    with bench(store, pages=60) as worker:
        for _ in range(60):
            begin = drawn.randrange(0, 900)
            sequence, _ = worker.start_prefill(TOKENS[begin : begin + drawn.randrange(1, 250)])
            for _ in range(drawn.randrange(3)):
                worker.engine.step()
            if drawn.random() < 0.5:
                worker.engine.cancel(sequence)
        worker.settle()
        assert worker.engine.load().kv_tokens == 0
        assert worker.engine.in_flight == 0
        worker.publisher.close(WAIT_S)
        assert worker.publisher.queue_bytes == 0


def test_five_percent_of_loads_fail_and_every_request_is_answered_right(store: MemoryStore) -> None:
    """A long run with random failures of gets and states: all answered, all equal to a run without a cache."""
    faulty, drawn = FaultyStore(store), random.Random(5)
    faulty.fail_get = lambda number: drawn.random() < 0.05
    faulty.fail_state = lambda number: drawn.random() < 0.05
    expected = first_tokens(FakeModel(HYBRID.kinds, HYBRID.window), 600)
    hits = 0
    with bench(faulty, fidelity="exact") as worker:
        for _ in range(150):
            length = drawn.randrange(1, 600)
            answer = worker.prefill(TOKENS[:length])
            assert answer.first.token == expected[length - 1]
            hits += answer.reuse.hit_tokens
    assert hits > 10_000


def test_too_many_requests_are_refused_and_the_rest_served(store: MemoryStore) -> None:
    """The bound holds from the first to the last, and a place is free again when somebody ends."""
    with bench(store, requests_max=3) as worker:
        answers = [worker.start_prefill(TOKENS[:20])[1] for _ in range(3)]
        with pytest.raises(Rejected) as caught:
            worker.start_prefill(TOKENS[:20])
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
        worker.settle()
        assert all(answer.finished for answer in answers)
        assert worker.prefill(TOKENS[:20]).finished


def test_what_can_never_be_served_is_refused_at_once(store: MemoryStore) -> None:
    """Beyond the context, beyond the KV memory, outside the vocabulary, a decode without its first token."""
    with bench(store, FakeModel("sg", context_tokens=300), pages=8) as worker:
        for tokens, words in (([1] * 300, "context of 300"), ([1] * 200, "KV memory of 128"), ([1000], "vocabulary")):
            with pytest.raises(Rejected, match=words) as caught:
                worker.start_prefill(tokens)
            assert caught.value.status == 400
        with pytest.raises(Rejected, match="first token"):
            worker.start_decode([1, 2], 2, 5)
        assert worker.engine.in_flight == 0


def test_logits_that_are_not_numbers_fail_one_request_only(store: MemoryStore) -> None:
    """A broken row ends its own sequence with an error, not its neighbours."""
    spoiled = HYBRID.expected(TOKENS[:50], 1)[0]

    def choose(row: int, sampling: Any, position: int) -> int:
        if row == spoiled and position == 50:
            raise ValueError("not numbers")
        return row

    with Bench(store, HYBRID, fake_memory, choose) as worker:
        bad, good = worker.start_prefill(TOKENS[:50])[1], worker.start_prefill(TOKENS[:60])[1]
        worker.settle()
        assert [type(event) for event in bad.events] == [WorkerFailure]
        assert not bad.events[0].retryable  # type: ignore[union-attr]
        assert good.finished


def test_stop_token_ends_the_answer_and_is_sent(worker: Bench) -> None:
    """Generation ends after a stop token, with reason stop; without one, with reason length."""
    expected = HYBRID.expected(TOKENS[:50], 10)
    stop = expected[6]
    answer = worker.start_decode([*TOKENS[:50], expected[0]], 50, 9, stop=[stop])[1]
    worker.settle()
    assert answer.tokens == expected[1 : expected.index(stop, 1) + 1]
    assert answer.of(Finished)[0].reason == "stop"
    full = worker.decode([*TOKENS[:50], expected[0]], 50, 9)
    assert full.of(Finished)[0].reason == "length"


def test_events_come_in_the_order_of_the_protocol(worker: Bench) -> None:
    """FirstToken, HandedOff; Tokens ..., Finished."""
    answer: Answer = worker.prefill(TOKENS[:40])
    assert [type(event) for event in answer.events] == [FirstToken, HandedOff]
    decoded = worker.decode([*TOKENS[:40], answer.first.token], 40, 3)
    assert [type(event) for event in decoded.events] == [Tokens, Tokens, Tokens, Finished]


def test_state_of_a_foreign_layout_is_computed_instead(store: MemoryStore) -> None:
    """Bytes that are verified but not this layout's never reach a slot; the request is computed."""
    with bench(store) as worker:
        worker.prefill(TOKENS[:100])
        for key, state in store._states.items():
            store._states[key] = type(state)(
                state.space_id, state.name, b"\0" * len(state.payload), state.checksum, state.flags, state.expires_s
            )
        answer = worker.prefill(TOKENS[:100])
        assert answer.reuse.hit_tokens == 0
        assert answer.tokens == HYBRID.expected(TOKENS[:100], 1)
        assert worker.engine.counts.imports_failed == 1


def test_step_that_breaks_fails_everybody_retryably_and_frees_all(store: MemoryStore) -> None:
    """After a fault of the model the engine is empty and serves the next request."""
    with bench(store) as worker:
        answer = worker.start_prefill(TOKENS[:40])[1]
        worker.engine.fail_all("broken")
        worker.settle()
        assert answer.events == [WorkerFailure(code="internal", message="broken", retryable=True)]
        assert worker.prefill(TOKENS[:40]).finished
