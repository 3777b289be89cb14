"""The decisions and events screens, newest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.app import ComposeResult

from clusterd.tui.model import columns, rows
from clusterd.tui.model.lines import Line, clock, full_value, line, printable, readable_kind
from clusterd.tui.screens.base import TableBoard
from clusterd.tui.source.sources import Context
from clusterd.tui.widgets.text_pane import TextPane


class StreamBoard(TableBoard[Any]):
    """Table of decisions or events; a cursor moved off the top stays on its row."""

    stay_on_top = True
    one = ""  # title of the detail pane

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.detail = TextPane(f"{name}-detail", hang=10)

    def compose(self) -> ComposeResult:
        yield self.table
        yield self.detail

    def tie(self, key: str) -> Any:
        """Newest first."""
        return -int(key)

    def jobs(self) -> list[str]:
        row = self.current
        return [row[1].job] if row is not None and row[1].job in self.context.model.jobs else []

    def hosts(self) -> list[str]:
        row = self.current
        return [row[1].host] if row is not None and row[1].host in self.context.model.hosts else []

    def row_lines(self, row: Any) -> list[Line]:
        """Detail lines of a row."""
        raise NotImplementedError

    def fields_of(self, row: Any) -> Mapping[str, str]:
        return columns.stream_fields(self.one, row[1])

    def show_side(self) -> None:
        row = self.current
        self.detail.show([] if row is None else self.row_lines(row))
        if row is not None:
            self.detail.border_title = f" {self.one} "

    def folds(self, row: Any) -> bool:
        """Hide lines that recur for everything that runs."""
        return bool(row[1].routine)

    def when_empty(self) -> list[Line]:
        return [line("Nothing matches the filter: esc clears it." if self.listing.hidden else "Nothing yet.")]


class DecisionsBoard(StreamBoard):
    """Decisions with their reasons, including jobs held back."""

    title = "decisions"
    one = "decision"
    all_columns = columns.DECISION_COLUMNS
    fields = columns.DECISION_FIELDS
    default_sort = "time"

    def all_rows(self) -> Mapping[str, Any]:
        """Decisions by number."""
        return self.unfolded((str(number), (number, each)) for number, each in self.context.model.decisions)

    def fields_of(self, row: Any) -> Mapping[str, str]:
        """Adds the job's name to the fields."""
        known = self.context.model.jobs.get(row[1].job or "")
        fields = super().fields_of(row)
        return {**fields, "job": f"{fields['job']} {known.name}"} if known else fields

    def row_lines(self, row: Any) -> list[Line]:
        """The decision, the event that caused it, and other decisions of that event."""
        decision: rows.Decision = row[1]
        model, now_s = self.context.model, self.context.clock()
        job = model.jobs.get(decision.job or "")
        made = [
            line((readable_kind(decision.kind), "bold"), f"  {clock(decision.at_s, now_s)}"),
            line(("what      ", "dim"), printable(decision.sentence)),
        ]
        if job is not None:
            made.append(line(("job       ", "dim"), f"{printable(job.name)} ({job.id}), now {job.shown_state}"))
        cause = next((event for _, event in reversed(model.events) if event.id == decision.cause), None)
        if cause is not None:
            event = f"{readable_kind(cause.kind)} (event {cause.id}): {printable(cause.sentence)}"
            made.append(line(("because   ", "dim"), event))
        others = [d for _, d in model.decisions if d.cause == decision.cause and d is not decision]
        for other in others[:5]:
            named = model.jobs.get(other.job or "")
            about = f" {named.name}" if named else ""
            made.append(line(("also      ", "dim"), f"{readable_kind(other.kind)}{about}: {printable(other.sentence)}"))
        return made


class EventsBoard(StreamBoard):
    """Events."""

    title = "events"
    one = "event"
    all_columns = columns.EVENT_COLUMNS
    fields = columns.EVENT_FIELDS
    default_sort = "number"

    def all_rows(self) -> Mapping[str, Any]:
        """Events by number."""
        return self.unfolded((str(number), (number, each)) for number, each in self.context.model.events)

    def row_lines(self, row: Any) -> list[Line]:
        """All fields of the event."""
        event: rows.EventRow = row[1]
        at = clock(event.at_s, self.context.clock())
        made = [line((readable_kind(event.kind), "bold"), f"  {at}")]
        for name, value in event.fields.items():
            made.append(line((f"{name:<9} ", "dim"), printable(full_value(value))))
        return made
