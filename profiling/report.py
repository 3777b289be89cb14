"""Report of measurements, fitted coefficients and predictions, in the terminal and as one HTML file."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterd.plans.legality import check
from clusterd.plans.plan import Plan
from clusterd.profiling import curves, fleet
from clusterd.profiling.coefficients import ALL
from clusterd.profiling.curves import Curve, Point, envelope
from clusterd.profiling.fit import Fit
from clusterd.profiling.knowledge import USABLE_SHARE, Knowledge, Ranked
from clusterd.profiling.model import Row, Rows


@dataclass(frozen=True, slots=True)
class Line:
    """One plan with its predicted and, if known, measured step time."""

    plan: str
    allocation: str
    predicted_s: float
    lower_s: float
    upper_s: float
    measured_s: float | None = None
    phases: tuple[tuple[str, float], ...] = ()  # of a measured step: name, seconds

    @property
    def spent(self) -> str:
        """Shares of the phases as text, longest first, without those below 1%."""
        whole = sum(part_s for _, part_s in self.phases)
        longest = sorted(self.phases, key=lambda part: -part[1])
        return ", ".join(f"{name} {part_s / whole:.0%}" for name, part_s in longest if part_s >= 0.01 * whole > 0)

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None without a measurement."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1.0


def lines(
    fit: Fit,
    rows: Sequence[Row],
    measured_s: Sequence[float | None],
    phases: Mapping[Row, tuple[tuple[str, float], ...]] | None = None,
) -> list[Line]:
    """Lines of the report, fastest prediction first.

    Args:
        measured_s: measured step time of each row, None if there is none.
        phases: measured phases by row.
    """
    if not rows:
        return []
    prediction = fit.predict(Rows.of(rows))
    low, high = prediction.interval(0.9)
    found = [
        Line(
            str(row.plan),
            row.allocation.spread,
            float(prediction.median_s[i]),
            float(low[i]),
            float(high[i]),
            measured_s[i],
            (phases or {}).get(row, ()),
        )
        for i, row in enumerate(rows)
    ]
    return sorted(found, key=lambda line: line.predicted_s)


def seconds(value: float) -> str:
    """Format seconds with three digits and the unit s, ms or us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def quantity(value: float, unit: str) -> str:
    """Format a value with three digits and, if its unit takes one, a metric prefix."""
    if unit.startswith("s"):
        return seconds(value) + unit[1:]
    if unit == "1" or not value:
        return f"{value:.3g}"
    power = min(max(int(math.log10(value) // 3), 0), 5)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}{unit}"


def coefficient_rows(fit: Fit) -> list[tuple[str, str, str, str]]:
    """Rows of the table of coefficients: name, value with its uncertainty, reduction of the prior's width, meaning."""
    best = fit.best
    found = []
    for index, c in enumerate(ALL):
        width = math.sqrt(max(float(best.covariance[index, index]), 0.0))
        learned = max(0.0, 1.0 - width / c.width)
        value = f"{quantity(math.exp(float(best.logs[index])), c.unit)} ×/÷ {math.exp(width):.2f}"
        found.append((c.name, value, f"{learned:.0%}", c.meaning))
    return found


def to_html(title: str, fit: Fit, plans: Sequence[Line], curve: Curve | None = None) -> str:
    """Self-contained HTML page without scripts and external resources."""

    def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
        cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(v)}</td>" for v in row) + "</tr>" for row in body)
        return f"<table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>"

    measured = [line for line in plans if line.measured_s is not None]
    listed = [
        (
            line.plan, line.allocation, seconds(line.predicted_s),
            f"{seconds(line.lower_s)} to {seconds(line.upper_s)}",
            "" if line.measured_s is None else seconds(line.measured_s),
            "" if line.error is None else f"{line.error:+.1%}",
            line.spent,
        )
        for line in plans
    ]  # fmt: skip
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{fit.measured} measured, {fit.noise:.1%} noise.</p>",
        scatter_svg(measured) if measured else "",
        curve_svg(curve) if curve is not None and curve.points else "",
        "<h2>Plans</h2>",
        table(("plan", "on", "predicted", "90%", "measured", "off", "where a step goes"), listed),
        "<h2>Coefficients</h2>",
        table(("name", "value", "learned", "meaning"), coefficient_rows(fit)),
    ]
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
        "color:#222;background:#fff}"
        "table{border-collapse:collapse;width:100%}"
        "td,th{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #ddd}"
        "svg{max-width:100%;height:auto}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )


_W, _H, _M = 560, 320, 56


def scatter_svg(plans: Sequence[Line]) -> str:
    """Scatter plot of predicted over measured step times on logarithmic axes, with the diagonal."""
    given = [(line.measured_s, line) for line in plans if line.measured_s is not None]
    ends = [v for m, line in given for v in (m, line.predicted_s)]
    low, high = math.log(min(ends)) - 0.1, math.log(max(ends)) + 0.1

    def at(value: float, size: int) -> float:
        return (math.log(value) - low) / (high - low) * (size - 2 * _M)

    dots = "".join(
        f'<circle cx="{_M + at(m, _W):.1f}" cy="{_H - _M - at(line.predicted_s, _H):.1f}" r="4" fill="#2b6cb0" '
        f'fill-opacity=".7"><title>{html.escape(line.plan)} on {line.allocation}: '
        f"{seconds(line.predicted_s)} predicted, {seconds(m)} measured</title></circle>"
        for m, line in given
    )
    diagonal = f'<line x1="{_M}" y1="{_H - _M}" x2="{_W - _M}" y2="{_M}" stroke="#999" stroke-dasharray="4 4"/>'
    ticks = _ticks(math.exp(low), math.exp(high))
    labels = "".join(
        f'<text x="{_M + at(t, _W):.1f}" y="{_H - _M + 18}" text-anchor="middle">{seconds(t)}</text>'
        f'<text x="{_M - 8}" y="{_H - _M - at(t, _H) + 4:.1f}" text-anchor="end">{seconds(t)}</text>'
        for t in ticks
    )
    return _frame(diagonal + dots + labels, "measured step time", "predicted")


def curve_svg(curve: Curve) -> str:
    """Plot of throughput over the resource, with the 90% interval."""
    most_x = max(p.amount for p in curve.points)
    # The interval is one of times, so the lower end of the time is the upper end of the throughput.
    ends = [(p.throughput * p.step_time_s / p.upper_s, p.throughput * p.step_time_s / p.lower_s) for p in curve.points]
    most_y = max(high for _, high in ends)

    def xy(amount: float, throughput: float) -> str:
        return f"{_M + amount / most_x * (_W - 2 * _M):.1f},{_H - _M - throughput / most_y * (_H - 2 * _M):.1f}"

    path = " ".join(xy(p.amount, p.throughput) for p in curve.points)
    band = " ".join(
        [xy(p.amount, high) for p, (_, high) in zip(curve.points, ends, strict=True)]
        + [xy(p.amount, low) for p, (low, _) in reversed(list(zip(curve.points, ends, strict=True)))]
    )
    at: list[tuple[Point, str, str]] = []
    for p in curve.points:
        x, y = xy(p.amount, p.throughput).split(",")
        at.append((p, x, y))
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="4" fill="#2b6cb0">'
        f"<title>{p.amount:g}: {html.escape(str(p.plan))} on {p.allocation.spread}, "
        f"{p.throughput:.4g} samples/s</title></circle>"
        for p, x, y in at
    )
    labels = "".join(f'<text x="{x}" y="{_H - _M + 18}" text-anchor="middle">{p.amount:g}</text>' for p, x, _ in at)
    labels += f'<text x="{_M - 8}" y="{_M + 4}" text-anchor="end">{most_y:.3g}</text>'
    drawn = (
        f'<polygon points="{band}" fill="#2b6cb0" fill-opacity=".15"/>'
        f'<polyline points="{path}" fill="none" stroke="#2b6cb0" stroke-width="2"/>'
    )
    return _frame(drawn + dots + labels, html.escape(curve.resource), "samples/s")


