"""One rank of the baseline: the same state through torch's distributed checkpoint, in plain torch.distributed.

    checkpoint_ranks.py live PLAN_A PLAN_B DIRECTORY REPEATS      save under A and load under B in the same processes
    checkpoint_ranks.py save PLAN_A - DIRECTORY 1                 save, and end
    checkpoint_ranks.py load PLAN_B - DIRECTORY 1                 start, load, and be ready for the first step

Rank 0 prints one JSON object with wall times. Sizes come from the environment (GPT_WIDTH, GPT_DEPTH, GPT_BATCH).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from train import Windows

from clusterd.plans.plan import Plan
from clusterd.train.loop.rank_training import Training
from clusterd.train.process.context import Context
from clusterd.train.process.job import Job


def job_of_size() -> Job:
    """The job that the benchmark's daemon trains, too."""
    width, depth, batch = (int(os.environ[f"GPT_{name}"]) for name in ("WIDTH", "DEPTH", "BATCH"))
    return Job(
        model=lambda: GPT(width=width, depth=depth, heads=4, context=64),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        data=Windows(64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        global_batch=batch,
        steps=1000,
        seed=0,
        layers=GPT.LAYERS,
        tp_plan=GPT.TP_PLAN,
        clip_norm=1.0,
    )


def training_under(job: Job, plan: Plan) -> Training:
    """Built, with one step done: the optimizer's state is there."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (plan.pp, plan.dp, plan.tp), mesh_dim_names=("pp", "dp", "tp"))
    context = Context(launcher="torchrun", rank=rank, world_size=plan.ranks, local_rank=rank, plan=plan)
    training = Training(job, context, torch.device("cpu"), mesh)
    inputs, targets = next(iter(training.batches()))
    training.stepper.step(inputs, targets)
    return training


def state_of(training: Training) -> dict[str, Any]:
    """Parameters and optimizer state by global name, sharded tensors as DTensors."""
    state: dict[str, Any] = {}
    slots = training.optimizer.state_by_name()
    for name, parameter, _ in training.optimizer.local:
        state[name] = parameter.detach()
        for slot, value in slots.get(name, {}).items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            if isinstance(parameter, DTensor):
                value = DTensor.from_local(
                    value, parameter.device_mesh, parameter.placements, run_check=False,
                    shape=parameter.shape, stride=parameter.stride(),
                )  # fmt: skip
            state[f"{name}.{slot}"] = value
    return state


def main() -> None:
    """One mode."""
    mode, first, second, directory, repeats = sys.argv[1:]
    torch.set_num_threads(1)
    began_s = time.time()
    dist.init_process_group("gloo")
    job = job_of_size()
    answer: dict[str, Any] = {"began_s": began_s}
    source = training_under(job, Plan.parse(first))
    if mode == "live":
        target = training_under(job, Plan.parse(second))
        seconds = []
        for number in range(int(repeats)):
            dist.barrier()
            started_s = time.perf_counter()
            dcp.save(state_of(source), checkpoint_id=f"{directory}/live")
            dcp.load(state_of(target), checkpoint_id=f"{directory}/live")
            dist.barrier()
            if number:  # the first one is cold
                seconds.append(time.perf_counter() - started_s)
        answer["seconds"] = seconds
    elif mode == "save":
        dist.barrier()
        answer["asked_s"] = time.time()
        dcp.save(state_of(source), checkpoint_id=directory)
    else:
        dcp.load(state_of(source), checkpoint_id=directory)
        dist.barrier()
        answer["ready_s"] = time.time()
    if dist.get_rank() == 0:
        print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
