"""Seeds under which every process of a job starts its script, so that draws before training are alike everywhere.

A split or a shuffle that a script draws when it loads its data must be the same on all ranks and in later attempts.
"""

from __future__ import annotations

import random
import sys
import zlib

SEED_VARIABLE = "CLUSTERD_SEED_OF"
"""Environment variable of a rank: the job that determines its seed, its own or the one that it continues."""

HASH_SEED = "0"
"""PYTHONHASHSEED of ranks. The same for all jobs: forks have that of their fork server, and jobs share one."""


def seed_generators(job: str) -> None:
    """Seed Python's, NumPy's and torch's global generators, as far as imported, with a number that `job` determines."""
    seed = zlib.crc32(f"clusterd {job}".encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
