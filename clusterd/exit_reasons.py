"""Exit reasons of ranks, and the exit codes by which clusterd's training loop tells some of them."""

from __future__ import annotations

import enum


class Reason(str, enum.Enum):
    """Exit reason of a rank, as its agent saw it."""

    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "oom"  # killed by the kernel for host memory
    DEVICE_OOM = "device-oom"
    DEVICE_FAULT = "device-fault"  # the GPU failed, by its driver's report
    CROWDED = "crowded"  # out of device memory beside ranks of a migration; found by the scheduler, not by an agent
    PORT = "port"  # the rendezvous port was taken
    NO_TORCH = "no-torch"
    PLAN = "plan"  # the job cannot train under this plan; it may under another
    SCRIPT = "script"  # the script asks for something that no plan can do
    DATA = "data"  # no host that has its data could be reached
    LOST = "lost"  # vanished without a record: a reboot, or a killed fork server
    STOPPED = "stopped"  # by request

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)

    @property
    def is_infrastructure(self) -> bool:
        """True where the fault is not the job's: it is requeued rather than failed."""
        return self in (Reason.LOST, Reason.PORT, Reason.DATA, Reason.CROWDED, Reason.DEVICE_FAULT)


EXIT_CODES = {
    92: Reason.SCRIPT,
    93: Reason.DEVICE_FAULT,
    94: Reason.DATA,
    95: Reason.DEVICE_OOM,
    96: Reason.PLAN,
    97: Reason.NO_TORCH,
    98: Reason.PORT,
}
"""Reasons of ranks that clusterd's training loop ended, by exit code."""

EXIT_CODE_OF = {reason: code for code, reason in EXIT_CODES.items()}
"""The same, by reason."""
