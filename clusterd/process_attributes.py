"""Attributes of processes: file creation mask, priority of threads, how often garbage is collected, seeds.

Files of daemon and agent are private, while processes of users keep the user's mask. Every process of a job starts its
script under seeds that the job determines, so that draws before training are alike everywhere: a split or a shuffle
that a script draws when it loads its data must be the same on all ranks and in later attempts.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import zlib

BACKGROUND_NICENESS = 10
"""Positive, since a delayed rank delays all other ranks of its job."""

_inherited = -1


def make_files_private() -> None:
    """Let this process create files that only its user can open."""
    global _inherited
    _inherited = os.umask(0o077)


def inherited_umask() -> int:
    """The mask from before, for `subprocess.Popen(umask=...)` of users' processes; -1, no change, if it holds."""
    return _inherited


def lower_priority() -> None:
    """Lower the priority of the calling thread, below that of training, for the rest of its life."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(BACKGROUND_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def collect_seldom() -> None:
    """Look for cycles of garbage a hundred times less often: states and rows are large and have none."""
    gc.set_threshold(50_000, 20, 10)


SEED_VARIABLE = "CLUSTERD_SEED_OF"
"""Environment variable of a rank: the job that determines its seed, its own or the one that it continues."""

HASH_SEED = "0"
"""PYTHONHASHSEED of ranks. The same for all jobs: forks have that of their fork server, and jobs share one."""


seeds_given: set[int] = set()
"""Numbers with which this process has seeded its generators."""


def seed_generators(job: str) -> None:
    """Seed Python's, NumPy's and torch's global generators, as far as imported, with a number that `job` determines."""
    seed = zlib.crc32(f"clusterd {job}".encode())
    seeds_given.add(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
