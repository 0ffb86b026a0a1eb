"""Set-up of every test process: one thread a process, no colours, the same examples of hypothesis in every run (others
with ``pytest --hypothesis-profile=explore``).
"""

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
    derandomize=True,  # nor is a change one for a fault that was there before it
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("reprise"), derandomize=False)
settings.load_profile("reprise")
