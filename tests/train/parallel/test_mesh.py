"""Process groups of a plan: as many as the memory estimate counts, none of one rank, and their members."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from model import GPT
from stand_in import StandIn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from clusterd.plans.legality import check
from clusterd.plans.memory import communicators
from clusterd.plans.plan import Plan
from clusterd.train.parallel import mesh
from clusterd.train.parallel.apply_plan import ParallelModel
from clusterd.train.process import accelerator
from clusterd.train.process.context import Context

SIZES = [sizes for sizes in itertools.product((1, 2, 3, 4, 8), repeat=3) if sizes[0] * sizes[1] * sizes[2] <= 8]


Members = tuple[int, ...]


@pytest.fixture
def groups_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan, int, str], AbstractContextManager[Any]]:
    """Context with the mesh of one rank of a plan on CPUs or GPUs, whose peers do not exist."""
    start = dist.init_process_group

    def fake(backend: str, **options: Any) -> None:
        start("fake", rank=options["rank"], world_size=options["world_size"], store=FakeStore())

    connect = mesh._connect

    def connect_fakes(groups: Any, device: torch.device) -> None:
        with FakeTensorMode():
            connect(groups, device)

    monkeypatch.setattr(dist, "init_process_group", fake)
    monkeypatch.setattr(mesh, "_store", lambda context, **_: FakeStore())
    monkeypatch.setattr(mesh, "_connect", connect_fakes)
    monkeypatch.setitem(accelerator.KINDS, "cuda", StandIn)

    @contextmanager
    def made(plan: Plan, rank: int, kind: str) -> Iterator[Any]:
        context = Context(rank=rank, world_size=plan.ranks, plan=plan)
        with mesh.process_groups(context, torch.device(kind)) as found:
            yield found

    return made


def members() -> list[Members]:
    """Ranks of each group of this process, in the order in which it made them."""
    return [tuple(dist.get_process_group_ranks(group)) for group in distributed_c10d._world.pg_map]


@pytest.mark.parametrize(
    ("sizes", "zero"), [(sizes, zero) for sizes in SIZES for zero in (0, 3) if not zero or sizes[1] > 1], ids=str
)
def test_a_rank_has_no_group_of_its_own_and_as_many_as_the_estimate_counts(
    sizes: tuple[int, int, int], zero: int, groups_of: Callable[..., Any]
) -> None:
    pp, dp, tp = sizes
    plan = Plan(pp=pp, dp=dp, tp=tp, zero=zero, accumulation=pp)
    with groups_of(plan, plan.ranks - 1, "cpu") as made:
        groups = members()
        assert min(map(len, groups), default=2) > 1
        assert len(groups) == communicators(plan)
        if made is not None:
            assert [made[name].size() for name in made.mesh_dim_names] == [n for n in sizes if n > 1]


def plans_of(ranks: int) -> Iterator[Plan]:
    """Every legal plan of so many ranks, with each kind of sharding."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, dp in itertools.product(divisors, divisors):
        if ranks % (pp * dp):
            continue
        for zero, offload in ((0, "none"), (1, "none"), (2, "optimizer"), (3, "none"), (3, "parameters")):
            plan = Plan(pp=pp, dp=dp, tp=ranks // (pp * dp), zero=zero, offload=offload, accumulation=pp)
            if not check(plan):
                yield plan


@pytest.mark.parametrize("ranks", [8, 12, slow(16), slow(24), slow(32), slow(64)])
def test_groups_of_gpus_are_the_cosets_of_the_dimensions_and_connect_in_one_order(
    ranks: int, groups_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank connects the group of all ranks first, and then those of its stages, replicas and shards."""
    connected: list[Members] = []
    all_reduce = dist.all_reduce

    def recorded(tensor: torch.Tensor, group: Any = None) -> Any:
        assert tensor.device.type == "cuda"
        connected.append(tuple(dist.get_process_group_ranks(group)))
        return all_reduce(tensor, group=group)

    monkeypatch.setattr(dist, "all_reduce", recorded)
    for plan in plans_of(ranks):
        # Without sharding every rank, else the corners.
        for rank in range(ranks) if not plan.zero else (0, ranks // 2, ranks - 1):
            connected.clear()
            with groups_of(plan, rank, "cuda") as made:
                alone = {(rank,)} if plan.zero and plan.dp == 1 else set()  # FSDP2 connects it
                assert set(members()) == {*connected, *alone}
                assert len(connected) + len(alone) == communicators(plan)
                dimensions = made.mesh_dim_names
                groups = {name: made[name].get_group() for name in made.mesh_dim_names if made[name].size() > 1}
                named = {name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items()}
            assert named == expected_members(plan, rank)
            first, *others = connected
            assert first == tuple(range(ranks))
            assert others == (list(named.values()) if len(dimensions) > 1 else [])


def expected_members(plan: Plan, rank: int) -> dict[str, Members]:
    """Ranks that differ from `rank` in one coordinate alone, for each dimension of several ranks."""
    own = plan.coordinates(rank)
    found = {
        "pp": tuple(plan.rank_of(stage, own.replica, own.shard) for stage in range(plan.pp)),
        "dp": tuple(plan.rank_of(own.stage, replica, own.shard) for replica in range(plan.dp)),
        "tp": tuple(plan.rank_of(own.stage, own.replica, shard) for shard in range(plan.tp)),
    }
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


@pytest.mark.parametrize(
    "text",
    [
        "dp=8",
        "dp=8,zero=1",
        "dp=8,zero=2",
        "dp=8,zero=3",
        "dp=4,tp=2",
        "dp=2,tp=4,zero=3",
        "dp=2,pp=2,tp=2,accumulation=2",
    ],
)
def test_a_model_under_a_plan_makes_no_further_groups(text: str, groups_of: Callable[..., Any]) -> None:
    """Each would cost every GPU the buffers of a communicator that the memory estimate does not count."""
    plan = Plan.parse(text)
    with groups_of(plan, 5, "cpu") as made:
        before = members()
        model = GPT(width=32, depth=4, heads=4, context=16, vocabulary=64)
        ParallelModel(model, plan, torch.device("cpu"), mesh=made, tp_plan=GPT.TP_PLAN)
        assert members() == before


RANK = """
import sys
import torch
import torch.distributed as dist
from clusterd.plans.plan import Plan
from clusterd.train.parallel import mesh
from clusterd.train.process.context import Context

class Code:
    def __reduce__(self):
        return eval, (f"__import__('os').mkdir(f'{sys.argv[4]}{{__import__(\\"os\\").getpid()}}')",)

rank, port = int(sys.argv[1]), int(sys.argv[2])
place = {"rank": rank, "world_size": 2, "plan": Plan(dp=2), "master_addr": "127.0.0.1", "master_port": port}
context = Context(**place, group_token=sys.argv[3])
with mesh.process_groups(context, torch.device("cpu")):
    dist.all_gather_object([None, None], Code() if rank else "mine")
"""


@pytest.mark.parametrize("token", ["known", "guessed"])
def test_objects_of_who_is_no_rank_of_the_job_are_not_unpickled(tmp_path: Path, token: str) -> None:
    """Regression: whoever reached the ports of a job's ranks ran code as its owner."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", RANK]
    rank = subprocess.Popen([*command, "0", port, "known", ""], stderr=subprocess.PIPE, text=True)
    stranger = subprocess.Popen([*command, "1", port, token, f"{tmp_path}/"], stderr=subprocess.DEVNULL)
    error = rank.communicate()[1]
    stranger.wait()
    assert (tmp_path / str(rank.pid)).exists() == (token == "known"), error
    assert ("no rank of its job has sent" in error) == (token == "guessed"), error
