"""The gateway over HTTP with healthy workers: OpenAI's own client, usage, stop strings, tenants, classes, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.access_log import AccessLog
from kvstore.traffic import AGENT, CHAT, TrafficClass
from retention.trace import read_trace
from tests.support.byte_tokenizer import EOS, VOCABULARY, byte_ids, write_tokenizer
from tests.support.fake_worker import DEFAULT_ANSWER, Behaviour
from tests.support.gateway_stack import Stack, chat, running_stack

KEYS = """
[[keys]]
key = "sk-acme-0001"
tenant = "acme"
[[keys]]
key = "sk-zeta-0001"
tenant = "zeta"
class = "agent"
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    with running_stack(
        directory, classes={"batch": TrafficClass(16)}, messages_max=50, body_bytes_max=200_000
    ) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    """A client of a gateway whose workers have forgotten faults and answers of earlier tests."""
    for worker in (*stack.prefill, *stack.decode):
        worker.behaviour = Behaviour()
        worker.prefills.clear()
        worker.decodes.clear()
    with stack.client() as client:
        yield client


@pytest.fixture
def official(client: httpx.Client, stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=30) as official:
        yield official


def answer_with(stack: Stack, text: str, *, eos: bool = True) -> None:
    ids = [*byte_ids(text), *([EOS] if eos else [])]
    for worker in (*stack.prefill, *stack.decode):
        worker.behaviour.answer = lambda prompt: ids


def frames_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a complete stream."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Usage without times and ids, which differ between two requests."""
    reuse = {k: v for k, v in usage["reprise"].items() if k != "request_id" and not k.endswith("_s")}
    return {k: v for k, v in usage.items() if k != "reprise"} | {"reprise": reuse}


# --- OpenAI's own client --------------------------------------------------------------------------------------------


def test_official_client_chat(official: openai.OpenAI) -> None:
    """The official client reads a whole chat answer, its usage, and our additions."""
    answer = official.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == DEFAULT_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    extra = answer.usage.model_extra or {}
    assert extra["prompt_cache_hit_tokens"] + extra["prompt_cache_miss_tokens"] == answer.usage.prompt_tokens
    assert answer.id.startswith("req-")


