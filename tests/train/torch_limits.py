"""torch features that fail between CPU ranks, tried in plain torch without clusterd."""

from __future__ import annotations

import torch
import torch.distributed as dist
from model import GPT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from clusterd.train.parallel.build import Stage


def attempt(way: str, rank: int, port: int) -> None:
    """Take two training steps with this feature on two ranks."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT(width=32, depth=2, heads=4, context=16, vocabulary=64)
    tokens = torch.randint(64, (8, 16))
    WAYS[way](model, tokens)


def _steps(model: nn.Module, tokens: torch.Tensor) -> None:
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def _fsdp1(model: nn.Module, tokens: torch.Tensor) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _steps(FullyShardedDataParallel(model), tokens)


def _pinned_offload(model: nn.Module, tokens: torch.Tensor) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    fully_shard(model, offload_policy=CPUOffloadPolicy())
    _steps(model, tokens)


def _ddp_over_tp(model: nn.Module, tokens: torch.Tensor) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    _steps(nn.parallel.DistributedDataParallel(model), tokens)


def _ddp_under_1f1b(model: nn.Module, tokens: torch.Tensor) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    stage = Stage(model, [["embed", "blocks.0"], ["blocks.1", "head"]][rank])
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    runner = nn.parallel.DistributedDataParallel(stage, process_group=alone)
    schedule = Schedule1F1B(
        PipelineStage(runner, rank, 2, torch.device("cpu")),
        n_microbatches=2,
        loss_fn=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
    )
    for _ in range(2):
        schedule.step(*([tokens] if rank == 0 else []), **({"target": tokens} if rank == 1 else {}))


def _context_parallel(model: nn.Module, tokens: torch.Tensor) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[tokens], buffer_seq_dims=[1]):
        _steps(model, tokens)


WAYS = {
    "fsdp1": _fsdp1,
    "pinned offload": _pinned_offload,
    "ddp over tp": _ddp_over_tp,
    "ddp under 1f1b": _ddp_under_1f1b,
    "context parallel": _context_parallel,
}
