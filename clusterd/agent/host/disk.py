"""Trees on this host's disk, whatever a job made of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterd.agent.log import say


def remove(tree: Path) -> int:
    """Remove a directory whatever the job did to its permissions; what cannot be removed is named in the log.

    Returns:
        Bytes that it took on the disk.
    """
    before = _taken_bytes(tree)

    def retry(function: Callable[[str], Any], path: str, _info: Any) -> None:
        try:
            Path(path).parent.chmod(0o700)
            function(path)
        except OSError as error:
            say(f"agent: cannot remove {path}: {error}")

    shutil.rmtree(tree, onerror=retry)
    return before - _taken_bytes(tree)


def _taken_bytes(tree: Path) -> int:
    taken = 0
    for directory, _names, files in os.walk(tree):
        for name in files:
            with contextlib.suppress(OSError):
                taken += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return taken
