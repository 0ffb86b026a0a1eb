"""The table of fuzzing targets, and the inputs that each begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import access_targets, disk_targets, reader_targets, wire_targets

CORPUS = Path(__file__).with_name("corpus")


@dataclass(frozen=True, slots=True)
class Target:
    """``run`` takes any bytes; ``seeds`` gives examples of what is meant by them. ``input_bytes_max``: of one input."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    input_bytes_max: int = 1024


TARGETS: dict[str, Target] = {
    "message": Target(wire_targets.message, wire_targets.message_seeds),
    "header": Target(wire_targets.header, wire_targets.header_seeds, 256),
    "control": Target(wire_targets.control_message, wire_targets.control_seeds),
    "conversation": Target(wire_targets.conversation, wire_targets.conversation_seeds),
    "tokens": Target(access_targets.tokens, access_targets.tokens_seeds),
    "keyring": Target(access_targets.keyring, access_targets.keyring_seeds),
    "trespass": Target(access_targets.trespass, access_targets.trespass_seeds),
    "greeting": Target(access_targets.greeting, access_targets.greeting_seeds, 256),
    "plan": Target(reader_targets.plan, reader_targets.plan_seeds, 512),
    "reader": Target(reader_targets.reader, reader_targets.reader_seeds, 256),
    "record": Target(disk_targets.record, disk_targets.record_seeds, 320),
    "segment": Target(disk_targets.segment, disk_targets.segment_seeds, 512),
    "index": Target(disk_targets.index, disk_targets.index_seeds),
    "catalog": Target(disk_targets.catalog, disk_targets.catalog_seeds, 2048),
}


def inputs_of(name: str) -> list[bytes]:
    """Seeds, and what exploring found worth keeping: one input a line, in hex."""
    path = CORPUS / f"{name}.txt"
    kept = path.read_text().split() if path.exists() else []
    return [*TARGETS[name].seeds(), *map(bytes.fromhex, kept)]


def _any(data: bytes) -> None:
    """The first byte chooses a target; the rest is its input."""
    if data:
        list(TARGETS.values())[data[0] % len(TARGETS)].run(data[1:])


def _any_seeds() -> list[bytes]:
    return [bytes([at]) + data for at, name in enumerate(TARGETS) for data in inputs_of(name)]


ALL = Target(_any, _any_seeds)
"""All of them in one process: starting one takes longer than many inputs."""
