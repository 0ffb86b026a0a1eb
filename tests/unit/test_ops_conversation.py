"""The demo's requests, and how its streamed answers are read."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from ops.answer import RequestFailed, ask
from ops.conversation import QUESTIONS, Conversation, kind_of_model

CHAT = Conversation("chat", "m", "u", "A long text.")
PLAIN = Conversation("completions", "m", "u", "A long text.")


def test_every_turn_begins_with_the_turn_before() -> None:
    """A growing conversation: what a cache can find of turn n is all of turn n-1."""
    answers = ["one", "two"]
    for turn in range(len(QUESTIONS) - 1):
        shorter, longer = (CHAT.body(answers[:count])["messages"] for count in (turn, turn + 1))
        assert longer[: len(shorter)] == shorter
        assert PLAIN.body(answers[: turn + 1])["prompt"].startswith(PLAIN.body(answers[:turn])["prompt"])


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, "completions"),
        ({"chat_template.jinja": "x"}, "chat"),
        ({"tokenizer_config.json": '{"chat_template": "x"}'}, "chat"),
        ({"tokenizer_config.json": "{}"}, "completions"),
        ({"tokenizer_config.json": "not json"}, "completions"),
    ],
)
def test_a_model_with_a_chat_template_is_talked_to(tmp_path: Path, files: dict[str, str], kind: str) -> None:
    """A base model gets completions."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert kind_of_model(str(tmp_path)) == kind


def client(*events: object, status: int = 200) -> httpx.Client:
    text = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    return httpx.Client(
        base_url="http://test",
        transport=httpx.MockTransport(lambda _: httpx.Response(status, text=text, headers={"x-request-id": "r7"})),
    )


def test_a_stream_becomes_an_answer() -> None:
    """Text, usage and request id come from the events; both APIs' shapes are read."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    pieces = [{"choices": [{"delta": {"content": "Hel"}}]}, {"choices": [{"text": "lo"}]}]
    answer = ask(client(*pieces, {"choices": [], "usage": usage}, "[DONE]"), CHAT, [], cache=True)
    assert (answer.text, answer.usage, answer.request_id) == ("Hello", usage, "r7")


@pytest.mark.parametrize(
    "answers",
    [
        client({"error": {"message": "worker lost"}}),
        client({"choices": [{"text": "x"}]}),
        client("[DONE]"),
        client({"error": "busy"}, status=503),
    ],
)
def test_a_broken_stream_is_a_failure(answers: httpx.Client) -> None:
    """An error event, a stream without usage or without text, and an HTTP error all fail the demo."""
    with pytest.raises(RequestFailed):
        ask(answers, CHAT, [], cache=True)
