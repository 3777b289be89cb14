"""Job page: state, loss, step time, plans and migrations over time, attempts, performance profile.

Its line charts are of braille dots, two columns and four rows per cell (numbered as in Unicode, "Braille Patterns",
U+2800), or of asterisks for ASCII terminals.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from clusterd.rows import JobDetail, Profile
from clusterd.tui.model import rows
from clusterd.tui.model.lines import Line, beside, clock, line, printable, wrap
from clusterd.tui.model.model import Model, Point
from clusterd.tui.model.state_styles import Look
from clusterd.tui.model.view import job_summary, restart_note
from clusterd.units import duration, size

WIDE_CELLS = 110
CHART_ROWS = 7
HANG = 4
"""Indent of wrapped lines."""


@dataclass(slots=True)
class JobDetails:
    """Data requested in addition to the job's row; filled in as replies arrive."""

    detail: JobDetail | None = None
    profile: Profile | None = None
    losses: Sequence[Point] = field(default_factory=tuple)
    times: Sequence[tuple[int, float]] = field(default_factory=tuple)
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)  # requests that failed, with the reason
    recorded: bool = False  # a recording answers no requests: it holds rows, events and decisions only


def read_steps(data: bytes) -> tuple[list[Point], list[tuple[int, float]]]:
    """Loss and step time by step, from rank 0's step log; incomplete lines are skipped."""
    losses: list[Point] = []
    times: list[tuple[int, float]] = []
    for raw in data.splitlines():
        try:
            row = json.loads(raw)
            step = int(row["step"])
            if isinstance(row.get("loss"), int | float):
                losses.append((step, float(row["loss"])))
            if isinstance(row.get("time_s"), int | float):
                times.append((step, float(row["time_s"])))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return losses, times


def read_metrics(data: bytes) -> dict[str, list[Point]]:
    """Metrics of the script and of its evaluations by step, from the same log."""
    found: dict[str, list[Point]] = {}
    for raw in data.splitlines():
        try:
            row = json.loads(raw)
            prefix = "evaluation " if "evaluated" in row else ""
            step = next(row[key] for key in ("evaluated", "logged", "step") if key in row)
            for name, value in row.get("metrics", {}).items():
                if isinstance(value, int | float):
                    found.setdefault(f"{prefix}{name}", []).append((int(step), float(value)))
        except (ValueError, StopIteration, TypeError, AttributeError, OverflowError):
            continue
    return found


def job_page(job: rows.Job, model: Model, details: JobDetails, look: Look, now_s: float, cells: int) -> list[Line]:
    """The whole page, in two columns where the terminal is wide enough."""
    wide = cells >= WIDE_CELLS
    left_cells = (cells - 3) // 2 if wide else cells
    right_cells = cells - 3 - left_cells if wide else cells
    left = [
        *job_summary(job, model, look, now_s),
        *_section("loss", left_cells, look),
        *_losses(job, model, details, look, left_cells),
        *_metrics(details, look, left_cells),
        *_section("step time, s", left_cells, look),
        *_times(job, details, look, left_cells),
    ]
    right = [
        *_section("plans so far", right_cells, look),
        *plan_timeline(job, details, look, now_s, right_cells),
        *_section("moves", right_cells, look),
        *_migrations(job, look, now_s),
        *_section("attempts", right_cells, look),
        *_attempts(job, details, now_s),
        *_section("measured and predicted speed", right_cells, look),
        *_profile(details, look, right_cells),
        *(line((printable(text), "dim")) for text in details.trouble),
    ]
    if not wide:
        return [*left, *right]
    return beside(
        [part for one in left for part in wrap(one, left_cells, HANG)],
        [part for one in right for part in wrap(one, right_cells, HANG)],
        left_cells,
        f" {look.glyph('bar')} ",
    )


def _section(name: str, cells: int, look: Look) -> list[Line]:
    return [line(""), line((f"{name} ", "title"), (look.glyph("rule") * max(cells - len(name) - 2, 0), "dim"))]


