"""Attributes of this process that agents, ranks and the daemon set: file creation mask, priority of background threads.

Files of daemon and agent are private, while processes of users keep the user's mask.
"""

from __future__ import annotations

import os
import threading

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
