"""Completion times and a timeline of allocations as one picture, drawn without a plotting library."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterd.errors import ClusterError, UsageError
from clusterd.simulate.run import Outcome
from clusterd.units import duration

_WIDTH, _HEIGHT, _LEFT, _TOP = 900, 320, 70, 40
_BAND = 130
_COLOURS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
)  # fmt: skip


def write_plot(path: Path, found: Mapping[str, Outcome], about: Mapping[str, Any]) -> None:
    """Draw the distribution of completion times of all policies and, below, the devices of each job over time.

    Raises:
        UsageError: the name ends in neither .svg nor .html.
        ClusterError: the file cannot be written.
    """
    if path.suffix not in (".svg", ".html"):
        raise UsageError(f"--plot {path}: name a file that ends in .svg or .html")
    picture = _picture(found, about)
    title = f"{about['jobs']} jobs on {about['cluster']}{_load(about)}"
    page = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>\n{picture}\n"
    try:
        path.write_text(page if path.suffix == ".html" else picture, encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"--plot {path}: cannot be written ({error.strerror}); name another file") from None


def _picture(found: Mapping[str, Outcome], about: Mapping[str, Any]) -> str:
    height = _TOP + _HEIGHT + 60 + len(found) * (_BAND + 30) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 240}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="22" font-size="15">'
        f"Share of jobs over by then: {about['jobs']} jobs{_load(about)}</text>",
        *_distribution(found),
    ]
    last_s = max((one.samples[-1][0] for one in found.values() if one.samples), default=1.0)
    first_s = min((one.samples[0][0] for one in found.values() if one.samples), default=0.0)
    top = _TOP + _HEIGHT + 60
    for name, one in found.items():
        parts += _timeline(name, one, top, first_s, last_s, int(about["devices"]))
        top += _BAND + 30
    return "\n".join([*parts, "</svg>"])


def _distribution(found: Mapping[str, Outcome]) -> list[str]:
    import math

    longest = max(max(one.completion_s) for one in found.values())
    low, high = 0.0, math.log10(max(longest, 10.0))
    parts: list[str] = []
    for exponent in range(int(high) + 1):
        x = _LEFT + (exponent - low) / (high - low) * _WIDTH
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _HEIGHT}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{duration(10.0**exponent)}</text>'
        )
    for share in (0, 25, 50, 75, 100):
        y = _TOP + _HEIGHT * (1 - share / 100)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share}%</text>')
    for number, (name, one) in enumerate(found.items()):
        ordered = sorted(one.completion_s)
        points = []
        for index, value in enumerate(ordered, 1):
            x = _LEFT + max(math.log10(max(value, 1.0)) - low, 0.0) / (high - low) * _WIDTH
            points.append(f"{x:.1f},{_TOP + _HEIGHT * (1 - index / len(ordered)):.1f}")
        colour = _COLOURS[number % len(_COLOURS)]
        y = _TOP + 14 + 18 * number
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<text x="{_LEFT + _WIDTH + 14}" y="{y}" fill="{colour}">{html.escape(name)}: '
            f"{duration(one.figures['average_completion_s'])}</text>"
        )
    return parts


def _timeline(name: str, one: Outcome, top: float, first_s: float, last_s: float, devices: int) -> list[str]:
    """Devices of each job, stacked, over time."""
    parts = [
        f'<text x="{_LEFT}" y="{top - 4}">{html.escape(name)}: devices of each job until {duration(last_s)}</text>'
    ]
    scale = _WIDTH / max(last_s - first_s, 1e-9)
    colours: dict[str, str] = {}
    ends = [at_s for at_s, _ in one.samples[1:]] + [last_s]
    for (at_s, held), end_s in zip(one.samples, ends, strict=True):
        x, width = _LEFT + (at_s - first_s) * scale, (end_s - at_s) * scale
        if width < 0.05:
            continue
        level = 0
        for job, count in held.items():
            colour = colours.setdefault(job, _COLOURS[len(colours) % len(_COLOURS)])
            h = _BAND * count / devices
            y = top + _BAND - _BAND * (level + count) / devices
            parts.append(f'<rect x="{x:.2f}" y="{y:.1f}" width="{width + 0.05:.2f}" height="{h:.1f}" fill="{colour}"/>')
            level += count
    parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_BAND}" fill="none" stroke="#888"/>')
    return parts


def _load(about: Mapping[str, Any]) -> str:
    return "" if about["load"] is None else f", load {about['load']:.2f}"
