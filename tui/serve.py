"""The same interface in a browser: one process per page, on this machine alone."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

HOST = "127.0.0.1"
"""Whoever reaches the port acts as the user who started it, so nobody else may."""


def serve(arguments: Sequence[str], port: int) -> int:
    """Serve until interrupted; `arguments` are those of ``clusterd top`` for each page."""
    from textual_serve.server import Server

    command = shlex.join([sys.executable, "-m", "clusterd", *arguments])
    print(f"clusterd top: http://{HOST}:{port}/ until ctrl+c", file=sys.stderr)
    Server(command, host=HOST, port=port, title="clusterd").serve()
    return 0
