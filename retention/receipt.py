"""Receipts of purges: what was ordered, what each node says that it did, and a signature over both.

Owns the document, its signature (Ed25519) and the keys' files. Does not purge or scan. Invariants: what is signed is
the whole document but the signature, in one canonical form; a receipt whose signature does not fit is never taken for
one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvstore.purges import (
    PurgeOrder,
    PurgeReport,
    order_from_json,
    order_to_json,
    report_from_json,
    report_to_json,
)
from retention.errors import ReceiptInvalid

RECEIPT_VERSION = 1
RECEIPT_BYTES_MAX = 16 * 1024 * 1024
KEY_FILE_BYTES_MAX = 64 * 1024
_DOMAIN = b"reprise purge receipt v1\n"


@dataclass(frozen=True, slots=True)
class Receipt:
    """``reports`` by node; ``failed``: nodes that did not answer, and why. ``public_key``: 32 bytes of its signer."""

    order: PurgeOrder
    reports: Mapping[str, PurgeReport]
    failed: Mapping[str, str]
    signed_s: int
    public_key: bytes

    @property
    def complete(self) -> bool:
        """Whether every node has carried the order out."""
        return not self.failed and all(report.done for report in self.reports.values())


def sign_receipt(
    order: PurgeOrder,
    reports: Mapping[str, PurgeReport],
    failed: Mapping[str, str],
    signed_s: int,
    key: Ed25519PrivateKey,
) -> bytes:
    """The signed document, as it lies in a file."""
    document = {
        "receipt": RECEIPT_VERSION,
        "order": order_to_json(order),
        "nodes": {name: report_to_json(report) for name, report in reports.items()},
        "failed": dict(failed),
        "signed_s": signed_s,
        "public_key": _raw(key.public_key()).hex(),
    }
    signature = key.sign(_signed_bytes(document))
    return json.dumps({**document, "signature": signature.hex()}, indent=1, sort_keys=True).encode() + b"\n"


def read_receipt(path: Path, trusted: Ed25519PublicKey | None = None) -> Receipt:
    """A receipt whose signature fits; ``trusted``: by this key. Raises ReceiptInvalid."""
    try:
        with path.open("rb") as file:
            data = file.read(RECEIPT_BYTES_MAX + 1)
    except OSError as error:
        raise ReceiptInvalid(f"the receipt {path} cannot be read: {error.strerror}") from error
    if len(data) > RECEIPT_BYTES_MAX:
        raise ReceiptInvalid(f"{path} has more than {RECEIPT_BYTES_MAX} bytes: it is no receipt")
    try:
        document = json.loads(data)
        signature = bytes.fromhex(document.pop("signature"))
        if document["receipt"] != RECEIPT_VERSION:
            raise ReceiptInvalid(f"{path} has version {document['receipt']!r}; this program reads {RECEIPT_VERSION}")
        public_key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["public_key"]))
        public_key.verify(signature, _signed_bytes(document))
        receipt = Receipt(
            order_from_json(document["order"]),
            {str(name): report_from_json(row) for name, row in document["nodes"].items()},
            {str(name): str(why) for name, why in document["failed"].items()},
            int(document["signed_s"]),
            _raw(public_key),
        )
    except ReceiptInvalid:
        raise
    except InvalidSignature:
        raise ReceiptInvalid(f"{path} was changed, or signed by another key than it names") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ReceiptInvalid(f"{path} is no receipt of a purge: {error}") from error
    if trusted is not None and _raw(trusted) != receipt.public_key:
        raise ReceiptInvalid(f"{path} was signed by the key {receipt.public_key.hex()}, not by the one given")
    return receipt


def write_key(path: Path) -> Path:
    """Make a key: the secret one in ``path`` (readable by its owner only), the public one beside it, whose path is
    returned. Raises FileExistsError rather than replace a key.
    """
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    public_path = path.with_name(path.name + ".pub")
    for target, data, mode in ((path, secret, 0o600), (public_path, public, 0o644)):
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(data)
    return public_path


def read_secret_key(path: Path) -> Ed25519PrivateKey:
    """Raises ReceiptInvalid."""
    try:
        key = serialization.load_pem_private_key(_key_bytes(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ReceiptInvalid(f"{path} is no secret key; make one with: reprise retention keygen {path}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ReceiptInvalid(f"{path} is no Ed25519 key; make one with: reprise retention keygen FILE")
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """Raises ReceiptInvalid."""
    try:
        key = serialization.load_pem_public_key(_key_bytes(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ReceiptInvalid(f"{path} is no public key; `retention keygen` writes one beside the secret key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ReceiptInvalid(f"{path} is no Ed25519 key")
    return key


def _key_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(KEY_FILE_BYTES_MAX)
    except OSError as error:
        raise ReceiptInvalid(f"the key {path} cannot be read: {error.strerror}") from error


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _signed_bytes(document: Mapping[str, Any]) -> bytes:
    return _DOMAIN + json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
