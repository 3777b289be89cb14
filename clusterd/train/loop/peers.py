"""Loss of peers: detection, and disconnection of the ranks that still wait for each other.

A rank whose peer dies gets an error from its next collective. Its other peers wait for it, for up to half an hour. So
the rank closes its own connections too, and the failure propagates to all groups.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from clusterd.train.process import accelerator

ABORT_S = 30.0
"""Time for NCCL to end its kernels; after it, nothing can be copied from the device any more."""

POLL_S = 1.0

_aborting = threading.Lock()

_ERROR_TEXTS = (
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


def is_peer_loss(error: BaseException) -> bool:
    """True if `error` is raised by collectives when another rank is gone."""
    if not dist.is_initialized():
        return False
    cause: BaseException | None = error
    while cause is not None:  # a pipeline stage wraps the error
        if isinstance(cause, (dist.DistBackendError, dist.DistNetworkError)):
            return True
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _ERROR_TEXTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def shut_down_connections() -> None:
    """Shut down every TCP connection of this process, so that local and remote waiters get an error.

    For a rank that stops talking to its peers. The connection to the agent is a Unix socket and stays.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                # A listening socket has no peer, and gloo aborts the process when its own fails.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
    if accelerator.is_in_use():
        with _aborting:
            if dist.is_initialized():  # another thread may have done it
                _abort_groups()


def _abort_groups() -> None:
    """Abort the kernels that wait for a peer; they would block copies from the device."""
    from torch.distributed import distributed_c10d

    if abort_together(list(_nccl_backends())):
        distributed_c10d._abort_process_group()  # torch's own bookkeeping
    else:
        print(f"clusterd: NCCL did not end within {ABORT_S:.0f} s", flush=True)


def abort_together(backends: Sequence[Any]) -> bool:
    """Abort all backends in parallel; return True if all ended in time.

    The kernel of one may hold the device until that one is aborted, and the others' aborts wait for the device: in
    sequence, as torch does it, the first may wait for the last (pytorch issue 119797).
    """
    aborts = [threading.Thread(target=backend.abort, name="clusterd-abort", daemon=True) for backend in backends]
    for abort in aborts:
        abort.start()
    deadline_s = time.monotonic() + ABORT_S
    for abort in aborts:
        abort.join(max(deadline_s - time.monotonic(), 0.0))
    return not any(abort.is_alive() for abort in aborts)


def _nccl_backends() -> Iterator[Any]:
    """NCCL backend of each process group."""
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # a gloo-only group
            yield group._get_backend(torch.device("cuda"))


def _nccl_errors() -> list[str]:
    """Errors that NCCL has recorded; with `SURVIVES_PEERS` torch does not raise them."""
    # Not every torch version has get_error.
    getters = (getattr(backend, "get_error", None) for backend in _nccl_backends())
    errors = (get_error() for get_error in getters if get_error is not None)
    return [error.name for error in errors if error.name != "SUCCESS"]


class HangDetector:
    """Detects a step that does not end although no peer is known to be gone; a rank on a GPU would wait forever.

    A broken connection is noticed at once; without one, only a timeout helps.

    Args:
        patience_s: limit for a step; None: no detection (gloo's collectives and a lone rank need none).
        on_hang: called once, on a thread of its own, with the reason.
    """

    def __init__(self, patience_s: float | None, on_hang: Callable[[str], None]) -> None:
        self._on_hang = on_hang
        self._since_s: float | None = None
        self._over = threading.Event()
        if patience_s is not None:
            threading.Thread(target=self._watch, args=[patience_s], name="clusterd-hangs", daemon=True).start()

    def begin(self) -> None:
        """Start timing a step."""
        self._since_s = time.monotonic()

    def end(self) -> None:
        """Stop timing: the step is done and the one before it settled."""
        self._since_s = None

    def close(self) -> None:
        """End the thread; no step follows."""
        self._over.set()

    def _watch(self, patience_s: float) -> None:
        while not self._over.wait(min(POLL_S, patience_s / 10)):
            since_s = self._since_s
            if since_s is None:
                continue
            waited_s = time.monotonic() - since_s
            errors = _nccl_errors()
            if errors or waited_s > patience_s:
                detail = f": NCCL says {errors[0]}" if errors else ""
                self._on_hang(f"a step has not ended for {waited_s:.0f} s{detail}")
                return
