"""The demo's conversation: a long document and three questions, as requests to the public HTTP API.

Owns the wording and the request bodies. Does not know where they are sent. Pure. Invariant: each turn's prompt begins
with all of the turn before, so that a cache has something to find.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

Kind = Literal["chat", "completions"]

QUESTIONS = (
    "What is this document about? Answer in one sentence.",
    "Which part of it matters most when a machine fails?",
    "Name one thing that it says must never happen.",
)
ANSWER_TOKENS_MAX = 24
DOCUMENT_CHARS_MAX = 15_000
"""About 3,100 tokens: long enough that a hit pays, short enough that the runs without a cache end soon on two cores."""
SYSTEM = "You answer questions about a document, briefly."


@dataclass(frozen=True, slots=True)
class Conversation:
    """What stays the same over all turns. ``user`` isolates the run: nobody else's blocks are found."""

    kind: Kind
    model: str
    user: str
    document: str

    def path(self) -> str:
        """Where a turn is posted."""
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        """The request of turn ``len(answers) + 1``, given the answers so far."""
        common = {
            "model": self.model,
            "user": self.user,
            "max_tokens": ANSWER_TOKENS_MAX,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.kind == "chat":
            return {"messages": self._messages(answers), **common}
        return {"prompt": self._prompt(answers), **common}

    def _messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{self.document}\n\n{QUESTIONS[0]}"},
        ]
        for answer, question in zip(answers, QUESTIONS[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        return messages

    def _prompt(self, answers: Sequence[str]) -> str:
        text = f"{self.document}\n\nQuestion: {QUESTIONS[0]}\nAnswer:"
        for answer, question in zip(answers, QUESTIONS[1:], strict=False):
            text += f"{answer}\n\nQuestion: {question}\nAnswer:"
        return text


def shipped_document() -> str:
    """The long text that comes with the package, up to a paragraph's end."""
    text = (files("ops") / "data" / "document.txt").read_text(encoding="utf-8")[:DOCUMENT_CHARS_MAX]
    return text[: text.rindex("\n\n")]


def kind_of_model(model: str) -> Kind:
    """Chat for a model with a chat template, else plain completions."""
    if model == "demo":
        return "chat"
    directory = Path(model)
    if (directory / "chat_template.jinja").is_file():
        return "chat"
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "completions"
    return "chat" if isinstance(settings, dict) and settings.get("chat_template") else "completions"
