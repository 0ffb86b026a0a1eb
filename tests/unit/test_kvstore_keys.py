"""Identity: what separates spaces, and what a chain of keys promises."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.keys import (
    Attachment,
    AttentionGroup,
    BlockName,
    ChainNames,
    ShardCoordinate,
    Space,
    SpaceId,
    TokenChain,
    decode_space,
    differing_fields,
    encode_space,
    space_id,
    tenant_salt,
)
from kvstore.limits import NAME_BYTES_MAX, SPACE_DIGEST_BYTES_MAX, STRIPE_BLOCKS
from tests.support.spaces import BASE, a_space

GROUP = BASE.groups[0]
ROOT = space_id(BASE)

DIFFERENT: dict[str, Any] = {
    "model": "tiny-gemma",
    "weights_digest": bytes(reversed(range(32))),
    "kv_dtype": "float16",
    "layout": "fused",
    "block_tokens": 8,
    "groups": (replace(GROUP, window=128),),
    "revision": "main",
    "kv_scale_format": "per-head",
    "shard": ShardCoordinate(1, 2, 0, 1),
    "adapter_digest": b"a" * 32,
    "tenant_salt": tenant_salt("a"),
    "epoch": 1,
    "key_algorithm": "blake3-chain-2",
}

u32 = st.integers(0, 2**32 - 1)
digests = st.binary(min_size=1, max_size=SPACE_DIGEST_BYTES_MAX)
names = st.text(max_size=40)


@st.composite
def groups(draw: st.DrawFn) -> AttentionGroup:
    layers = tuple(sorted(draw(st.sets(u32, min_size=1, max_size=6))))
    positive = st.integers(1, 2**32 - 1)
    return AttentionGroup(draw(u32), layers, draw(positive), draw(positive))


@st.composite
def shards(draw: st.DrawFn) -> ShardCoordinate:
    tensor, pipeline = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    return ShardCoordinate(draw(st.integers(0, tensor - 1)), tensor, draw(st.integers(0, pipeline - 1)), pipeline)


spaces = st.builds(
    Space,
    model=names,
    weights_digest=digests,
    kv_dtype=names,
    layout=names,
    block_tokens=st.integers(1, 4096),
    groups=st.lists(groups(), min_size=1, max_size=4).map(tuple),
    revision=st.none() | names,
    kv_scale_format=st.none() | names,
    shard=shards(),
    adapter_digest=st.none() | st.binary(max_size=SPACE_DIGEST_BYTES_MAX),
    tenant_salt=st.none() | st.binary(max_size=SPACE_DIGEST_BYTES_MAX),
    epoch=u32,
    key_algorithm=names,
)


# --- spaces ---------------------------------------------------------------------------------------------------------


def test_every_field_is_covered_here() -> None:
    """A field added to Space must be added to the table of differences too."""
    assert set(DIFFERENT) == {item.name for item in fields(Space)}


@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_every_field_separates_spaces(name: str) -> None:
    """Two spaces that differ in any one field have different ids, keys and a named difference."""
    other = a_space(**{name: DIFFERENT[name]})
    assert space_id(other) != ROOT
    assert differing_fields(BASE, other) == (name,)
    tokens = range(BASE.block_tokens)
    here = TokenChain(ROOT, BASE.block_tokens, tokens)
    there = TokenChain(space_id(other), BASE.block_tokens, tokens)
    assert here.names[0].key != there.names[0].key
    assert here.names[0].token_digest == there.names[0].token_digest


@pytest.mark.parametrize(
    "change",
    [
        {"groups": (replace(GROUP, layers=(0, 1)),)},
        {"groups": (replace(GROUP, kv_heads=1),)},
        {"groups": (replace(GROUP, head_dim=32),)},
        {"groups": (GROUP, GROUP)},
        {"shard": ShardCoordinate(0, 2, 0, 1)},
        {"shard": ShardCoordinate(0, 1, 0, 2)},
        {"weights_digest": BASE.weights_digest[:-1]},
        {"weights_digest": BASE.weights_digest[:-1] + b"\xff"},
    ],
)
def test_every_part_of_a_field_separates_spaces(change: dict[str, Any]) -> None:
    """Groups, ranks and digests count in every part."""
    assert space_id(a_space(**change)) != ROOT


@pytest.mark.parametrize("name", ["revision", "kv_scale_format", "adapter_digest", "tenant_salt"])
def test_absent_empty_and_two_values_are_four_chains(name: str) -> None:
    """None, an empty value, "a" and "b" name four spaces, whose chains share no key."""
    kind: Callable[[str], Any] = (lambda text: text) if "digest" not in name and "salt" not in name else str.encode
    ids = [space_id(a_space(**{name: value})) for value in (None, kind(""), kind("a"), kind("b"))]
    keys = {TokenChain(item, 4, range(4)).names[0].key for item in ids}
    assert len(set(ids)) == len(keys) == 4


def test_salts_of_tenants_differ_and_none_is_no_tenant() -> None:
    """No two tenants share a space, and no tenant's name gives the shared one."""
    salts = [None, tenant_salt(""), tenant_salt("a"), tenant_salt("b"), tenant_salt("A")]
    assert len({space_id(a_space(tenant_salt=salt)) for salt in salts}) == len(salts)


