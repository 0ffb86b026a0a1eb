"""The endpoints: from an HTTP request to a checked job, and from a generation to an answer.

Owns the order of checks: key, body, fields, model, class, tenant, tokens, context. Does not know workers' wire or
stores. Invariants: nothing is sent to a worker before all checks passed; a stream's status is sent only when the first
token is there, so that every failure before it has its proper status.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.access_log import AccessLog, Asked
from gateway.answers import Envelope, usage_of
from gateway.classes import ClassNames
from gateway.classify import CLASS_HEADER, classify
from gateway.config import GatewayConfig
from gateway.edge import Gate, LogLine, Record
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    ContextExceeded,
    GatewayError,
    NoCapacity,
    RequestTimeout,
    Unauthorized,
    UnknownModel,
)
from gateway.fleet import Fleet
from gateway.generate import AnswerText, Generation, Job, Waits
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.schemas import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    parse_body,
    single_prompt,
    template_messages,
)
from gateway.stops import StopFilter
from gateway.streaming import EventStream, frames, while_connected
from gateway.tenants import ApiKey, KeyRing, bearer, tenant_name
from gateway.tokens import ModelTokenizer, Tokenizers
from workers.protocol import TOKENS_MAX, Fidelity, ModelInfo, Sampling

CACHE_HEADER = "x-reprise-cache"
FIDELITY_HEADER = "x-reprise-fidelity"
INLINE_BYTES_MAX = 64 << 10
"""Larger bodies are parsed beside the event loop."""
TOKENIZER_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Services:
    """What the endpoints work with; built once by ``create_app``."""

    config: GatewayConfig
    fleet: Fleet
    tokenizers: Tokenizers
    keys: KeyRing | None
    classes: ClassNames
    metrics: Metrics
    access_log: AccessLog | None
    gate: Gate
    log: LogLine
    now_s: Callable[[], float]
    wall_s: Callable[[], float]

    def ready_models(self) -> list[str]:
        """Models that can be served now: workers for both phases, and the tokenizer in memory."""
        models = self.fleet.models()
        return [name for name in self.fleet.ready_models() if self.tokenizers.loaded(models[name].directory)]

    async def load_tokenizers(self) -> None:
        """Load the tokenizer of every model that appears, so that no request waits for it. Runs until cancelled."""
        while True:
            for info in self.fleet.models().values():
                if not self.tokenizers.loaded(info.directory):
                    try:
                        await self.tokenizers.get(info.directory)
                    except NoCapacity as error:
                        self.log({"event": "tokenizer_unread", "model": info.name, "error": error.message})
                        await asyncio.sleep(TOKENIZER_RETRY_S)
            await asyncio.sleep(self.config.poll_s)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks and with which headers."""

    key: ApiKey | None
    class_header: str | None
    cache: bool
    fidelity: Fidelity | None


