"""Ranks of a script as processes on this machine, as torchrun would start them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from collections.abc import Mapping, Sequence

from clusterd.agent.host.rank_environment import LARGE_PAGES


def started(
    command: Sequence[str], count: int, more: Mapping[str, str], stdout: int = subprocess.DEVNULL
) -> list[subprocess.Popen[bytes]]:
    """Start all ranks; `stdout` receives the output of rank 0."""
    port = _free_port()
    common = {**os.environ, **more, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The pages that ours have: a comparison is not to be one of pages.
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **LARGE_PAGES}
    return [
        subprocess.Popen(
            list(command),
            env={**common, "RANK": str(rank)},
            stdout=subprocess.DEVNULL if rank else stdout,
            stderr=subprocess.DEVNULL if rank else None,
        )
        for rank in range(count)
    ]


def _free_port() -> int:
    """Below those that the kernel gives to outgoing connections, one of which might have it before the ranks do."""
    while True:
        port = random.randrange(12000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
