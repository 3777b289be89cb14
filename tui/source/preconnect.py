"""Early connection to the daemon: it prepares its baseline while Textual is being imported."""

from __future__ import annotations

import socket
from pathlib import Path

from clusterd import protocol
from clusterd.errors import DaemonAbsent
from clusterd.protocol import calls
from clusterd.socket_files import refuse_impostor

HELLO, WATCH = 1, 2
"""Ids of the two requests sent ahead."""


def preconnect(path: Path) -> socket.socket | None:
    """Connect and send `hello` and `watch`; None if nobody listens (the later attempt reports why)."""
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(str(path))
        refuse_impostor(made, path)
        made.sendall(
            protocol.encode(calls.request(HELLO, "hello", {"protocol_version": protocol.VERSION}))
            + protocol.encode(calls.request(WATCH, "watch", {}))
        )
    except (OSError, DaemonAbsent):
        made.close()
        return None
    return made
