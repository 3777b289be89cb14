"""The application of ``clusterd top``: attaches to a source, keeps the model and shows it on five screens."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen

from clusterd.errors import ClusterError
from clusterd.tui.model import rows, view
from clusterd.tui.model.keys import COMMANDS, Command, available
from clusterd.tui.model.lines import Line, line, printable, wrap
from clusterd.tui.model.model import Touched
from clusterd.tui.model.state_styles import Look
from clusterd.tui.model.view import Link
from clusterd.tui.screens.base import Board, TableBoard, footer, playback_line
from clusterd.tui.source.feed import REFRESH_S, Feed
from clusterd.tui.source.sources import Context, Source
from clusterd.tui.widgets.painting import PlainTextApp
from clusterd.tui.widgets.table import Table
from clusterd.tui.widgets.text_pane import Bar

if TYPE_CHECKING:
    from clusterd.tui.commands.actions import ClusterCommands
    from clusterd.tui.commands.view_actions import ViewCommands

HISTORY_AFTER_S = 0.3

WIDTHS = [(0, "-narrow"), (120, "-wide")]
"""Minimum terminal width in columns for each class of the Textual screen."""

HEIGHTS = [(0, "-short"), (16, "-tall")]
"""Minimum terminal height in lines for each class."""

STYLE = """
Screen { layers: base; }
#head { height: 2; }
#banner { height: auto; max-height: 3; display: none; color: $text-error; text-style: bold; padding: 0 1; }
#banner.shown { display: block; }
#body { height: 1fr; }
#body, .board, #queue-side { visibility: hidden; }
#job, Table, TextPane, LogPane { visibility: visible; }
#foot { height: 1; }
#playback { height: 1; display: none; }
#playback.shown { display: block; }
#filter { height: 1; border: none; padding: 0 1; display: none; }
#filter.shown { display: block; }
.board { display: none; height: 1fr; width: 1fr; }
.board.current { display: block; }
Table, TextPane, LogPane {
    border-top: solid $foreground 40%; border-title-color: $foreground; border-title-style: bold;
    scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; overflow-x: hidden;
}
Table:focus, TextPane:focus, LogPane:focus { border-top: heavy $accent; border-title-style: bold reverse; }
#fleet-table { height: 2fr; }
#fleet-detail { height: 1fr; min-height: 6; }
#queue-table { height: auto; min-height: 6; max-height: 50%; }
#queue-side { height: 1fr; layout: horizontal; }
#queue-side > * { width: 1fr; height: 1fr; }
.-wide #queue.current { layout: horizontal; }
.-wide #queue-table { width: 3fr; margin-right: 1; }
.-wide #queue-table, .-short #queue-table { height: 1fr; max-height: 100%; }
#queue-detail { margin-right: 1; }
.-wide #queue-detail { margin-right: 0; }
.-wide #queue-side { width: 2fr; height: 1fr; layout: vertical; }
#decisions-table, #events-table { height: 3fr; }
#decisions-detail, #events-detail { height: 1fr; min-height: 5; }
.-short #fleet-detail, .-short #queue-side, .-short #decisions-detail, .-short #events-detail { display: none; }
Toast { max-width: 90%; }
.-ascii Table, .-ascii TextPane, .-ascii LogPane { border-top: ascii $foreground 40%; }
.-ascii Table:focus, .-ascii TextPane:focus, .-ascii LogPane:focus { border-top: ascii $accent; }
.-ascii Toast { border-left: ascii $accent; }
.-ascii * { scrollbar-size-vertical: 0; }
"""
"""Layout of the main screen; dialogs bring their own styles, parsed when the first one opens.

