"""Where a model's files are, and what names their content.

Owns the weights digest. Does not know about tensors of a forward, slots or requests.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from blake3 import blake3

log = logging.getLogger(__name__)

_DIGEST_FILE = ".reprise-digest.json"
_DIGEST_CONTEXT = "reprise-kv 2026 weights digest"


def weights_digest(directory: Path) -> bytes:
    """32 bytes that name the checkpoint: its config and every safetensors file, by content.

    Kept beside the files, keyed by their sizes and modification times, since hashing takes seconds a gigabyte.
    Raises FileNotFoundError when there are no safetensors.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no *.safetensors: convert the checkpoint to safetensors first")
    files.append(directory / "config.json")
    stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    kept = _read_digest(directory / _DIGEST_FILE, stamps)
    if kept is not None:
        return kept
    whole = blake3(b"", derive_key_context=_DIGEST_CONTEXT)
    for path in files:
        name = path.name.encode()
        content = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        whole.update(len(name).to_bytes(4, "little") + name + content)
    digest = whole.digest()
    _keep_digest(directory / _DIGEST_FILE, stamps, digest)
    return digest


def _read_digest(path: Path, stamps: list[list[object]]) -> bytes | None:
    try:
        kept = json.loads(path.read_bytes())
        return bytes.fromhex(kept["digest"]) if kept["files"] == stamps else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_digest(path: Path, stamps: list[list[object]], digest: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"files": stamps, "digest": digest.hex()}))
        temporary.replace(path)
    except OSError as error:
        log.info("weights_digest_not_kept", extra={"reason": str(error)})
