"""Tests that run in a forked process of their own.

An illegal access ends a CUDA context for good, a hung call into the driver does not return to Python, and a process
with a context must not fork: none of this may reach the tests that follow.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

import pytest

GONE_S = 10.0
"""Time for a killed process to vanish; one that hangs in the driver never does."""


def run(work: Callable[[], None], limit_s: float) -> None:
    """Run `work` in a fork, and fail or skip as it does there; kill it after `limit_s`."""
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads of the parent, which the child needs not
        pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child_main(work, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        in_time = False
        try:
            in_time = bool(select.select([file], [], [], limit_s)[0])  # the child writes once, at its end
        finally:  # an alarm of the parent may come first
            if not in_time:
                os.kill(pid, signal.SIGKILL)
        reply = file.read() if in_time else b""
    status = _wait(pid)
    if not in_time:
        left = "" if status is not None else "; it hangs in the driver and cannot be killed"
        pytest.fail(f"not over after {limit_s:.0f} s{left}", pytrace=False)
    if not reply:
        assert status is not None, "the process closed its pipe and hangs"
        pytest.fail(f"the process of the test ended with {os.waitstatus_to_exitcode(status)}", pytrace=False)
    outcome, text = pickle.loads(reply)
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)


def _wait(pid: int) -> int | None:
    """Status of a process that has ended, or is about to; None: it does not end."""
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], GONE_S)[0]:
            return None
    finally:
        os.close(descriptor)
    return os.waitpid(pid, 0)[1]


def _child_main(work: Callable[[], None], write_end: int) -> None:
    """Run `work`, write how it ended, and exit without exit handlers."""
    code = 1
    try:
        signal.alarm(0)  # the parent counts the time
        try:
            work()
            reply = "passed", ""
        except pytest.skip.Exception as skipped:
            reply = "skipped", str(skipped)
        except BaseException:
            reply = "failed", traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(write_end, "wb") as file:
            file.write(pickle.dumps(reply))
        code = 0
    finally:
        os._exit(code)
