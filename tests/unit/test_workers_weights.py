"""Files of a model: what names their content, the one conversion, and errors that say what to do."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import checkpoint
from workers import weights
from workers.weights import PACKAGED, ModelUnavailable, PackagedModel, resolve_model, weights_digest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


def test_equal_content_has_equal_digests_and_any_change_another(directory: Path, tmp_path: Path) -> None:
    """The digest follows the bytes of weights and config, not the place, and nothing else in the folder."""
    original = weights_digest(directory)
    other = Path(shutil.copytree(checkpoint("llama"), tmp_path / "elsewhere"))
    (other / "README.md").write_text("not part of the model")
    assert weights_digest(other) == original
    assert len(original) == 32
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    changed = weights_digest(directory)
    assert changed != original
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5.0
    (other / "config.json").write_text(json.dumps(config))
    assert weights_digest(other) not in (original, changed)


def test_a_digest_is_kept_until_a_file_changes(directory: Path) -> None:
    """The second time nothing is hashed; a damaged or foreign note is not believed."""
    digest = weights_digest(directory)
    note = directory / ".reprise-digest.json"
    kept = json.loads(note.read_text())
    kept["digest"] = "00" * 32
    note.write_text(json.dumps(kept))
    assert weights_digest(directory) == bytes(32)
    for broken in ("", "[]", "{}", json.dumps({**kept, "digest": "00"}), json.dumps({**kept, "files": []})):
        note.write_text(broken)
        assert weights_digest(directory) == digest
    note.write_text(json.dumps(kept))
    os.utime(directory / "model.safetensors", ns=(1, 1))
    assert weights_digest(directory) == digest


def test_a_read_only_checkpoint_is_hashed_without_a_note(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note is best effort."""
    digest = weights_digest(directory)
    (directory / ".reprise-digest.json").unlink()

    def refuse(self: Path, *_args: object, **_kwargs: object) -> int:
        raise PermissionError(self)

    monkeypatch.setattr(Path, "write_text", refuse)
    assert weights_digest(directory) == digest
    assert not (directory / ".reprise-digest.json").exists()


def test_a_directory_is_served_under_its_own_name(directory: Path, tmp_path: Path) -> None:
    """One replay window unless the checkpoint's own file says otherwise."""
    model = resolve_model(str(directory), tmp_path)
    assert (model.name, model.directory, model.replay_windows, model.revision) == ("copy", directory, 1, None)
    (directory / "reprise.json").write_text('{"replay_windows": 4}')
    assert resolve_model(str(directory), tmp_path).replay_windows == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[1]", "JSON object"),
        ("{", "not JSON"),
        ('{"replay_windows": -1}', "whole number"),
        ('{"replay_windows": true}', "whole number"),
        ('{"replay_windows": 1.5}', "whole number"),
        ('{"replay_window": 1}', "unknown keys: replay_window"),
    ],
)
def test_wrong_settings_beside_a_checkpoint_are_refused(
    directory: Path, tmp_path: Path, settings: str, message: str
) -> None:
    """A misspelt key is an error, not a default."""
    (directory / "reprise.json").write_text(settings)
    with pytest.raises(ModelUnavailable, match=message):
        resolve_model(str(directory), tmp_path)


def test_what_is_not_a_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Neither a demo name nor a directory; a directory without config; one without safetensors."""
    with pytest.raises(ModelUnavailable, match="neither a demo model"):
        resolve_model("dmeo", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"), tmp_path)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match="convert the checkpoint to safetensors"):
        resolve_model(str(tmp_path / "empty"), tmp_path)


def test_a_demo_model_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the command to run."""
    missing = PackagedModel("m", "m", "nope", "no_such_module", "pip install nope", "", 1, lambda a, b: a)
    monkeypatch.setitem(PACKAGED, "m", missing)
    with pytest.raises(ModelUnavailable, match="run `pip install nope`"):
        resolve_model("m", tmp_path)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the cache is complete or not there, and the next start tries again."""

    def fail(package: Path, scratch: Path) -> Path:
        (scratch / "half.gguf").write_bytes(b"half")
        raise ModelUnavailable("reinstall the package")

    broken = PackagedModel("m", "tiny", "blake3", "blake3", "", "", 1, fail)
    monkeypatch.setitem(PACKAGED, "m", broken)
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="reinstall"):
            resolve_model("m", tmp_path)
        assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_workers_that_start_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One converts, the others wait for it and then find the folder; a file lock serves threads too."""
    conversions: list[str] = []

    def convert(_model: PackagedModel, _package: Path, directory: Path, progress: weights.Progress) -> None:
        progress("converting")
        conversions.append(directory.name)
        waiting.wait(60)
        made = directory.with_suffix(".made")
        shutil.copytree(checkpoint("llama"), made)
        made.rename(directory)

    def tell(line: str) -> None:
        if line.startswith("waiting"):
            waiting.set()

    waiting = threading.Event()
    monkeypatch.setattr(weights, "_convert", convert)
    monkeypatch.setitem(PACKAGED, "m", PackagedModel("m", "tiny", "blake3", "blake3", "", "", 3, lambda a, b: a))
    with ThreadPoolExecutor(3) as pool:
        models = [job.result(60) for job in [pool.submit(resolve_model, "m", tmp_path, tell) for _ in range(3)]]
    assert len(conversions) == 1
    assert len(set(models)) == 1
    assert models[0].revision == f"blake3=={version('blake3')}"
    assert (models[0].directory / "config.json").is_file()


def test_a_conversion_that_hangs_elsewhere_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded and the error names the lock."""
    monkeypatch.setattr(weights, "CONVERT_S_MAX", 0.05)
    monkeypatch.setitem(PACKAGED, "m", PackagedModel("m", "tiny", "blake3", "blake3", "", "", 3, lambda a, b: a))
    with (tmp_path / f"tiny-{version('blake3')}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelUnavailable, match=r"is it hung\? \(lock: "):
            resolve_model("m", tmp_path)


def test_a_converted_model_carries_no_mark_of_its_gguf(tmp_path: Path) -> None:
    """Saved as plain bf16: a config that still said gguf would be unpacked again at every load."""
    network = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    network.config.quantization_config = {"quant_method": "gguf"}
    network.hf_quantizer = object()
    weights._save_bf16(network, tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="auto").dtype == torch.bfloat16
