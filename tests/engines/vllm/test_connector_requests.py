"""What requests say of themselves to the connector: understood, or not cached and told; and whose KV is never mixed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.kv_hints.protocol import KvHintAction, KvHintsEnvelope
from vllm.v1.outputs import KVConnectorOutput

from kvstore.explain import explain, read_access
from kvstore.explain_cli import records_of
from kvstore.keys import TokenChain
from kvstore.store import BlockPut
from kvstore.traffic import AGENT, CHAT
from tests.support.vllm_halves import TOKENS, Ranks, a_request, config_of, full, sliding
from workers.adapters import vllm_wishes
from workers.adapters.attachment import CACHE_WISH, CLASS_WISH, TENANT_WISH, Terms
from workers.adapters.vllm_accesses import REASON_END, REASON_RANK, REASON_WINDOW, access_record
from workers.adapters.vllm_wishes import OF_OTHERS, TOLD_MAX, VALUE_SHOWN, read_wishes

TOKEN_IDS = list(range(100, 122))
ENDED: Any = {"is_finished": lambda: True, "num_output_tokens": 1}
"""What a request says of itself when it leaves."""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    both = Ranks(config_of(a_0_1=full()))
    yield both
    both.half.close()


def hints(payload: dict[str, Any]) -> KvHintsEnvelope:
    return KvHintsEnvelope("1", "m", [KvHintAction("a", "reprise", "1", payload)])


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of parameters."""
    return [record.getMessage() for record in caplog.records if record.name == vllm_wishes.__name__]


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "unclear"),
    [
        ({"tennant": "alice"}, "tennant"),
        ({TENANT_WISH: "alice", "reprise_clas": "agent"}, "reprise_clas"),
        ({TENANT_WISH: 7}, TENANT_WISH),
        ({TENANT_WISH: ["alice"]}, TENANT_WISH),
        ({TENANT_WISH: None}, TENANT_WISH),
        ({TENANT_WISH: ""}, TENANT_WISH),
        ({CLASS_WISH: "unheard"}, CLASS_WISH),
        ({CLASS_WISH: {"agent": 1}}, CLASS_WISH),
        ({CACHE_WISH: False}, CACHE_WISH),
        ({CACHE_WISH: "OFF"}, CACHE_WISH),
        ({7: "alice"}, "7"),
        (["reprise_tenant", "alice"], "kv_transfer_params"),
        ("alice", "kv_transfer_params"),
    ],
)
def test_what_is_not_understood_keeps_a_request_out_of_every_space(
    ranks: Ranks, parameters: Any, unclear: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is neither looked up nor saved, above all not in the space that all share; the log names what was written
    once, and every request is counted.
    """
    for rank in range(2):
        ranks.put(rank, TOKEN_IDS, [0, 1, 2])
    for number in range(3):
        request = a_request(TOKEN_IDS, f"r{number}", kv_transfer_params=parameters)
        ranks.half.arrive(request)
        assert ranks.matched(request) == (0, False)
        assert ranks.half._requests == {}
    told = complaints(caplog)
    assert len(told) == 1
    assert repr(unclear) in told[0]
    stats = ranks.half.stats()
    assert stats is not None
    assert stats.data["parameters_unclear"] == 3


@pytest.mark.parametrize(
    ("parameters", "hinted", "terms"),
    [
        (None, None, Terms(None, CHAT)),
        ({}, None, Terms(None, CHAT)),
        ({TENANT_WISH: "alice", CLASS_WISH: "agent", CACHE_WISH: "on"}, None, Terms("alice", AGENT)),
        ({"do_remote_decode": True, "remote_host": "h", TENANT_WISH: "alice"}, None, Terms("alice", CHAT)),
        (None, {TENANT_WISH: "bob"}, Terms("bob", CHAT)),
        ({TENANT_WISH: "alice"}, {TENANT_WISH: "bob", CLASS_WISH: "agent"}, Terms("alice", AGENT)),
        ({CACHE_WISH: "off"}, None, None),
    ],
)
def test_what_is_understood_is_taken(
    ranks: Ranks, parameters: Any, hinted: dict[str, Any] | None, terms: Terms | None
) -> None:
    """Parameters before hints; what vLLM's own connectors say in the same place is nobody's mistake."""
    wishes = read_wishes(ranks.half._settings, parameters, None if hinted is None else hints(hinted))
    assert (wishes.terms, wishes.unclear) == (terms, ())


def test_a_hint_that_is_misspelt_is_told_as_a_parameter_is(ranks: Ranks) -> None:
    """Whoever writes hints may misspell as well."""
    (unclear,) = read_wishes(ranks.half._settings, None, hints({"tenant": "bob"})).unclear
    assert (unclear.name, unclear.value) == ("tenant", "'bob'")


@pytest.mark.parametrize(
    "parameters",
    [lambda number: {f"{number}{'x' * 1000}\n": 1}, lambda number: {CLASS_WISH: f"{number}\n{'x' * 1000}"}],
    ids=["names", "values"],
)
def test_a_client_cannot_flood_the_log(ranks: Ranks, parameters: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Names and values that are not understood are told up to a bound, and shortened; all are counted."""
    for number in range(2 * TOLD_MAX):
        ranks.half.arrive(a_request(TOKEN_IDS, kv_transfer_params=parameters(number)))
    told = complaints(caplog)
    assert len(told) == TOLD_MAX
    assert all("\n" not in line and len(line) < 400 for line in told)
    assert ranks.half._complaints.count == 2 * TOLD_MAX


def test_the_log_says_what_was_written_and_what_may_be(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each value, however often it comes: with the classes that are configured, and values cut short."""
    for value in ["batch", "bogus", "batch", 10**5000, ["x" * 1000] * 1000]:
        ranks.half.arrive(a_request(TOKEN_IDS, kv_transfer_params={CLASS_WISH: value}))
    told = complaints(caplog)
    assert len(told) == 4
    assert [f"value='{name}'" in line for name, line in zip(["batch", "bogus"], told, strict=False)] == [True, True]
    assert all("expected=one of agent, chat, or 16..255" in line for line in told)
    assert all(len(line) < 300 + VALUE_SHOWN for line in told)


def test_a_request_that_is_not_cached_is_in_the_access_log(tmp_path: Path) -> None:
    """What was not understood, or that it wished so: its client, who was told nothing, can be answered."""
    log = tmp_path / "access.jsonl"
    both = Ranks(config_of(a_0_1=full()), access_log=log)
    for name, parameters in [("unclear", {CLASS_WISH: "batch"}), ("off", {CACHE_WISH: "off"})]:
        request = a_request(TOKEN_IDS, name, kv_transfer_params=parameters, **ENDED)
        both.half.arrive(request)
        assert both.matched(request) == (0, False)
        both.half.leave(request)
    assert both.half._uncached == {}
    both.half.close()
    unclear, off = (explain(read_access(next(records_of(log, name))), None, {}) for name in ("unclear", "off"))
    assert (unclear.cause, off.cause) == ("parameters", "off")
    assert "'reprise_class' was 'batch', expected is one of agent, chat" in unclear.sentence


def test_what_others_say_is_in_their_sources() -> None:
    """The names that are nobody's mistake are those of this vLLM's own connectors."""
    import vllm.distributed.kv_transfer.kv_connector.v1 as package

    sources = "".join(path.read_text() for path in Path(str(package.__file__)).parent.rglob("*.py"))
    assert [name for name in sorted(OF_OTHERS) if name not in sources] == []


# --- whose KV it is ---------------------------------------------------------------------------------------------------


def test_adapters_and_none_never_mix(ranks: Ranks, tmp_path: Path) -> None:
    """Blocks that were saved under one LoRA adapter are found under it only, whatever its name and path: not under
    another, not without one.
    """
    requests = {}
    for name, content in [("one", b"one"), ("other", b"other"), ("copy", b"one")]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(content)
        adapter = LoRARequest(name, len(requests) + 1, str(folder))
        requests[name] = a_request(TOKEN_IDS, name, lora_request=adapter)
        while ranks.half._adapters.of(adapter) is None:
            pass
    requests["none"] = a_request(TOKEN_IDS, "none")
    ranks.half.arrive(requests["one"])
    prefix = ranks.half._requests["one"].prefix
    assert ranks.half._attached is not None
    for base in ranks.bases:
        space = prefix.space_in(ranks.half._attached.spaces, base)
        ranks.store.register_space(space.space)
        names = TokenChain(space.id, TOKENS, TOKEN_IDS).names
        ranks.store.put(space.id, [BlockPut(name, TOKENS, b"x") for name in names[:3]], traffic_class=CHAT)
    found = {}
    for name, request in requests.items():
        again = replace_id(request, f"{name} again")
        ranks.half.arrive(again)
        found[name] = ranks.matched(again)[0]
    assert found == {"one": 3 * TOKENS, "other": 0, "copy": 3 * TOKENS, "none": 0}


def test_the_first_request_of_an_adapter_waits_until_it_has_a_name(ranks: Ranks, tmp_path: Path) -> None:
    """It is looked up and saved like any other, once its adapter's files are hashed; when that takes longer than a
    look-up may, it is computed.
    """
    gate = threading.Event()
    ranks.half._adapters._pool.submit(gate.wait, 20.0)
    for number, name in [(1, "first"), (2, "late")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
        request = a_request(TOKEN_IDS, name, lora_request=LoRARequest(name, number, str(tmp_path / name)))
        ranks.half.arrive(request)
        assert ranks.half.match(request, 0) == (None, False)
        if name == "late":
            ranks.half._unnamed[name] = 0.0  # its deadline is over
            assert ranks.half.match(request, 0) == (0, False)
            assert name not in ranks.half._requests
            break
        gate.set()
        while ranks.half.match(request, 0) == (None, False):
            pass
        assert ranks.half._requests[name].prefix.adapter is not None
        gate.clear()
        ranks.half._adapters._pool.submit(gate.wait, 20.0)
    gate.set()
    assert ranks.half._unnamed == {}


def replace_id(request: Any, name: str) -> Any:
    return SimpleNamespace(**{**vars(request), "request_id": name})


def image(offset: int, name: str = "ab" * 32, modality: str = "image") -> SimpleNamespace:
    return SimpleNamespace(identifier=name, modality=modality, mm_position=SimpleNamespace(offset=offset))


def test_images_are_part_of_what_names_a_block(ranks: Ranks) -> None:
    """The same placeholder tokens with another image, at another place, of another sort, or with none, are other blocks
    from the image on; those before it are shared.
    """
    base = ranks.bases[0]
    prefixes = []
    for number, features in enumerate(
        [[], [image(6)], [image(6, "cd" * 32)], [image(7)], [image(6, modality="audio")], [image(6), image(14)]]
    ):
        ranks.half.arrive(a_request(TOKEN_IDS, str(number), mm_features=features))
        prefixes.append(ranks.half._requests[str(number)].prefix)
    assert ranks.half._attached is not None
    space = ranks.half._attached.spaces.of(None, base)
    keys = [[name.key for name in prefix.chain_in(space).names] for prefix in prefixes]
    assert len({row[0] for row in keys}) == 1
    assert len({row[1] for row in keys}) == len({row[-1] for row in keys}) - 1 == 5
    assert keys[5][1] == keys[1][1]


# --- windows that are gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "reason", "missed"), [(22, REASON_WINDOW, 1), (12, REASON_WINDOW, 1), (4, REASON_END, 0)]
)
def test_a_hit_that_is_declined_for_want_of_a_window_is_told(length: int, reason: str, missed: int) -> None:
    """Where the blocks are stored and no window, the request is computed: counted, and in the access log by name. A
    block that could not be reused anyhow, since vLLM computes the last token, is none of that.
    """
    both = Ranks(config_of(a_0=full(), b_1=sliding(9)))
    for rank in range(2):
        both.put(rank, TOKEN_IDS, [0, 1, 2])
    request = a_request(TOKEN_IDS[:length])
    both.half.arrive(request)
    assert both.matched(request) == (0, False)
    both.half.admit(request, SimpleNamespace(get_block_ids=lambda: ([1] * 6, [2] * 6)), 0)
    reuse = both.half._requests["r"].reuse
    assert reuse is not None
    assert reuse.reason == reason
    stats = both.half.stats()
    assert stats is not None
    assert stats.data.get("windows_missed", 0) == missed
    ended: Any = SimpleNamespace(**vars(request), is_finished=lambda: True, num_output_tokens=1)
    told = explain(read_access(access_record(ended, reuse, 1.0).to_json()), None, {})
    assert ("its window is not stored" in told.sentence) == (missed > 0)
    both.half.close()


# --- which cache gave it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("computed", "stored", "tokens", "last", "reason", "way"),
    [
        (0, 3, (0, 12, 10), 2, "never", "blocks"),
        (1, 3, (4, 8, 10), 2, "never", "blocks"),
        (2, 0, (8, 0, 14), None, "never", "engine"),
        (3, 3, (12, 0, 10), None, "never", "engine"),
        (5, 0, (20, 0, 2), None, REASON_END, "engine"),
        (0, 0, (0, 0, 22), None, "never", "cold"),
    ],
)
def test_what_vllm_had_itself_is_not_told_as_given_by_the_store(
    tmp_path: Path,
    computed: int,
    stored: int,
    tokens: tuple[int, int, int],
    last: int | None,
    reason: str,
    way: str,
) -> None:
    """``computed`` blocks were in vLLM's own prefix cache, ``stored`` in the store: the record keeps both apart, names
    only a block that was loaded as the last, agrees with its first miss, and leaves out what was not measured.
    """
    log = tmp_path / "access.jsonl"
    both = Ranks(config_of(a_0_1=full()), access_log=log)
    for rank in range(2 if stored else 0):
        both.put(rank, TOKEN_IDS, list(range(stored)))
    request = a_request(TOKEN_IDS, **ENDED)
    both.half.arrive(request)
    found, _ = both.matched(request, computed * TOKENS)
    assert found is not None
    both.half.admit(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5, 6],)), found)
    both.half.hear(KVConnectorOutput(finished_recving={"r"} if found else set()))
    assert both.half._attached is not None
    space = both.half._requests["r"].prefix.space_in(both.half._attached.spaces, both.bases[0])
    names = TokenChain(space.id, TOKENS, TOKEN_IDS).names
    both.half.leave(request)
    both.half.close()
    row = json.loads(log.read_text())
    assert (row["engine_tokens"], row["hit_tokens"], row["miss_tokens"]) == tokens
    assert row["last_hit"] == (None if last is None else names[last].key.hex())
    assert (row["reason"], row["way"]) == (reason, way)
    assert (row["first_miss"] or {"presence": REASON_END})["presence"] == reason
    assert (row["queued_s"], row["compute_s"], row["published_blocks"]) == (None, None, None)
    assert (row["load_s"] is None) == (found == 0)


def test_a_block_that_another_rank_lacks_is_not_told_as_unused(tmp_path: Path) -> None:
    """The first rank has it, so its look-up names no reason."""
    log = tmp_path / "access.jsonl"
    both = Ranks(config_of(a_0_1=full()), access_log=log)
    for rank, blocks in enumerate([[0, 1, 2], [0, 1]]):
        both.put(rank, TOKEN_IDS, blocks)
    request = a_request(TOKEN_IDS, **ENDED)
    both.half.arrive(request)
    assert both.matched(request) == (2 * TOKENS, True)
    both.half.admit(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5, 6],)), 2 * TOKENS)
    both.half.leave(request)
    both.half.close()
    row = json.loads(log.read_text())
    assert (row["first_miss"]["index"], row["first_miss"]["presence"]) == (2, "present")
    assert REASON_RANK in explain(read_access(row), None, {}).sentence
