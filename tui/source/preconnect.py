"""Knocking at the daemon before the interface is even imported: the snapshot is made while Textual starts."""

from __future__ import annotations

import socket
from pathlib import Path

from clusterd import protocol

HELLO, WATCH = 1, 2
"""Numbers of the two requests that are sent ahead."""


def preconnect(path: Path) -> socket.socket | None:
    """A connection on which `hello` and `watch` are asked; None: nobody is there; dialling again says why."""
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(str(path))
        made.sendall(
            protocol.encode({"id": HELLO, "verb": "hello", "protocol_version": protocol.VERSION})
            + protocol.encode({"id": WATCH, "verb": "watch"})
        )
    except OSError:
        made.close()
        return None
    return made
