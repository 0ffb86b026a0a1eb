"""Prefixes that are given as token ids or as text: which block each names, in which space.

Owns the reading of token ids and the tokenizer, which makes of a text what the gateway makes of a prompt. Does not know
what becomes of the blocks. Invariant: a prefix names the last whole block of it; what its last tokens would add to that
is never asked for, since a block's key needs all of its tokens. Token ids and texts are never printed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.keys import BlockKey, Space, SpaceId, TokenChain
from retention.errors import PackageMissing, SelectionInvalid

PREFIX_BYTES_MAX = 64 * 1024 * 1024
"""Of a file of token ids, or of text."""
_LIST = re.compile(r"[\s,\[\]0-9]+\Z")
_SEPARATORS = re.compile(r"[\s,\[\]]+")


@dataclass(frozen=True, slots=True)
class Root:
    """The last whole block of a prefix in one space, and the keys of those before it."""

    key: BlockKey
    before: tuple[BlockKey, ...]


def read_tokens(text: str) -> tuple[int, ...]:
    """Token ids: a list like ``1,15,27`` or ``[1, 15, 27]``, or the file that has one. Raises SelectionInvalid."""
    if not _LIST.match(text):
        text = _read(Path(text), "token ids")
        if not _LIST.match(text):
            raise SelectionInvalid("a file of token ids has whole numbers only, between commas or spaces")
    tokens = tuple(int(part) for part in _SEPARATORS.split(text) if part)
    if not tokens:
        raise SelectionInvalid("there are no token ids")
    return tokens


def tokens_of_text(file: Path, tokenizer: Path, *, rendered: bool) -> tuple[int, ...]:
    """The token ids of a text, as of a prompt that the gateway is given; ``rendered``: of what a chat template made.

    Raises SelectionInvalid; PackageMissing where there is no ``transformers``.
    """
    text = _read(file, "the text")
    try:
        from transformers import AutoTokenizer  # a storage node does without, until somebody purges by text
    except ImportError:
        raise PackageMissing(
            "--text needs the package transformers, not installed here: pip install '.[workers]'"
        ) from None
    if not tokenizer.is_dir():
        raise SelectionInvalid(f"{tokenizer} is no directory: name the model's, with its tokenizer")
    try:
        encode = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SelectionInvalid(f"{tokenizer} has no tokenizer that can be read: {str(error)[:300]}") from error
    ids = encode(text, add_special_tokens=not rendered, split_special_tokens=not rendered)["input_ids"]
    return tuple(int(token) for token in ids)


def roots_of(tokens: Sequence[int], spaces: Mapping[SpaceId, Space]) -> dict[SpaceId, Root]:
    """The block that a prefix names in each space.

    Raises SelectionInvalid where it is shorter than one block: of less than a whole block nothing is known.
    """
    found: dict[SpaceId, Root] = {}
    for space_id, space in sorted(spaces.items()):
        if len(tokens) < space.block_tokens:
            raise SelectionInvalid(
                f"the prefix has {len(tokens)} tokens, fewer than one block of space {space_id.hex()[:16]} "
                f"({space.block_tokens} tokens): give a longer one, or purge the space"
            )
        whole = len(tokens) // space.block_tokens * space.block_tokens
        try:
            chain = TokenChain(space_id, space.block_tokens, tokens[:whole])
        except ValueError as error:
            raise SelectionInvalid(str(error)) from error
        *before, last = (name.key for name in chain.names)
        found[space_id] = Root(last, tuple(before))
    return found


def opaque_note(spaces: int) -> str:
    """What is said of spaces that a purge by tokens does not look through."""
    return (
        f"{spaces} space{'' if spaces == 1 else 's'} not looked through: an engine names the blocks there by hashes of "
        "its own, to which no token ids lead (--space, --tenant, --class and --older-than reach them)"
    )


def spaces_of_model(model: str | None, spaces: Mapping[SpaceId, Space]) -> dict[SpaceId, Space]:
    """Those of one model; of None, all, if they are of one. Raises SelectionInvalid: tokens mean another text there."""
    models = sorted({space.model for space in spaces.values()})
    if model is None:
        if len(models) > 1:
            raise SelectionInvalid(
                f"the spaces are of {len(models)} models ({', '.join(models)[:300]}): name one with --model"
            )
        return dict(spaces)
    chosen = {space_id: space for space_id, space in spaces.items() if space.model == model}
    if not chosen:
        raise SelectionInvalid(f"no space is of the model {model!r}, but of: {', '.join(models)[:300] or 'none'}")
    return chosen


def _read(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(PREFIX_BYTES_MAX + 1)
    except OSError as error:
        raise SelectionInvalid(f"{what}: {str(path)[:200]} cannot be read: {error.strerror}") from error
    if len(data) > PREFIX_BYTES_MAX:
        raise SelectionInvalid(f"{what}: {path} has more than {PREFIX_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SelectionInvalid(f"{what}: {path} is not UTF-8") from None
