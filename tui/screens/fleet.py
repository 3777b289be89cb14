"""The fleet screen: hosts and their devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from textual.app import ComposeResult

from clusterd.errors import ClusterError
from clusterd.rows import Usage
from clusterd.tui.model import columns, rows
from clusterd.tui.model.fleet import busy_share, empty_fleet, host_summary, legend
from clusterd.tui.model.lines import Line, line
from clusterd.tui.model.model import Touched
from clusterd.tui.screens.base import TableBoard
from clusterd.tui.source.sources import Context
from clusterd.tui.widgets.text_pane import TextPane

USAGE_EVERY_S = 20.0
"""Seconds between two requests for the use of devices."""


class FleetBoard(TableBoard[rows.Host]):
    """Table of hosts with a detail pane."""

    title = "hosts"
    all_columns = columns.HOST_COLUMNS
    fields = columns.HOST_FIELDS
    default_sort = "host"

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.detail = TextPane("fleet-detail")
        self._usage: Usage | None = None
        self._asked_s = 0.0

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
        return [line("No host matches the filter: esc clears it.")] if self.listing.hidden else empty_fleet()

    def show_side(self) -> None:
        host = self.current
        look, now_s = self.context.look, self.context.clock()
        self._ask(now_s)
        made = host_summary(host, self.context.model.jobs, look, now_s, self._usage) if host else []
        self.detail.show([*made, line(""), legend(look)])
        self.detail.border_title = f" {host.name if host else 'host'} "

    def _ask(self, now_s: float) -> None:
        """Request the last hour of all devices, at most once a while."""
        if self.display and self.context.source.can_act and now_s - self._asked_s >= USAGE_EVERY_S:
            self._asked_s = now_s
            self.run_worker(self._request_usage(), group="usage", exclusive=True, exit_on_error=False)

    async def _request_usage(self) -> None:
        try:
            answer = await self.context.source.call("usage", minutes=60)
            self._usage = rows.read(Usage, answer)
        except (ClusterError, rows.Malformed) as error:  # an older daemon, or one that is away
            self.log(f"no use of devices: {error}")
            return
        self.show_side()

    def table_title(self) -> str:
        """Adds what is leased and what of it works."""
        title = super().table_title()
        busy = busy_share(self.context.model.hosts, self._usage, self.context.clock()) if self._usage else None
        return title if busy is None else f"{title}─ leased devices are {busy:.0%} busy "

    def hosts(self) -> list[str]:
        return self.table.chosen

    def jobs(self) -> list[str]:
        """The first job of the host under the cursor."""
        host = self.current
        held = [device.job for device in host.devices if device.job] if host else []
        return held[:1]
