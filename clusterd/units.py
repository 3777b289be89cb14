"""Parsing and formatting of sizes, durations, times and lists of numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from datetime import time as clock_time
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import combinations
from operator import eq, ge, gt, le, lt
from typing import Any

_UTC = timezone.utc  # noqa: UP017 - some hosts have Python 3.10

_SIZES = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZES |= {f"{unit}ib": 1 << shift for unit, shift in (("k", 10), ("m", 20), ("g", 30), ("t", 40))}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SECONDS |= {word: _SECONDS[word[0]] for word in ("sec", "second", "min", "minute", "hr", "hour", "day", "week")}


def parse_size(text: str | int) -> int:
    """Parse a size into bytes: ``16GiB``, ``512 MB``, ``1024``.

    Raises:
        ValueError: not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].lower() not in _SIZES:
        raise ValueError(f"{text!r} is no size; write it as in 16GiB")
    return int(float(match[1]) * _SIZES[match[2].lower()])


def parse_gpus(text: str | int) -> tuple[str, int]:
    """Parse a number of GPUs, with their type before it if one is asked for: ``2``, ``a100:2``.

    Raises:
        ValueError: not a number of GPUs.
    """
    named, _, count = str(text).rpartition(":")
    if isinstance(text, bool) or not count.strip().isascii() or not count.strip().isdigit() or int(count) > 1 << 20:
        raise ValueError(f"{text!r} is no number of GPUs; write it as in 2 or a100:2")
    return named.strip(), int(count)


def parse_gpus_or_part(text: str | float) -> tuple[str, int, int]:
    """Parse a number of GPUs as `parse_gpus` does, or a part of one, as in ``0.5`` or ``a100:0.25``.

    Returns:
        Type, number, and how many jobs share the GPU; 1: none.
    Raises:
        ValueError: neither.
    """
    named, _, part = str(text).rpartition(":")
    if not re.fullmatch(r"\s*0?\.\d+\s*", part):
        return *parse_gpus(text if isinstance(text, int) else str(text)), 1
    jobs = round(1.0 / float(part)) if float(part) else 0
    if jobs < 2 or abs(jobs * float(part) - 1.0) > 0.02:
        raise ValueError(f"{text!r} is no part of a GPU that jobs can share; write it as in 0.5, 0.33 or 0.25")
    return named.strip(), 1, jobs


