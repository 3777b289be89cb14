"""The job screen: one job in full."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult

from clusterd.errors import ClusterError
from clusterd.rows import JobDetail, Profile
from clusterd.tui.model import rows
from clusterd.tui.model.job_page import JobDetails, job_page, read_metrics, read_steps
from clusterd.tui.model.lines import line
from clusterd.tui.model.model import Touched
from clusterd.tui.screens.base import Board
from clusterd.tui.source.sources import Context
from clusterd.tui.widgets.text_pane import TextPane


class JobBoard(Board):
    """A single page about the current job."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.page = TextPane("job-page", hang=4)
        self._details: dict[str, JobDetails] = {}
        self._requested: tuple[Any, ...] = ()

    def compose(self) -> ComposeResult:
        yield self.page

    @property
    def job(self) -> rows.Job | None:
        """The job shown."""
        return self.context.model.jobs.get(self.context.job or "")

    @property
    def trail(self) -> str:
        return f"{self.job.name} ({self.job.id})" if self.job else ""

    def sync(self, touched: Touched) -> None:
        """Render the job; request details again when its row shows a change of state."""
        job = self.job
        if job is None:
            self.page.border_title = " job "
            self.page.show([line("No job is chosen: go to ", ("2 Queue", "key"), " and press enter on one.")])
            return
        context = self.context
        details = self._details.setdefault(job.id, JobDetails(recorded=not context.source.can_act))
        cells = max(self.page.size.width - 1, 20)
        self.page.border_title = f" {job.name} "
        self.page.show(job_page(job, context.model, details, context.look, context.clock(), cells))
        state = (job.id, job.state, job.attempt, len(job.migrations), job.migrating is None)
        if state != self._requested and context.source.can_act and self.display:
            self._requested = state
            self.run_worker(self._request(job.id, details), group="job", exclusive=True, exit_on_error=False)

    async def _request(self, job: str, details: JobDetails) -> None:
        details.trouble = []
        for verb, take in (("job", _take_detail), ("steps", _take_steps), ("profile", _take_profile)):
            try:
                take(details, await self.context.source.call(verb, job=job))
            except ClusterError as refused:
                details.trouble.append(str(refused))
            except (rows.Malformed, KeyError, TypeError) as error:
                details.trouble.append(f"{verb}: the daemon's answer cannot be read: {error}")
        self.sync(Touched(everything=True))

    def on_resize(self) -> None:
        self.sync(Touched(everything=True))

    def tick(self) -> None:
        self.sync(Touched())

    def left(self) -> None:
        """Request details again on the next visit."""
        self._requested = ()

    def jobs(self) -> list[str]:
        return [self.context.job] if self.job and self.context.job else []


def _take_detail(details: JobDetails, answer: Any) -> None:
    details.detail = rows.read(JobDetail, answer)


def _take_steps(details: JobDetails, answer: Any) -> None:
    details.losses, details.times = read_steps(answer["data"])
    details.metrics = read_metrics(answer["data"])


def _take_profile(details: JobDetails, answer: Any) -> None:
    details.profile = rows.read(Profile, answer)
