"""The OpenAI request bodies that we read, checked and bounded.

Owns field names, types and ranges, and the refusal of what is not supported. Does not know workers, tokens or HTTP.
Invariants: unknown fields are ignored, as OpenAI does; a known field of a wrong type is an error that names it; a field
whose effect we cannot give (penalties, log probabilities, several choices) is refused instead of being silently
dropped.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import BadRequest
from workers.protocol import TOKENS_MAX

STOPS_MAX = 4
STOP_CHARS_MAX = 512
TOOLS_MAX = 512
MODEL_CHARS_MAX = 512
PARTS_MAX = 4096
SEED_SPAN = 2**63
COMPLETION_TOKENS_DEFAULT = 16
"""What OpenAI's completions endpoint generates when max_tokens is absent; chat goes on to the end of the context."""

StopText = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]
MaxTokens = Annotated[int, Field(ge=1, le=TOKENS_MAX)]


class Body(BaseModel):
    """Base of all bodies: JSON types as they are (no text for numbers), unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Body):
    """``include_usage`` True: a last frame with usage only; False: none; absent: usage in the finishing frame."""

    include_usage: bool | None = None


class FunctionCall(Body):
    name: str
    arguments: str = ""


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(Body):
    """One part of a message; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=PARTS_MAX)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=TOOLS_MAX)] | None = None
    tool_call_id: str | None = None


class CommonRequest(Body):
    """What both endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-SEED_SPAN, lt=SEED_SPAN)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=STOPS_MAX)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    user_id: str | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def seed_in_range(self) -> int | None:
        """The seed as the workers take it: negative ones are mapped into 0..2^63-1."""
        return None if self.seed is None else self.seed % SEED_SPAN


class ChatRequest(CommonRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def has_tools(self) -> bool:
        """Whether this is an agent's turn: tools are offered, or a tool's answer is among the messages."""
        return bool(self.tools) or any(message.role == "tool" or message.tool_calls for message in self.messages)


class CompletionRequest(CommonRequest):
    """Body of ``POST /v1/completions``. Control tokens can be given as token ids only; in text they are text."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else COMPLETION_TOKENS_DEFAULT


Request = TypeVar("Request", bound=CommonRequest)


def parse_body(kind: type[Request], data: bytes) -> Request:
    """A checked request. Raises BadRequest that names the first field at fault."""
    try:
        request = kind.model_validate_json(data)
    except ValidationError as error:
        raise _first_fault(error) from None
    _refuse_unsupported(request)
    return request


def single_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> str | list[int]:
    """The one prompt of a completions request. Raises BadRequest for none or several."""
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], int):
        return [token for token in prompt if isinstance(token, int)]
    if len(prompt) != 1:
        raise BadRequest(f"prompt has {len(prompt)} entries; send exactly one prompt per request", param="prompt")
    only = prompt[0]
    assert not isinstance(only, int)
    return only


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text, tool arguments as objects. Raises BadRequest for other parts."""
    return [_template_message(number, message) for number, message in enumerate(messages)]


def _template_message(number: int, message: ChatMessage) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": _text_of(number, message)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            row[name] = value
    if message.tool_calls:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return row


def _text_of(number: int, message: ChatMessage) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise BadRequest(f"messages[{number}] has no content", param=f"messages.{number}.content")
        return ""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise BadRequest(
                f"messages[{number}] has a part of type {part.type[:32]!r}; only text parts with a text are supported",
                param=f"messages.{number}.content.{index}",
                code="unsupported_content",
            )
    return "".join(part.text or "" for part in content)


def _arguments(text: str) -> Any:
    """Templates render arguments as JSON themselves; what is not a JSON object stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


# --- refusals -------------------------------------------------------------------------------------------------------


def _refuse_unsupported(request: CommonRequest) -> None:
    for name, harmless in _HARMLESS.items():
        value = getattr(request, name, None)
        if value is not None and (type(value), value) not in [(type(item), item) for item in harmless]:
            raise _unsupported(name, value)
    if request.logit_bias:
        raise _unsupported("logit_bias", "a bias")
    if isinstance(request, ChatRequest):
        if request.response_format is not None and request.response_format.get("type", "text") != "text":
            raise _unsupported("response_format", request.response_format.get("type"))
        if request.tool_choice not in (None, "auto", "none"):
            raise _unsupported("tool_choice", "a forced call")
    if request.user is not None and request.user_id is not None and request.user != request.user_id:
        raise BadRequest("user and user_id differ; send one of them", param="user_id")


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
}
"""Values that ask for nothing, by type too (0 log probabilities are some, False are none); any other is refused."""


def _unsupported(name: str, value: Any) -> BadRequest:
    shown = str(value)[:32]
    return BadRequest(f"{name} = {shown} is not supported here; leave it out", param=name, code="unsupported_parameter")


def _first_fault(error: ValidationError) -> BadRequest:
    """The first fault as a sentence with the path of the field; never the value itself."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if fault["type"] == "json_invalid":
        return BadRequest(
            f"the body is not valid JSON: {fault['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    # Branches of a union add names such as "list[str]" or "constrained-str" to the path: only fields and indices are
    # shown.
    path = [
        str(part) for part in fault["loc"] if isinstance(part, int) or (part.isidentifier() and part not in _BRANCHES)
    ]
    param = ".".join(path) or None
    return BadRequest(f"{param or 'the body'}: {fault['msg']}", param=param, code="invalid_value")


_BRANCHES = frozenset({"str", "int", "float", "bool", "dict", "list"})