def test_official_client_streams_chat(official: openai.OpenAI) -> None:
    """The official client's stream gives the same text and, when asked, a last frame with usage only."""
    stream = official.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == DEFAULT_ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_official_client_completions(official: openai.OpenAI) -> None:
    """Text completions, in one piece and streamed, by text and by token ids."""
    whole = official.completions.create(model="tiny", prompt="abc", max_tokens=100)
    assert whole.choices[0].text == DEFAULT_ANSWER
    streamed = official.completions.create(model="tiny", prompt=[1, *byte_ids("abc")], max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == DEFAULT_ANSWER


def test_official_client_lists_models(official: openai.OpenAI) -> None:
    """The model is listed and can be asked for by name."""
    assert [model.id for model in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        official.models.retrieve("huge")


def test_official_client_reads_errors(official: openai.OpenAI) -> None:
    """Refusals come as the client's own error types, with a code."""
    with pytest.raises(openai.NotFoundError) as caught:
        official.chat.completions.create(model="huge", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "model_not_found"


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_usage", [True, None])
def test_usage_equal_streamed_and_whole(client: httpx.Client, include_usage: bool | None) -> None:
    """The last frame's usage and the whole body's usage are the same, and hit + miss is the prompt."""
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    body = chat(f"usage {include_usage} of a warm prompt")
    client.post("/v1/chat/completions", json=body)
    whole = client.post("/v1/chat/completions", json=body).json()["usage"]
    streamed = frames_of(client.post("/v1/chat/completions", json=body | {"stream": True} | options))
    assert counts(streamed[-1]["usage"]) == counts(whole)
    assert whole["prompt_cache_hit_tokens"] + whole["prompt_cache_miss_tokens"] == whole["prompt_tokens"]
    assert whole["prompt_tokens_details"]["cached_tokens"] == whole["prompt_cache_hit_tokens"] > 0
    assert whole["reprise"]["way"] == "blocks"
    assert whole["reprise"]["replayed_tokens"] == 3
    assert streamed[-1]["choices"] == ([] if include_usage else streamed[-1]["choices"])


def test_usage_can_be_declined(client: httpx.Client) -> None:
    """A client that says include_usage false gets no usage at all."""
    body = chat(stream=True, stream_options={"include_usage": False})
    assert not any("usage" in frame for frame in frames_of(client.post("/v1/chat/completions", json=body)))


def test_cache_opt_out_is_passed_down_and_not_counted(client: httpx.Client, stack: Stack) -> None:
    """A request with the cache off hits nothing, stores nothing, and is in no hit-rate counter."""

    def tokens() -> dict[str, float]:
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        wanted = ("reprise_gateway_prompt_tokens_total", "reprise_gateway_cache_off_tokens_total")
        totals = dict.fromkeys(wanted, 0.0)
        for sample in samples:
            if sample.name in wanted:
                totals[sample.name] += sample.value
        return totals

    body = chat("opt out")
    client.post("/v1/chat/completions", json=body)
    before = tokens()
    answer = client.post("/v1/chat/completions", json=body, headers={"x-reprise-cache": "off"}).json()["usage"]
    after = tokens()
    assert answer["prompt_cache_hit_tokens"] == 0
    assert answer["reprise"]["reason"] == "off"
    assert stack.prefill[0].prefills[-1].cache is False
    assert stack.decode[0].decodes[-1].cache is False
    assert after["reprise_gateway_prompt_tokens_total"] == before["reprise_gateway_prompt_tokens_total"]
    off = after["reprise_gateway_cache_off_tokens_total"] - before["reprise_gateway_cache_off_tokens_total"]
    assert off == answer["prompt_tokens"]


def test_request_id_is_ours(client: httpx.Client, stack: Stack) -> None:
    """Every answer has our own id, also as the body's id and the workers'; the client's is only repeated."""
    headers = {"x-request-id": "mine-1"}
    answer = client.post("/v1/chat/completions", json=chat(), headers=headers)
    ours = answer.headers["x-request-id"]
    assert (
        ours
        == answer.json()["id"]
        == stack.prefill[0].prefills[-1].request_id
        == answer.json()["usage"]["reprise"]["request_id"]
    )
    assert ours != "mine-1"
    assert answer.headers["x-client-request-id"] == "mine-1"
    assert stack.line(ours)["client_request_id"] == "mine-1"
    for path in ("/healthz", "/metrics", "/nowhere", "/v1/models"):
        assert client.get(path).headers["x-request-id"].startswith("req-")
    assert "x-client-request-id" not in client.get("/healthz", headers={"x-request-id": "two words"}).headers


def test_log_line_has_no_text_and_no_tokens(client: httpx.Client, stack: Stack) -> None:
    """One line a request with its numbers; neither the prompt nor the answer is in it."""
    answer = client.post("/v1/chat/completions", json=chat("a secret prompt"))
    line = stack.line(answer.headers["x-request-id"])
    assert line["status"] == 200
    assert line["prompt_cache_miss_tokens"] + line["prompt_cache_hit_tokens"] == line["prompt_tokens"]
    assert line["traffic_class"] == "chat"
    text = json.dumps(line)
    assert "secret" not in text
    assert DEFAULT_ANSWER not in text
    assert not any(isinstance(value, list) and value and isinstance(value[0], int) for value in line.values())


# --- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_an_event", [1, 7])
def test_stop_string_over_token_borders(client: httpx.Client, stack: Stack, stream: bool, tokens_an_event: int) -> None:
    """A stop string that is spread over tokens ends the answer before it, and decode is told to stop."""
    answer_with(stack, "one two three four five six seven eight nine ten")
    stack.decode[0].behaviour.tokens_an_event = tokens_an_event
    body = chat(stop=["never", "ee fo"], stream=stream)
    answer = client.post("/v1/chat/completions", json=body)
    if stream:
        frames = frames_of(answer)
        text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
        reason = frames[-1]["choices"][0]["finish_reason"]
    else:
        text = answer.json()["choices"][0]["message"]["content"]
        reason = answer.json()["choices"][0]["finish_reason"]
    assert text == "one two thr"
    assert reason == "stop"


def test_characters_of_several_tokens_arrive_whole(client: httpx.Client, stack: Stack) -> None:
    """With one token a byte no frame shows half a character."""
    text = "na\u00efve \u20ac \U0001f600 \u65e5\u672c"
    answer_with(stack, text)
    frames = frames_of(client.post("/v1/chat/completions", json=chat(stream=True)))
    pieces = [frame["choices"][0]["delta"].get("content", "") for frame in frames]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_tokens_is_exact(client: httpx.Client, stack: Stack, limit: int) -> None:
    """Exactly so many tokens, finish reason length; one token needs no decode worker."""
    for field in ("max_tokens", "max_completion_tokens"):
        stack.decode[0].decodes.clear()
        answer = client.post("/v1/chat/completions", json=chat(**{field: limit})).json()
        assert answer["usage"]["completion_tokens"] == limit
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["content"] == DEFAULT_ANSWER[:limit]
        assert len(stack.decode[0].decodes) == (0 if limit == 1 else 1)


def test_first_token_that_stops_needs_no_decode(client: httpx.Client, stack: Stack) -> None:
    """An answer that ends with its first token is empty and complete."""
    answer_with(stack, "")
    answer = client.post("/v1/chat/completions", json=chat()).json()
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": None,
        "message": {"role": "assistant", "content": ""},
    }
    assert stack.decode[0].decodes == []


def test_ignore_eos_goes_on_to_the_limit(client: httpx.Client, stack: Stack) -> None:
    """A benchmark can ask for exactly so many tokens."""
    answer = client.post("/v1/chat/completions", json=chat(max_tokens=40, ignore_eos=True)).json()
    assert answer["usage"]["completion_tokens"] == 40
    assert stack.decode[0].decodes[-1].stop_token_ids == []


def test_decode_gets_prompt_and_first_token(client: httpx.Client, stack: Stack) -> None:
    """Between the workers nothing passes but tokens: decode gets the prompt and what was generated so far."""
    client.post("/v1/chat/completions", json=chat(max_tokens=9, temperature=0.5, top_p=0.9, seed=-1))
    prefill, decode = stack.prefill[0].prefills[-1], stack.decode[0].decodes[-1]
    assert decode.tokens == [*prefill.tokens, byte_ids(DEFAULT_ANSWER)[0]]
    assert decode.prompt_tokens == len(prefill.tokens)
    assert decode.max_tokens == 8
    assert prefill.sampling == decode.sampling
    assert (decode.sampling.temperature, decode.sampling.top_p, decode.sampling.seed) == (0.5, 0.9, 2**63 - 1)


def test_defaults_are_openais(client: httpx.Client, stack: Stack) -> None:
    """Without settings: temperature 1, no seed, chat to the end of the context, completions of 16 tokens."""
    client.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "x"}]})
    request = stack.decode[0].decodes[-1]
    assert request.sampling.temperature == 1.0
    assert request.sampling.seed is None
    assert request.max_tokens == 2048 - request.prompt_tokens - 1
    client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert stack.decode[0].decodes[-1].max_tokens == 15


