"""Measured rates of the device and of links between ranks, taken once before a job's first step.

The performance model uses them as priors of its fit. Each measurement takes some hundredths of a second. Collectives
are timed at two sizes: the difference gives the bandwidth, the rest the latency of a hop, as in the alpha-beta model of
a ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from clusterd.train.process import accelerator

TIME_S = 0.04
SMALL_BYTES, LARGE_BYTES = 1 << 12, 1 << 22


def probe(device: torch.device, hosts: int, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Measure the performance model's coefficients, by their names and in their units; every rank must call it.

    Args:
        hosts: of the ranks; with several, links between hosts are measured.
        dtype: of the job's matrix products.
    """
    figures = {
        "compute_rate": _matmul_rate(device, dtype),
        "update_rate": _update_rate(device),
        "copy_rate": _copy_rate(device),
    }
    if device.type == "cuda":
        figures |= _host_update_rates()
    if dist.is_initialized() and dist.get_world_size() > 1:
        link = "network" if hosts > 1 else "local"
        rate, delay_s = _ring_rate(device)
        figures[f"{link}_rate"] = rate
        figures[f"{link}_latency_s"] = delay_s
    if (gpu := accelerator.of(device)) is not None:
        # The probe's memory must not count as the job's.
        gpu.empty_cache()
        gpu.reset_peak()
    return {name: value for name, value in figures.items() if value > 0}


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a matrix product."""
    size = 4096 if device.type == "cuda" else 512
    a = torch.ones(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / _seconds(lambda: a @ a, device)


def _update_rate(device: torch.device) -> float:
    """Parameters per second through AdamW."""
    count = 1 << (24 if device.type == "cuda" else 19)
    parameter = torch.nn.Parameter(torch.ones(count, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    return count / _seconds(optimizer.step, device)


def _host_update_rates() -> dict[str, float]:
    """Update rates on the host: with one thread and, if this rank has more, with all."""
    count = torch.get_num_threads()
    found: dict[str, float] = {}
    try:
        torch.set_num_threads(1)
        found["thread_update_rate"] = _update_rate(torch.device("cpu"))
    finally:
        torch.set_num_threads(count)
    if count > 1:
        found["host_update_rate"] = _update_rate(torch.device("cpu"))
    return found


def _copy_rate(device: torch.device) -> float:
    """Bytes per second between device and host; for a CPU device, within memory."""
    count = LARGE_BYTES * (16 if device.type == "cuda" else 1)
    source = torch.ones(count, dtype=torch.uint8)
    if device.type == "cuda":
        source = source.pin_memory()
    target = torch.empty(count, dtype=torch.uint8, device=device)
    return count / _seconds(lambda: target.copy_(source), device)


def _ring_rate(device: torch.device) -> tuple[float, float]:
    """Bytes per second of one rank's ring, 0 if hidden by noise, and seconds per hop."""
    ranks = dist.get_world_size()
    # Between GPUs, 4 MiB take little longer than a kernel launch.
    large_bytes = LARGE_BYTES * (16 if device.type == "cuda" else 1)
    times = {}
    for size in (SMALL_BYTES, large_bytes):
        data = torch.ones(size // 4, device=device)
        # A fixed count: repeating by the clock would differ between ranks.
        times[size] = _seconds(lambda: dist.all_reduce(data), device, repeats=8)  # noqa: B023 (called at once)
    share = 2.0 * (ranks - 1) / ranks
    extra_s = times[large_bytes] - times[SMALL_BYTES]
    rate = share * (large_bytes - SMALL_BYTES) / extra_s if extra_s > 0 else 0.0
    return rate, times[SMALL_BYTES] / (2.0 * (ranks - 1))


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 0) -> float:
    """Best time of several runs: the capability of the machine without interference."""
    work()
    best = float("inf")
    began = time.perf_counter()
    done = 0
    while done < repeats if repeats else time.perf_counter() - began < TIME_S:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - start)
        done += 1
    return best


def _wait(device: torch.device) -> None:
    if (gpu := accelerator.of(device)) is not None:
        gpu.synchronize()
