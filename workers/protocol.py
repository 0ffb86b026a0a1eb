"""What the gateway sends to a worker and what comes back. Torch-free.

Owns the message shapes and the paths of the worker's HTTP endpoint. Nothing but tokens passes here: a worker finds the
attention state in the store by itself, so any worker can continue any request.

    POST /v1/prefill   PrefillRequest  -> application/x-ndjson: FirstToken, then HandedOff (or WorkerFailure)
    POST /v1/decode    DecodeRequest   -> application/x-ndjson: Tokens ..., then Finished (or WorkerFailure)
    GET  /v1/model     -> ModelInfo        GET /v1/load -> Load
    GET  /v1/requests/{request_id} -> AccessRecord as JSON (404 when forgotten)
    GET  /healthz, /metrics

Closing the connection cancels the request and frees its memory.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

PREFILL_PATH = "/v1/prefill"
DECODE_PATH = "/v1/decode"
MODEL_PATH = "/v1/model"
LOAD_PATH = "/v1/load"
REQUEST_PATH = "/v1/requests/{request_id}"

TOKENS_MAX = 1_048_576
"""Tokens of one request; the model's own context is checked by the worker."""

Role = Literal["prefill", "decode", "both"]
Fidelity = Literal["bounded", "exact"]
Way = Literal["cold", "blocks", "state", "replay", "exact_replay"]
"""How a prefix came to be: computed; global blocks only (no sliding layers); a state; a replay; an exact one."""


class Message(BaseModel):
    """Base of all messages: immutable, unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(Message):
    """How the next token is chosen. ``temperature`` 0 is greedy. With a seed, token i depends on (seed, i) only, so
    that another worker continues the same stream."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class WorkRequest(Message):
    """What prefill and decode share.

    ``tenant``: its salt goes into the space; None is the space shared by all who have no tenant.
    ``cache`` False: neither look-up nor publishing; everything is computed.
    ``fidelity`` None: the worker's own setting.
    """

    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1, max_length=TOKENS_MAX)]
    traffic_class: Annotated[int, Field(ge=1, le=255)]
    tenant: Annotated[str, Field(max_length=512)] | None = None
    cache: bool = True
    fidelity: Fidelity | None = None
    sampling: Sampling = Sampling()


class PrefillRequest(WorkRequest):
    """``tokens`` is the prompt. Its blocks and its end-of-prompt state are published, and its first token is chosen."""


class DecodeRequest(WorkRequest):
    """``tokens`` is the prompt and what was generated so far (at least the first token, which prefill chose).

    ``prompt_tokens``: how many of them are the prompt. ``max_tokens``: how many more to generate.
    Generation ends after any of ``stop_token_ids`` (the token itself is emitted, with finish reason "stop").
    """

    prompt_tokens: Annotated[int, Field(ge=1)]
    max_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)]
    stop_token_ids: list[int] = []


class Reuse(Message):
    """What was really reused for a prompt. ``hit + miss == prompt`` tokens; replayed tokens are part of the hit.

    ``exact``: the output is what a cold run would give. ``reason``: why it was not more (first miss), one of the
    Presence names in lower case, "declined", "deadline", "end" (everything that can be reused was) or "off".
    """

    prompt_tokens: int
    hit_tokens: int
    miss_tokens: int
    replayed_tokens: int = 0
    way: Way = "cold"
    exact: bool = True
    reason: str = "end"


class FirstToken(Message):
    event: Literal["first_token"] = "first_token"
    token: int
    reuse: Reuse
    queued_s: float
    load_s: float
    compute_s: float


class HandedOff(Message):
    """The prompt's blocks and its state are acknowledged by the store (or could not be: ``published`` False)."""

    event: Literal["handed_off"] = "handed_off"
    published: bool


class Tokens(Message):
    """``exact``: a cold run, given the tokens before, would choose these too. Once False it stays so in a stream."""

    event: Literal["tokens"] = "tokens"
    tokens: list[int]
    exact: bool = True


class Finished(Message):
    """``resumed``: how the decode worker got the state to go on from; ``exact`` False if any of its tokens was not."""

    event: Literal["finished"] = "finished"
    reason: Literal["stop", "length"]
    resumed: Reuse


class WorkerFailure(Message):
    """The stream ends with this when the worker cannot go on. ``retryable``: another worker may continue."""

    event: Literal["failed"] = "failed"
    code: str
    message: str
    retryable: bool


WorkerEvent = Annotated[FirstToken | HandedOff | Tokens | Finished | WorkerFailure, Field(discriminator="event")]
WORKER_EVENT: TypeAdapter[FirstToken | HandedOff | Tokens | Finished | WorkerFailure] = TypeAdapter(WorkerEvent)


class ModelInfo(Message):
    """What a gateway must know of a worker's model. ``directory`` holds tokenizer and config (same host or disk).

    ``context_tokens``: the longest sequence served here, by the model's context and the worker's KV memory.
    """

    name: str
    role: Role
    directory: str
    context_tokens: int
    vocabulary: int
    stop_token_ids: list[int]
    block_tokens: int
    space_id: str
    fidelity: Fidelity


class Load(Message):
    """A worker's load, for routing. ``queued_pairs``: attention pairs (query x key) waiting, mean of the layers."""

    running: int
    waiting: int
    queued_pairs: float
    kv_tokens: int
    kv_tokens_max: int
    draining: bool = False
