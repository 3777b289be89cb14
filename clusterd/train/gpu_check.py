"""Program of `clusterd host check`: one product of matrices on this process's device, and an all-reduce with others.

The result is one line of JSON: seconds, or an error. `cpu` in the place of `cuda` is for tests.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

SIDE = 512


def multiply(kind: str) -> None:
    """Multiply matrices of small integers, whose product is exact on every device.

    Raises:
        RuntimeError: the device cannot compute, or the product is wrong.
    """
    left = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 7
    right = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 5
    product = (left.to(kind, torch.float32) @ right.to(kind, torch.float32)).to("cpu", torch.int64)
    if not torch.equal(product, left @ right):
        raise RuntimeError("a product of matrices is wrong")


def all_reduce(kind: str, rank: int, world_size: int, store: str) -> None:
    """Sum a tensor over all ranks.

    Raises:
        RuntimeError: the ranks do not reach each other, or the sum is wrong.
    """
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
    )
    values = torch.full((1 << 20,), float(rank + 1), device=kind)
    dist.all_reduce(values)
    expected = world_size * (world_size + 1) / 2
    if values.min().item() != expected or values.max().item() != expected:
        raise RuntimeError("the sum of an all-reduce is wrong")
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Run the check that the arguments name: KIND, or KIND RANK WORLD_SIZE STORE for an all-reduce."""
    kind, *ranks = arguments
    began_s = time.monotonic()
    try:
        if ranks:
            all_reduce(kind, int(ranks[0]), int(ranks[1]), ranks[2])
        else:
            multiply(kind)
    except Exception as error:
        print(json.dumps({"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}), flush=True)
        sys.exit(1)
    print(json.dumps({"seconds": time.monotonic() - began_s}), flush=True)
