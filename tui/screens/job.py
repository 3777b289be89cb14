"""The job screen: one job in full."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult

from clusterd.errors import ClusterError
from tui.model import rows
from tui.model.job_page import Known, job_page, read_steps
from tui.model.lines import line
from tui.model.model import Touched
from tui.screens.base import Board
from tui.source.context import Context
from tui.widgets.text_pane import TextPane


class JobBoard(Board):
    """One job in full."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.page = TextPane("job-page", hang=4)
        self._known: dict[str, Known] = {}
        self._asked: tuple[Any, ...] = ()

    def compose(self) -> ComposeResult:
        """One page."""
        yield self.page

    @property
    def job(self) -> rows.Job | None:
        """The one it is about."""
        return self.context.model.jobs.get(self.context.job or "")

    @property
    def trail(self) -> str:
        """The job's name."""
        return f"{self.job.name} ({self.job.id})" if self.job else ""

    def sync(self, touched: Touched) -> None:
        """The job as it is now; what its row does not hold is asked for when the row says that it changed."""
        job = self.job
        if job is None:
            self.page.border_title = " job "
            self.page.show([line("No job is chosen: go to ", ("2 Queue", "key"), " and press enter on one.")])
            return
        context = self.context
        known = self._known.setdefault(job.id, Known(recorded=not context.source.can_act))
        cells = max(self.page.size.width - 1, 20)
        self.page.border_title = f" {job.name} "
        self.page.show(job_page(job, context.model, known, context.look, context.clock(), cells))
        state = (job.id, job.state, job.attempt, len(job.migrations), job.migrating is None)
        if state != self._asked and context.source.can_act and self.display:
            self._asked = state
            self.run_worker(self._ask(job.id, known), group="job", exclusive=True, exit_on_error=False)

    async def _ask(self, job: str, known: Known) -> None:
        known.trouble = []
        for verb, take in (("job", _take_detail), ("steps", _take_steps), ("profile", _take_profile)):
            try:
                take(known, await self.context.source.call(verb, job=job))
            except ClusterError as refused:
                known.trouble.append(str(refused))
            except (rows.Malformed, KeyError, TypeError) as error:
                known.trouble.append(f"{verb}: the daemon's answer cannot be read: {error}")
        self.sync(Touched(everything=True))

    def on_resize(self) -> None:
        """Columns beside each other or below."""
        self.sync(Touched(everything=True))

    def tick(self) -> None:
        """Ages grow."""
        self.sync(Touched())

    def left(self) -> None:
        """Ask anew next time."""
        self._asked = ()

    def jobs(self) -> list[str]:
        """The one job."""
        return [self.context.job] if self.job and self.context.job else []


def _take_detail(known: Known, answer: Any) -> None:
    known.detail = rows.read(rows.JobDetail, answer)


def _take_steps(known: Known, answer: Any) -> None:
    known.losses, known.times = read_steps(answer["data"])


def _take_profile(known: Known, answer: Any) -> None:
    known.profile = rows.read(rows.Profile, answer)
