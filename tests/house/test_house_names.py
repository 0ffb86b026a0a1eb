"""The public names of the contracts: others build on them, so adding is a decision and removing is a break."""

from __future__ import annotations

import importlib
from types import FunctionType

import pytest

PUBLIC = {
    "kvstore.keys": (
        "Attachment AttentionGroup BlockName ChainNames ShardCoordinate Space StateName TokenChain decode_space "
        "differing_fields encode_space opaque_name space_id tenant_salt"
    ),
    "kvstore.store": (
        "BlockInfo BlockPut ClassEffect Clock Effect GetStatus Lookup Pin Policy Presence PutOutcome "
        "Sighting StateEntry Store SystemClock"
    ),
    "kvstore.traffic": "ClassRule ClassRules",
    "kvstore.errors": (
        "CapacityProtected DeadlineExceeded Held InternalError Overloaded PolicyConflict ProtocolError QuotaExceeded "
        "SpaceUnknown StoreError Unauthorized Unavailable VersionMismatch VolumeError VolumeFormat "
        "VolumeInUse from_code"
    ),
    "kvstore.units": "format_bytes format_bytes_short format_duration parse_bytes parse_duration_s parse_seconds",
    "kvstore.client": "StoreClient",
    "workers.protocol": (
        "DecodeRequest Finished FirstToken HandedOff Load Message ModelInfo PrefillRequest Reuse "
        "Sampling Tokens WorkRequest WorkerFailure"
    ),
    "workers.client": "WorkerClient",
    "workers.errors": "Failed ProtocolError Rejected Unavailable WorkerError",
}
"""Classes and functions that each module of a contract defines, by name."""


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_the_agreed_ones(module: str) -> None:
    """A contract's module defines exactly these classes and functions without a leading underscore."""
    found = {
        name
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_") and isinstance(value, type | FunctionType) and value.__module__ == module
    }
    assert found == set(PUBLIC[module].split())
