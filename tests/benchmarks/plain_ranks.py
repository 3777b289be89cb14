"""One rank of the example GPT in plain torch: what a step costs without clusterd. Appends step times to a file.

    plain_ranks.py zero3|dp FILE

Sizes and the rendezvous come from the environment, as for `checkpoint_ranks.py`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

import torch
import torch.distributed as dist
from model import GPT
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from train import Windows


def main() -> None:
    """Train until killed."""
    how, file = sys.argv[1:]
    width, depth, batch = (int(os.environ[f"GPT_{name}"]) for name in ("WIDTH", "DEPTH", "BATCH"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(width=width, depth=depth, heads=4, context=64)
    if how == "zero3":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = Windows(64)
    loader = DataLoader(data, batch // dist.get_world_size(), sampler=DistributedSampler(data, seed=0), drop_last=True)
    with open(file, "a", encoding="utf-8", buffering=1) as log:
        while True:
            began_s = time.perf_counter()
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                ended_s = time.perf_counter()
                if dist.get_rank() == 0:
                    log.write(f"{ended_s - began_s:.6f} {loss.item():.5f}\n")
                began_s = ended_s


if __name__ == "__main__":
    main()
