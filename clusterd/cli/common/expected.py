"""Texts about expected starts and ends, and about the effect of what an operator would do."""

from __future__ import annotations

import time
from typing import Any

from clusterd.cli.common.output import print_line, show_table
from clusterd.units import duration

PLAYING = "playing the queue forward, with it and without it"


def clock(at_s: float) -> str:
    """Time of day, with the date where it is not today's."""
    at = time.localtime(at_s)
    return time.strftime("%H:%M" if at[:3] == time.localtime()[:3] else "%m-%d %H:%M", at)


def expected_cell(forecast: dict[str, Any] | None, what: str) -> str:
    """Text of a start or an end: ``16:40 (16:10-18:30)``."""
    return quantiles_cell(forecast[what] if forecast else None)


def quantiles_cell(times: dict[str, Any] | None) -> str:
    """Text of a point in time and its 90% interval."""
    if times is None:
        return "not known"
    low, middle, high = (times[name] for name in ("p5_s", "p50_s", "p95_s"))
    around = f"{clock(low) if low is not None else ''}-{clock(high) if high is not None else ''}"
    return f"{clock(middle)} ({around})"


def print_effect(effect: dict[str, Any]) -> None:
    """Print when devices would be free, and which jobs would end later, or earlier."""
    print_line(f"free: {quantiles_cell(effect['free'])} (90% interval, {effect['rollouts']} pairs of roll-outs)")
    rows = [
        [row["job"], row["name"], row["user"], _later(row["p50_s"]), _later(row["p95_s"])] for row in effect["delays"]
    ]
    show_table(["id", "name", "user", "ends", "95% at most"], rows, "no job would end a minute later or earlier")


def _later(delay_s: float | None) -> str:
    if delay_s is None:
        return "not known"
    return f"{duration(abs(delay_s))} {'earlier' if delay_s < 0 else 'later'}" if delay_s else "as before"
