"""What starting, moving and stopping cost in the simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

STATE_BYTES_PER_PARAMETER = 16
"""Parameters, gradients' master copies and two moments of Adam, as training keeps them in mixed precision."""

LIVE_FIXED_S = 0.1
"""Agreement on the last step, messages and the commit of the switch: as `clusterd.daemon.foresight` reckons."""

LIVE_COPY_BYTES_PER_S = 2e9
LIVE_NETWORK_BYTES_PER_S = 1e9
LIVE_PREPARE_S = 5.0
"""New ranks start and rehearse while the old ones train."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds; what `move_s` is None for is reckoned from the model's size, as live migration takes."""

    move_s: float | None = 78.0  # without progress, on the new devices
    start_s: float = 0.0  # before the first step of a job
    restart_s: float = 78.0  # before the first step after a preemption or a fault
    state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER

    def of_move(self, parameters: int, hosts: int, old_hosts: int) -> tuple[float, float]:
        """Seconds that the old ranks still train, and seconds in which nobody does."""
        if self.move_s is not None:
            return 0.0, self.move_s
        state = parameters * self.state_bytes_per_parameter
        # Each host copies its part out of and into shared memory; what changes hosts crosses the network once.
        local_s = 2 * state / min(hosts, old_hosts) / LIVE_COPY_BYTES_PER_S
        network_s = state / max(hosts, old_hosts) / LIVE_NETWORK_BYTES_PER_S
        return LIVE_PREPARE_S, LIVE_FIXED_S + local_s + network_s