def _losses(job: rows.Job, model: Model, details: JobDetails, look: Look, cells: int) -> list[Line]:
    seen = model.losses.get(job.id, ())
    asked = list(details.losses)
    points = [*asked, *(point for point in seen if not asked or point[0] > asked[-1][0])]
    if not points:
        none = "the recording holds none" if details.recorded else "no step yet"
        return [line((none if job.kind == "elastic" else "a command: it reports no steps", "dim"))]
    return chart([Series(points, "info")], cells, CHART_ROWS, look.ascii)


def _metrics(details: JobDetails, look: Look, cells: int) -> list[Line]:
    """A chart of each metric, those of evaluations first."""
    lines: list[Line] = []
    for name in sorted(details.metrics, key=lambda name: (not name.startswith("evaluation "), name)):
        series = Series(details.metrics[name], "info")
        lines += [*_section(printable(name), cells, look), *chart([series], cells, CHART_ROWS - 2, look.ascii)]
    return lines


def _times(job: rows.Job, details: JobDetails, look: Look, cells: int) -> list[Line]:
    if not details.times:
        return [line(("the recording holds none" if details.recorded else "no step yet", "dim"))]
    steps = [step for step, _ in details.times]
    values = sorted(seconds for _, seconds in details.times)
    ceiling = values[int(len(values) * 0.98)] * 1.5  # a step that waited for a migration would flatten the others
    series = [Series([(step, min(seconds, ceiling)) for step, seconds in details.times], "info", joined=False)]
    legend = [line(("measured", "info"))]
    if job.predicted_step_time_s:
        series.append(Series([(steps[0], job.predicted_step_time_s), (steps[-1], job.predicted_step_time_s)], "warn"))
        legend = [line(("measured  ", "info"), (f"predicted {duration(job.predicted_step_time_s)}", "warn"))]
    return [*chart(series, cells, CHART_ROWS - 2, look.ascii), *legend]


@dataclass(frozen=True, slots=True)
class _Span:
    plan: str
    start_s: float
    end_s: float


def plan_spans(job: rows.Job, details: JobDetails, now_s: float) -> list[_Span]:
    """Plans the job ran under, with start and end times."""
    if job.started_s is None:
        return []
    end_s = job.ended_s or now_s
    attempts = details.detail.attempts if details.detail else ()
    runs = [(a.started_s, min(a.ended_s or end_s, end_s), a.plan or job.kind) for a in attempts]
    if not runs:
        runs = [(job.started_s, end_s, job.plan or job.kind)]
    made: list[_Span] = []
    migrations = [migration for migration in job.migrations if not migration.failure and migration.ended_s]
    for start_s, stop_s, last_plan in runs:
        at_s = start_s
        for migration in (m for m in migrations if start_s <= m.started_s <= stop_s):
            made.append(_Span(migration.old, at_s, migration.ended_s or stop_s))
            at_s = migration.ended_s or stop_s
        made.append(_Span(last_plan, at_s, max(stop_s, at_s)))
    return made


def plan_timeline(job: rows.Job, details: JobDetails, look: Look, now_s: float, cells: int) -> list[Line]:
    """A bar over the job's life, one shade per plan, and a legend."""
    found = plan_spans(job, details, now_s)
    if not found:
        return [line(("not started", "dim"))]
    start_s, end_s = found[0].start_s, max(found[-1].end_s, found[0].start_s + 1e-9)
    plans = list(dict.fromkeys(span.plan for span in found))
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    bar: list[tuple[str, str]] = []
    for at in range(cells):
        instant_s = start_s + (end_s - start_s) * (at + 0.5) / cells
        span = next((s for s in found if s.start_s <= instant_s < s.end_s), None)
        if span is None:
            bar.append((look.glyph("none"), "dim"))
            continue
        number = plans.index(span.plan)
        bar.append((letters[number % 26], f"tile{number % 8}"))
    made: list[Line] = [tuple(bar)]
    for number, plan in enumerate(plans):
        mine = [span for span in found if span.plan == plan]
        ran_s = sum(span.end_s - span.start_s for span in mine)
        since = f"for {duration(ran_s)}, since {clock(mine[0].start_s, now_s)}"
        made.append(line((f" {letters[number % 26]} ", f"tile{number % 8}"), f" {plan}  ", (since, "dim")))
    return made


