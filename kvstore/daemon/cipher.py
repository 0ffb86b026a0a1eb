"""Encryption at rest: what a payload becomes under a tenant's cipher key, and which cipher key reads it again.

Owns the stored form of an encrypted payload (AES-256-GCM) and the choice of the cipher key for a block of a space. Does
not know where cipher keys come from, nor how records lie. Invariants: each block is encrypted under a key of its own,
derived from the cipher key, space and block key, with a fresh nonce; what is decrypted is the payload that was put
under this very space, key, token digest, length and flags, or RecordDamaged; a cipher key that is not there is
KeyMissing, which is a miss and no damage, because the key may come back. Place and generation are left out, so that
records move as they lie.
"""

from __future__ import annotations

import logging
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.daemon.codec import ENCRYPTION_BYTES, is_encrypted, slot_of, with_slot
from kvstore.daemon.record import RecordDamaged, RecordHeader
from kvstore.keys import BlockKey, BlockName, Space, SpaceId
from kvstore.store import Buffer

CIPHER_KEY_BYTES = 32
NUMBER_MAX = 30
"""Cipher keys of one tenant are numbered from 1 to this."""
UNKNOWN_SLOT = 63
"""Of no cipher key: a block whose key is known to have had a number that another key has now."""
_DEFAULT_SLOTS = 32
_ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 16, 12, 16
_ID_CONTEXT = "reprise-kv 2026 cipher key id"
_RECORD_CONTEXT = "reprise-kv 2026 record encryption"
_BOUND = struct.Struct("<16sIBB")
assert _ID_BYTES + _NONCE_BYTES + _TAG_BYTES == ENCRYPTION_BYTES
assert NUMBER_MAX < _DEFAULT_SLOTS and NUMBER_MAX + _DEFAULT_SLOTS < UNKNOWN_SLOT

log = logging.getLogger(__name__)


class KeyMissing(Exception):
    """The cipher key of a block is not in force. Never leaves the daemon: it becomes a miss.

    ``renumbered``: another one has its number.
    """

    def __init__(self, *, renumbered: bool) -> None:
        super().__init__("the block's cipher key is not there")
        self.renumbered = renumbered


@dataclass(frozen=True, slots=True)
class CipherKey:
    """One cipher key. ``slot``: what codec bytes say of it; ``key_id``: what stored bytes say, derived from the key."""

    slot: int
    key_id: bytes
    root: bytes = field(repr=False)

    @classmethod
    def make(cls, number: int, secret: bytes, *, default: bool = False) -> CipherKey:
        """From its number and 32 random bytes; ``default``: of tenants that have none of their own."""
        return cls(
            number + _DEFAULT_SLOTS * default,
            blake3(secret, derive_key_context=_ID_CONTEXT).digest(_ID_BYTES),
            blake3(secret, derive_key_context=_RECORD_CONTEXT).digest(),
        )


@dataclass(frozen=True, slots=True)
class Keyring:
    """The cipher keys in force. ``own``: by tenant's salt; ``default``: of all other spaces. The last one encrypts."""

    own: Mapping[bytes, Sequence[CipherKey]] = field(default_factory=dict)
    default: Sequence[CipherKey] = ()

    def writing(self, salt: bytes | None) -> CipherKey | None:
        """What encrypts a tenant's new blocks; None: they are stored as they are."""
        keys = self.own.get(salt or b"") or self.default
        return keys[-1] if keys else None

    def readable(self, salt: bytes | None) -> dict[int, CipherKey]:
        """By slot: what decrypts a tenant's blocks."""
        return {key.slot: key for key in (*self.default, *self.own.get(salt or b"", ()))}


class Ciphers:
    """The cipher keys of a node's spaces. Thread-safe: ``keyring`` is replaced as a whole."""

    def __init__(self, spaces: Callable[[], Mapping[SpaceId, Space]], keyring: Keyring) -> None:
        self._spaces = spaces
        self._reported: set[bytes] = set()
        self.keyring = keyring

    def writing(self, space_id: SpaceId) -> CipherKey | None:
        """What encrypts new blocks of a space."""
        if not self.keyring.own and not self.keyring.default:
            return None
        space = self._spaces().get(space_id)
        return self.keyring.writing(space.tenant_salt) if space is not None else None

    def is_locked(self, space_id: SpaceId, codec: int) -> bool:
        """Whether blocks of this codec byte in a space are encrypted, and there is no cipher key that reads them."""
        return is_encrypted(codec) and slot_of(codec) not in self._readable(space_id)

    def decrypt(self, header: RecordHeader, stored: Buffer) -> bytes:
        """The packed payload of a whole record. Raises KeyMissing, RecordDamaged."""
        key_id = bytes(stored[:_ID_BYTES])
        key = self._readable(header.space_id).get(slot_of(header.codec))
        if key is None or key.key_id != key_id:
            if key_id not in self._reported:
                self._reported.add(key_id)
                log.warning(
                    "cipher_key_missing id=%s: %s", key_id.hex(), "its number has another key" if key else "it is gone"
                )
            raise KeyMissing(renumbered=key is not None)
        return decrypt(key, header, stored)

    def lost_spaces(self, before: Keyring) -> list[SpaceId]:
        """Spaces that had a cipher key once which they have no longer."""
        found = []
        for space_id, space in self._spaces().items():
            old, new = before.readable(space.tenant_salt), self.keyring.readable(space.tenant_salt)
            if {key.key_id for key in old.values()} - {key.key_id for key in new.values()}:
                found.append(space_id)
        return found

    def _readable(self, space_id: SpaceId) -> dict[int, CipherKey]:
        space = self._spaces().get(space_id)
        return self.keyring.readable(space.tenant_salt) if space is not None else {}


@dataclass(frozen=True, slots=True)
class Encryption:
    """How the blocks of one put are encrypted."""

    key: CipherKey
    space_id: SpaceId

    def encrypt(self, name: BlockName, flags: int, payload_bytes: int, codec: int, packed: Buffer) -> tuple[int, bytes]:
        """The codec byte and stored bytes of a payload that ``codec`` packed."""
        codec = with_slot(codec, self.key.slot)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        bound = _BOUND.pack(name.token_digest, payload_bytes, flags, codec)
        cipher = _cipher(self.key, self.space_id, name.key)
        return codec, b"".join((self.key.key_id, nonce, cipher.encrypt(nonce, packed, bound)))


def decrypt(key: CipherKey, header: RecordHeader, stored: Buffer) -> bytes:
    """The packed payload of a record of this cipher key. Raises RecordDamaged."""
    if len(stored) < ENCRYPTION_BYTES:
        raise RecordDamaged("the stored bytes are too short to be encrypted")
    view = memoryview(stored)[_ID_BYTES:]
    bound = _BOUND.pack(header.token_digest, header.payload_bytes, header.flags, header.codec)
    try:
        cipher = _cipher(key, header.space_id, header.key)
        return cipher.decrypt(bytes(view[:_NONCE_BYTES]), view[_NONCE_BYTES:], bound)
    except InvalidTag as error:
        raise RecordDamaged("the payload's authentication tag differs") from error


def _cipher(key: CipherKey, space_id: SpaceId, block_key: BlockKey) -> AESGCM:
    """In 1.6 us. A nonce need then be unique only among the puts of one block: no number of blocks wears a key out."""
    return AESGCM(blake3(space_id + block_key, key=key.root).digest())
