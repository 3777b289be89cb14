"""Work that has time gives way to training, in agents and in ranks."""

from __future__ import annotations

import os
import threading

PATIENT = 10
"""Niceness: a rank that is held up for a moment holds up all others of its job."""


def be_patient() -> None:
    """The calling thread gives way to whoever else wants its core, until it ends."""
    me = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, me, max(PATIENT, os.getpriority(os.PRIO_PROCESS, me)))