# --- class, tenant, fidelity ----------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({}, {}, CHAT),
        ({"tools": TOOLS}, {}, AGENT),
        ({"tools": TOOLS}, {"x-reprise-class": "chat"}, CHAT),
        ({}, {"x-reprise-class": "batch"}, 16),
    ],
)
def test_class_of_a_request(
    client: httpx.Client, stack: Stack, fields: dict[str, Any], headers: dict[str, str], expected: int
) -> None:
    """Header first, then tools mean agent, else chat; both phases get the same class."""
    assert client.post("/v1/chat/completions", json=chat(**fields), headers=headers).status_code == 200
    assert stack.prefill[0].prefills[-1].traffic_class == expected
    assert stack.decode[0].decodes[-1].traffic_class == expected


def test_tools_reach_the_template(client: httpx.Client, stack: Stack) -> None:
    """Tools are part of the prompt, unless tool_choice is none."""
    with_tools = client.post("/v1/chat/completions", json=chat(tools=TOOLS)).json()["usage"]["prompt_tokens"]
    without = client.post("/v1/chat/completions", json=chat(tools=TOOLS, tool_choice="none")).json()["usage"][
        "prompt_tokens"
    ]
    assert with_tools > without + len('{"type": "function"')


@pytest.mark.parametrize(("value", "expected"), [("exact", "exact"), ("bounded", "bounded"), (None, None)])
def test_fidelity_header(client: httpx.Client, stack: Stack, value: str | None, expected: str | None) -> None:
    """The asked fidelity reaches both workers; without a header they use their own setting."""
    client.post("/v1/chat/completions", json=chat(), headers={} if value is None else {"x-reprise-fidelity": value})
    assert stack.prefill[0].prefills[-1].fidelity == expected
    assert stack.decode[0].decodes[-1].fidelity == expected