def build_router(services: Services) -> APIRouter:
    """All endpoints over the given services."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _complete(services, request, ChatRequest)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _complete(services, request, CompletionRequest)

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        _authenticate(services, request)
        rows = [_model_row(services, info) for info in services.fleet.models().values()]
        return JSONResponse({"object": "list", "data": rows})

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        _authenticate(services, request)
        return JSONResponse(_model_row(services, _find_model(services, name)))

    @router.get("/healthz")
    async def healthz() -> Response:
        ready = services.ready_models()
        status = "draining" if services.gate.draining else "ok" if ready else "no_workers"
        return JSONResponse({"status": status, "models": ready}, status_code=200 if status == "ok" else 503)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        if not _from_loopback(request):
            _authenticate(services, request)
        usable = [worker for worker in services.fleet.workers if worker.usable]
        services.metrics.workers(
            sum("prefill" in worker.roles for worker in usable), sum("decode" in worker.roles for worker in usable)
        )
        if services.access_log is not None:
            services.metrics.access_log_dropped(services.access_log.dropped)
        return Response(services.metrics.render(), media_type=CONTENT_TYPE)

    return router


async def _complete(
    services: Services, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    record = cast(Record, request.state.record)
    caller = _caller(services, request)
    if caller.key is not None:
        services.gate.enter_tenant(caller.key.tenant)
        record.tenant = record.fields["tenant"] = caller.key.tenant
    data = await _read_body(request, services.config)
    body: ChatRequest | CompletionRequest = (
        parse_body(kind, data) if len(data) <= INLINE_BYTES_MAX else await asyncio.to_thread(parse_body, kind, data)
    )
    del data
    model = _find_model(services, body.model)
    record.fields |= {"model": model.name, "stream": bool(body.stream)}
    tokenizer = await services.tokenizers.get(model.directory)
    job = await _job(services, caller, record, body, model, tokenizer)
    text = AnswerText(tokenizer.detokenizer(job.tokens), StopFilter(body.stop_strings))
    generation = Generation(job, services.fleet, text, _waits(services.config), services.metrics, services.now_s)
    answer = _Answer(services, record, body, generation)
    try:
        await while_connected(request.receive, generation.start(record.began_s))
        answer.first_token()
        if body.stream:
            return answer.stream()
        return JSONResponse(await while_connected(request.receive, answer.whole()))
    except BaseException:
        await answer.close()
        raise


class _Answer:
    """One generation on its way out: counts it when it begins and when it ends, whichever way it ends."""

    def __init__(
        self, services: Services, record: Record, body: ChatRequest | CompletionRequest, generation: Generation
    ) -> None:
        self._services = services
        self._record = record
        self._generation = generation
        self._include_usage = None if body.stream_options is None else body.stream_options.include_usage
        self._closed = False
        self._envelope = Envelope(
            record.request_id, generation.job.model.name, int(services.wall_s()), isinstance(body, ChatRequest)
        )

    def first_token(self) -> None:
        job, first = self._generation.job, self._generation.progress.first
        assert first is not None
        self._services.metrics.prompt(
            self._record.traffic_class,
            hit=first.reuse.hit_tokens,
            miss=first.reuse.miss_tokens,
            replayed=first.reuse.replayed_tokens,
            way=first.reuse.way,
            reason=first.reuse.reason,
            cache=job.cache,
            ttft_s=self._generation.progress.ttft_s,
        )
        if self._services.access_log is not None and job.cache:
            self._services.access_log.append(
                Asked(
                    time_s=self._services.wall_s(),
                    class_name=self._record.traffic_class,
                    tenant=job.tenant,
                    space_id=job.model.space_id,
                    block_tokens=job.model.block_tokens,
                    tokens=job.tokens,
                    hit_tokens=first.reuse.hit_tokens,
                )
            )

    async def whole(self) -> dict[str, Any]:
        pieces = [piece async for piece in self._generation.deltas()]
        await self.close()
        return self._envelope.body("".join(pieces), self._generation.progress.finish_reason, self._usage())

    def stream(self) -> EventStream:
        events = frames(
            self._generation, self._envelope, self._usage, include_usage=self._include_usage, failed=self._failed
        )
        return EventStream(events, self.close, write_s_max=self._services.config.write_s_max)

    async def close(self) -> None:
        """Close the workers' streams and write what happened into the record; once."""
        if self._closed:
            return
        self._closed = True
        progress = self._generation.progress
        if progress.first is not None:
            usage = self._usage()
            usage |= usage.pop("reprise")
            usage.pop("prompt_tokens_details")
            usage.pop("request_id")
            self._record.fields |= usage | {
                "finish_reason": progress.finish_reason,
                "prefill_worker": progress.prefill_worker,
                "decode_workers": list(progress.decode_workers),
            }
            self._services.metrics.generated(
                self._record.traffic_class, len(progress.generated), progress.continuations
            )
        if progress.prefill_retries:
            self._record.fields["prefill_retries"] = progress.prefill_retries
        await self._generation.aclose()

    def _failed(self, error: GatewayError) -> None:
        self._record.error = error.message

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._generation.job, self._generation.progress, self._record.traffic_class)


# --- checks ---------------------------------------------------------------------------------------------------------


def _authenticate(services: Services, request: Request) -> ApiKey | None:
    """The caller's key; None where the gateway has none. Raises Unauthorized."""
    if services.keys is None:
        return None
    presented = bearer(request.headers.get("authorization"))
    if presented is None:
        raise Unauthorized("send an API key: Authorization: Bearer KEY")
    key = services.keys.find(presented)
    if key is None:
        raise Unauthorized("this API key is not known here")
    return key


def _caller(services: Services, request: Request) -> Caller:
    key = _authenticate(services, request)
    cache = request.headers.get(CACHE_HEADER, "on").strip().lower()
    if cache not in ("on", "off"):
        raise BadRequest(f"{CACHE_HEADER} {cache[:32]!r} is neither 'on' nor 'off'", param=CACHE_HEADER)
    fidelity = request.headers.get(FIDELITY_HEADER, "").strip().lower() or None
    if fidelity not in (None, "exact", "bounded"):
        raise BadRequest(f"{FIDELITY_HEADER} {fidelity[:32]!r} is neither 'exact' nor 'bounded'", param=FIDELITY_HEADER)
    return Caller(key, request.headers.get(CLASS_HEADER), cache == "on", cast("Fidelity | None", fidelity))


