"""Made-up clusters and models with known truths, unlike the priors and unlike each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from clusterd.plans.plan import Plan
from clusterd.profiling.coefficients import NAMES, Array
from clusterd.profiling.curves import Curve, Fits, best_points, envelope, packed
from clusterd.profiling.fit import Fit
from clusterd.profiling.model import Row, Rows, Structure, predict
from clusterd.profiling.placement import Allocation
from clusterd.profiling.table import Measured
from clusterd.profiling.workload import Workload

TRANSFORMER = Workload.from_sizes(
    "made-up", parameters=700_000_000, layers=36, hidden=1280, seq_len=1024, global_batch=32
)
CONVOLUTIONS = Workload.from_sizes("conv", parameters=25_000_000, layers=50, hidden=0, seq_len=0, global_batch=256)

SLOW_NETWORK = {
    "compute_rate": 25e12, "launch_s": 2e-4, "overlap": 1.5, "local_rate": 10e9, "network_rate": 1.1e9,
    "card_growth": 0.7, "update_rate": 6e9, "host_update_rate": 8e8, "copy_rate": 5e9, "network_latency_s": 4e-3,
}  # fmt: skip
FAST_NETWORK = {
    "compute_rate": 300e12, "launch_s": 3e-4, "overlap": 0.3, "local_rate": 300e9, "network_rate": 40e9,
    "update_rate": 4e10, "host_update_rate": 3e9, "copy_rate": 25e9, "host_sharing": 0.8, "step_s": 1e-2,
}  # fmt: skip


def truth(**changed: float) -> Array:
    """Logarithms of coefficients: plausible ones, and those given."""
    typical = {
        "compute_rate": 80e12, "launch_s": 3e-4, "backward_ratio": 2.1, "recompute_ratio": 0.9, "unsharded_share": 0.05,
        "parallel_path": 1.1, "crowding": 1e-3, "sharded_path": 1.02, "overlap": 0.5, "local_rate": 90e9,
        "network_rate": 8e9, "card_growth": 0.9, "local_latency_s": 3e-5, "network_latency_s": 2e-3, "tp_slowness": 1.2,
        "tp_messages": 1.1, "pipe_slowness": 1.3, "gather_ratio": 0.8, "gather_messages": 2.0, "scatter_messages": 1.1,
        "update_rate": 1e10, "host_update_rate": 2e9, "host_sharing": 0.4, "copy_rate": 1e10, "offload_whole_rate": 5e9,
        "offload_s": 2e-2, "step_s": 4e-3, "sample_core_s": 2e-5, "thread_update_rate": 3e8,
        "part_used_card": 0.02, "further_hosts": 1.0, "further_ranks": 1.0, "host_slowness": 1.0,
    }  # fmt: skip
    return np.array([math.log({**typical, **changed}[name]) for name in NAMES])


def plans_on(counts: tuple[int, ...], load: Workload, *, parallel: bool = True) -> list[Plan]:
    """Plans that a user would try there."""
    n = sum(counts)
    plans = [Plan(dp=n), Plan(dp=n, checkpointing=True), Plan(dp=n, zero=2), Plan(dp=n, zero=2, offload="optimizer")]
    if parallel:
        for tp in (2, 4, 8):
            if n % tp == 0 and load.global_batch % (n // tp) == 0:
                plans.append(Plan(dp=n // tp, tp=tp))
                if n % (2 * tp) == 0:
                    micro = min(4, load.global_batch // (n // tp // 2))
                    plans.append(Plan(dp=n // tp // 2, tp=tp, pp=2, accumulation=micro))
    return [p for p in plans if load.global_batch % p.dp == 0]


PLACES = ((1,), (2,), (4,), (8,), (1, 1), (2, 2), (4, 4), (8, 8), (1,) * 4, (2,) * 4, (4,) * 4, (8,) * 4)


def measured(
    logs: Array, load: Workload, *, noise: float = 0.02, seed: int = 0, parallel: bool = True, devices_per_card: int = 2
) -> list[Measured]:
    """A table of step times in such a world."""
    rows = [
        Row(load, plan, Allocation.of(counts))
        for counts in PLACES
        for plan in plans_on(counts, load, parallel=parallel)
    ]
    times = predict(logs, Rows.of(rows), Structure(devices_per_card))
    times = times * np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)))
    return [Measured(row, float(t), _family(row.plan), 0) for row, t in zip(rows, times, strict=True)]


def _family(plan: Plan) -> str:
    if plan.tp > 1 or plan.pp > 1:
        return "3d"
    return f"zero={plan.zero},{plan.offload}" + (",gc" if plan.checkpointing else "")


def over_devices(
    fit: Fit,
    workload: Workload,
    plans: Callable[[int], Iterable[Plan]],
    counts: Iterable[int],
    per_host: int,
    *,
    cores_per_device: int = 0,
    device_type: str = "",
    speed: float = 1.0,
    fits: Fits | None = None,
) -> Curve:
    """Throughput over the number of devices, packed on hosts of `per_host` devices.

    Args:
        plans: legal plans for a number of devices (`plans.enumerate`).
        counts: numbers of devices to evaluate.
        speed: of one device, relative to the type for which `fit` was made.
    """
    choices = [
        (
            float(n),
            packed(n, per_host, cores_per_device=cores_per_device, device_type=device_type, speed=speed),
            plans(n),
        )
        for n in counts
    ]
    return envelope(f"devices {device_type}".strip(), best_points(fit, workload, choices, fits))
