"""What requests say of themselves to the connector: understood, or not cached and told; and whose KV is never mixed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.kv_hints.protocol import KvHintAction, KvHintsEnvelope

from kvstore.explain import explain, read_access
from kvstore.keys import TokenChain
from kvstore.store import BlockPut
from kvstore.traffic import AGENT, CHAT
from tests.support.vllm_halves import TOKENS, Ranks, a_request, config_of, full, sliding
from workers.adapters import vllm_wishes
from workers.adapters.attachment import CACHE_WISH, CLASS_WISH, TENANT_WISH, Terms
from workers.adapters.vllm_accesses import REASON_END, REASON_WINDOW, access_record
from workers.adapters.vllm_wishes import NAMES_TOLD_MAX, OF_OTHERS, read_wishes

TOKEN_IDS = list(range(100, 122))


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
    assert read_wishes(ranks.half._settings, None, hints({"tenant": "bob"})).unclear == ("tenant",)


def test_a_client_cannot_flood_the_log(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """Names that are not understood are told up to a bound, and shortened; all are counted."""
    for number in range(2 * NAMES_TOLD_MAX):
        ranks.half.arrive(a_request(TOKEN_IDS, kv_transfer_params={f"{number}{'x' * 1000}\n": 1}))
    told = complaints(caplog)
    assert len(told) == NAMES_TOLD_MAX
    assert all("\n" not in line and len(line) < 400 for line in told)
    assert ranks.half._complaints.count == 2 * NAMES_TOLD_MAX


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
