"""Every byte of identity is pinned: a change of these vectors leaves every stored block behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.keys import (
    KEY_ALGORITHM,
    Attachment,
    SpaceId,
    TokenChain,
    decode_space,
    encode_space,
    opaque_name,
    space_id,
    tenant_salt,
)
from tests.support.spaces import space_from

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "keys_vectors.json").read_text(encoding="utf-8"))


def chain_from(vector: dict[str, Any]) -> TokenChain:
    attachments = [Attachment(item["position"], bytes.fromhex(item["digest"])) for item in vector["attachments"]]
    root = SpaceId(bytes.fromhex(vector["space_id"]))
    return TokenChain(root, vector["block_tokens"], vector["tokens"], attachments)


def test_key_algorithm_has_its_name() -> None:
    """The vectors belong to one named algorithm; another derivation needs another name."""
    assert VECTORS["key_algorithm"] == KEY_ALGORITHM


@pytest.mark.parametrize("vector", VECTORS["spaces"], ids=["least", "every field", "empty fields"])
def test_space_encodes_and_hashes_to_its_vector(vector: dict[str, Any]) -> None:
    """A space's canonical bytes and id are the recorded ones, and its bytes decode to it."""
    space = space_from(vector["space"])
    assert encode_space(space).hex() == vector["encoding"]
    assert space_id(space).hex() == vector["space_id"]
    assert decode_space(bytes.fromhex(vector["encoding"])) == space


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=["plain", "one token a block", "attachments"])
def test_chain_gives_its_vectors(vector: dict[str, Any]) -> None:
    """Keys, parents, routes and token digests of blocks, and the names of states, are the recorded ones."""
    chain = chain_from(vector)
    blocks = [
        {
            "key": name.key.hex(),
            "token_digest": name.token_digest.hex(),
            "parent": name.parent.hex(),
            "route": name.route.hex(),
        }
        for name in chain.names
    ]
    assert blocks == vector["blocks"]
    for expected in vector["states"]:
        name = chain.state_name(expected["position"])
        assert name.key.hex() == expected["key"]
        assert (name.parent.hex(), name.route.hex()) == (expected["parent"], expected["route"])
        assert name.tail_tokens == expected["tail_tokens"]


@pytest.mark.parametrize("tenant", sorted(VECTORS["tenant_salts"]))
def test_tenant_salt_is_its_vector(tenant: str) -> None:
    """A tenant's salt is the recorded one, also for the empty name."""
    assert tenant_salt(tenant).hex() == VECTORS["tenant_salts"][tenant]


@pytest.mark.parametrize("vector", VECTORS["opaque"], ids=["hash of 32 bytes", "hash and group", "another space"])
def test_an_engines_own_key_gives_its_vector(vector: dict[str, Any]) -> None:
    """A block that an engine names itself has the recorded key and digest, and is the first of its own stripe."""
    space = SpaceId(bytes.fromhex(vector["space_id"]))
    name = opaque_name(space, bytes.fromhex(vector["engine_key"]))
    assert (name.key.hex(), name.token_digest.hex()) == (vector["key"], vector["token_digest"])
    assert (name.parent, name.route, name.index) == (space, name.key, 0)


def test_an_engines_key_has_one_digest_in_every_space() -> None:
    """So explain finds the same prefix in another space; keys differ there, and no key is another's beginning."""
    same, elsewhere = VECTORS["opaque"][1], VECTORS["opaque"][2]
    assert same["engine_key"] == elsewhere["engine_key"]
    assert same["token_digest"] == elsewhere["token_digest"]
    assert len({vector["key"] for vector in VECTORS["opaque"]}) == 3
