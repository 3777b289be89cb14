"""Setting of a simulation: all that is fixed while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from clusterd.core.performance_table import PerformanceTable
from clusterd.simulate.cluster import Cluster
from clusterd.simulate.costs import Costs
from clusterd.simulate.runs import Disturbance
from clusterd.simulate.truth import Truth
from clusterd.simulate.workload import Workload

RESTART_S = 78.0
"""Cost of a restart from a checkpoint: Rubick's average reconfiguration."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A simulation without its policy."""

    cluster: Cluster
    workload: Workload
    truth: Truth
    performance_tables: dict[str, PerformanceTable]
    move_s: float | None = RESTART_S  # of every policy; None: measured for ours, a restart for those that restart
    start_s: float = 0.0
    disturbances: tuple[Disturbance, ...] = ()
    checkpoint_s: float = 600.0
    horizon_s: float = float("inf")
    round_s: float = 0.0  # between the instants at which anything is heard of and decided; 0: at once
    whole_steps: bool = False  # steps that a round begins and does not end are not made

    def costs(self, policy: str) -> Costs:
        """Migration and restart costs of a policy; preempted jobs restart from a checkpoint under every policy."""
        move_s = self.move_s if self.move_s is not None else (None if migrates(policy) else RESTART_S)
        restart_s = self.move_s if self.move_s is not None else RESTART_S
        return Costs(move_s=move_s, start_s=self.start_s, restart_s=restart_s)


def migrates(policy: str) -> bool:
    """True if this policy migrates live; the published ones restart from a checkpoint."""
    return policy.partition("+")[0] == "default"
