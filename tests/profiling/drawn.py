"""Made-up clusters and models drawn at random, whose step times follow formulas unlike those of the performance model.

Table for `profiling evaluate`, one cluster per model: ``python -m tests.profiling.drawn OUT.csv [CLUSTERS]``.
Seeds below 100 were for choices while the performance model was built; figures are reported for seeds from 100 on.
"""

from __future__ import annotations

import csv
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clusterd.plans.plan import Plan
from clusterd.profiling.model import Row
from clusterd.profiling.placement import Allocation
from clusterd.profiling.table import REQUIRED, Measured
from clusterd.profiling.workload import Workload

REPORTED = 100
"""First seed of the tables for which figures are reported."""

_HOST = 8
_SEQ_LEN = 512


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts of eight devices, and how collectives run between them."""

    devices_per_card: int
    rate: float  # byte/s of a network card
    local_rate: float  # byte/s inside a host
    link: float  # byte/s of all cards of a host together, where they share a link
    part_card: float  # factor on network traffic where a host uses a card with part of its devices
    tree: float  # factor on network traffic on three hosts and more, where another algorithm is used
    uplink: float  # further factor on more than four hosts, which no longer share a switch
    straggler: float  # further compute time per doubling of hosts, since the slowest one sets the pace
    hop_s: float

    @classmethod
    def draw(cls, random: np.random.Generator) -> Cluster:
        """Any lab: from 10 Gbit/s to 200 Gbit/s per card; most have no more than one peculiarity."""
        rate = _between(random, 1e9, 25e9)
        per_card = int(random.choice([1, 2, 4, 8]))
        cards = _HOST // per_card
        return cls(
            devices_per_card=per_card,
            rate=rate,
            local_rate=max(_between(random, 8e9, 200e9), 2 * rate),
            link=rate * (_between(random, 1.0, cards) if random.random() < 0.3 else cards),
            part_card=_between(random, 1.5, 8.0) if random.random() < 0.3 else _between(random, 1.0, 1.1),
            tree=_between(random, 0.7, 1.5) if random.random() < 0.5 else 1.0,
            uplink=_between(random, 1.0, 2.0) if random.random() < 0.3 else 1.0,
            straggler=_between(random, 0.01, 0.05) if random.random() < 0.3 else 0.0,
            hop_s=_between(random, 2e-4, 4e-3),
        )

    def network_s(self, sent: float, counts: tuple[int, ...]) -> float:
        """Seconds of an all-reduce that sends this many bytes through the poorest host."""
        channels = min(-(-n // self.devices_per_card) for n in counts)
        seconds = sent / min(channels * self.rate, self.link)
        if any(n % self.devices_per_card for n in counts):
            seconds *= self.part_card
        return seconds * (self.tree if len(counts) > 2 else 1.0) * (self.uplink if len(counts) > 4 else 1.0)


def table(seed: int) -> list[Measured]:
    """Step times of a drawn model on a drawn cluster: every shape on two hosts, and even spreads over more."""
    random = np.random.default_rng(seed)
    cluster = Cluster.draw(random)
    hidden, layers = int(random.choice([512, 1024, 2048])), int(random.choice([12, 24, 36]))
    parameters = 12 * layers * hidden * hidden
    load = Workload.from_sizes(
        "drawn", parameters=parameters, layers=layers, hidden=hidden, seq_len=_SEQ_LEN, global_batch=64
    )
    sample_s = load.flops_per_sample / _between(random, 15e12, 150e12)
    filled = _between(random, 0.2, 4.0)  # samples of a micro-batch that keep a device half busy
    overlap, noise = random.uniform(0.0, 0.9), _between(random, 0.01, 0.04)
    update_rate, constant_s = _between(random, 3e9, 3e10), _between(random, 1e-3, 2e-2)
    rows = []
    for counts in shapes():
        hosts = len(counts)
        for plan in _plans(counts):
            share = math.ceil(load.global_batch / plan.dp)
            busy_s = sample_s / plan.tp * (share + filled) * (1.0 + cluster.straggler * math.log2(hosts))
            split_s = 0.0
            if plan.tp > 1:
                traffic = 4 * load.tp_bytes * share * (plan.tp - 1) / plan.tp
                split_s = traffic / cluster.local_rate + 8 * layers * 3e-5
            forward_s = busy_s + split_s / 2
            backward_s = 2 * busy_s + split_s / 2 + plan.checkpointing * busy_s
            sent = 2 * load.gradient_bytes / plan.tp * (plan.dp - 1) / plan.dp
            sync_s = sent / cluster.local_rate if hosts == 1 else cluster.network_s(sent * plan.tp, counts)
            shown_s = max(sync_s - overlap * backward_s, 0.1 * sync_s) + cluster.hop_s * (hosts - 1)
            gather_s = 0.5 * sync_s if plan.zero else 0.0
            update_s = parameters / plan.tp / update_rate / (plan.dp if plan.zero else 1)
            step_s = forward_s + backward_s + shown_s + gather_s + update_s + constant_s
            step_s *= float(np.exp(noise * random.standard_normal()))
            family = f"tp={plan.tp},zero={plan.zero}"
            rows.append(Measured(Row(load, plan, Allocation.of(counts)), step_s, family, 0))
    return rows


def shapes() -> list[tuple[int, ...]]:
    """All shapes on one or two hosts, and even spreads over three, four and eight."""
    some = range(1, _HOST + 1)
    pairs = [(more, fewer) for more in some for fewer in range(1, more + 1)]
    spread = [(n,) * hosts for hosts in (3, 4) for n in some]
    return [*((n,) for n in some), *pairs, *spread, *((n,) * 8 for n in (1, 2, 4, 8))]


def _plans(counts: tuple[int, ...]) -> list[Plan]:
    devices = sum(counts)
    plans = [Plan(dp=devices), Plan(dp=devices, zero=2)]
    if all(n % 2 == 0 for n in counts):
        plans.append(Plan(dp=devices // 2, tp=2))
    return [plan for plan in plans if plan.dp <= 64]


def _between(random: np.random.Generator, low: float, high: float) -> float:
    """Drawn log-uniformly."""
    return math.exp(random.uniform(math.log(low), math.log(high)))


def write(path: Path, clusters: int = 16) -> None:
    """Write the tables of the first seeds for which figures are reported."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(REQUIRED)
        for seed in range(REPORTED, REPORTED + clusters):
            for one in table(seed):
                load, plan = one.row.workload, one.row.plan
                hidden = round(math.sqrt(load.parameters / (12 * load.layers)))
                model = (f"drawn{seed}", load.parameters, load.layers, hidden, _SEQ_LEN, load.global_batch)
                shape = "+".join(map(str, one.row.allocation.counts))
                writer.writerow((*model, plan.dp, plan.tp, plan.pp, plan.zero, 0, 0, shape, one.step_time_s))


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