Containers are hidden and their children are not: otherwise Textual draws each container line by line under the widgets
that cover it. The job screen stays visible because a hidden widget gets no resize events.
"""

R = TypeVar("R")


class Top(PlainTextApp):
    """The terminal UI. It holds no state of its own: the model is what the source reported, and widgets render it."""

    CSS = STYLE
    TITLE = "clusterd"
    NOTIFICATION_TIMEOUT = 3.0
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(at), f"show('{name}')", name, show=False) for at, name in enumerate(view.SCREENS, 1)),
        Binding("escape", "back", "back", show=False),
        *(Binding(command.key, f"command('{command.action}')", command.help, show=False) for command in COMMANDS),
    ]

    def __init__(
        self,
        source: Source,
        *,
        readonly: bool = False,
        ascii: bool = False,
        clock: Callable[[], float] = time.time,
        first: str = "queue",
        ticks: bool = True,
    ) -> None:
        """`clock` and `ticks` are for tests: a fixed time, and no periodic refresh."""
        super().__init__()
        player = self.player = source.player
        shown = (lambda: player.now_s) if player is not None else clock
        self.shared = Context(source, Look(ascii), shown, readonly)
        self.feed = Feed(self, Link(since_s=clock()), HISTORY_AFTER_S if ticks else None)
        self._ticks = ticks
        self._first = first
        self._boards: dict[str, Board] = {}
        self._trail: list[str] = []
        self._current = first
        if player is not None:
            self.shared.model = player.model

    @cached_property
    def cluster_commands(self) -> ClusterCommands:
        """Commands that act on the cluster; imported on first use, since most sessions only watch."""
        from clusterd.tui.commands.actions import ClusterCommands

        return ClusterCommands(self)

    @cached_property
    def view_commands(self) -> ViewCommands:
        """Commands that act on the screens only."""
        from clusterd.tui.commands.view_actions import ViewCommands

        return ViewCommands(self)

    # --- the frame ----------------------------------------------------------------------------------------------------

    def get_default_screen(self) -> Screen[None]:
        """A screen with the breakpoint classes set before the first layout.

        Textual sets them after the first layout and then lays out again.
        """
        wide = [name for cells, name in WIDTHS if self.size.width >= cells][-1]
        tall = [name for lines, name in HEIGHTS if self.size.height >= lines][-1]
        return Screen(id="_default", classes=f"{wide} {tall}{' -ascii' if self.shared.look.ascii else ''}")

    def compose(self) -> ComposeResult:
        """Header, the first screen and footer; the other screens are created when first shown."""
        yield Bar("head")
        yield Bar("banner")
        first = self._boards[self._first] = make_board(self._first, self.shared)
        first.add_class("current")
        yield Container(first, id="body")
        yield Bar("playback")
        yield Bar("foot")

    def on_load(self) -> None:
        """Connect while the screen is being built."""
        self.feed.dial()

    async def on_mount(self) -> None:
        """Show the first items. Textual draws nothing before this returns, so it waits for them here."""
        await self.feed.wait_for_first()
        self.query_one("#playback").set_class(self.player is not None, "shown")
        self._focus_first()
        self.feed.take_first()
        self.show_frame()
        self.run_worker(self.feed.pump(), name="pump", exit_on_error=True)
        if self._ticks:
            self.set_interval(1.0, self._tick)
            if self.player is not None:
                self.set_interval(REFRESH_S, self._play_on)

    async def on_unmount(self) -> None:
        """Detach; the daemon and its jobs are not affected."""
        self.feed.stop()
        await self.shared.source.close()

    @property
    def link(self) -> Link:
        """State of the connection to the daemon or recording."""
        return self.feed.link

    @property
    def board(self) -> Board:
        """The visible screen."""
        return self._boards[self._current]

    def show_touched(self, touched: Touched) -> None:
        """Redraw the parts of the visible screen that changed."""
        if self.is_running and self._boards:
            touched.jobs |= self.shared.model.place_jobs()
            self.board.sync(touched)
            self.show_frame()

    def _play_on(self) -> None:
        """Advance the recording by one refresh interval."""
        try:
            if self.player is not None and self.player.advance(REFRESH_S):
                self.show_recording()
        except ClusterError as unread:
            self.notify(str(unread), severity="error", timeout=10)
            self.show_recording()
        self.show_frame()

    def show_recording(self) -> None:
        """Redraw all screens at the recording's current instant."""
        if self.player is not None:
            self.shared.model = self.player.model
            self.feed.note(Touched(everything=True))

    def _tick(self) -> None:
        """Refresh ages and the time since the daemon was lost, once a second."""
        if self._boards:
            self.board.tick()
            self.show_frame()

    def show_frame(self) -> None:
        """Redraw header, banner, playback line and footer."""
        if not self._boards or not self.is_running:  # the source may report during shutdown
            return
        shared, cells = self.shared, self.size.width
        now_s = shared.clock()
        head = view.header(shared.model, self.link, now_s, shared.look, cells, shared.readonly)
        board = self.board
        tabs = view.crumbs(self._current, board.trail, board.shown, shared.look, cells)
        clicks = {f" {name.capitalize()}": f"show('{name}')" for name in view.SCREENS}
        screen = self.screen_stack[0]
        screen.query_one("#head", Bar).show([head, tabs], clicks)
        banner_text = view.banner(self.link, shared.model, now_s)
        banner = screen.query_one("#banner", Bar)
        banner.set_class(bool(banner_text), "shown")
        folded = wrap(line(printable(banner_text)), max(cells - 2, 1))
        banner.styles.height = min(len(folded), 3)
        banner.show(folded)
        keys, actions = footer(self._current, shared.can_act, self.player is not None, cells)
        screen.query_one("#foot", Bar).show(keys, actions)
        if self.player is not None:
            screen.query_one("#playback", Bar).show([playback_line(self.player, shared.look, cells)])

    def on_resize(self) -> None:
        """Redraw the frame for the new width."""
        self.call_after_refresh(self.show_frame)

    # --- navigation ---------------------------------------------------------------------------------------------------

    async def action_show(self, name: str) -> None:
        """Go to a screen by name; resets the back trail."""
        self._trail.clear()
        await self._go(name)

    async def _go(self, name: str) -> None:
        if name == "job" and self._boards:
            found = self.board.jobs()
            if found:
                self.shared.job = found[0]
        if self._boards:
            self.board.set_class(False, "current")
            self.board.left()
        board = self._boards.get(name)
        if board is None:
            board = self._boards[name] = make_board(name, self.shared)
            board.add_class("current")
            await self.query_one("#body").mount(board)
        board.set_class(True, "current")
        self._current = name
        board.entered()
        self._focus_first()
        self.show_frame()

    def _focus_first(self) -> None:
        first = next(iter(self.board.query("Table, TextPane")), None)
        if first is not None:
            first.focus()

    async def on_table_opened(self, message: Table.Opened) -> None:
        """Open a job's page, or from a host the queue filtered by that host."""
        message.stop()
        board = self.board
        trail = [*self._trail, self._current]
        if self._current == "fleet":
            hosts = board.hosts()[:1]
            await self._go("queue")
            queue = self.board
            if isinstance(queue, TableBoard) and hosts:
                queue.set_filter(f"host:(?<!\\S){re.escape(hosts[0])}(?!\\S)")
        elif board.jobs():
            cursor = message.table.cursor if self._current == "queue" else None
            self.shared.job = cursor if cursor in self.shared.model.jobs else board.jobs()[0]
            job = self.shared.job
            await self._go("job")
            self.shared.job = job
            self.board.sync(Touched(everything=True))
        self._trail = trail
        self.show_frame()

    def goto_job_row(self, job: str) -> None:
        """Open the queue with the cursor on `job`."""

        async def go() -> None:
            await self.action_show("queue")
            if isinstance(self.board, TableBoard):
                self.board.table.move_to(job)

        self.run_worker(go())

    async def action_back(self) -> None:
        """Undo the last of: marks, filter, change of screen."""
        board = self.board
        if isinstance(board, TableBoard) and board.table.marked:
            self.clear_marks()
        elif isinstance(board, TableBoard) and board.filter and not self._trail:
            board.set_filter("")
        elif self._trail:
            if isinstance(board, TableBoard) and board.filter:
                board.set_filter("")
            trail = self._trail[:-1]
            await self._go(self._trail[-1])
            self._trail = trail
        self.show_frame()

    def clear_marks(self) -> None:
        """Unmark all rows."""
        if isinstance(self.board, TableBoard):
            self.board.table.marked.clear()
            self.board.table.redraw()
            self.board.table.border_title = self.board.table_title()

    # --- dialogs ------------------------------------------------------------------------------------------------------

    async def show_dialog(self, screen: Screen[R]) -> R | None:
        """Open a dialog and wait for its answer."""
        screen.set_class(self.shared.look.ascii, "-ascii")
        return await self.push_screen_wait(screen)

    async def show_text(self, title: str, lines: list[Line], hang: int = 2) -> None:
        """Show lines to read in a dialog."""
        from clusterd.tui.widgets.dialogs import TextDialog

        await self.show_dialog(TextDialog(title, lines, hang))

    async def confirm(self, title: str, lines: list[Line], keys: dict[str, str]) -> str | None:
        """Ask a question; return the key pressed, or None."""
        from clusterd.tui.widgets.dialogs import ConfirmDialog

        return await self.show_dialog(ConfirmDialog(title, lines, keys))

    async def prompt(
        self, title: str, lines: list[Line], value: str, read: Callable[[str], R], suggestions: Sequence[str] = ()
    ) -> R | None:
        """Ask for a line of text; return it as parsed by `read`, or None."""
        from clusterd.tui.widgets.dialogs import PromptDialog

        return await self.show_dialog(PromptDialog(title, lines, value, read, suggestions))

    # --- commands -----------------------------------------------------------------------------------------------------

    def _available(self) -> list[Command]:
        return available(self._current, self.shared.can_act, self.player is not None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable commands that are not available on this screen."""
        return action != "command" or parameters[0] in {command.action for command in self._available()}

    def action_command(self, name: str) -> None:
        """Run a command in a worker; show a refusal in a dialog."""
        work: Callable[[], Awaitable[None]] = getattr(self.cluster_commands, name, None) or getattr(
            self.view_commands, name
        )

        async def run() -> None:
            try:
                await work()
            except ClusterError as refused:
                lines = [line(printable(text)) for text in str(refused).splitlines()]
                await self.show_text(f"{name.replace('_', ' ')}: refused", lines)
            except rows.Malformed as error:
                await self.show_text(name.replace("_", " "), [line(f"the daemon's answer cannot be read: {error}")])

        self.run_worker(run(), group="command", exit_on_error=True)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Entries of the command palette: every screen, and every command available here."""
        for at, name in enumerate(view.SCREENS, 1):
            yield SystemCommand(f"{name} ({at})", f"go to the {name} screen", partial(self._run, f"show('{name}')"))
        for command in self._available():
            title = f"{command.action.replace('_', ' ')} ({command.shown})"
            yield SystemCommand(title, command.help, partial(self._run, f"command('{command.action}')"))

    def _run(self, action: str) -> None:
        self.call_later(self.run_action, action)

    def on_bar_pressed(self, message: Bar.Pressed) -> None:
        """Handle a click on a screen's name or on a key in the footer."""
        message.stop()
        self._run(message.action)


BOARDS = {
    "fleet": ("fleet", "FleetBoard"),
    "queue": ("queue", "QueueBoard"),
    "job": ("job", "JobBoard"),
    "decisions": ("streams", "DecisionsBoard"),
    "events": ("streams", "EventsBoard"),
}
"""Module and class of each screen."""


def make_board(name: str, context: Context) -> Board:
    """Create the screen of this name; its module is imported on first use."""
    module, kind = BOARDS[name]
    made: Board = getattr(import_module(f"clusterd.tui.screens.{module}"), kind)(name, context)
    return made
