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


def apart(work: Callable[[], T]) -> T:
    """What `work` returns, which must be fit for pickling.

    Where the fork cannot be had, or fails, the work is done here: what the script raises is then raised here.

    Raises:
        TrainError: as `work` does.
    """
    answer = _answer(work)
    if answer is None:
        return work()
    made, value = pickle.loads(answer)
    if not made:
        raise value
    result: T = value
    return result


def _answer(work: Callable[[], object]) -> bytes | None:
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of ours is needed there
            pid = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return None
    if pid == 0:
        _serve(work, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        in_time = bool(select.select([file], [], [], PATIENCE_S)[0])  # what comes, comes at the end, and at once
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    return answer if status == 0 else None


def _serve(work: Callable[[], object], writing: int) -> None:
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
            answer = pickle.dumps((True, work()))
        except TrainError as refusal:
            answer = pickle.dumps((False, refusal))
        with os.fdopen(writing, "wb") as file:
            file.write(answer)
        code = 0
    finally:
        os._exit(code)