def test_ranks_have_their_own_keys() -> None:
    """Every rank of a sharded model has its own key for one prefix, so ranks never write one object."""
    ids = {
        space_id(a_space(shard=ShardCoordinate(tensor, 4, pipeline, 2))) for tensor in range(4) for pipeline in range(2)
    }
    assert len({TokenChain(item, 4, range(4)).names[0].key for item in ids}) == 8


@given(spaces)
@settings(max_examples=150, deadline=None)
def test_a_space_survives_its_encoding(space: Space) -> None:
    """decode(encode(space)) is the space, with the same id."""
    decoded = decode_space(encode_space(space))
    assert decoded == space
    assert space_id(decoded) == space_id(space)


@given(spaces, spaces)
@settings(max_examples=150, deadline=None)
def test_spaces_are_equal_exactly_when_their_ids_are(one: Space, other: Space) -> None:
    """Ids, encodings and named differences all agree with equality."""
    assert (one == other) == (space_id(one) == space_id(other)) == (differing_fields(one, other) == ())


BAD_SPACES: dict[str, dict[str, Any]] = {
    "block of no tokens": {"block_tokens": 0},
    "block too long": {"block_tokens": 4097},
    "block length as text": {"block_tokens": "64"},
    "block length as truth": {"block_tokens": True},
    "epoch below 0": {"epoch": -1},
    "epoch beyond u32": {"epoch": 2**32},
    "no group": {"groups": ()},
    "groups as list": {"groups": [GROUP]},
    "groups of something else": {"groups": (1,)},
    "no model": {"model": None},
    "model as bytes": {"model": b"tiny"},
    "name too long": {"layout": "x" * (NAME_BYTES_MAX + 1)},
    "digest as text": {"weights_digest": "ab"},
    "no weights digest": {"weights_digest": b""},
    "digest too long": {"weights_digest": b"x" * (SPACE_DIGEST_BYTES_MAX + 1)},
    "salt as text": {"tenant_salt": "a"},
    "shard as tuple": {"shard": (0, 1, 0, 1)},
    "too large": {"groups": tuple(AttentionGroup(0, tuple(range(1024)), 1, 1) for _ in range(2))},
}


