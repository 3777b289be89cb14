"""Dialogs of a manual migration: choose a plan by predicted speed and cost, then follow the phases."""

from __future__ import annotations

from collections.abc import Sequence

from textual.timer import Timer
from textual.widgets import OptionList, Static

from clusterd.errors import ClusterError
from clusterd.rows import MigrationPreview, Plans, RankedPlan
from clusterd.tui.model import rows
from clusterd.tui.model.job_page import migration_lines
from clusterd.tui.model.lines import Line, line, printable, short_plan
from clusterd.tui.source.sources import Context
from clusterd.tui.widgets.dialogs import Dialog, Options, rich_text
from clusterd.tui.widgets.text_pane import TextPane
from clusterd.units import compact_devices, duration, size

OTHER_PLAN = "other"
"""Option for typing a plan."""

REST_S = 0.2


def plan_lines(plans: Sequence[RankedPlan]) -> list[Line]:
    """Ranked plans: devices, predicted step time, speed relative to the current plan, uncertainty."""
    now = next((plan for plan in plans if plan.current), None)
    cells = max((len(short_plan(plan.plan)) for plan in plans), default=0)
    return [_plan_line(plan, now, cells) for plan in plans]


def _plan_line(plan: RankedPlan, now: RankedPlan | None, cells: int) -> Line:
    start = f"{short_plan(plan.plan):<{cells}}  on {plan.devices:<3}"
    if not plan.fits:
        return line((start, "dim"), (f" excluded: {printable(plan.why)}", "bad"))
    if plan.step_time_s is None:
        return line((start, "bold"), (" not predicted", "dim"))
    gain = f"{now.step_time_s / plan.step_time_s - 1:+5.0%}" if now and now.step_time_s and plan is not now else "now"
    spread = ""
    if plan.lower_s is not None and plan.upper_s is not None:
        spread = f" {duration(plan.lower_s):>6} -{duration(plan.upper_s):>6}"
    style = "good" if gain.lstrip().startswith("+") else "warn"
    return line((start, "bold"), f"{duration(plan.step_time_s):>7}", (f" {gain:>5}", style), (spread, "dim"))


def cost_lines(preview: MigrationPreview) -> list[Line]:
    """Cost of a migration, from the dry run of `migrate`."""
    if preview.restarts:
        return [
            line(("from      ", "dim"), printable(preview.old)),
            line(("to        ", "dim"), (printable(preview.plan), "bold")),
            line("the job saves a checkpoint and restarts; the plan stays pinned until unpinned"),
        ]
    moved = f"{size(preview.local_bytes)} within hosts, {size(preview.network_bytes)} over the network"
    if preview.crowded:  # source and target ranks do not fit side by side
        moved = f"{size(preview.local_bytes)} through host memory; the job stops and restarts"
    return [
        line(("from      ", "dim"), printable(preview.old)),
        line(("to        ", "dim"), (printable(preview.plan), "bold"), f" on {compact_devices(preview.devices)}"),
        line(("moves     ", "dim"), moved),
        line(("downtime  ", "dim"), f"about {duration(preview.predicted_downtime_s)}"),
    ]


class PlanDialog(Dialog[str]):
    """Choice of a plan, best first, with the migration cost of the one under the cursor."""

    def __init__(self, context: Context, job: rows.Job, known: Plans) -> None:
        super().__init__(f"move {job.name} from {short_plan(job.plan or '')}", "enter chooses   esc closes")
        self.shared = context
        self._job = job
        lines = plan_lines(known.rows)
        self._plans = [(plan.plan, shown) for plan, shown in zip(known.rows, lines, strict=True) if not plan.current]
        self._now = [shown for plan, shown in zip(known.rows, lines, strict=True) if plan.current]
        self._memory = {plan.plan: plan.device_bytes for plan in known.rows}
        self._known = known.known
        self._preview_timer: Timer | None = None
        self._cost_lines: dict[str, list[Line]] = {}

    def content(self) -> Sequence[Static | OptionList | TextPane]:
        from textual.widgets.option_list import Option

        options = [Option(rich_text(shown), id=plan) for plan, shown in self._plans]
        other = Option(rich_text(line(("another plan: type it", "info"))), id=OTHER_PLAN)
        self.list = Options(*options, other)
        self.list.styles.max_height = "50vh"  # keeps the cost and the keys visible
        self.preview = TextPane("preview")
        self.preview.styles.height = 5
        heading = "plan, devices, predicted step time, speed against current, likely range"
        return [Static(rich_text(line((heading, "dim")))), self.list, self.preview]

    def on_mount(self) -> None:
        self.list.highlighted = 0
        self.list.focus()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Request the cost when the cursor rests."""
        event.stop()
        plan = event.option.id or ""
        if self._preview_timer is not None:
            self._preview_timer.stop()
        if plan == OTHER_PLAN:
            self.preview.show([line((self._known or "as in dp=2,tp=2", "dim")), *self._now])
        elif plan in self._cost_lines:
            self.preview.show(self._cost_lines[plan])
        else:
            self.preview.show([line(("requesting the cost", "dim"))])
            self._preview_timer = self.set_timer(REST_S, lambda: self.run_worker(self._ask(plan), exclusive=True))

    async def _ask(self, plan: str) -> None:
        try:
            answer = rows.read(
                MigrationPreview, await self.shared.source.call("migrate", job=self._job.id, plan=plan, dry_run=True)
            )
            memory = self._memory.get(plan)
            about = [line(("needs     ", "dim"), f"{size(memory)} on each device")] if memory else []
            self._cost_lines[plan] = [*cost_lines(answer), *about]
        except (ClusterError, rows.Malformed) as refused:  # not cached: the obstacle may be temporary
            self.preview.show([line((printable(str(refused)), "warn"))])
            return
        self.preview.show(self._cost_lines[plan])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option.id)


class MigrationDialog(Dialog[None]):
    """Phases of a migration in progress; closing the dialog does not stop it."""

    def __init__(self, context: Context, job: rows.Job, moves_before: int, predicted_s: float) -> None:
        super().__init__(f"moving {job.name}", "esc closes; the move continues")
        self.shared = context
        self._job = job.id
        self._before = moves_before
        self._predicted_s = predicted_s
        self._ended = False

    def content(self) -> Sequence[TextPane]:
        self.pane = TextPane("phases", hang=4)
        self.pane.styles.height = 12
        return [self.pane]

    def on_mount(self) -> None:
        self.pane.focus()
        self.refresh_phases()
        self.set_interval(0.1, self.refresh_phases)

    def refresh_phases(self) -> None:
        """Render the current state of the migration from the model."""
        job = self.shared.model.jobs.get(self._job)
        if job is None:
            return
        new = job.migrations[self._before :]
        migration = new[0] if new else job.migrating
        predicted = line(("predicted downtime ", "dim"), duration(self._predicted_s))
        if migration is None:
            status = "requested; target ranks are starting"
            if job.is_over:
                status = f"{job.name} is {job.state}: {job.reason}"
            self.pane.show([line((status, "info")), predicted])
            return
        made = migration_lines(migration, self.shared.look, self.shared.clock())
        self._ended = migration.ended_s is not None
        self.pane.show([*made, predicted, *([line(("done: esc closes", "good"))] if self._ended else [])])
