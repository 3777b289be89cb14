"""What a rank does between steps, without others."""

from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import torch
from scenarios import Recorded, job

from clusterd.train.context import Context
from clusterd.train.control import Control
from clusterd.train.entry import Training
from clusterd.train.loop import Loop


def test_a_rank_that_ran_out_of_memory_lets_go_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the plan before start again on the same device, while this one keeps the state for them."""
    monkeypatch.setattr("clusterd.train.peers.cut_off", lambda: None)  # the tests' own connections
    context = Context()
    training = Training(job(Recorded(32), depth=1), context, torch.device("cpu"), None)
    control = Control(context)
    loop = Loop(training, control, lambda *_: None)
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
    loop._wait_as_orphan(cast(Exception, raised.value), no_memory=True)
    assert activations[0]() is None
