"""Text to tokens and back: tokenizer, chat template, incremental detokenisation.

Owns the seam to transformers (tokenizers only: works without torch). Does not know HTTP or workers. Invariants: control
tokens inside a caller's text are encoded as text; a chat template is foreign code, so whatever it raises becomes a
BadRequest, and tools that it would drop without a word are refused; the texts a ``Detokenizer`` returns, joined, are
what decoding all tokens at once would give.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from gateway.errors import BadRequest, NoCapacity

REPLACEMENT = "\ufffd"
HELD_CHARS_MAX = 3
"""Replacement characters at the end that may still become a character: UTF-8 has at most 3 incomplete bytes."""
CONTEXT_TOKENS = 6
"""Prompt tokens that give the first piece its context: some tokenizers drop the space of a first word."""
WINDOW_TOKENS_MAX = 128
"""Tokens without a sure border; then the rest is shown as it is (bytes that are no text at all)."""
ENCODE_S_MAX = 60.0
KEY_DEPTH_MAX = 64

Result = TypeVar("Result")


class Detokenizer:
    """Tokens of one answer to text, piece by piece.

    Decodes a short window that starts at the last sure border; what was shown of it is skipped. A character whose bytes
    are spread over tokens is held back until it is complete.
    """

    __slots__ = ("_decode", "_shown", "_silent", "_window")

    def __init__(
        self, decode: Callable[[list[int]], str], *, silent: frozenset[int] = frozenset(), context: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._silent = silent
        self._window = [token for token in context if token not in silent]
        self._shown = decode(self._window) if self._window else ""
        if self._shown.endswith(REPLACEMENT):  # the prompt ends within a character: begin afresh
            self._window, self._shown = [], ""

    def push(self, token: int) -> str:
        """Text that this token made sure."""
        if token in self._silent:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(text) - len(text.rstrip(REPLACEMENT))
        full = len(self._window) >= WINDOW_TOKENS_MAX
        if held and not full:
            # With byte-fallback tokenizers one incomplete character makes the text of its whole run of bytes
            # unreadable.
            sure = len(text) - min(held, HELD_CHARS_MAX) if text.startswith(self._shown) else 0
            piece = text[len(self._shown) : sure]
            self._shown += piece
            return piece
        piece, self._shown = text[len(self._shown) :], text
        self._trim(full)
        return piece

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        piece = self._decode(self._window)[len(self._shown) :] if self._window else ""
        self._window, self._shown = [], ""
        return piece

    def _trim(self, full: bool) -> None:
        """Begin the window at a later token that reads the same without what lies before it."""
        if len(self._window) <= 2 * CONTEXT_TOKENS:
            return
        for size in range(CONTEXT_TOKENS, CONTEXT_TOKENS + 4):
            tail = self._window[-size:]
            text = self._decode(tail)
            if text and self._shown.endswith(text):
                self._window, self._shown = tail, text
                return
        if full:
            self._window, self._shown = [], ""


class ModelTokenizer:
    """The tokenizer and chat template of one model directory. Blocking; not thread-safe but for ``detokenizer``."""

    def __init__(self, encoder: Any, decoder: Any) -> None:
        self._encoder = encoder
        self._decoder = decoder
        special = {number for number, token in encoder.added_tokens_decoder.items() if token.special}
        self._silent = frozenset(special | set(encoder.all_special_ids))
        self._control = frozenset(token.content for token in encoder.added_tokens_decoder.values() if token.special)

    @classmethod
    def open(cls, directory: Path) -> ModelTokenizer:
        """Load from files; reads nothing from elsewhere and runs no code of the directory."""
        from transformers import AutoTokenizer  # slow to import: only a serving gateway pays for it

        encoder = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        # The encoder's settings change with every call, so decoding on another thread needs an object of its own.
        return cls(encoder, copy.deepcopy(encoder))

    def encode_text(self, text: str) -> list[int]:
        """A raw prompt: the tokenizer's own opening tokens, then the text; special tokens in it are text."""
        ids = self._encoder(text, add_special_tokens=True, split_special_tokens=True)["input_ids"]
        return [int(token) for token in ids]

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """The prompt that the model's template makes of messages. Raises BadRequest with what the template says."""
        if not self._encoder.chat_template:
            raise BadRequest(
                "this model has no chat template; use /v1/completions", param="messages", code="no_template"
            )
        self._refuse_control_keys(tools, 0)
        template = str(self._encoder.chat_template)
        rows = [self._known_role(row, template) for row in messages]
        try:
            ids = self._apply_template(rows, tools, tokenize=True)
            dropped = bool(tools) and self._drops_tools(rows, tools)
        except Exception as error:  # seam: the template is the model's code and raises what it likes
            raise BadRequest(
                f"the model's chat template refuses these messages: {str(error)[:300]}",
                param="messages",
                code="template",
            ) from error
        if dropped:
            raise BadRequest(
                "this model's chat template does not take tools: leave `tools` out",
                param="tools",
                code="unsupported_parameter",
            )
        return [int(token) for token in ids]

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """A detokenizer for the answer to a prompt; special tokens give no text."""
        return Detokenizer(self._text, silent=self._silent, context=prompt[-CONTEXT_TOKENS:])

    def _apply_template(self, rows: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, tokenize: bool) -> Any:
        return self._encoder.apply_chat_template(
            rows,
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=tokenize,
            sanitize_control_tokens=tokenize,
            return_dict=False,
        )

    def _drops_tools(self, rows: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        """Whether the prompt reads the same without the tools: no template says what it takes, so both are made."""
        text, without = (self._apply_template(rows, choice, tokenize=False) for choice in (tools, None))
        return bool(text == without)

    def _text(self, tokens: list[int]) -> str:
        return str(self._decoder.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _known_role(self, row: dict[str, Any], template: str) -> dict[str, Any]:
        """Templates that do not know ``developer`` get it as ``system``, which it replaced."""
        return {**row, "role": "system"} if row["role"] == "developer" and "developer" not in template else row

    def _refuse_control_keys(self, value: Any, depth: int) -> None:
        """The template seam makes text of control tokens in values, not of those in the names of a tool's fields."""
        if depth > KEY_DEPTH_MAX:
            raise BadRequest(f"tools are nested deeper than {KEY_DEPTH_MAX} levels", param="tools")
        if isinstance(value, dict):
            for name, item in value.items():
                if any(token in name for token in self._control):
                    raise BadRequest("a tool has a field name that contains a control token", param="tools")
                self._refuse_control_keys(item, depth + 1)
        elif isinstance(value, list):
            for item in value:
                self._refuse_control_keys(item, depth + 1)


class Tokenizers:
    """The tokenizers of all models of the fleet, used on one thread beside the event loop."""

    def __init__(self, load: Callable[[Path], ModelTokenizer] = ModelTokenizer.open) -> None:
        self._load = load
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._by_directory: dict[str, ModelTokenizer] = {}

    def loaded(self, directory: str) -> bool:
        """Whether a request would not have to wait for the files to be read."""
        return directory in self._by_directory

    async def get(self, directory: str) -> ModelTokenizer:
        """The tokenizer of a model directory, loaded at first use. Raises NoCapacity when it cannot be read."""
        known = self._by_directory.get(directory)
        if known is None:
            known = await self.run(lambda: self._open(directory))
        return known

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do something with a tokenizer off the event loop. Raises NoCapacity past the deadline."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ENCODE_S_MAX):
                return await loop.run_in_executor(self._thread, work)
        except TimeoutError:
            raise NoCapacity(f"tokenising took more than {ENCODE_S_MAX:.0f} s", retry_after_s=5.0) from None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open(self, directory: str) -> ModelTokenizer:
        if directory not in self._by_directory:
            try:
                self._by_directory[directory] = self._load(Path(directory))
            except Exception as error:  # seam: the loader raises whatever the files make it raise
                raise NoCapacity(
                    f"the gateway cannot read the model's tokenizer: {str(error)[:200]}", retry_after_s=30.0
                ) from error
        return self._by_directory[directory]