def _ticks(low: float, high: float) -> list[float]:
    found = [
        m * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for m in (1, 2, 5)
        if low <= m * 10.0**e <= high
    ]
    return found or [math.sqrt(low * high)]


def _frame(inside: str, below: str, beside: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" width="{_W}" height="{_H}" role="img" '
        f'aria-label="{beside} over {below}" font-family="system-ui,sans-serif" font-size="11" fill="#444">'
        f'<rect width="{_W}" height="{_H}" fill="#fff"/>'
        f'<path d="M{_M} {_M}V{_H - _M}H{_W - _M}" fill="none" stroke="#999"/>{inside}'
        f'<text x="{_W / 2}" y="{_H - 14}" text-anchor="middle">{below}</text>'
        f'<text x="{_M}" y="{_M - 14}" text-anchor="middle">{beside}</text></svg>'
    )


LISTED = 30
"""Most plans of one answer; slower ones are omitted."""

RESOURCES = ("devices", "cores", "memory", "bandwidth")
"""Resources of curves: devices, CPU cores, bytes of host memory, multiples of the network's bandwidth."""


def plan_rows(
    known: Knowledge, count: int, shape: tuple[int, ...] | None, current: Plan | None
) -> list[dict[str, Any]]:
    """Plans on `count` devices, those that can run first and fastest first.

    Args:
        shape: devices on each host; default: the fewest hosts.
        current: plan of the running job, which is marked and always listed.
    """
    shapes = [s for s in fleet.shapes(known.devices) if sum(s) == count] or [(count,)]
    chosen = shape if shape is not None and sum(shape) == count else shapes[0]
    ranked = known.ranked([chosen], keep=LISTED, always=[current] if current is not None else ())
    rows = [_row(known, one, current) for one in sorted(ranked, key=lambda r: r.step_time_s)]
    if count > known.devices.devices:
        for row in rows:
            row["fits"], row["why"] = False, f"the cluster has {known.devices.devices} such devices"
    return rows + _out(known, count, current)


