"""Any JSON, any headers: the gateway answers with a completion or a 4xx in OpenAI's shape, never with a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.byte_tokenizer import write_tokenizer
from tests.support.gateway_stack import Stack, running_stack

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
        st.sampled_from(["user", "assistant", "tool", "text", "function", "auto", "<|im_end|>", "tiny"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip
PART = st.fixed_dictionaries(
    {}, optional={"type": st.one_of(st.just("text"), JSON), "text": st.one_of(st.text(), JSON)}
)
CALL = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": st.text(max_size=5)}, optional={"arguments": st.one_of(st.text(), JSON)}
        )
    }
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": st.one_of(st.text(max_size=20), st.lists(PART, max_size=3), JSON),
        "name": st.one_of(st.text(max_size=5), JSON),
        "tool_calls": st.one_of(st.lists(CALL, max_size=2), JSON),
        "tool_call_id": JSON,
    },
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.one_of(st.floats(0, 2), JSON),
    "top_p": st.one_of(st.floats(0, 1), JSON),
    "seed": st.one_of(st.integers(-(2**63), 2**63 - 1), JSON),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=5), JSON),
    "stream": st.one_of(st.booleans(), JSON),
    "stream_options": st.one_of(st.fixed_dictionaries({"include_usage": st.booleans()}), JSON),
    "user": st.one_of(st.text(max_size=10), JSON),
    "tools": st.one_of(st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=2), max_size=2), JSON),
    "tool_choice": JSON,
    "response_format": JSON,
    "n": JSON,
    "logit_bias": JSON,
}
CHAT = st.fixed_dictionaries(
    {"model": st.just("tiny"), "max_tokens": st.integers(1, 3)},
    optional={"messages": st.one_of(st.lists(MESSAGE, max_size=3), JSON), **FIELDS},
)
TEXT = st.fixed_dictionaries(
    {"model": st.just("tiny"), "max_tokens": st.integers(1, 3)},
    optional={"prompt": st.one_of(st.text(), st.lists(st.integers(-1, 330)), JSON), **FIELDS},
)
BODY = st.one_of(
    CHAT.map(lambda body: ("/v1/chat/completions", body)),
    TEXT.map(lambda body: ("/v1/completions", body)),
    st.tuples(st.sampled_from(["/v1/chat/completions", "/v1/completions"]), JSON),
)
HEADERS = st.dictionaries(
    st.sampled_from(["x-reprise-class", "x-reprise-cache", "x-reprise-fidelity", "x-request-id", "authorization"]),
    st.one_of(st.sampled_from(["agent", "off", "exact"]), st.text("abc :;\u00e9", max_size=8).map(str.strip)),
    max_size=2,
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(write_tokenizer(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[httpx.Client]:
    with stack.client() as shared:
        yield shared


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    assert answer.headers["x-request-id"].startswith("req-")
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n")
        return
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@given(BODY, HEADERS)
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
def test_any_body(client: httpx.Client, body: tuple[str, Any], headers: dict[str, str]) -> None:
    """JSON of nearly the right shape, with wrong values anywhere."""
    path, value = body
    raw = [(name, text.encode("latin-1")) for name, text in headers.items()]
    check(client.post(path, content=json.dumps(value), headers=raw))


@given(st.binary(max_size=200))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_any_bytes(client: httpx.Client, data: bytes) -> None:
    """Bytes that are mostly no JSON at all."""
    answer = client.post("/v1/chat/completions", content=data)
    assert answer.status_code == 400
    check(answer)


@given(st.text(max_size=200))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_any_text_is_served(client: httpx.Client, text: str) -> None:
    """Any text at all is a valid message, and hit + miss is the prompt."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
