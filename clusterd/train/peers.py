"""Peers that are gone: how it is seen, and how those are told who only wait for each other.

A rank whose peer dies gets an error from its next collective; its other peers wait for it, and would for half an hour.
So it closes its connections too, and the news spreads over all groups.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "NCCL communicator was aborted",
    "NCCL error",
    "Transport endpoint is not connected",
    "Failed to recv, got 0 bytes",
)


def are_lost(error: BaseException) -> bool:
    """Whether `error` is what a collective raises when another rank is gone."""
    if not dist.is_initialized():
        return False
    cause: BaseException | None = error
    while cause is not None:  # a pipeline stage wraps what happened in it
        if isinstance(cause, (dist.DistBackendError, dist.DistNetworkError)):
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in _SIGNS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def cut_off() -> None:
    """Ends every TCP connection of this process, so that whoever waits for it, here or there, gets an error.

    For a rank that will not talk to its peers again. The line to the agent is a Unix socket and stays.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                # A listening socket has no peer, and gloo ends the process when its own fails.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
    if torch.cuda.is_initialized() and dist.is_initialized():  # not once more, if another thread did it
        from torch.distributed.distributed_c10d import _abort_process_group

        # Kernels that wait for a peer would keep the device from copying anything out.
        _abort_process_group()


class HangWatch:
    """Notices a step that does not end although nobody is known to be gone: a rank on a GPU would wait for ever.

    Args:
        patience_s: with a step; none: gloo's collectives, and a lone rank, need no watch.
        tell: called once, on a thread of its own, with the reason.
    """

    def __init__(self, patience_s: float | None, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._since_s: float | None = None
        self._over = threading.Event()
        if patience_s is not None:
            threading.Thread(target=self._watch, args=[patience_s], name="clusterd-hangs", daemon=True).start()

    def begin(self) -> None:
        """A step begins."""
        self._since_s = time.monotonic()

    def end(self) -> None:
        """It is done, and the one before it was settled."""
        self._since_s = None

    def close(self) -> None:
        """No step will follow."""
        self._over.set()

    def _watch(self, patience_s: float) -> None:
        while not self._over.wait(patience_s / 10):
            since_s = self._since_s
            if since_s is not None and time.monotonic() - since_s > patience_s:
                self._tell(f"a step has not ended for {time.monotonic() - since_s:.0f} s")
                return
