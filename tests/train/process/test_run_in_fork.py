"""Execution of work in a forked child."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
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


def test_a_fork_that_fails_is_done_without() -> None:
    here = os.getpid()

    def work() -> str:
        if os.getpid() != here:
            os._exit(3)
        return "done here"

    assert run_in_fork(work) == "done here"


def test_a_fork_that_hangs_ends_in_words_and_its_work_is_not_repeated_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the work would use up what the training needs: the next samples of a stream."""
    monkeypatch.setattr(module, "SLOW_S", 0.1)
    monkeypatch.setattr(module, "PATIENCE_S", 0.3)
    ends = threading.Event()
    reader = threading.Thread(target=ends.wait, name="reader-of-shards")
    reader.start()
    here = os.getpid()

    def work() -> None:
        assert os.getpid() != here, "the work is repeated in the rank"
        time.sleep(600)

    with pytest.raises(TrainError, match=r"gave no answer.*threads \(.*reader-of-shards\)"):
        run_in_fork(work)
    ends.set()
    reader.join()
    assert "takes long" in capsys.readouterr().out


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