def _migrations(job: rows.Job, look: Look, now_s: float) -> list[Line]:
    migrations = [*job.migrations, *([job.migrating] if job.migrating else [])]
    if not migrations:
        return [line(("none", "dim"))]
    made: list[Line] = []
    for migration in reversed(migrations):
        made += migration_lines(migration, look, now_s)
    return made


def migration_lines(migration: rows.Migration, look: Look, now_s: float) -> list[Line]:
    """One migration with its phases."""
    made = [
        line(
            (f"{clock(migration.started_s, now_s)} ", "dim"),
            (f"{migration.old} {look.glyph('to')} {migration.new}", "bold"),
        )
    ]
    if migration.reason:
        made.append(line("  ", printable(migration.reason)))
    longest = max((phase.seconds for phase in migration.phases), default=0.0) or 1.0
    for phase in migration.phases:
        bar = look.bar(phase.seconds / longest, 12)
        took = f" {duration(phase.seconds):>6}  "
        made.append(line(f"  {phase.phase:<9} ", (bar, "info"), took, (printable(phase.note), "dim")))
    if migration.failure:
        made.append(line("  ", (f"failed, {migration.old} continues: {printable(migration.failure)}", "bad")))
    elif migration.downtime_s is not None:
        moved = f"{size(migration.local_bytes)} in hosts, {size(migration.network_bytes)} over the network"
        if migration.restarts:
            moved = restart_note(migration)
        downtime = f"  downtime {duration(migration.downtime_s)}; "
        made.append(line((downtime, "good"), (f"{moved}; resumed after step {migration.step}", "dim")))
    else:
        made.append(line(("  in progress; the source ranks train until the switch", "info")))
    return made


def _attempts(job: rows.Job, details: JobDetails, now_s: float) -> list[Line]:
    if details.detail is None:
        count = f"{job.attempt} so far" if job.attempt else "none yet"
        return [line((count, "dim"))]
    if not details.detail.attempts:
        return [line(("none yet", "dim"))]
    made = []
    for attempt in reversed(details.detail.attempts):
        ran = duration(max((attempt.ended_s or now_s) - attempt.started_s, 0.0))
        when = f"{attempt.state} {clock(attempt.started_s, now_s)} for {ran}"
        made.append(line((f"{attempt.number:>2} ", "bold"), f"{attempt.plan or 'command'}  ", (when, "dim")))
        if attempt.why:
            made.append(line("   ", (printable(attempt.why), "warn")))
        if attempt.start:
            phases = ", ".join(f"{each.phase} {duration(each.seconds)}" for each in attempt.start)
            made.append(line("   ", (f"to its first step: {phases}", "dim")))
        ends = {rank.end for rank in attempt.ranks if rank.end}
        if ends:
            made.append(line("   ", ("ranks: " + ", ".join(sorted(ends)), "dim")))
    if len(details.detail.attempts) > 1:
        made.append(line(("   L shows the log of the one before", "dim")))
    return made


def _profile(details: JobDetails, look: Look, cells: int) -> list[Line]:
    profile = details.profile
    if profile is None or not (profile.trials or profile.curve):
        return [line(("the recording does not hold it" if details.recorded else "nothing yet", "dim"))]
    made = []
    for trial in profile.trials:
        measured = duration(trial.step_time_s) if trial.step_time_s is not None else "-"
        result = f"  {trial.plan:<24} on {trial.devices}  {measured:>7} measured"
        predicted = f", {duration(trial.predicted_s)} predicted" if trial.predicted_s is not None else ""
        made.append(line(result, (predicted, "dim")))
    if profile.curve:
        points = [(float(speed.devices), speed.samples_per_s) for speed in profile.curve]
        made.append(line(("samples/s by devices", "dim")))
        made += chart([Series(points, "good")], cells, 5, look.ascii)
    return made


