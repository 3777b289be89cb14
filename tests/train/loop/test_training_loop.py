"""Behaviour of a single rank between steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, cast

import pytest
import torch
from migration_driver import Mover
from scenarios import Recorded, Steps, job

from clusterd.train.loop import peers
from clusterd.train.loop.consensus import StepConsensus
from clusterd.train.loop.rank_training import Training
from clusterd.train.loop.training_loop import TrainingLoop
from clusterd.train.parallel import build
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control
from tests.hang import HANG_S


def test_a_rank_that_ran_out_of_memory_lets_go_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the previous plan start again on the same device, while this one keeps the state for them."""
    monkeypatch.setattr("clusterd.train.loop.peers.shut_down_connections", lambda: None)  # the tests' own connections
    context = Context()
    training = Training(job(Recorded(32), depth=1), context, torch.device("cpu"), None)
    control = Control(context)
    loop = TrainingLoop(training, control, Steps())
    activations: list[Any] = []

    def forward() -> None:
        output = torch.ones(4)
        activations.append(weakref.ref(output))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def stage() -> None:
        try:
            forward()
        except Exception as error:
            raise RuntimeError("in a pipeline stage") from error

    with pytest.raises(RuntimeError) as raised:
        stage()
    assert activations[0]() is not None
    control.request("stop", "enough")
    loop._survivor._keep_state(cast(Exception, raised.value), True, loop._record.log_unsettled)
    assert activations[0]() is None


def test_whoever_waits_for_successors_gives_its_gpu_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank failed because of its peers, and the next ranks use the same GPU."""
    given_back: list[bool] = []
    monkeypatch.setattr("clusterd.train.loop.peers.shut_down_connections", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    context = Context()
    training = Training(job(Recorded(32), depth=1), context, torch.device("cpu"), None)
    parameter = next(training.parallel.module.parameters())
    parameter.grad = torch.ones_like(parameter)
    training.parallel.device = torch.device("cuda")
    control = Control(context)
    control.request("stop", "enough")
    loop = TrainingLoop(training, control, Steps())
    loop._survivor._keep_state(RuntimeError("Connection reset by peer"), False, loop._record.log_unsettled)
    assert given_back
    assert parameter.grad is None


def test_no_parameter_follows_gradients_that_came_while_peers_were_lost() -> None:
    """Groups may be aborted during the step, and all-reduces then complete with garbage."""
    context = Context()
    training = Training(job(Recorded(32), depth=1), context, torch.device("cpu"), None)
    loop = TrainingLoop(training, Control(context), Steps())
    before = build.fingerprint(training.parallel.module)
    loop._survivor._disconnected = True
    inputs, targets = next(loop.batches())
    with pytest.raises(ConnectionError, match="peers are gone"):
        loop.step(inputs, targets)
    assert training.step == 0
    assert build.fingerprint(training.parallel.module) == before


def test_a_step_that_does_not_end_is_noticed_and_one_that_ends_is_not() -> None:
    told: SimpleQueue[str] = SimpleQueue()
    watch = peers.HangDetector(0.2, told.put)
    for _ in range(3):
        watch.begin()
        watch.end()
    assert told.empty()
    watch.begin()
    assert "has not ended" in told.get(timeout=HANG_S)
    watch.close()


def test_groups_that_are_torn_down_already_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's message and the failed collective abort them on two threads."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("os.listdir", lambda _: [])  # the tests' own connections
    peers.shut_down_connections()  # torch raises when there is no group to tear down


@pytest.mark.parametrize("replicated", [True, False])
def test_the_last_step_before_peers_were_lost_is_logged_with_the_loss_that_is_known(
    replicated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterd.train.loop.peers.shut_down_connections", lambda: None)
    context = Context()
    control = Control(context)
    log = Steps()
    training = Training(job(Recorded(32), depth=1), context, torch.device("cpu"), None)
    loop = TrainingLoop(training, control, log)
    loop._survivor._replicated = replicated
    loop._record.add(7, 0.1, StepConsensus(torch.tensor(2.5), control.flags()))
    control.request("stop", "enough")
    loop._survivor._keep_state(ConnectionError("gone"), False, loop._record.log_unsettled)
    assert log.steps == [(7, pytest.approx(2.5) if replicated else None)]


@pytest.mark.slow
def test_ranks_compute_on_the_cores_that_they_are_given_from_the_next_step_on(moving: Callable[..., Mover]) -> None:
    """Without a migration, and once per request."""
    mover = moving()
    mover.start("dp=2")
    mover.train(3)
    mover.use_cores(2)
    mover.train(3)
    mover.stop()
    for rank in mover.now.run.result()[0].ranks:
        said = [line for line in rank.output.splitlines() if "CPU threads" in line]
        assert len(said) == 1 and said[0].startswith("clusterd: using 2 CPU threads from step ")
