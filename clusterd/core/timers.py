"""Timers of the scheduler: typed values, which the daemon and the simulator fire as events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from clusterd.types import HostId


class TimerKind(StrEnum):
    """Purposes of timers."""

    ROUND = "round"  # the policy's next round
    PASS = "pass"  # a scheduling pass that was put off, as the last one was a moment ago
    RECOVERY = "recovery"  # the daemon stops waiting for hosts to report after its start
    HOST_LOST = "host-lost"  # an unreachable host is given up
    CLAIM = "claim"  # a claim on devices begins or ends, or what a booking has not used is released
    ACCOUNT_LOST = "account-lost"  # an account's agent on a host is given up; about: see `account_on`
    FAULT = "fault"  # a faulty device is offered again
    RECOVER = "recover"  # survivors of an attempt must have reported
    CHECKPOINT = "checkpoint"  # a periodic checkpoint is due
    TRIAL = "trial"  # a trial must have been measured
    STALL = "stall"  # a job without a step is restarted
    LIMIT = "limit"  # a job's time limit
    SIGNAL = "signal"  # the signal that a job asked for before its time limit
    IDLE = "idle"  # a reservation whose devices do nothing ends
    SHARE = "share"  # a job that holds too much of a shared device's memory ends
    RETRY = "retry"  # the back-off of a job is over
    SETTLE = "settle"  # a job may be migrated again


def account_on(host: HostId, account: str) -> str:
    """Subject of a timer of an account on a host; neither name has a space."""
    return f"{host} {account}"


@dataclass(frozen=True, slots=True)
class Timer:
    """Key of a timer: its purpose and the job, host or device that it is about."""

    kind: TimerKind
    about: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.about}" if self.about else self.kind.value
