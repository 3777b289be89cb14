"""Ranks with a GPU each: links, NCCL, steps equal to those of one GPU, and moves between GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from figures import Figures
from migration_driver import Mover
from rank_pool import RankPool, free_port

from clusterd.agent.host.gpu_probe import Probe

TOLERANCE = 1e-3
"""Sums in another order."""

REPEATS = 20

pytestmark = [pytest.mark.gpu, pytest.mark.gpus, pytest.mark.time_limit(100)]


@pytest.fixture(scope="module")
def count(kind: str) -> int:
    """Number of GPUs that take part: two or four."""
    there = torch.cuda.device_count() if kind == "cuda" else 2
    return 4 if there >= 4 else 2


@pytest.fixture(scope="module")
def several(count: int, kind: str) -> Callable[[str], None]:
    """Ends a test before its first CUDA call on a machine without several GPUs."""

    def check(done: str) -> None:
        if kind == "cuda" and torch.cuda.device_count() < count:
            pytest.skip(f"{torch.cuda.device_count()} GPUs here, {count} needed: {done}; the next step calls CUDA")

    return check


@pytest.fixture(scope="module")
def pools(count: int, kind: str) -> Iterator[tuple[RankPool, RankPool]]:
    gpus = count if kind == "cuda" else 0
    with closing(RankPool(gpus=gpus)) as first, closing(RankPool(gpus=gpus)) as second:
        yield first, second


@pytest.fixture(scope="module")
def options(kind: str) -> dict[str, Any]:
    return {"depth": 2, **({"stand_in": True} if kind == "cpu" else {})}


@pytest.fixture(scope="module")
def on_one(
    pools: tuple[RankPool, RankPool],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    options: dict[str, Any],
    several: Callable[[str], None],
) -> list[float]:
    several("two pools of ranks are starting")
    device = {"device": {"kind": kind}}
    job = [{**options, "steps": 300}]
    losses: list[float] = (
        pools[0].run_each(tmp_path_factory.mktemp("one"), "dp=1", job, more=lambda _: device)[0].checked().losses
    )
    return losses


@pytest.mark.parametrize("plan", ["dp=N", "dp=N,zero=1", "dp=N,zero=3", "tp=N", "pp=N,accumulation=4"])
def test_several_gpus_train_as_one_does(
    plan: str,
    count: int,
    pools: tuple[RankPool, RankPool],
    on_one: list[float],
    kind: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    device = {"device": {"kind": kind}}
    job = [{**options, "steps": 20}]
    run = pools[0].run_each(tmp_path, plan.replace("N", str(count)), job, more=lambda _: device)[0]
    assert run.checked().losses == pytest.approx(on_one[:20], rel=TOLERANCE)


def test_a_job_moves_between_gpus_while_it_trains(
    pools: tuple[RankPool, RankPool],
    on_one: list[float],
    kind: str,
    options: dict[str, Any],
    tmp_path: Path,
    figures: Figures,
) -> None:
    """From one GPU to several and back, and between ways to share the work."""
    mover = Mover(pools, tmp_path, {**options, "pace_s": 0.03}, rank_file={"device": {"kind": kind}})
    try:
        mover.start("dp=1")
        for plan in ("dp=2", "tp=2", "dp=2,zero=3", "pp=2,accumulation=2", "dp=1"):
            mover.train(3)
            before = mover.now.plan
            moved = mover.move(plan)
            assert moved is not None
            figures.record(f"downtime of a small job between GPUs: {before} to {plan}", moved.downtime_s * 1e3, "ms")
        mover.train(3)
        steps = mover.stop()
    finally:
        mover.close()
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    assert [s["loss"] for s in steps] == pytest.approx(on_one[: len(steps)], rel=TOLERANCE)


def test_links_of_the_driver_carry_an_all_reduce(
    count: int, kind: str, several: Callable[[str], None], tmp_path: Path, figures: Figures
) -> None:
    """The slowest rank's bytes per second, as `nccl-tests` count them on the bus."""
    found, _ = Probe().gpus()
    several(f"the driver lists {len(found)} GPUs")
    names = {gpu["uuid"] for gpu in found}
    for gpu in found:
        assert set(gpu["nvlink_peers"]) <= names - {gpu["uuid"]}
        assert bool(gpu["nvlinks"]) or not gpu["nvlink_peers"], "a peer over NVLink without an active link"
    linked = bool(found) and len(found[0]["nvlink_peers"]) + 1 >= count
    sizes = (1 << 16, 1 << 28) if kind == "cuda" else (1 << 10, 1 << 16)
    torch.multiprocessing.spawn(_all_reduce, (count, kind, free_port(), sizes, tmp_path), nprocs=count)
    over = "NVLink" if linked else "PCIe"
    for size_bytes in sizes:
        seconds = max(float((tmp_path / f"{rank}-{size_bytes}").read_text()) for rank in range(count))
        rate = 2 * (count - 1) / count * size_bytes / seconds / 1e9
        figures.record(f"all-reduce of {size_bytes} B over {over}, {count} GPUs", rate, "GB/s")


def _all_reduce(rank: int, count: int, kind: str, port: int, sizes: tuple[int, ...], directory: Path) -> None:
    """Sum tensors over all ranks, and write the seconds of one sum of each size."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    for size_bytes in sizes:
        values = torch.ones(size_bytes // 4, device=device)
        dist.all_reduce(values)
        assert values.min().item() == values.max().item() == count
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(REPEATS):
            dist.all_reduce(values)
        if kind == "cuda":
            torch.cuda.synchronize()
        (directory / f"{rank}-{size_bytes}").write_text(str((time.perf_counter() - began_s) / REPEATS))
    dist.destroy_process_group()
