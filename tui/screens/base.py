"""Base classes of the screens: a container, and one around a filtered and sorted table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from textual.app import ComposeResult
from textual.containers import Container

from clusterd.tui.model.columns import Column
from clusterd.tui.model.filters import Filter, FilterTooSlow, Listing, parse, time_limit
from clusterd.tui.model.keys import NAVIGATION_KEYS, available
from clusterd.tui.model.lines import Line, clock, line
from clusterd.tui.model.model import Touched
from clusterd.tui.model.state_styles import Look
from clusterd.tui.source.sources import Context
from clusterd.tui.widgets.table import Table
from clusterd.units import duration

if TYPE_CHECKING:
    from clusterd.tui.source.playback import Player


R = TypeVar("R")


class Board(Container):
    """One of the five screens: a container of panes inside the single Textual screen."""

    title = ""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(id=name, classes="board")
        self.context = context

    def sync(self, touched: Touched) -> None:
        """Redraw what changed in the model."""

    def tick(self) -> None:
        """Refresh ages; called once a second."""

    def entered(self) -> None:
        """Called when the screen becomes visible."""
        self.sync(Touched(everything=True))

    def left(self) -> None:
        """Called when the screen is hidden."""

    @property
    def trail(self) -> str:
        """Text after the screen's name in the breadcrumbs."""
        return ""

    @property
    def shown(self) -> str:
        """Active filter and order, at the right of the breadcrumbs."""
        return ""

    def jobs(self) -> list[str]:
        """Jobs that a command applies to: the marked ones, or the one under the cursor."""
        return []

    def hosts(self) -> list[str]:
        """Hosts that a command applies to."""
        return []


class TableBoard(Board, Generic[R]):
    """A screen around one table."""

    all_columns: Sequence[Column[R]] = ()
    fields: frozenset[str] = frozenset()
    default_sort = ""
    stay_on_top = False
    folded_name = "routine"  # rows that `folds` hides

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.filter = Filter("")
        self.shows_all = False
        self.folded = 0
        """Rows that are not shown unless asked for."""
        self.sort, self.descending = self.default_sort, False
        self.columns = [column.name for column in self.all_columns if column.shown]
        self.listing: Listing[R] = Listing(self.fields_of, self._order, self.tie)
        self.table = Table(f"{name}-table", self._cells, context.look, self.stay_on_top)
        self._rows: Mapping[str, R] = {}

    # --- overridden by each screen ------------------------------------------------------------------------------------

    def all_rows(self) -> Mapping[str, R]:
        """All rows by key."""
        raise NotImplementedError

    def fields_of(self, row: R) -> Mapping[str, str]:
        """Filter fields of a row."""
        raise NotImplementedError

    def tie(self, key: str) -> Any:
        """Secondary sort key."""
        return (len(key), key)

    def folds(self, row: R) -> bool:
        """True for a row that is not shown unless asked for."""
        return False

    def unfolded(self, rows: Iterable[tuple[str, R]]) -> Mapping[str, R]:
        """The rows to show by key; all of them where all were asked for, or a filter looks for some."""
        known = dict(rows)
        shown = known if self.shows_all or self.filter else {k: row for k, row in known.items() if not self.folds(row)}
        self.folded = len(known) - len(shown)
        return shown

    def show_all(self) -> None:
        """Toggle between all rows and those that matter."""
        self.shows_all = not self.shows_all
        self.sync(Touched(everything=True))

    def touched(self, touched: Touched) -> Iterable[str] | None:
        """Keys to evaluate again; None for all."""
        return None

    def when_empty(self) -> list[Line]:
        """Lines shown while there are no rows, once the first items have come."""
        return []

    def show_side(self) -> None:
        """Show details of the row under the cursor."""

    # --- the table ----------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield self.table

    def on_mount(self) -> None:
        self.apply_choices()

    def _cells(self, key: str, laid: Sequence[tuple[Column[R], int]]) -> Sequence[Line]:
        row = self._rows.get(key)
        if row is None:
            return [()] * len(laid)
        cell_context = self.context.cell_context
        return [column.show(row, cell_context) for column, _ in laid]

    @property
    def _order(self) -> Callable[[R], Any]:
        return next(column.order for column in self.all_columns if column.name == self.sort)

    def apply_choices(self) -> None:
        """Apply the chosen filter, order and columns."""
        chosen = [column for column in self.all_columns if column.name in self.columns]
        self.table.set_columns(chosen, self.sort, self.descending)
        self.listing.configure(self.filter, self._order, self.descending)
        self.sync(Touched(everything=True))

    def set_filter(self, text: str) -> None:
        """Parse and apply a filter.

        Raises:
            BadFilter: the text is invalid.
        """
        self.use_filter(parse(text, self.fields))

    def use_filter(self, shown: Filter) -> None:
        """Apply a filter."""
        self.filter = shown
        self.apply_choices()

    def sort_by(self, column: str) -> None:
        """Sort by this column; reverse the order if it is already sorted by it."""
        self.descending = not self.descending if column == self.sort else False
        self.sort = column
        self.apply_choices()

    def sync(self, touched: Touched) -> None:
        """Evaluate the touched rows and redraw."""
        self._rows = self.all_rows()
        keys = None if touched.everything else self.touched(touched)
        try:
            with time_limit() if self.filter else nullcontext():
                self._list(keys)
        except FilterTooSlow as error:
            self.filter = Filter("")
            self.listing.configure(self.filter, self._order, self.descending)
            self._rows = self.all_rows()  # without a filter some are folded
            self._list(None)
            self.app.notify(str(error), severity="error")
        if not self.listing.keys:
            self.table.empty = self.when_empty() if self.context.model.number >= 0 else []
        self.table.show(self.listing.keys)
        self.table.border_title = self.table_title()
        self.show_side()

    def _list(self, keys: Iterable[str] | None) -> None:
        if keys is None:
            self.listing.rebuild(self._rows)
        else:
            self.listing.update(self._rows, keys)

    def table_title(self) -> str:
        """Title with row counts."""
        count = len(self.listing.keys)
        hidden = f", {self.listing.hidden} hidden by the filter" if self.listing.hidden else ""
        folded = f", {self.folded} {self.folded_name}: a shows them" if self.folded else ""
        marked = f", {len(self.table.marked)} marked" if self.table.marked else ""
        return f" {self.title} ({count}{hidden}{folded}{marked}) "

    def tick(self) -> None:
        self.table.redraw()
        self.show_side()

    @property
    def current(self) -> R | None:
        """The row under the cursor."""
        return self._rows.get(self.table.cursor or "")

    @property
    def shown(self) -> str:
        text = f"/{self.filter.text}" if self.filter else ""
        if self.sort != self.default_sort or self.descending:
            text += f" by {self.sort}{' (descending)' if self.descending else ''}"
        return text.strip()

    def on_table_moved(self, message: Table.Moved) -> None:
        """Show the new row's details."""
        message.stop()
        self.show_side()

    def on_table_sorted(self, message: Table.Sorted) -> None:
        """Sort by the heading that was clicked."""
        message.stop()
        self.sort_by(message.column)


