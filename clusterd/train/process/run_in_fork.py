"""Calling what the script gave where it can leave nothing behind: in a fork of this process.

A model or a loss may keep what it has once made: a mask in a cache, a mean of the last losses. What is made to find out
about a model has no values; kept, it would be trained with.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from clusterd.train.process.exits import TrainError

T = TypeVar("T")

PATIENCE_S = 300.0
"""A fork may wait for a thread that only its parent has."""


def run_in_fork(work: Callable[[], T]) -> T:
    """What `work` returns, which must be fit for pickling.

    Where the fork cannot be had, or fails, the work is done here: what the script raises is then raised here.

    Raises:
        TrainError: as `work` does.
    """
    reply = _run_child(work)
    if reply is None:
        return work()
    succeeded, value = pickle.loads(reply)
    if not succeeded:
        raise value
    result: T = value
    return result


def _run_child(work: Callable[[], object]) -> bytes | None:
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of ours is needed there
            pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        return None
    if pid == 0:
        _child_main(work, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        in_time = bool(select.select([file], [], [], PATIENCE_S)[0])  # what comes, comes at the end, and at once
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        reply = file.read()
    _, status = os.waitpid(pid, 0)
    return reply if status == 0 else None


def _child_main(work: Callable[[], object], write_end: int) -> None:
    """Does it, and ends the process without any of its exit handlers."""
    code = 1
    try:
        gc.freeze()  # of what was garbage already nothing may be taken apart here: groups wait for threads that are not
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # a model that prints has printed, or will
            os.dup2(null, stream)
        torch.set_num_threads(1)  # the threads of the parent's OpenMP are not here
        try:
            reply = pickle.dumps((True, work()))
        except TrainError as refusal:
            reply = pickle.dumps((False, refusal))
        with os.fdopen(write_end, "wb") as file:
            file.write(reply)
        code = 0
    finally:
        os._exit(code)
