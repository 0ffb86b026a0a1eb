"""Tokenizer directories for tests, made without any download: one token a byte, a few merged ones, a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
EOS = 2
VOCABULARY = 320
"""Larger than the tokenizer, as padded models are."""

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, special tokens, and the merges asked for."""
    vocabulary = {token: number for number, token in enumerate(SPECIALS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    for left, right in merges or []:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges or [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return _wrap(backend)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece-shaped: words with a space mark, and single bytes as ``<0x..>`` for what has no token."""
    vocabulary = {token: number for number, token in enumerate(SPECIALS)}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ("\u2581", *"abcdefghijklmnopqrstuvwxyz.,!", "\u2581the", "\u2581cat", "ing", "\u00e9"):
        vocabulary[piece] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(backend)


def write_tokenizer(directory: Path, template: str | None = TEMPLATE) -> Path:
    """A model directory with the byte tokenizer only: all that a gateway reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(directory))
    return directory


def byte_ids(text: str) -> list[int]:
    """The byte tokenizer's ids of a text, without control tokens."""
    return [int(token) for token in byte_tokenizer()(text, add_special_tokens=False)["input_ids"]]


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer
