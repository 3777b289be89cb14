"""Costs of starts, migrations and restarts in the simulated cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clusterd.plans.plan import Plan
from clusterd.types import HostId

STATE_BYTES_PER_PARAMETER = 16
"""Training state per parameter byte: master copy and two moments of Adam, in mixed precision."""

WHOLE_BYTES_PER_PARAMETER = 2
"""Part of it that ZeRO-1 and ZeRO-2 replicate on every rank."""

LIVE_FIXED_S = 0.1
"""Consensus on the last step, messages, and the commit of the switch; as in `daemon.api.migration_cost`."""

LIVE_COPY_BYTES_PER_S = 2e9
"""Copy rate of one rank, measured with four ranks on two cores (tests/benchmarks/migration.py)."""

LIVE_NETWORK_BYTES_PER_S = 1e9
"""Network rate of one host: half of the loopback's on the machine that measured the copy rate, below 10 Gbit/s."""

LIVE_PREPARE_S = 5.0
"""Target ranks start and rehearse while the source ranks train."""


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks of one plan, on one side of a migration."""

    plan: Plan
    hosts: Sequence[HostId]  # of each rank

    @property
    def share(self) -> float:
        """Share of the state that one rank holds."""
        plan = self.plan
        whole = {0: 1.0, 3: 0.0}.get(plan.zero, WHOLE_BYTES_PER_PARAMETER / STATE_BYTES_PER_PARAMETER)
        return (whole + (1.0 - whole) / plan.dp) / (plan.tp * plan.pp)

    def on_hosts(self) -> dict[HostId, float]:
        """Share of the state that each host holds."""
        return {host: min(count * self.share, 1.0) for host, count in Counter(self.hosts).items()}


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds. Where `move_s` is None, a migration is priced by the bytes that it moves."""

    move_s: float | None = 78.0  # without progress, on the new devices
    start_s: float = 0.0  # before the first step of a job
    restart_s: float = 78.0  # before the first step after a preemption or a fault
    state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER

    @property
    def prepare_s(self) -> float:
        """Time in which the target ranks start while the source ranks train."""
        return LIVE_PREPARE_S if self.move_s is None else 0.0

    def downtime_s(self, parameters: int, old: Side, new: Side) -> float:
        """Downtime of a migration: seconds in which no rank trains.

        Replicas share the sending: each source rank copies its part of the state out once, each target rank copies in
        what it holds. A host fetches the parts that it needs and lacks; of the parts that it has, the average share is
        useful.
        """
        if self.move_s is not None:
            return self.move_s
        state = parameters * self.state_bytes_per_parameter
        there = old.on_hosts()
        fetched = max(need * (1.0 - there.get(host, 0.0)) for host, need in new.on_hosts().items())
        copied = 1.0 / len(old.hosts) + new.share
        return LIVE_FIXED_S + state * (copied / LIVE_COPY_BYTES_PER_S + fetched / LIVE_NETWORK_BYTES_PER_S)
