"""Pipelines with many more micro-batches than stages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_pool import RankPool

from clusterd.train.loop.step import share_receive_buffers

OPTIONS = {"depth": 3, "steps": 4, "global_batch": 12}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["pp=3,accumulation=12", "pp=2,accumulation=6,schedule=gpipe"])
def test_micro_batches_that_share_a_buffer_give_the_losses_of_one_process(
    plan: str, ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(tmp_path / "one", "dp=1", **OPTIONS).checked().losses
    found = ranks.run(tmp_path / "pipeline", plan, **OPTIONS).checked().losses
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_stage_receives_into_as_many_buffers_as_micro_batches_are_in_flight() -> None:
    """Regression: it had one for each micro-batch of a step, gigabytes where there are many."""
    stage = SimpleNamespace(get_fwd_recv_ops=lambda chunk: stage.args_recv_info[chunk][0].buffer)

    def prepare(count: int, of: str) -> None:
        setattr(stage, of, {n: (SimpleNamespace(buffer=torch.zeros(1)),) for n in range(count)})

    stage._prepare_forward_infra = lambda count: prepare(count, "args_recv_info")
    stage._prepare_backward_infra = lambda count: prepare(count, "grad_recv_info")
    share_receive_buffers(stage, 3)
    stage._prepare_forward_infra(16)
    stage._prepare_backward_infra(16)
    buffers = [stage.get_fwd_recv_ops(chunk) for chunk in range(16)]
    assert len({id(buffer) for buffer in buffers}) == 3
    assert all(len({id(buffer) for buffer in buffers[n : n + 3]}) == 3 for n in range(14)), "those in flight differ"
    assert len({id(infos[0].buffer) for infos in stage.grad_recv_info.values()}) == 1
    buffers[0].grad = torch.ones(1)
    assert stage.get_fwd_recv_ops(3).grad is None, "the next micro-batch's gradient would be added to it"
