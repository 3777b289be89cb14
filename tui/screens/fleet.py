"""The fleet screen: hosts and their devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from textual.app import ComposeResult

from tui.model import columns, rows
from tui.model.fleet import empty_fleet, host_summary, legend
from tui.model.lines import Line, line
from tui.model.model import Touched
from tui.screens.base import TableBoard
from tui.source.context import Context
from tui.widgets.text_pane import TextPane


class FleetBoard(TableBoard[rows.Host]):
    """Table of hosts with a detail pane."""

    title = "hosts"
    all_columns = columns.HOST_COLUMNS
    fields = columns.HOST_FIELDS
    default_sort = "host"

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.detail = TextPane("fleet-detail")

    def compose(self) -> ComposeResult:
        yield self.table
        yield self.detail

    def all_rows(self) -> Mapping[str, rows.Host]:
        """Hosts by name."""
        return self.context.model.hosts

    def fields_of(self, row: rows.Host) -> Mapping[str, str]:
        return columns.host_fields(row)

    def touched(self, touched: Touched) -> Iterable[str]:
        return touched.hosts

    def when_empty(self) -> list[Line]:
        if self.context.model.number < 0:
            return []
        return [line("No host matches the filter: esc clears it.")] if self.listing.hidden else empty_fleet()

    def show_side(self) -> None:
        host = self.current
        look, now_s = self.context.look, self.context.clock()
        made = host_summary(host, self.context.model.jobs, look, now_s) if host else []
        self.detail.show([*made, line(""), legend(look)])
        self.detail.border_title = f" {host.name if host else 'host'} "

    def hosts(self) -> list[str]:
        return self.table.chosen

    def jobs(self) -> list[str]:
        """The first job of the host under the cursor."""
        host = self.current
        held = [device.job for device in host.devices if device.job] if host else []
        return held[:1]
