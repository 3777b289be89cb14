"""What all table screens have in common: a listing, its filter, order and columns, and a table that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

from textual.app import ComposeResult
from textual.containers import Container

from tui.model.columns import Column
from tui.model.filters import Filter, FilterTooSlow, parse, time_limit
from tui.model.lines import Line
from tui.model.listing import Listing
from tui.model.model import Touched
from tui.source.context import Context
from tui.widgets.table import Table

R = TypeVar("R")


class Board(Container):
    """One of the five screens."""

    title = ""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(id=name, classes="board")
        self.context = context

    def sync(self, touched: Touched) -> None:
        """Show what the model says now."""

    def tick(self) -> None:
        """A second has gone by."""

    def entered(self) -> None:
        """It is in sight from now on."""
        self.sync(Touched(everything=True))

    def left(self) -> None:
        """It is out of sight."""

    @property
    def trail(self) -> str:
        """What the crumbs say behind the screen's name."""
        return ""

    @property
    def shown(self) -> str:
        """Filter and order, for the crumbs' right end."""
        return ""

    def jobs(self) -> list[str]:
        """The jobs that a verb is about: the marked ones, or the one under the cursor."""
        return []

    def hosts(self) -> list[str]:
        """The hosts that a verb is about."""
        return []


class TableBoard(Board, Generic[R]):
    """A screen around one table."""

    all_columns: Sequence[Column[R]] = ()
    fields: frozenset[str] = frozenset()
    default_sort = ""
    stay_on_top = False

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.filter = Filter("")
        self.sort, self.descending = self.default_sort, False
        self.columns = [column.name for column in self.all_columns if column.shown]
        self.listing: Listing[R] = Listing(self.fields_of, self._order, self.tie)
        self.table = Table(f"{name}-table", self._cells, context.look, self.stay_on_top)
        self._rows: Mapping[str, R] = {}

    # --- for each screen to say ---------------------------------------------------------------------------------------

    def all_rows(self) -> Mapping[str, R]:
        """All rows by key."""
        raise NotImplementedError

    def fields_of(self, row: R) -> Mapping[str, str]:
        """What a filter sees."""
        raise NotImplementedError

    def tie(self, key: str) -> Any:
        """The order of rows that are equal otherwise."""
        return (len(key), key)

    def touched(self, touched: Touched) -> Iterable[str] | None:
        """The keys to look at again; None: all of them."""
        return None

    def when_empty(self) -> list[Line]:
        """What stands there instead of rows."""
        return []

    def show_side(self) -> None:
        """Show more about the row under the cursor."""

    # --- the table ----------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """The table alone."""
        yield self.table

    def on_mount(self) -> None:
        """Columns first."""
        self.apply_choices()

    def _cells(self, key: str, laid: Sequence[tuple[Column[R], int]]) -> Sequence[Line]:
        row = self._rows.get(key)
        if row is None:
            return [()] * len(laid)
        frame = self.context.frame
        return [column.show(row, frame) for column, _ in laid]

    @property
    def _order(self) -> Callable[[R], Any]:
        return next(column.order for column in self.all_columns if column.name == self.sort)

    def apply_choices(self) -> None:
        """Filter, order and columns as chosen now."""
        chosen = [column for column in self.all_columns if column.name in self.columns]
        self.table.set_columns(chosen, self.sort, self.descending)
        self.listing.choose(self.filter, self._order, self.descending)
        self.sync(Touched(everything=True))

    def set_filter(self, text: str) -> None:
        """Show rows that match.

        Raises:
            BadFilter: it is no filter.
        """
        self.use_filter(parse(text, self.fields))

    def use_filter(self, shown: Filter) -> None:
        """Show rows that match."""
        self.filter = shown
        self.apply_choices()

    def sort_by(self, column: str) -> None:
        """By this column; once more: the other way round."""
        self.descending = not self.descending if column == self.sort else False
        self.sort = column
        self.apply_choices()

    def sync(self, touched: Touched) -> None:
        """Look at what was touched, and show it."""
        self._rows = self.all_rows()
        keys = None if touched.everything else self.touched(touched)
        try:
            with time_limit() if self.filter else nullcontext():
                self._list(keys)
        except FilterTooSlow as error:
            self.filter = Filter("")
            self.listing.choose(self.filter, self._order, self.descending)
            self._list(None)
            self.app.notify(str(error), severity="error")
        if not self.listing.keys:
            self.table.empty = self.when_empty()
        self.table.show(self.listing.keys)
        self.table.border_title = self.table_title()
        self.show_side()

    def _list(self, keys: Iterable[str] | None) -> None:
        if keys is None:
            self.listing.rebuild(self._rows)
        else:
            self.listing.update(self._rows, keys)

    def table_title(self) -> str:
        """The rows in figures."""
        count = len(self.listing.keys)
        hidden = f", {self.listing.hidden} hidden by the filter" if self.listing.hidden else ""
        marked = f", {len(self.table.marked)} marked" if self.table.marked else ""
        return f" {self.title} ({count}{hidden}{marked}) "

    def tick(self) -> None:
        """Ages grow."""
        self.table.redraw()
        self.show_side()

    @property
    def current(self) -> R | None:
        """The row under the cursor."""
        return self._rows.get(self.table.cursor or "")

    @property
    def shown(self) -> str:
        """Filter and order."""
        said = f"/{self.filter.text}" if self.filter else ""
        if self.sort != self.default_sort or self.descending:
            said += f" by {self.sort}{' (down)' if self.descending else ''}"
        return said.strip()

    def on_table_moved(self, message: Table.Moved) -> None:
        """Another row, another side."""
        message.stop()
        self.show_side()

    def on_table_sorted(self, message: Table.Sorted) -> None:
        """A click on a heading."""
        message.stop()
        self.sort_by(message.column)
