"""Abort of GPU process groups, as far as it can be tested without a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from scenarios import Recorded, Steps, job
from stand_in import StandIn

from clusterd.protocol.rank import Orphaned
from clusterd.train.loop import peers
from clusterd.train.loop.rank_training import Training
from clusterd.train.loop.survivor import INCONSISTENT_STEP
from clusterd.train.loop.training_loop import TrainingLoop
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control


def test_groups_are_aborted_together() -> None:
    """Each abort may wait for the device, which another group's kernel holds until that one is aborted."""
    together = threading.Barrier(3)
    backends = [SimpleNamespace(abort=lambda: together.wait(20)) for _ in range(3)]
    assert peers.abort_together(backends)
    assert not together.broken


def test_a_group_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ABORT_S", 0.1)
    over = threading.Event()
    assert not peers.abort_together([SimpleNamespace(abort=over.wait), SimpleNamespace(abort=lambda: None)])
    over.set()


def test_an_nccl_error_ends_a_step_that_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks live, but a link between them failed: nothing else would notice for half an hour."""
    monkeypatch.setattr(peers, "POLL_S", 0.01)
    said = iter(["SUCCESS", "SUCCESS", "REMOTE_ERROR"])
    backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=next(said)))
    monkeypatch.setattr(peers, "_nccl_backends", lambda: [SimpleNamespace(), backend])
    told: list[str] = []
    heard = threading.Event()
    watch = peers.HangDetector(1800.0, lambda why: (told.append(why), heard.set()))  # type: ignore[func-returns-value]
    watch.begin()
    assert heard.wait(20)
    assert told == ["a step has not ended for 0 s: NCCL says REMOTE_ERROR"]


@pytest.mark.parametrize(
    ("replicated", "is_done", "step"), [(False, True, 7), (False, False, INCONSISTENT_STEP), (True, False, 7)]
)
def test_parameters_that_a_gpu_was_about_to_change_are_of_no_step(
    monkeypatch: pytest.MonkeyPatch, replicated: bool, is_done: bool, step: int
) -> None:
    """Replicas queue an update once its gradients are complete.

    Others queue it behind an all-reduce that may never complete.
    """
    monkeypatch.setattr("clusterd.train.loop.peers.shut_down_connections", lambda: None)
    monkeypatch.setattr("clusterd.train.loop.survivor.UPDATE_WAIT_S", 0.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    training = Training(job(Recorded(32), depth=1), Context(), torch.device("cpu"), None)
    training.step = 7
    control = Control(Context())
    reported: list[Orphaned] = []
    monkeypatch.setattr(control, "report", reported.append)
    control.request("stop", "enough")
    loop = TrainingLoop(training, control, Steps())
    loop._survivor._replicated = replicated
    monkeypatch.setattr(loop._survivor, "_gradients_complete", lambda: False)
    loop._survivor.last_step.gpu = StandIn()
    loop._survivor.last_step._update_done = SimpleNamespace(query=lambda: is_done)
    loop._survivor._keep_state(ConnectionError("gone"), False, loop._record.log_unsettled)
    assert [report.step for report in reported] == [step]