def parse_duration_s(text: str | float) -> float:
    """Parse a duration into seconds: ``90``, ``12h``, ``1h30m``, ``2 days``, and as in Slurm ``2:30:00``, ``1-12``.

    Raises:
        ValueError: not a duration.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    if not isinstance(text, str):  # TOML has times of day, which are not durations
        raise ValueError(f"{text} is no duration; write it as in 90s, 12h or 1h30m")
    if clock := re.fullmatch(r"(?:(\d+)-(?=\d+)|(?=\d+:\d+:\d+$))(\d+)(?::(\d+))?(?::(\d+))?", text):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return ((days * 24.0 + hours) * 60.0 + minutes) * 60.0 + seconds
    parts = re.findall(r"([0-9.]+)\s*([a-z]+)", text.lower())
    try:
        if not parts or re.sub(r"[0-9.]+\s*[a-z]+|\s", "", text.lower()):
            return float(text)
        return sum(float(count) * _SECONDS[unit[:2] + unit[2:].removesuffix("s")] for count, unit in parts)
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is no duration; write it as in 90s, 12h or 1h30m") from None


def is_pattern(text: str) -> bool:
    """True for a text with a letter of patterns, which no name has."""
    return any(letter in text for letter in "*?[")


def is_match(name: str, pattern: str) -> bool:
    """True if a name matches a pattern; ``12_[3]`` and ``gpu[08-12]`` have numbers, as in Slurm, not characters."""
    parts = re.fullmatch(r"(.*?)\[(\d{1,9}(?:[,-]\d{1,9})*)\](.*)", pattern)
    is_task = parts is not None and parts[1].endswith("_")
    if parts is None or (parts[2].isdecimal() and not is_task):
        return fnmatchcase(name, pattern)
    ranges = [  # zeros before a number are part of a host's name
        (int(low), int(high or low), len(low) if low[0] == "0" and not is_task else 1)
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", parts[2])
    ]
    return any(
        fnmatchcase(name[:begin], parts[1])
        and is_match(name[end:], parts[3])
        and any(low <= int(text) <= high and text == str(int(text)).zfill(width) for low, high, width in ranges)
        for digits in re.finditer(r"[0-9]+", name)
        for begin, end in combinations(range(digits.start(), digits.end() + 1), 2)
        for text in (name[begin:end],)
    )


_CLOCKS = {"midnight": "0:00", "noon": "12:00"}
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def parse_time_s(text: str) -> float:
    """Parse local time into seconds since the epoch: ``14:00``, ``mon 9:00``, ``tomorrow``, a date and time, ``+2h``.

    A time of day without a day is the next one; one that clocks leave out in spring is as much after the change.

    Raises:
        ValueError: not a point in time.
    """
    now = datetime.now(_UTC).astimezone()
    given = text.strip().lower()
    if given.startswith(("+", "now")):
        ahead_s = parse_duration_s(given.removeprefix("now").removeprefix("+") or "0")
        if not 0.0 <= ahead_s < math.inf:
            raise ValueError("the time from now must be at least 0, as in +2h")
        return now.timestamp() + ahead_s
    with suppress(ValueError):
        padded = re.sub(r"\b\d\b", r"0\g<0>", given.replace("t", " ")).upper()
        return datetime.fromisoformat(padded).timestamp()
    named, _, clock = given.rpartition(" ")
    if clock in ("yesterday", "today", "tomorrow", *_DAYS, *(day[:3] for day in _DAYS)):
        named, clock = clock, "0:00"
    clock = _CLOCKS.get(clock, clock)
    with suppress(ValueError):
        at = clock_time.fromisoformat(clock.rjust(8 if clock.count(":") == 2 else 5, "0"))
        is_past = (at.hour, at.minute) < (now.hour, now.minute)
        days = {"": int(is_past), "yesterday": -1, "today": 0, "tomorrow": 1}
        for number, day in enumerate(_DAYS):
            ahead = (number - now.weekday()) % 7 or 7 * is_past
            days |= {day: ahead, day[:3]: ahead}
        if ":" in clock and named.strip() in days:
            day_of_it = now.date() + timedelta(days=days[named.strip()])
            return datetime.combine(day_of_it, at).timestamp()
    raise ValueError("write it as in 14:00, 'mon 9:00', '2026-12-24 08:00' or +2h")


def local_time(at_s: float) -> str:
    """Point in time as people here write it: ``2026-12-24 08:00``."""
    return datetime.fromtimestamp(at_s, _UTC).astimezone().strftime("%Y-%m-%d %H:%M" + (":%S" if at_s % 60 else ""))


def size(count: float) -> str:
    """Format bytes as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def fine(seconds: float) -> str:
    """Format a step time with three digits: ``38.2 ms``."""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= one:
            return f"{seconds / one:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


Capability = tuple[int, ...]
"""CUDA compute capability: ``(8, 0)``."""

_COMPARISONS = {">=": ge, "<=": le, ">": gt, "<": lt, "==": eq}


@lru_cache(maxsize=256)
def parse_capability(text: str) -> tuple[tuple[str, Capability], ...]:
    """Parse conditions on the compute capability of a GPU: ``>=8.0``, ``>=8.0,<9``; a number alone means at least.

    Raises:
        ValueError: not such conditions.
    """
    found = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(>=|<=|==|>|<)?\s*(\d+)(?:\.(\d+))?\s*", part, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is no compute capability; write it as in >=8.0, or >=8.0,<9.0")
        found.append((match[1] or ">=", (int(match[2]), int(match[3] or 0))))
    return tuple(found)


def has_capability(there: str, conditions: str) -> bool:
    """True where a GPU of the compute capability `there` meets all conditions; an unknown one meets none."""
    wanted = parse_capability(conditions)
    if not wanted or not there:
        return not wanted
    ((_, actual),) = parse_capability(there)
    return all(_COMPARISONS[comparison](actual, least) for comparison, least in wanted)


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: ``1 device``, ``2 devices``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def compact_devices(devices: Iterable[str | None]) -> str:
    """Device ranges by host, as in ``gpu01:gpu0-3 gpu02:gpu1``."""
    by_kind: dict[tuple[str, str], list[int]] = {}
    for device in devices:
        host, _, local = (device or "").rpartition(":")
        kind = local.rstrip("0123456789")
        if number := local[len(kind) :]:
            by_kind.setdefault((host, kind), []).append(int(number))
    parts = []
    for (host, kind), numbers in by_kind.items():
        runs: list[list[int]] = []
        for each in sorted(numbers):
            if runs and runs[-1][-1] == each - 1:
                runs[-1].append(each)
            else:
                runs.append([each])
        ranges = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        parts.append(f"{host}:{kind}{ranges}")
    return " ".join(parts)


