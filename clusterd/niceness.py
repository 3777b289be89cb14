"""Scheduling priority of background threads in agents and ranks: below that of training."""

from __future__ import annotations

import os
import threading

BACKGROUND_NICENESS = 10
"""Positive, since a delayed rank delays all other ranks of its job."""


def lower_priority() -> None:
    """Lower the priority of the calling thread for the rest of its life."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(BACKGROUND_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