@pytest.mark.parametrize("case", sorted(BAD_SPACES))
def test_a_wrong_space_is_refused(case: str) -> None:
    """A space with a field out of bounds or of the wrong type cannot be made."""
    with pytest.raises(ValueError, match=r".{10}"):
        a_space(**BAD_SPACES[case])


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionGroup(-1, (0,), 1, 1),
        lambda: AttentionGroup(0, (), 1, 1),
        lambda: AttentionGroup(0, (1, 0), 1, 1),
        lambda: AttentionGroup(0, (0, 0), 1, 1),
        lambda: AttentionGroup(0, (-1,), 1, 1),
        lambda: AttentionGroup(0, (0,), 0, 1),
        lambda: AttentionGroup(0, (0,), 1, 0),
        lambda: AttentionGroup(0, tuple(range(1025)), 1, 1),
        lambda: ShardCoordinate(1, 1, 0, 1),
        lambda: ShardCoordinate(0, 1, 2, 2),
        lambda: ShardCoordinate(0, 0, 0, 1),
        lambda: tenant_salt("x" * (NAME_BYTES_MAX + 1)),
        lambda: Attachment(-1, b"x" * 32),
        lambda: Attachment(0, b"x" * 31),
    ],
)
def test_wrong_parts_are_refused(make: Callable[[], object]) -> None:
    """Groups, coordinates, tenants and attachments out of bounds cannot be made."""
    with pytest.raises(ValueError, match=r".{10}"):
        make()


# --- chains ---------------------------------------------------------------------------------------------------------


def test_keys_follow_the_stated_formula() -> None:
    """Keys are what the module's docstring says, computed here by hand."""

    def derived(context: str) -> bytes:
        return blake3(b"", derive_key_context=context).digest()

    def block(tokens: list[int], attached: bytes = b"", count: int = 0) -> bytes:
        return struct.pack("<II", len(tokens), count) + np.asarray(tokens, "<u4").tobytes() + attached

    image = b"i" * 32
    chain = TokenChain(ROOT, 4, [1, 2, 3, 4, 5, 6, 7, 8, 9], [Attachment(5, image)])
    first = blake3(ROOT + block([1, 2, 3, 4]), key=derived("reprise-kv 2026 block key")).digest()
    content = block([5, 6, 7, 8], struct.pack("<I", 1) + image, 1)
    second = blake3(first + content, key=derived("reprise-kv 2026 block key")).digest()
    assert [name.key for name in chain.names] == [first, second]
    digest = blake3(bytes(16) + block([1, 2, 3, 4]), key=derived("reprise-kv 2026 token digest")).digest(16)
    assert chain.names[0].token_digest == digest
    state = blake3(second + block([9]), key=derived("reprise-kv 2026 state key")).digest()
    assert chain.state_name(9).key == state
    assert space_id(BASE) == blake3(encode_space(BASE), derive_key_context="reprise-kv 2026 space id").digest()


