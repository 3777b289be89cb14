"""One workload under several policies, side by side in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from clusterd.core.performance_table import PerformanceTable
from clusterd.core.policies import POLICIES
from clusterd.errors import UsageError
from clusterd.simulate.cluster import Cluster
from clusterd.simulate.loop import Simulation
from clusterd.simulate.metrics import figures
from clusterd.simulate.runs import Disturbance, Result
from clusterd.simulate.setting import Setting
from clusterd.simulate.truth import Truth, by_count, learned, oracle
from clusterd.simulate.world import OnBatch


def check_policies(names: Sequence[str]) -> None:
    """Check that all policies exist.

    Raises:
        UsageError: one is unknown.
    """
    for name in names:
        if name not in POLICIES:
            raise UsageError(f"--policy {name}: there is none of that name; there are {', '.join(POLICIES)}")


def simulate(setting: Setting, policy: str, on_batch: OnBatch | None = None) -> Result:
    """Run one workload under one policy."""
    return Simulation(setting, POLICIES[policy](), on_batch).run()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Metrics of a run."""

    policy: str
    figures: dict[str, Any]
    completion_s: tuple[float, ...]  # of each job, in the order of arrival
    undone: dict[str, str]  # jobs that were given up or would wait for ever, and why


def outcome(setting: Setting, policy: str) -> Outcome:
    """Run one workload under one policy, and return its metrics."""
    result = simulate(setting, policy)
    end_s = result.ended_s
    times = tuple((r.end_s if r.end_s is not None else end_s) - r.arrival.at_s for r in result.runs)
    return Outcome(policy, figures(result), times, {**result.failed, **result.stuck})


def side_by_side(
    setting: Setting, policies: Sequence[str], processes: int | None, on_done: Callable[[str], None]
) -> dict[str, Outcome]:
    """Run all policies, and report each that completes to `on_done`."""
    count = min(processes or os.cpu_count() or 1, len(policies))
    if count <= 1:
        found = {}
        for name in policies:
            found[name] = outcome(setting, name)
            on_done(name)
        return found
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(outcome, setting, name): name for name in policies}
        done: dict[str, Outcome] = {}
        for future in as_completed(waiting):
            done[waiting[future]] = future.result()
            on_done(waiting[future])
    return {name: done[name] for name in policies}


def believe(
    truth: Truth, is_oracle: bool, seed: int, models: Sequence[str], counts_only: bool = False
) -> dict[str, PerformanceTable]:
    """Performance tables that policies see, by model.

    Args:
        counts_only: hide all but the step time by number of devices, on as few hosts as possible.
    """
    known = {
        name: by_count(truth.models[name]) if counts_only else truth.models[name] for name in dict.fromkeys(models)
    }
    return {name: oracle(one) if is_oracle else learned(one, seed) for name, one in known.items()}


def faults(cluster: Cluster, per_host_day: float, repair_s: float, span_s: float, seed: int) -> list[Disturbance]:
    """Hosts go down at random times (exponential gaps) and come back after the repair."""
    random_ = random.Random(f"faults {seed}")
    found: list[Disturbance] = []
    hosts = sum(g.hosts for g in cluster.groups)
    for host in range(hosts):
        at_s = random_.expovariate(per_host_day / 86400.0)
        while at_s < span_s:
            found += [Disturbance(at_s, host, "down"), Disturbance(at_s + repair_s, host, "up")]
            at_s += repair_s + random_.expovariate(per_host_day / 86400.0)
    return sorted(found, key=lambda d: d.at_s)


def drains(cluster: Cluster, texts: Sequence[str]) -> list[Disturbance]:
    """Parse ``HOST@START-END``: seconds, and the host's number.

    Raises:
        UsageError: a text has another form.
    """
    hosts = sum(g.hosts for g in cluster.groups)
    found: list[Disturbance] = []
    for text in texts:
        try:
            host, _, span = text.partition("@")
            start, _, end = span.partition("-")
            if not 0 <= int(host) < hosts:
                raise ValueError
            start_s, end_s = float(start), float(end)
            if not 0 <= start_s < end_s:
                raise ValueError
            found += [Disturbance(start_s, int(host), "drain"), Disturbance(end_s, int(host), "undrain")]
        except ValueError:
            raise UsageError(
                f"--drain {text}: write HOST@START-END with a host from 0 to {hosts - 1} and seconds, as in 3@3600-7200"
            ) from None
    return sorted(found, key=lambda d: d.at_s)
