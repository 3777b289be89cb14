"""The five screens: fleet, queue, job, decisions, events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from textual.app import ComposeResult
from textual.containers import Container
from textual.timer import Timer

from clusterd.errors import ClusterError
from tui import columns, rows
from tui.boards import Board, TableBoard
from tui.context import Context
from tui.fleet import empty_fleet, host_summary, legend
from tui.job_page import Known, job_page, read_steps
from tui.lines import Line, line, printable
from tui.log_pane import LogPane
from tui.model import Touched
from tui.text_pane import TextPane
from tui.view import job_summary

SETTLE_S = 0.15
"""The cursor rests so long before anything is asked of the daemon for its row."""


class FleetBoard(TableBoard[rows.Host]):
    """Hosts by devices."""

    title = "hosts"
    all_columns = columns.HOST_COLUMNS
    fields = columns.HOST_FIELDS
    default_sort = "host"

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.detail = TextPane("fleet-detail")

    def compose(self) -> ComposeResult:
        """The hosts, and one of them in full."""
        yield self.table
        yield self.detail

    def all_rows(self) -> Mapping[str, rows.Host]:
        """Hosts by name."""
        return self.context.model.hosts

    def fields_of(self, row: rows.Host) -> Mapping[str, str]:
        """What a filter sees."""
        return columns.host_fields(row)

    def touched(self, touched: Touched) -> Iterable[str]:
        """Hosts."""
        return touched.hosts

    def when_empty(self) -> list[Line]:
        """How to get hosts."""
        if self.context.model.number < 0:
            return []
        return [line("No host matches the filter: esc clears it.")] if self.listing.hidden else empty_fleet()

    def show_side(self) -> None:
        """The host under the cursor."""
        host = self.current
        look, now_s = self.context.look, self.context.clock()
        made = host_summary(host, self.context.model.jobs, look, now_s) if host else []
        self.detail.show([*made, line(""), legend(look)])
        self.detail.border_title = f" {host.name if host else 'host'} "

    def hosts(self) -> list[str]:
        """Marked, or under the cursor."""
        return self.table.chosen

    def jobs(self) -> list[str]:
        """The first job of the host under the cursor."""
        host = self.current
        held = [device.job for device in host.devices if device.job] if host else []
        return held[:1]


class QueueBoard(TableBoard[rows.Job]):
    """Jobs, and one of them with its log."""

    title = "jobs"
    all_columns = columns.JOB_COLUMNS
    fields = columns.JOB_FIELDS
    default_sort = "state"

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
        """Jobs by id."""
        return self.context.model.jobs

    def fields_of(self, row: rows.Job) -> Mapping[str, str]:
        """What a filter sees."""
        return columns.job_fields(row)

    def touched(self, touched: Touched) -> Iterable[str]:
        """Jobs."""
        return touched.jobs

    def when_empty(self) -> list[Line]:
        """How to get jobs."""
        if self.context.model.number < 0:
            return []
        if self.listing.hidden:
            return [line("No job matches the filter: esc clears it.")]
        how = line(
            "Press ", ("n", "key"), " to submit a job file, or in a shell:  ", ("clusterd submit job.toml", "key")
        )
        return [line(("There are no jobs yet.", "bold")), line(""), *([how] if self.context.can_act else [])]

    def show_side(self) -> None:
        """The job under the cursor: its detail at once, its log when the cursor rests."""
        job = self.current
        context = self.context
        self.detail.show(job_summary(job, context.model, context.look, context.clock()) if job else [])
        self.detail.border_title = f" {printable(job.name) if job else 'job'} "
        wanted = (job.id, bool(job.attempt) or job.is_over) if job else None
        if wanted != self._log_of and self.display:
            self._log_of = wanted
            if self._settling is not None:
                self._settling.stop()
            self._settling = self.set_timer(SETTLE_S, self._show_log)

    def _show_log(self) -> None:
        job = self.context.model.jobs.get(self._log_of[0]) if self._log_of else None
        if job is None:
            self.log_pane.say("")
        elif not self.context.source.can_act:
            self.log_pane.say("a recording holds no logs")
        elif not (job.attempt or job.is_over):
            self.log_pane.say(f"{job.name} has not started: w says why")
        else:
            self.log_pane.follow_job(self.context.source, job.id, name=job.name)

    def left(self) -> None:
        """A log that nobody sees is not pulled."""
        self._log_of = None
        self.log_pane.stop()

    def jobs(self) -> list[str]:
        """Marked, or under the cursor."""
        return self.table.chosen


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
        known = self._known.setdefault(job.id, Known())
        cells = max(self.page.size.width - 1, 20)
        self.page.border_title = f" {printable(job.name)} "
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
    known.detail = rows.detail(answer)


def _take_steps(known: Known, answer: Any) -> None:
    known.losses, known.times = read_steps(answer["data"])


def _take_profile(known: Known, answer: Any) -> None:
    known.profile = rows.profile(answer)


class StreamBoard(TableBoard[Any]):
    """Newest first; a cursor that is moved down stays with its row."""

    stay_on_top = True

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.detail = TextPane(f"{name}-detail", hang=10)

    def compose(self) -> ComposeResult:
        """The stream, and one of it in full."""
        yield self.table
        yield self.detail

    def tie(self, key: str) -> Any:
        """Newest first."""
        return -int(key)

    def jobs(self) -> list[str]:
        """The job of the row under the cursor."""
        row = self.current
        return [row[1].job] if row is not None and row[1].job in self.context.model.jobs else []

    def hosts(self) -> list[str]:
        """The host of the row under the cursor."""
        row = self.current
        return [row[1].host] if row is not None and row[1].host in self.context.model.hosts else []

    def when_empty(self) -> list[Line]:
        """Nothing yet."""
        if self.context.model.number < 0:
            return []
        return [line("Nothing matches the filter: esc clears it." if self.listing.hidden else "Nothing yet.")]


class DecisionsBoard(StreamBoard):
    """What was decided, and what was turned down, with reasons."""

    title = "decisions"
    all_columns = columns.DECISION_COLUMNS
    fields = columns.DECISION_FIELDS
    default_sort = "time"

    def all_rows(self) -> Mapping[str, Any]:
        """By number."""
        return {str(number): (number, decision) for number, decision in self.context.model.decisions}

    def fields_of(self, row: Any) -> Mapping[str, str]:
        """What a filter sees."""
        known = self.context.model.jobs.get(row[1].job or "")
        fields = columns.decision_fields(row)
        return {**fields, "job": f"{fields['job']} {known.name}"} if known else fields

    def show_side(self) -> None:
        """The decision under the cursor, its event, and what else that event brought about."""
        row = self.current
        if row is None:
            self.detail.show([])
            return
        decision: rows.Decision = row[1]
        model, now_s = self.context.model, self.context.clock()
        job = model.jobs.get(decision.job or "")
        made = [
            line((columns.decided(decision.kind), "bold"), f"  {columns.clock(decision.at_s, now_s)}"),
            line(("why       ", "dim"), printable(decision.reason)),
        ]
        if job is not None:
            made.append(line(("job       ", "dim"), f"{printable(job.name)} ({job.id}), now {job.shown_state}"))
        cause = next((event for _, event in reversed(model.events) if event.id == decision.cause), None)
        if cause is not None:
            said = columns.said(cause)
            made.append(
                line(("because   ", "dim"), f"{columns.words(cause.kind)} (event {cause.id}) {printable(said)}")
            )
        others = [d for _, d in model.decisions if d.cause == decision.cause and d is not decision]
        for other in others[:5]:
            named = model.jobs.get(other.job or "")
            about = f" {named.name}" if named else ""
            made.append(line(("also      ", "dim"), f"{columns.decided(other.kind)}{about}: {printable(other.reason)}"))
        self.detail.show(made)
        self.detail.border_title = " decision "


class EventsBoard(StreamBoard):
    """What happened."""

    title = "events"
    all_columns = columns.EVENT_COLUMNS
    fields = columns.EVENT_FIELDS
    default_sort = "number"

    def all_rows(self) -> Mapping[str, Any]:
        """By number."""
        return {str(number): (number, event) for number, event in self.context.model.events}

    def fields_of(self, row: Any) -> Mapping[str, str]:
        """What a filter sees."""
        return columns.event_fields(row)

    def show_side(self) -> None:
        """The event under the cursor, field by field."""
        row = self.current
        if row is None:
            self.detail.show([])
            return
        event: rows.Happening = row[1]
        made = [line((columns.words(event.kind), "bold"), f"  {columns.clock(event.at_s, self.context.clock())}")]
        made += [line((f"{name:<9} ", "dim"), printable(str(value))) for name, value in event.fields.items()]
        self.detail.show(made)
        self.detail.border_title = " event "


BOARDS: dict[str, type[Board]] = {
    "fleet": FleetBoard,
    "queue": QueueBoard,
    "job": JobBoard,
    "decisions": DecisionsBoard,
    "events": EventsBoard,
}
