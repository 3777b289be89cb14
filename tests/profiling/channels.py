"""Made-up clusters whose collectives run in channels, by formulas unlike those of the performance model."""

from __future__ import annotations

import numpy as np

from clusterd.plans.plan import Plan
from clusterd.profiling.model import Row
from clusterd.profiling.placement import Allocation
from clusterd.profiling.table import Measured
from clusterd.profiling.workload import Workload

PLACES = (
    (1,), (2,), (4,), (8,), (1, 1), (2, 2), (4, 4), (8, 8), (1, 3), (2, 6), (1, 7), (3, 5), (3, 3), (5, 5), (6, 6),
    (1, 1, 2), (2, 2, 4), (2, 3, 3), (1,) * 4, (2,) * 4, (4,) * 4, (5,) * 4, (1,) * 8, (2,) * 8, (4,) * 8,
)  # fmt: skip


def table(
    *,
    seed: int,
    half_card: float = 1.0,
    beyond_two: float = 1.0,
    parameters: int = 300_000_000,
    rate: float = 8e9,
    noise: float = 0.02,
) -> list[Measured]:
    """Step times where a channel is one network card, shared by two devices, of every host.

    Args:
        half_card: factor on network traffic where a host uses a card with one of its devices.
        beyond_two: factor on network traffic on more than two hosts.
    """
    random = np.random.default_rng(seed)
    load = Workload.from_sizes("channels", parameters=parameters, layers=24, hidden=1024, seq_len=512, global_batch=64)
    rows = []
    for counts in PLACES:
        devices = sum(counts)
        channels = min(-(-n // 2) for n in counts)
        for checkpointing in (False, True):
            for zero in (0, 2):
                forward_s = 0.3 / devices + 0.005
                backward_s = 2 * forward_s + checkpointing * forward_s
                sent = 4.0 * parameters * (devices - 1) / devices
                sync_s = sent / 1e11 if len(counts) == 1 else sent / (channels * rate)
                sync_s *= half_card if len(counts) > 1 and any(n % 2 for n in counts) else 1.0
                sync_s *= beyond_two if len(counts) > 2 else 1.0
                shown_s = max(sync_s - backward_s / 2, 0.15 * sync_s) + 0.001 * (len(counts) - 1)
                gather_s = sync_s / 2 if zero else 0.0
                update_s = parameters / 1.5e10 / (devices if zero else 1)
                step_s = forward_s + backward_s + shown_s + gather_s + update_s + 0.005
                step_s *= float(np.exp(noise * random.standard_normal()))
                plan = Plan(dp=devices, zero=zero, checkpointing=checkpointing)
                rows.append(Measured(Row(load, plan, Allocation.of(counts)), step_s, f"zero={zero}", 0))
    return rows