@given(st.lists(u32, max_size=60), st.lists(st.integers(0, 60), max_size=8), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_appending_in_any_chunks_gives_the_same_keys(tokens: list[int], cuts: list[int], block_tokens: int) -> None:
    """How tokens arrive does not matter; each complete block is returned exactly once."""
    whole = TokenChain(ROOT, block_tokens, tokens)
    grown = TokenChain(ROOT, block_tokens)
    returned: list[BlockName] = []
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for begin, end in pairwise(edges):
        returned += grown.append(tokens[begin:end])
    assert returned == list(grown.names) == list(whole.names)
    assert len(whole.names) == len(tokens) // block_tokens
    assert len(grown) == len(tokens)
    assert all(grown.state_name(at) == whole.state_name(at) for at in range(len(tokens) + 1))


@given(st.integers(0, 70), st.data())
@settings(max_examples=150, deadline=None)
def test_the_names_of_a_chain_are_those_of_a_list(blocks: int, data: st.DataObject) -> None:
    """Indices, slices of slices, columns and comparisons: a chain's names, held as columns, differ from a list in
    nothing that is asked of both.
    """
    edges = st.none() | st.integers(-blocks - 2, blocks + 2)
    names: Sequence[BlockName] = TokenChain(ROOT, 1, range(blocks)).names
    listed = list(names)
    for _ in range(2):
        cut = slice(data.draw(edges), data.draw(edges), data.draw(st.sampled_from([None, 1, 2, -1])))
        assert names == listed
        assert list(names[cut]) == listed[cut]
        assert len(names[cut]) == len(listed[cut])
        cut = slice(cut.start, cut.stop)
        names, listed = names[cut], listed[cut]
    assert names != [*listed, *listed[:1], BASE]
    assert (names != listed[1:]) == bool(listed)
    for at in range(-len(listed), len(listed)):
        assert names[at] == listed[at]
    for at in (len(listed), -len(listed) - 1):
        with pytest.raises(IndexError):
            names[at]
    assert isinstance(names, ChainNames)
    assert (names.keys, names.token_digests) == (
        b"".join(name.key for name in listed),
        b"".join(name.token_digest for name in listed),
    )
    assert [(route, at) for route, places in names.stripes() for at in places] == [
        (name.route, at) for at, name in enumerate(listed)
    ]


def test_names_that_were_taken_do_not_grow_with_their_chain() -> None:
    """Whoever holds the names of a prefix asks for that prefix, whatever was appended since."""
    chain = TokenChain(ROOT, 1, range(3))
    names, listed = chain.names, list(chain.names)
    more = chain.append(range(20))
    assert names == listed
    assert len(chain.names) == 23
    assert [name.index for name in more] == list(range(3, 23))


@given(st.lists(u32, min_size=1, max_size=40), st.data())
@settings(max_examples=150, deadline=None)
def test_a_changed_token_changes_every_key_from_its_block_on(tokens: list[int], data: st.DataObject) -> None:
    """Equal keys mean equal prefixes: before the change all are equal, from it on all differ."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] = (other[at] + data.draw(st.integers(1, 2**32 - 1))) % 2**32
    here, there = TokenChain(ROOT, 4, tokens), TokenChain(ROOT, 4, other)
    for index, (one, two) in enumerate(zip(here.names, there.names, strict=True)):
        before = (index + 1) * 4 <= at
        assert (one.key == two.key) == (one.token_digest == two.token_digest) == before
    for position in range(len(tokens) + 1):
        assert (here.state_name(position).key == there.state_name(position).key) == (position <= at)


def test_an_attachment_changes_keys_only_from_its_block_on() -> None:
    """An image counts by content, place and number, and only for what comes at or after it."""
    tokens = range(16)
    plain = [name.key for name in TokenChain(ROOT, 4, tokens).names]

    def keys(*attachments: Attachment) -> list[bytes]:
        return [name.key for name in TokenChain(ROOT, 4, tokens, attachments).names]

    one, two = Attachment(5, b"1" * 32), Attachment(5, b"2" * 32)
    variants = [plain, keys(one), keys(two), keys(one, two), keys(one, one), keys(Attachment(6, b"1" * 32))]
    assert {variant[0] for variant in variants} == {plain[0]}
    for index in (1, 2, 3):
        assert len({variant[index] for variant in variants}) == len(variants)
    assert keys(one, two) == keys(two, one)
    assert keys(Attachment(16, b"1" * 32)) == plain


def test_an_attachment_in_the_tail_is_part_of_the_state() -> None:
    """Two states after the same tokens but other images have different keys."""
    tokens = [1, 2, 3, 4, 5, 6]
    keys = {
        TokenChain(ROOT, 4, tokens, attached).state_name(6).key
        for attached in ([], [Attachment(5, b"1" * 32)], [Attachment(5, b"2" * 32)], [Attachment(4, b"1" * 32)])
    }
    assert len(keys) == 4
    late = TokenChain(ROOT, 4, tokens, [Attachment(5, b"1" * 32)])
    assert late.state_name(5).key == TokenChain(ROOT, 4, tokens).state_name(5).key


@pytest.mark.parametrize(
    "tokens", [[-1], [2**32], [1, 2, -5], [1.5], ["1"], [None], [1, 2**64], [np.int64(-1)], [np.float32(1)]]
)
def test_token_ids_out_of_range_are_refused_whole(tokens: list[Any]) -> None:
    """An id that is no u32 is refused, and nothing of its batch is taken."""
    chain = TokenChain(ROOT, 2, [7, 8, 9])
    with pytest.raises(ValueError, match="token ids"):
        chain.append([3, *tokens])
    assert list(chain.tokens) == [7, 8, 9]
    assert len(chain.names) == 1


def test_token_ids_of_any_integer_kind_are_the_same() -> None:
    """Python and numpy integers, and both ends of u32, name the same prefix."""
    ids = [0, 1, 2**31, 2**32 - 1]
    kinds = [ids, tuple(ids), iter(ids), np.asarray(ids, np.uint32), np.asarray(ids, np.int64)]
    assert len({TokenChain(ROOT, 4, kind).names[0].key for kind in kinds}) == 1


def test_routes_are_the_first_key_of_each_stripe() -> None:
    """All blocks of a stripe share a route, so placement keeps them together; stripes differ."""
    blocks = 2 * STRIPE_BLOCKS + 3
    chain = TokenChain(ROOT, 2, range(2 * blocks + 1))
    for name in chain.names:
        assert name.route == chain.names[name.index - name.index % STRIPE_BLOCKS].key
    assert len({name.route for name in chain.names}) == 3
    assert [name.index for name in chain.names] == list(range(blocks))
    assert [name.parent for name in chain.names[1:]] == [name.key for name in chain.names[:-1]]


def test_states_lie_with_their_parent() -> None:
    """A state's route is its parent block's, or the space's root before the first block."""
    chain = TokenChain(ROOT, 4, range(10))
    assert (chain.state_name(3).parent, chain.state_name(3).route) == (ROOT, ROOT)
    assert chain.state_name(9).parent == chain.names[1].key
    assert chain.state_name(9).route == chain.names[1].route
    assert [chain.state_name(at).tail_tokens for at in (0, 3, 4, 10)] == [0, 3, 0, 2]
    for position in (-1, 11):
        with pytest.raises(ValueError, match="outside"):
            chain.state_name(position)


def test_block_and_state_keys_never_coincide() -> None:
    """The same content as a block and as a state has different keys."""
    chain = TokenChain(ROOT, 4, range(8))
    long_blocks = TokenChain(ROOT, 8, range(8))
    keys = [name.key for name in chain.names] + [chain.state_name(at).key for at in range(9)]
    keys += [long_blocks.names[0].key, long_blocks.state_name(4).key]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("root", "block_tokens"), [(b"short", 4), (bytes(32), 0), (bytes(32), 4097)])