_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the dot at [column][row], rows from the top."""

XY = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one curve, by ascending x, and its style."""

    points: Sequence[XY]
    style: str = "info"
    joined: bool = True  # joined by lines; otherwise dots only


class Canvas:
    """Grid of dots over terminal cells."""

    def __init__(self, cells: int, rows: int, ascii: bool = False) -> None:
        self.cells, self.rows, self._ascii = cells, rows, ascii
        self._bits = [[0] * cells for _ in range(rows)]
        self._styles = [[""] * cells for _ in range(rows)]
        self._across, self._down = (1, 1) if ascii else (2, 4)

    @property
    def dots(self) -> tuple[int, int]:
        """Dots across and down."""
        return self.cells * self._across, self.rows * self._down

    def dot(self, x: int, y: int, style: str) -> None:
        """Set one dot; (0, 0) is the top left. Dots outside the canvas are ignored."""
        across, down = self.dots
        if 0 <= x < across and 0 <= y < down:
            row, cell = y // self._down, x // self._across
            self._bits[row][cell] |= 1 if self._ascii else _DOTS[x % 2][y % 4]
            self._styles[row][cell] = style

    def segment(self, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
        """Draw a straight line of dots."""
        (x0, y0), (x1, y1) = start, end
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            self.dot(round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps), style)

    def lines(self) -> list[Line]:
        """The drawing as styled lines."""
        made = []
        for bits, styles in zip(self._bits, self._styles, strict=True):
            runs: list[tuple[str, str]] = []
            for bit, style in zip(bits, styles, strict=True):
                shown = " " if not bit else "*" if self._ascii else chr(0x2800 + bit)
                if runs and runs[-1][1] == style:
                    runs[-1] = (runs[-1][0] + shown, style)
                else:
                    runs.append((shown, style))
            made.append(tuple(runs))
        return made


def chart(series: Sequence[Series], cells: int, rows: int, ascii: bool = False) -> list[Line]:
    """The curves in one drawing with the scale at the left and below: `rows` + 1 lines of `cells`.

    Non-finite points are dropped; without any point, returns a single line that says so.
    """
    clean = [
        Series([p for p in one.points if math.isfinite(p[0]) and math.isfinite(p[1])], one.style, one.joined)
        for one in series
    ]
    points = [point for one in clean for point in one.points]
    if not points:
        return [line(("nothing measured yet", "dim"))]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    bottom, top = min(y for _, y in points), max(y for _, y in points)
    labels = (f"{top:.4g}", f"{bottom:.4g}")
    margin = max(map(len, labels)) + 1
    canvas = Canvas(max(cells - margin, 4), max(rows, 2), ascii)
    across, down = canvas.dots
    wide, high = right - left, top - bottom
    for one in clean:
        places = [
            (
                round((x - left) / wide * (across - 1)) if wide else 0,
                round(down - 1 - (y - bottom) / high * (down - 1)) if high else down // 2,
            )
            for x, y in one.points
        ]
        for place in places:
            canvas.dot(*place, one.style)
        if one.joined:
            for start, end in itertools.pairwise(places):
                canvas.segment(start, end, one.style)
    made = []
    for at, drawn in enumerate(canvas.lines()):
        label = labels[0] if at == 0 else labels[1] if at == canvas.rows - 1 and top > bottom else ""
        made.append(((label.rjust(margin - 1) + " ", "dim"), *drawn))
    first, last = f"{left:.6g}", f"{right:.6g}"
    gap = canvas.cells - len(first) - len(last)
    made.append((((" " * margin) + first + (" " * max(gap, 1) + last if right > left else ""), "dim"),))
    return made
