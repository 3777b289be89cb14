"""Program of `clusterd host check`: a product and copies on one device, an all-reduce and access of several.

The result is one line of JSON: seconds, and what was measured, or an error. `cpu` in the place of `cuda` is for tests.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

SIDE = 512
COPIED_BYTES, COPIES = 128 << 20, 5


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


def copies(kind: str) -> dict[str, float]:
    """Bytes per second of copies between pinned memory and the device, to and from it: the fastest of some."""
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=kind == "cuda")
    there = torch.empty_like(host, device=kind, pin_memory=False)
    found = {}
    for name, target, source in (("to_bytes_per_s", there, host), ("from_bytes_per_s", host, there)):
        times_s = []
        for _ in range(COPIES):
            began_s = time.monotonic()
            target.copy_(source)  # waits for the device, as one side is in host memory
            times_s.append(time.monotonic() - began_s)
        found[name] = COPIED_BYTES / min(times_s)
    return found


def without_access(kind: str, count: int) -> dict[str, list[tuple[int, int]]]:
    """Pairs of devices that do not reach each other's memory, by their numbers among those of this process."""
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    reach = torch.cuda.can_device_access_peer if kind == "cuda" else lambda *_: True
    return {"without_access": [pair for pair in pairs if not (reach(*pair) and reach(*reversed(pair)))]}


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
    """Run what the arguments name: KIND, KIND COUNT for access, or KIND RANK WORLD_SIZE STORE for an all-reduce."""
    kind, *others = arguments
    began_s = time.monotonic()
    found: dict[str, Any] = {}
    try:
        if len(others) > 1:
            all_reduce(kind, int(others[0]), int(others[1]), others[2])
        elif others:
            found = without_access(kind, int(others[0]))
        else:
            multiply(kind)
            took_s = time.monotonic() - began_s
            found = {"seconds": took_s, **copies(kind)}
    except Exception as error:
        print(json.dumps({"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}), flush=True)
        sys.exit(1)
    print(json.dumps({"seconds": time.monotonic() - began_s, **found}), flush=True)