def test_wrong_chains_are_refused(root: bytes, block_tokens: int) -> None:
    """A chain needs a whole space id and a block length within bounds."""
    with pytest.raises(ValueError, match=r"space id|block_tokens"):
        TokenChain(SpaceId(root), block_tokens)


PRINT_KEYS = """
from kvstore.keys import AttentionGroup, Attachment, Space, TokenChain, space_id, tenant_salt
groups = (AttentionGroup(0, (0, 1), 2, 16),)
space = Space("m", b"w" * 32, "bfloat16", "KV2LTD", 4, groups, tenant_salt=tenant_salt("t"))
chain = TokenChain(space_id(space), 4, range(40), [Attachment(9, b"x" * 32)])
print([name.key.hex() for name in chain.names], chain.state_name(39).key.hex(), chain.names[-1].token_digest.hex())
"""


def test_keys_do_not_depend_on_the_process() -> None:
    """Processes with another or no hash seed compute the same keys."""
    root = Path(__file__).resolve().parents[2]
    printed = set()
    for seed in (None, "0", "7"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment |= {"PYTHONPATH": str(root)} | ({"PYTHONHASHSEED": seed} if seed is not None else {})
        done = subprocess.run(
            [sys.executable, "-c", PRINT_KEYS], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    assert len(printed.pop()) > 10 * 64
