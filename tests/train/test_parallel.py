"""What a rank's parts do that no whole run shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from clusterd.train.replicate import GradientSum


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_gradient_that_only_some_micro_batches_have_is_not_passed_over(group: dist.ProcessGroup) -> None:
    """An expert that one micro-batch did not ask: its gradient stays this replica's own unless somebody says so."""
    always, sometimes = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    sums = GradientSum([always, sometimes, nn.Parameter(torch.ones(4))], group, micro_batches=2)
    always.sum().backward()
    (always.sum() + sometimes.sum()).backward()
    with pytest.raises(RuntimeError, match=r"shape .3,. got a gradient in 1 of 2 micro-batches"):
        sums.finish()