def test_users_are_isolated(client: httpx.Client, stack: Stack) -> None:
    """The same prompt of another user does not hit; user and user_id are the same thing; empty is not absent."""
    hits = []
    for fields in ({}, {}, {"user": "a"}, {"user_id": "a"}, {"user": "b"}, {"user": ""}):
        answer = client.post("/v1/chat/completions", json=chat("isolated prompt", **fields)).json()
        hits.append(answer["usage"]["prompt_cache_hit_tokens"] == answer["usage"]["prompt_tokens"] - 1)
    assert hits == [False, True, False, True, False, False]
    assert len({request.tenant for request in stack.prefill[0].prefills}) == 4


def test_two_keys_same_prompt_share_nothing(tmp_path: Path) -> None:
    """Another tenant's key and the same long prompt: other tenant passed down, nothing hit; the key's class is used."""
    (tmp_path / "keys.toml").write_text(KEYS)
    with (
        running_stack(write_tokenizer(tmp_path / "model"), keys=tmp_path / "keys.toml") as stack,
        stack.client() as client,
    ):
        usages = []
        for key in ("sk-acme-0001", "sk-acme-0001", "sk-zeta-0001"):
            answer = client.post(
                "/v1/chat/completions", json=chat("word " * 200), headers={"authorization": f"Bearer {key}"}
            )
            usages.append(answer.json()["usage"])
        assert usages[1]["prompt_cache_hit_tokens"] == usages[1]["prompt_tokens"] - 1
        assert usages[2]["prompt_cache_hit_tokens"] == 0
        assert [request.tenant for request in stack.prefill[0].prefills] == ["acme", "acme", "zeta"]
        assert [request.traffic_class for request in stack.prefill[0].prefills] == [CHAT, CHAT, AGENT]
        for headers in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": "Basic sk-acme-0001"}):
            for answer in (
                client.post("/v1/chat/completions", json=chat(), headers=headers),
                client.post("/v1/completions", content=b"not json", headers=headers),
                client.get("/v1/models", headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/healthz").status_code == 200


# --- refusals -------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": "x"}] * 51}, "messages"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": {"a": 1}}, "tools"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"user": 7}, "user"),
    ({"user": "x" * 300}, "user"),
    ({"user": "a", "user_id": "b"}, "user_id"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_wrong_fields_are_named(client: httpx.Client, stack: Stack, fields: dict[str, Any], param: str) -> None:
    """A wrong field is a 400 in OpenAI's shape that names it; no worker is asked."""
    answer = client.post("/v1/chat/completions", json=chat() | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert stack.prefill[0].prefills == []


@pytest.mark.parametrize(
    "prompt", [[], ["a", "b"], [[1], [2]], [VOCABULARY], [-1], ["a", 1], {"a": 1}, None, [1.5], [[]], [["a"]]]
)
def test_wrong_prompts(client: httpx.Client, stack: Stack, prompt: Any) -> None:
    """Completions take one text or one list of token ids of the vocabulary."""
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("prompt")
    assert stack.prefill[0].prefills == []


def test_one_prompt_in_a_list(client: httpx.Client, stack: Stack) -> None:
    """A list of one prompt is that prompt, as text and as token ids."""
    for prompt in ("abc", ["abc"], [1, *byte_ids("abc")], [[1, *byte_ids("abc")]]):
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": prompt}).status_code == 200
    assert {tuple(request.tokens) for request in stack.prefill[0].prefills} == {(1, *byte_ids("abc"))}


@pytest.mark.parametrize(
    "field", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"logprobs": 0}, {"logprobs": 5}], ids=str
)
def test_unsupported_completions_fields(client: httpx.Client, field: dict[str, Any]) -> None:
    """What we cannot give is refused by name, never silently dropped."""
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "x"} | field)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_unknown_and_harmless_fields_are_ignored(client: httpx.Client) -> None:
    """Fields of other servers, nulls and values that ask for nothing do not disturb."""
    body = chat(
        foo={"bar": 1}, n=1, logprobs=False, frequency_penalty=0, presence_penalty=0.0, logit_bias={}, stop=None,
        tools=[], response_format={"type": "text"}, store=True, metadata={}, service_tier="auto", stream=None,
    )  # fmt: skip
    assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "tiny", "messages": NaN}', b"[" * 100_000, b'"\\ud800"',
     b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}'],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_bad_json(client: httpx.Client, data: bytes) -> None:
    """Whatever is not a JSON object of the right shape is a 400."""
    answer = client.post("/v1/chat/completions", content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "headers", [{"x-reprise-class": "gold"}, {"x-reprise-cache": "maybe"}, {"x-reprise-fidelity": "high"}], ids=str
)
def test_wrong_headers_are_named(client: httpx.Client, headers: dict[str, str]) -> None:
    """A header of ours with an unknown value is refused; the message lists what is known."""
    answer = client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in headers
    if "x-reprise-class" in headers:
        assert "agent, batch, chat" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [{"messages": [{"role": "user", "content": "x" * 3000}]}, {"max_tokens": 2047}, {"max_tokens": 2048}],
    ids=["prompt", "one over", "far"],
)
def test_context_length(client: httpx.Client, fields: dict[str, Any]) -> None:
    """Prompt and answer must fit the model's context; the message has the numbers."""
    answer = client.post("/v1/chat/completions", json=chat() | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "2048" in answer.json()["error"]["message"]


def test_context_filled_to_the_last_token(client: httpx.Client) -> None:
    """Prompt plus answer of exactly the context is served."""
    prompt = client.post("/v1/chat/completions", json=chat(max_tokens=1)).json()["usage"]["prompt_tokens"]
    assert client.post("/v1/chat/completions", json=chat(max_tokens=2048 - prompt)).status_code == 200
    assert client.post("/v1/chat/completions", json=chat(max_tokens=2049 - prompt)).status_code == 400


@pytest.mark.parametrize("declared", [True, False])
def test_body_too_large(client: httpx.Client, declared: bool) -> None:
    """A body beyond the limit is refused, with and without a content-length."""
    data = json.dumps(chat("x" * 300_000)).encode()
    parts = data if declared else iter([data[:150_000], data[150_000:]])
    answer = client.post("/v1/chat/completions", content=parts, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "200000" in answer.json()["error"]["message"]


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    """404 and 405 have OpenAI's shape too."""
    assert client.get("/v2/x").json()["error"]["code"] == "not_found"
    assert client.get("/v1/chat/completions").json()["error"]["code"] == "method_not_allowed"


def test_the_gateway_tells_of_requests_that_may_be_cached(tmp_path: Path) -> None:
    """Through HTTP: two equal prompts share all their whole blocks; one with the cache off is not told of."""
    path = tmp_path / "access.jsonl"
    log = AccessLog.open(path)
    with running_stack(write_tokenizer(tmp_path / "model"), access_log=log) as stack, stack.client() as client:
        for headers in ({}, {}, {"x-reprise-cache": "off"}):
            body = chat("Tell me of rivers, and of the sea.", max_tokens=2)
            assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    first, second = read_trace(path, seed=1).prompts
    assert first.runs == second.runs
    assert first.class_name == "chat"
