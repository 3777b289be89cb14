"""Process groups of a plan: their number is that of the memory estimate, and none has one rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from clusterd.train.parallel import mesh
from clusterd.train.process.context import Context
from plans.memory import communicators
from plans.plan import Plan

SIZES = [sizes for sizes in itertools.product((1, 2, 3, 4, 8), repeat=3) if sizes[0] * sizes[1] * sizes[2] <= 8]


@pytest.mark.parametrize(
    ("sizes", "zero"), [(sizes, zero) for sizes in SIZES for zero in (0, 3) if not zero or sizes[1] > 1], ids=str
)
def test_a_rank_has_no_group_of_its_own_and_as_many_as_the_estimate_counts(
    sizes: tuple[int, int, int], zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pp, dp, tp = sizes
    plan = Plan(pp=pp, dp=dp, tp=tp, zero=zero, accumulation=pp)
    start = dist.init_process_group

    def fake(backend: str, **options: Any) -> None:
        start("fake", rank=options["rank"], world_size=options["world_size"], store=FakeStore())

    monkeypatch.setattr(dist, "init_process_group", fake)
    monkeypatch.setattr(mesh, "_store", lambda context: FakeStore())
    context = Context(rank=plan.ranks - 1, world_size=plan.ranks, plan=plan)
    with mesh.process_groups(context, torch.device("cpu")) as made:
        groups = [dist.get_world_size(group) for group in distributed_c10d._world.pg_map]
        assert min(groups, default=2) > 1
        assert len(groups) == communicators(plan)
        if made is not None:
            assert [made[name].size() for name in made.mesh_dim_names] == [n for n in sizes if n > 1]