def held_text(devices: Sequence[str | None], hosts: Sequence[str], cores: int) -> str:
    """Devices of a running job, or its hosts and cores where it has no devices: ``gpu01 (2 cores)``."""
    return compact_devices(devices) or " ".join([*hosts, asked_text(0, cores)]).strip()


def asked_text(devices: int, cores: int) -> str:
    """Request of a job: ``(4)`` devices, or ``(2 cores)``; empty: an older daemon does not tell its cores."""
    return f"({devices or counted(cores, 'core')})" if devices or cores else ""


def duration(seconds: float) -> str:
    """Format a duration by its two largest units: ``1h30m``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest_s:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def start_text(
    at_s: float | None, latest_s: float | None, after: Sequence[str], now_s: float, clock: Callable[[float], str]
) -> str:
    """Sentence about the start of the first waiting job: what is expected while it is ahead, else what was promised.

    Args:
        at_s: expected start; None: none can be foreseen.
        latest_s: promised start; None: none can be promised.
        after: names of the jobs whose end it waits for.
        clock: text of a point in time.
    """
    several = [name if count == 1 else f"{count} jobs {name}" for name, count in Counter(after).items()]
    names = " and ".join(several[:3]) + (" ..." if len(several) > 3 else "")
    ends = f" when {names} end{'s' * (len(after) == 1)}" if after else " as soon as devices are free"
    latest = clock(latest_s) if latest_s is not None and latest_s >= now_s else ""
    if at_s is not None and at_s >= now_s:
        if not latest:
            return f"starts{ends}, expected at about {clock(at_s)}; nothing tells when at the latest"
        about = f"at about {clock(at_s)}, " if clock(at_s) != latest else ""
        return f"starts {about}by {latest} at the latest,{ends}; nobody behind it may delay it"
    if latest:
        return f"starts{ends}, by {latest} at the latest; nobody behind it may delay it"
    return f"starts{ends}; nothing tells when that is"


def expected_text(
    p5_s: float | None, p50_s: float, p95_s: float | None, clock: Callable[[float], str], after: str = ""
) -> str:
    """Point in time with its 90% interval: ``16:40, between 16:10 and 18:30; after gpt-wide ends or shrinks``.

    Args:
        p5_s, p95_s: ends of the interval; None: not known.
        clock: text of a point in time.
        after: job that is waited for; empty: none.
    """
    middle = clock(p50_s)
    low, high = ("" if at_s is None else clock(at_s) for at_s in (p5_s, p95_s))
    around = ""
    if low and not low == high == middle:
        around = f", between {low} and {high}" if high else f", not before {low}"
    return f"{middle}{around}{f'; after {after} ends or shrinks' if after else ''}"


TIMES = {
    "at_s", "since_s", "submitted_s", "queued_s", "created_s", "started_s", "ended_s", "progressed_s", "idle_since_s",
    "latest_s", "p5_s", "p25_s", "p50_s", "p75_s", "p95_s", "from_s", "until_s", "reclaim_at_s", "not_before_s",
    "ends_by_s", "begin_s",
}  # fmt: skip
"""Fields of rows that are points in time, as seconds since the epoch; all other names in ``_s`` are durations."""


def with_iso_times(value: Any) -> Any:
    """Copy of rows in which each point in time is text by ISO 8601, too: ``started_s``, ``started_at``."""
    if isinstance(value, list | tuple):
        return [with_iso_times(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    if not isinstance(value, dict):
        return value
    shown: dict[Any, Any] = {}
    for key, item in value.items():
        shown[key] = with_iso_times(item)
        if key in TIMES and (item is None or isinstance(item, int | float)):
            shown[iso_name(key)] = None if item is None else iso_time(item)
    return shown


def iso_name(name: str) -> str:
    """Name of the text beside a point in time: ``started_at`` beside ``started_s``, ``at`` beside ``at_s``."""
    bare = name.removesuffix("_s")
    return bare if bare == "at" or bare.endswith("_at") else f"{bare}_at"


def iso_time(at_s: float) -> str:
    """Point in time by ISO 8601 in UTC, to the millisecond, as in ``2026-03-02T09:15:00.250Z``."""
    try:
        found = datetime.fromtimestamp(at_s, _UTC)
    except (OverflowError, ValueError, OSError):  # as of a claim without end
        return ""
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")