def footer(screen: str, can_act: bool, replays: bool, cells: int) -> tuple[list[Line], dict[str, str]]:
    """Keys of this screen that fit in `cells`, and the action of a click on each."""
    commands = [command for command in available(screen, can_act, replays) if screen in command.footer]
    while 1 + sum(len(c.shown) + len(c.short) + 3 for c in commands) > cells and len(commands) > 1:
        commands.remove(max(reversed(commands), key=lambda command: command.rank))
    runs: list[tuple[str, str]] = []
    actions: dict[str, str] = {}
    for command in commands:
        label = f" {command.short}  "
        runs += ((command.shown, "key"), (label, ""))
        actions[command.shown] = actions[label] = f"command('{command.action}')"
    return [((" ", ""), *runs)], actions


def playback_line(player: Player, look: Look, cells: int) -> Line:
    """Position and speed of a recording."""
    sign = look.glyph("pause" if not player.playing else "play")
    speed = f"x{player.speed:g}"
    at, end = clock(player.now_s, player.end_s), clock(player.end_s, player.end_s)
    start = f" {sign} {speed:<7} {at} "
    rest = f" {end}  change {player.index}/{len(player) - 1}, {duration(player.end_s - player.start_s)} in all "
    bar_cells = max(cells - len(start) - len(rest), 0)
    return line((start, "bold"), (look.bar(player.share, bar_cells), "info"), (rest, "dim"))


def help_lines(screen: str, can_act: bool, replays: bool, readonly: bool) -> list[Line]:
    """All keys of this screen."""
    made = [line((f"{keys:<15} ", "key"), effect) for keys, effect in NAVIGATION_KEYS]
    made.append(line(""))
    made += [line((f"{command.shown:<15} ", "key"), command.help) for command in available(screen, can_act, replays)]
    if readonly:
        made += [line(""), line(("read-only: commands that change the cluster are hidden", "dim"))]
    made += [
        line(""),
        line(
            ("filter          ", "title"),
            "gpt.*large   state:queued   !user:ann   step:>100   two terms: both must match",
        ),
    ]
    return made
