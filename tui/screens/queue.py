"""The queue screen: jobs, and details and log of the one under the cursor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from textual.app import ComposeResult
from textual.containers import Container
from textual.timer import Timer

from clusterd.tui.model import columns, rows
from clusterd.tui.model.lines import Line, line
from clusterd.tui.model.model import Touched
from clusterd.tui.model.view import job_summary
from clusterd.tui.screens.base import TableBoard
from clusterd.tui.source.sources import Context
from clusterd.tui.widgets.log_pane import LogPane
from clusterd.tui.widgets.text_pane import TextPane

SETTLE_S = 0.15
"""The log is requested after the cursor has rested this long on a row."""


class QueueBoard(TableBoard[rows.Job]):
    """Table of jobs with detail and log panes."""

    title = "jobs"
    all_columns = columns.JOB_COLUMNS
    fields = columns.JOB_FIELDS
    default_sort = "state"
    folded_name = "over"

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.detail = TextPane("queue-detail")
        self.log_pane = LogPane("queue-log")
        self._settling: Timer | None = None
        self._log_of: tuple[str, bool] | None = None

    def compose(self) -> ComposeResult:
        """The table, and beside it (below it in a narrow terminal) detail and log."""
        yield self.table
        yield Container(self.detail, self.log_pane, id="queue-side")

    def all_rows(self) -> Mapping[str, rows.Job]:
        """Jobs by id, an array of several tasks as one row; what a filter finds is shown task by task."""
        model = self.context.model
        return self.unfolded((model.jobs if self.filter else model.folded_jobs()).items())

    def folds(self, row: rows.Job) -> bool:
        """Hide jobs that are over."""
        return row.is_over

    def fields_of(self, row: rows.Job) -> Mapping[str, str]:
        return columns.job_fields(row)

    def touched(self, touched: Touched) -> Iterable[str]:
        if self.filter:
            return touched.jobs
        model = self.context.model
        arrays = {key for job in touched.jobs if (key := model.key_of(job)) != job}
        # With its second task an array takes the place of the first one's row.
        return {*touched.jobs, *arrays, *(job for key in arrays for job in model.tasks_of(key))}

    def when_empty(self) -> list[Line]:
        if self.listing.hidden:
            return [line("No job matches the filter: esc clears it.")]
        if self.folded:
            return [line(f"No job waits or runs. {self.folded} are over: ", ("a", "key"), " shows them.")]
        how = line(
            "Press ", ("n", "key"), " to submit a job file, or in a shell:  ", ("clusterd submit job.toml", "key")
        )
        return [line(("There are no jobs yet.", "bold")), line(""), *([how] if self.context.can_act else [])]

    def show_side(self) -> None:
        """Show the job's details at once, its log when the cursor rests."""
        job = self.current
        context = self.context
        self.detail.show(job_summary(job, context.model, context.look, context.clock()) if job else [])
        self.detail.border_title = f" {job.name if job else 'job'} "
        wanted = (job.id, bool(job.attempt) or job.is_over) if job else None
        if wanted != self._log_of and self.display:
            self._log_of = wanted
            if self._settling is not None:
                self._settling.stop()
            self._settling = self.set_timer(SETTLE_S, self._show_log)

    def _show_log(self) -> None:
        job = self.context.model.jobs.get(self._log_of[0]) if self._log_of else None
        if self.current is not None and self.current.tasks:
            self.log_pane.show_placeholder(f"/ and {self.current.name} lists the tasks")
        elif job is None:
            self.log_pane.show_placeholder("")
        elif not self.context.source.can_act:
            self.log_pane.show_placeholder("a recording holds no logs")
        elif not (job.attempt or job.is_over):
            self.log_pane.show_placeholder(f"{job.name} has not started: w shows why")
        else:
            self.log_pane.follow_job(self.context.source, job.id, name=job.name)

    def left(self) -> None:
        """Stop the log stream of the hidden pane."""
        self._log_of = None
        self.log_pane.stop()

    def jobs(self) -> list[str]:
        return [job for key in self.table.chosen for job in self.context.model.tasks_of(key)]