async def _read_body(request: Request, config: GatewayConfig) -> bytes:
    """The whole body, bounded in size and time."""
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > config.body_bytes_max:
        raise BodyTooLarge(f"the body has {declared[:19]} bytes; at most {config.body_bytes_max} are accepted")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_s_max):
            async for part in request.stream():
                size += len(part)
                if size > config.body_bytes_max:
                    raise BodyTooLarge(f"the body has more than {config.body_bytes_max} bytes, the most accepted")
                parts.append(part)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {config.body_s_max:.0f} s") from None
    return b"".join(parts)


def _find_model(services: Services, name: str) -> ModelInfo:
    models = services.fleet.models()
    if name in models:
        return models[name]
    if not models:
        raise NoCapacity("no worker has answered yet", retry_after_s=2.0)
    raise UnknownModel(
        f"the model {name[:128]!r} is not served here; there is {', '.join(sorted(models))}", param="model"
    )


async def _job(
    services: Services,
    caller: Caller,
    record: Record,
    body: ChatRequest | CompletionRequest,
    model: ModelInfo,
    tokenizer: ModelTokenizer,
) -> Job:
    """A request with every check passed. Raises GatewayError."""
    key = caller.key
    has_tools = isinstance(body, ChatRequest) and body.has_tools
    try:
        traffic_class = classify(
            caller.class_header, key.traffic_class if key else None, has_tools=has_tools, names=services.classes.names
        )
    except ValueError as error:
        raise BadRequest(str(error), param=CLASS_HEADER) from None
    try:
        tenant = tenant_name(key.tenant if key else None, body.user if body.user is not None else body.user_id)
    except ValueError as error:
        raise BadRequest(str(error), param="user") from None
    record.traffic_class = services.classes.name_of(traffic_class)
    tokens = await _tokens(services, body, model, tokenizer)
    return Job(
        request_id=record.request_id,
        model=model,
        tokens=tokens,
        max_tokens=_room(body.tokens_wanted, len(tokens), model.context_tokens),
        sampling=_sampling(body),
        stop_token_ids=() if body.ignore_eos else tuple(model.stop_token_ids),
        traffic_class=traffic_class,
        tenant=tenant,
        cache=caller.cache,
        fidelity=caller.fidelity,
    )


async def _tokens(
    services: Services, body: ChatRequest | CompletionRequest, model: ModelInfo, tokenizer: ModelTokenizer
) -> list[int]:
    """The prompt's token ids, checked against the vocabulary."""
    if isinstance(body, ChatRequest):
        if len(body.messages) > services.config.messages_max:
            raise BadRequest(
                f"{len(body.messages)} messages; at most {services.config.messages_max} are accepted", param="messages"
            )
        messages = template_messages(body.messages)
        tools = None if body.tool_choice == "none" else body.tools
        tokens = await services.tokenizers.run(lambda: tokenizer.encode_chat(messages, tools))
    else:
        prompt = single_prompt(body.prompt)
        tokens = (
            prompt if isinstance(prompt, list) else await services.tokenizers.run(lambda: tokenizer.encode_text(prompt))
        )
    if not tokens:
        raise BadRequest("the prompt has no tokens", param="prompt")
    if min(tokens) < 0 or max(tokens) >= model.vocabulary:
        raise BadRequest(f"the prompt has a token id outside 0..{model.vocabulary - 1}", param="prompt")
    return tokens


def _room(wanted: int | None, prompt: int, context: int) -> int:
    """How many tokens to generate: what is asked, or all that fit. Raises ContextExceeded."""
    context = min(context, TOKENS_MAX)
    if prompt >= context or prompt + (wanted or 1) > context:
        asked = "" if wanted is None else f" and max_tokens is {wanted}"
        raise ContextExceeded(
            f"prompt and answer have at most {context} tokens here; the prompt has {prompt}{asked}: shorten either",
            param="messages" if wanted is None else "max_tokens",
        )
    return wanted if wanted is not None else context - prompt


def _sampling(body: CommonRequest) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed_in_range,
    )


def _waits(config: GatewayConfig) -> Waits:
    return Waits(config.prefill_s_max, config.event_s_max, config.hand_off_s_max, config.continue_s_max)


def _model_row(services: Services, info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": 0,
        "owned_by": "reprise",
        "max_model_len": info.context_tokens,
        "reprise": {"block_tokens": info.block_tokens, "fidelity": info.fidelity, "space_id": info.space_id},
    }


def _from_loopback(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
