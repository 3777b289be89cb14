"""Unit tests of the parallel package that no complete run covers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from clusterd.plans.plan import Plan
from clusterd.train.loop.step import clip_gradients
from clusterd.train.parallel import build
from clusterd.train.parallel.gradient_sync import GradientSum
from clusterd.train.parallel.meta_build import allocate, can_build_on_meta
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.process.exits import PlanRefused


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Process group of this process alone; gloo's would listen on a port for the rest of the session."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_gradient_that_only_some_micro_batches_have_is_summed_all_the_same(group: dist.ProcessGroup) -> None:
    """An expert that one micro-batch did not use; and one that none used, which must not be updated.

    A backward pass of the script's own before the step filled the buckets with its gradients.
    """
    always, sometimes, never = (nn.Parameter(torch.ones(n)) for n in (2, 3, 4))
    sums = GradientSum([always, sometimes, never], group, micro_batches=2)
    for _ in range(2):
        for parameter in (always, sometimes, never):
            (5 * parameter).sum().backward()
            parameter.grad = None
        sums.begin()
        always.sum().backward()
        (always.sum() + sometimes.sum()).backward()
        sums.finish()
        assert [always.grad.tolist(), sometimes.grad.tolist(), never.grad] == [[2.0, 2.0], [1.0, 1.0, 1.0], None]


def test_the_norm_of_narrow_gradients_is_not_narrow() -> None:
    """Otherwise shards and whole tensors would be clipped differently."""
    parameters = [nn.Parameter(torch.ones(n, dtype=d)) for n, d in ((999, torch.bfloat16), (77, torch.float32))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)).to(parameter.dtype)
    expected = torch.cat([p.grad.double() for p in parameters if p.grad is not None]).norm().item()
    norm = clip_gradients(parameters, Plan(), torch.device("cpu"), 0.5)
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    clipped = torch.cat([p.grad.double() for p in parameters if p.grad is not None]).norm().item()
    assert clipped == pytest.approx(0.5, rel=1e-2)


class Masks(nn.Module):
    """Keeps tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 2)
        self.masks = {"causal": [torch.ones(2, 2).tril()]}


def test_tensors_in_a_modules_own_lists_are_not_left_without_values() -> None:
    """Regression: such a job could start, but neither migrate nor resume from a checkpoint."""
    assert not can_build_on_meta(Masks, 0)


def test_a_list_of_a_modules_own_parameters_is_filled_with_them() -> None:
    """Recurrent networks keep one."""
    assert can_build_on_meta(lambda: nn.LSTM(2, 3), 0)
    model = build.build_model(lambda: nn.LSTM(2, 3), 0, meta=True)
    assert all(p.is_meta for p in model.parameters())
    allocate(model, torch.device("cpu"))
    assert model(torch.ones(1, 1, 2))[0].shape == (1, 1, 3)


def test_replicas_logs_do_not_begin_with_advice_for_nobody(ranks: RankPool, tmp_path: Path) -> None:
    """A warning of torch about an option that the script did not set."""
    run = ranks.run(tmp_path, "dp=2", steps=3).checked()
    assert not any("find_unused_parameters" in rank.output for rank in run.ranks)


def offloaded(parameter: nn.Parameter) -> Any:
    """Model of one parameter, of which the optimizer has a copy."""
    return SimpleNamespace(
        parameters=[("w", parameter)],
        plan=Plan.parse("dp=1,offload=optimizer"),
        device=torch.device("cpu"),
        parameter_attributes={"w": {}},
    )


def test_a_state_that_was_loaded_is_guarded_as_the_first_one() -> None:
    """After a restart under the same plan a loop looked its moments up by the model's parameters, and found none."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = RankOptimizer(offloaded(parameter), torch.optim.Adam)
    optimizer.load(optimizer.holder.state_dict())
    with pytest.raises(PlanRefused, match="looks up the optimizer's state"):
        optimizer.holder.state.get(parameter)


def test_a_layer_that_is_thawed_first_after_a_restore_trains() -> None:
    """The flag of the restored model counted as the loop's, and the layer stayed frozen for a step."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = RankOptimizer(offloaded(parameter), torch.optim.Adam, own_loop=True)
    parameter.requires_grad_(False)
    optimizer.follow_frozen()
    optimizer.holder.param_groups[0]["params"][0].requires_grad_(True)
    optimizer.share_writes()
    assert parameter.requires_grad
