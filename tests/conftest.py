"""Set-up of every test process: one thread a process, no colours, seeds printed by hypothesis when something fails."""

from __future__ import annotations

import os

# Before torch or numpy is imported anywhere: the tests share two cores with the processes that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("NO_COLOR", "1")
os.environ.setdefault("COLUMNS", "160")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "reprise",
    deadline=None,  # a busy machine is not a failure
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("reprise")