def _row(known: Knowledge, one: Ranked, current: Plan | None) -> dict[str, Any]:
    return {
        "plan": str(one.plan),
        "devices": one.plan.ranks,
        "shape": "+".join(map(str, one.shape)),
        "step_time_s": one.step_time_s,
        "lower_s": one.lower_s,
        "upper_s": one.upper_s,
        "device_bytes": one.memory.device_bytes,
        "host_bytes": one.memory.host_bytes,
        "measured_s": _newest(known, one.plan, one.shape),
        "fits": True,
        "why": "",
        "current": one.plan == current,
    }


def _out(known: Knowledge, count: int, current: Plan | None) -> list[dict[str, Any]]:
    """Plans that cannot run, one of each family and those that failed in a trial, with the reason."""
    rows: list[dict[str, Any]] = []
    families = (Plan(dp=count), Plan(tp=count), Plan(pp=count), Plan(dp=count, zero=1), Plan(dp=count, zero=3))
    tried = sorted((plan for plan in known.refused if plan.ranks == count), key=str)
    for plan in dict.fromkeys((*families, *tried)):
        reasons = check(plan, known.model, kinds=[known.devices.kind])
        if not reasons and plan in known.refused:
            reasons = ["it was tried, and ran out of memory or failed"]
        if not reasons and not known.fits(plan):
            need, have = known.memory(plan).device_bytes, known.devices.memory_bytes
            reasons = [f"a rank needs {need / 2**30:.1f} GiB, a device has {have * USABLE_SHARE / 2**30:.1f} to use"]
        if reasons and all(row["plan"] != str(plan) for row in rows):
            rows.append(
                {
                    "plan": str(plan), "devices": count, "shape": "", "step_time_s": None, "lower_s": None,
                    "upper_s": None, "device_bytes": None, "host_bytes": None, "measured_s": None, "fits": False,
                    "why": reasons[0], "current": plan == current,
                }
            )  # fmt: skip
    return rows


def device_curve(known: Knowledge) -> Curve:
    """Samples per second over the number of devices, with the best plan for each."""
    ranked = known.ranked(fleet.shapes(known.devices), keep=1)
    return envelope("devices", [_point(known, one) for one in ranked])


def _point(known: Knowledge, one: Ranked) -> Point:
    return Point(
        amount=float(sum(one.shape)),
        allocation=known.devices.allocation(one.shape),
        plan=one.plan,
        step_time_s=one.step_time_s,
        lower_s=one.lower_s,
        upper_s=one.upper_s,
        throughput=known.workload.global_batch / one.step_time_s,
    )


def on_types(on_each: Iterable[Knowledge], count: int) -> tuple[Point, ...]:
    """Best plan for `count` devices of each type on the fewest hosts, fastest type first."""
    found: list[Point] = []
    for known in on_each:
        shapes = [shape for shape in fleet.shapes(known.devices) if sum(shape) == count]
        found += [_point(known, one) for one in known.ranked(shapes[:1], keep=1)]
    return tuple(sorted(found, key=lambda p: -p.throughput))


def resource_curve(known: Knowledge, over: str, count: int) -> Curve:
    """Samples per second over one resource; the others are those of `count` devices on the fewest hosts."""
    if over == "devices":
        return device_curve(known)
    shape = next((s for s in fleet.shapes(known.devices) if sum(s) == count), (count,))
    allocation = known.devices.allocation(shape)
    fit, load = known.online.fit, known.workload
    plans = [
        plan for plan in known.plans(count) if known.fits(plan) and (over == "memory" or not known.is_needless(plan))
    ]
    if over == "cores":
        most = max(known.devices.cores_per_device, 1) * max(shape)
        return curves.over_cores(fit, load, plans, allocation, range(1, most + 1))
    if over == "memory":
        needs = {plan: known.memory(plan).host_bytes * max(shape) for plan in plans}
        amounts = sorted(set(needs.values()))[:64]
        return curves.over_host_memory(fit, load, plans, allocation, amounts, needs.__getitem__)
    return curves.over_bandwidth(fit, load, plans, allocation, (0.25, 0.5, 1.0, 2.0, 4.0))


def _newest(known: Knowledge, plan: Plan, shape: tuple[int, ...]) -> float | None:
    """Newest measured step time of a plan on a shape, with any number of cores; None if there is none."""
    newest = reversed(known.online.observations)
    return next((o.step_time_s for o in newest if (o.row.plan, o.row.allocation.counts) == (plan, shape)), None)
