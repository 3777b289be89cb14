"""Execution of user code in a forked child, so that its side effects are discarded.

A model or a loss may cache what it creates: a mask, a mean of the last losses. Fake tensors left in such a cache would
be used in training.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import IO, TypeVar

import torch

from clusterd.train.process.exits import TrainError

T = TypeVar("T")

PATIENCE_S, SLOW_S = 120.0, 10.0
"""Time limit, as a child may hang on a lock of a thread that only the parent has; and when the log tells of it."""


def run_in_fork(work: Callable[[], T]) -> T:
    """Run `work` in a forked child and return its result, which must be picklable.

    If the fork is impossible or ends with an error, run it in this process, so that the script's own error is raised
    here. If a signal ended it (a crash in native code, no memory), here it would end a rank without a message.

    Raises:
        TrainError: as `work` does, or the fork hung, or a signal ended it.
    """
    reply = _run_child(work)
    if reply is None:
        return work()
    succeeded, value = pickle.loads(reply)
    if not succeeded:
        raise value
    result: T = value
    return result


def start_fork(work: Callable[[], bytes]) -> tuple[int, IO[bytes]]:
    """Start a forked child that writes the result of `work` at its end; return its pid, and where to read.

    The child prints nothing, computes with one thread, and ends with this process. It exits with 0 if it has written.

    Raises:
        OSError: no process can be made.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads; the child needs none
            pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if pid == 0:
        os.close(read_end)
        _child_main(work, write_end, parent)
    os.close(write_end)
    return pid, os.fdopen(read_end, "rb", buffering=0)


def _run_child(work: Callable[[], object]) -> bytes | None:
    def reply_of() -> bytes:
        try:
            return pickle.dumps((True, work()))
        except TrainError as refusal:
            return pickle.dumps((False, refusal))

    try:
        pid, file = start_fork(reply_of)
    except OSError:
        return None
    with file:
        in_time = _answers(file, SLOW_S)  # the child writes once, at its end
        if not in_time:
            print(f"clusterd: trying the script's model and loss takes long; {_suspects()}", flush=True)
            in_time = _answers(file, PATIENCE_S - SLOW_S)
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        reply = file.read()
    _, status = os.waitpid(pid, 0)
    if not in_time:
        raise TrainError(
            f"a process that tried the script's model and loss before training gave no answer for {PATIENCE_S:.0f} "
            f"seconds; {_suspects()}"
        )
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number not in (0, signal.SIGTERM):  # a stop is the parent's matter too
        known = {s.value: s.name for s in signal.Signals}
        why = " (was there too little memory?)" if number == signal.SIGKILL else ""
        raise TrainError(
            f"{known.get(number, f'signal {number}')}{why} ended a process that tried the script's model, loss and "
            "data before training; training would end alike"
        )
    return reply if status == 0 else None


def _answers(file: IO[bytes], seconds: float) -> bool:
    return bool(select.select([file], [], [], max(seconds, 0.0))[0])


def _suspects() -> str:
    """Threads of this process, for which a forked one may wait in vain, in words."""
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    threads = [name for name in threads if not name.startswith("clusterd")]
    has = f"threads ({', '.join(threads[:3])})" if threads else "no threads"
    return (
        f"the script has {has}: start threads and open connections that the model or the loss use in their first call, "
        "not before the training, as no forked process has them"
    )


_PR_SET_PDEATHSIG = 1


def _child_main(work: Callable[[], bytes], write_end: int, parent: int) -> None:
    """Run `work`, write the result and exit without exit handlers."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        # The parent's garbage must not be finalised here: process groups wait for threads that a fork lacks.
        gc.freeze()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # the model prints in the parent anyway
            os.dup2(null, stream)
        torch.set_num_threads(1)  # a fork lacks the parent's OpenMP threads
        reply = work()
        with os.fdopen(write_end, "wb") as file:
            file.write(reply)
        code = 0
    finally:
        os._exit(code)
