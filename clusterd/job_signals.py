"""Signals that users send to running jobs, and the one that a job asks for before its time limit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2

from clusterd.units import parse_duration_s

SIGNALS = {each.name.removeprefix("SIG"): each for each in (SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2)}
"""By name; their programs decide what follows."""

BEFORE_S = 60.0


@dataclass(frozen=True, slots=True)
class LimitSignal:
    """Signal that a job's processes get some time before its time limit ends it."""

    number: int
    before_s: float
    first_only: bool  # to the first process of each rank alone, not to its children


def parse_limit_signal(text: str) -> LimitSignal:
    """Parse ``USR1@2m``, or ``B:USR1@120`` for the first process alone; seconds by default, as in Slurm.

    Raises:
        ValueError: not a signal that jobs are sent.
    """
    match = re.fullmatch(r"(B:)?(?:SIG)?([A-Z]+\d?|\d+)(?:@(.+))?", text.upper())
    known = {**SIGNALS, **{str(int(each)): each for each in SIGNALS.values()}}
    if match is None or match[2] not in known:
        raise ValueError(f"write it as in USR1@2m; signals are {', '.join(SIGNALS)}")
    before_s = parse_duration_s(match[3].lower()) if match[3] else BEFORE_S
    if not 0.0 <= before_s < inf:
        raise ValueError("the time before the limit must be at least 0, as in USR1@2m")
    return LimitSignal(int(known[match[2]]), before_s, match[1] is not None)
