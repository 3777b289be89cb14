"""Files of listening Unix sockets: detection of a removed or replaced one, which clients no longer reach."""

from __future__ import annotations

from pathlib import Path


def inode(path: Path) -> int | None:
    """Inode number of the file at `path`; None if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def is_still(path: Path, made: int | None) -> bool:
    """True if the file at `path` still has the inode `made`; false if it was removed or replaced."""
    return made is not None and inode(path) == made
