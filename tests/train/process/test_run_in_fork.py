"""Execution of work in a forked child."""

from __future__ import annotations

import faulthandler
import os
import signal
import time

import pytest

from clusterd.train.process import run_in_fork as module
from clusterd.train.process.exits import Refused, TrainError
from clusterd.train.process.run_in_fork import run_in_fork

KEPT: list[int] = []


def keep() -> int:
    KEPT.append(1)
    return len(KEPT)


def test_state_kept_in_one_place_is_not_kept_in_another() -> None:
    assert run_in_fork(keep) == 1
    assert KEPT == []


def test_a_refusal_comes_back() -> None:
    def refuse() -> None:
        raise Refused("no such layer")

    with pytest.raises(Refused, match="no such layer"):
        run_in_fork(refuse)


def test_an_exception_of_the_script_is_raised_with_its_traceback() -> None:
    here = os.getpid()
    with pytest.raises(ZeroDivisionError) as raised:
        run_in_fork(lambda: 1 // 0)
    assert raised.traceback[-1].name == "<lambda>"
    assert os.getpid() == here


@pytest.mark.parametrize("ends", [lambda: os._exit(3), lambda: time.sleep(600)])
def test_a_fork_that_gives_no_answer_is_done_without(ends: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    here = os.getpid()

    def work() -> str:
        if os.getpid() != here:
            ends()  # type: ignore[operator]
        return "done here"

    assert run_in_fork(work) == "done here"


@pytest.mark.parametrize("number, name", [(signal.SIGKILL, "SIGKILL .was there too"), (signal.SIGSEGV, "SIGSEGV")])
def test_work_that_crashed_in_a_fork_is_not_repeated_here(number: int, name: str) -> None:
    """Here the crash would end the rank without a message."""

    def work() -> None:
        KEPT.append(2)
        faulthandler.disable()  # pytest's would print this crash
        os.kill(os.getpid(), number)

    with pytest.raises(TrainError, match=f"{name}.* ended a process"):
        run_in_fork(work)
    assert KEPT == []


def test_it_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A model that prints would print again for each description."""
    run_in_fork(lambda: os.write(1, b"made"))
    assert capfd.readouterr().out == ""
