"""A training loop of its own, not clusterd's: saves when asked, goes on from what it saved, at any number of replicas.

One process per replica, as torchrun would start them. The global batch stays the same; each replica takes its part.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from clusterd.train.checkpointable import Requests

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=1, help="replicas")
    parser.add_argument("--directory", type=Path, required=True, help="for checkpoints, shared by all hosts")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    assert args.dp == world, f"started with {world} processes for --dp {args.dp}"
    if world > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    newest, first = args.directory / "newest.pt", 0
    if newest.exists():
        state = torch.load(newest, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"goes on from step {first} with {world} replicas", flush=True)
    runner = nn.parallel.DistributedDataParallel(model) if world > 1 else model

    def save(step: int) -> None:
        if rank == 0:
            args.directory.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, newest.with_suffix(".part"))
            newest.with_suffix(".part").replace(newest)

    with Requests() as requests:
        for step in range(first, args.steps):
            random = torch.Generator().manual_seed(step)
            inputs = torch.randn(64, 32, generator=random)
            mine = inputs[rank * 64 // world : (rank + 1) * 64 // world]
            # The mean over all 64, also where they cannot be shared out equally: replicas' gradients are averaged.
            loss = (runner(mine) - mine.sin().mean(dim=1, keepdim=True)).square().sum() * world / 64
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # All replicas must save and leave after the same step, whoever heard of it first.
            wishes = torch.tensor([loss.item() / world, float(requests.save), float(requests.stop)])
            if world > 1:
                dist.all_reduce(wishes)
            requests.progress(step + 1, wishes[0].item(), samples=64, steps=args.steps)
            if wishes[1] or wishes[2] or step + 1 == args.steps:
                save(step + 1)
                requests.saved(step + 1, str(newest))
            if wishes[2]:
                print(f"saved after step {step + 1}, leaves", flush=True)
                break
    if world > 1:
        dist.destroy_process_group()
