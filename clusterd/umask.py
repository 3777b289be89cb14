"""File creation mask: files of daemon and agent are private, and processes of users keep the user's mask."""

from __future__ import annotations

import os

_inherited = -1


def make_files_private() -> None:
    """Let this process create files that only its user can open."""
    global _inherited
    _inherited = os.umask(0o077)


def inherited() -> int:
    """The mask from before, for `subprocess.Popen(umask=...)` of users' processes; -1, no change, if it holds."""
    return _inherited
