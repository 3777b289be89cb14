"""Unix sockets: who is at the other end, and detection of a removed or replaced file, which clients no longer reach."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from clusterd.errors import DaemonAbsent
from clusterd.trusted_paths import account_name


def inode(path: Path) -> int | None:
    """Inode number of the file at `path`; None if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def is_still(path: Path, made: int | None) -> bool:
    """True if the file at `path` still has the inode `made`; false if it was removed or replaced."""
    return made is not None and inode(path) == made


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end of a connected socket: who made it listen, or connected."""
    credentials = struct.Struct("3i")  # process, user, group
    return int(credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1])


def refuse_impostor(connection: socket.socket, path: Path) -> None:
    """Check that who serves a daemon's socket is root, this account, or the owner of the socket's directory.

    Raises:
        DaemonAbsent: it is somebody else, who can merely write there.
    """
    if not hasattr(socket, "SO_PEERCRED"):  # macOS, whose clients reach a daemon through a directory of their own
        return
    served_by = peer_uid(connection)
    if served_by not in (0, os.getuid(), path.parent.stat().st_uid):
        raise DaemonAbsent(
            f"{path} is served by {account_name(served_by)}, who does not own its directory: nothing was sent; "
            "a daemon's socket lies in a directory of its account or of root"
        )
