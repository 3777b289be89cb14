"""The five screens by name; the module of each is imported when it is first shown."""

from __future__ import annotations

from tui.boards import Board
from tui.context import Context


def board(name: str, context: Context) -> Board:
    """A new screen of this name."""
    match name:
        case "fleet":
            from tui.fleet_board import FleetBoard

            return FleetBoard(name, context)
        case "queue":
            from tui.queue_board import QueueBoard

            return QueueBoard(name, context)
        case "job":
            from tui.job_board import JobBoard

            return JobBoard(name, context)
        case "decisions":
            from tui.stream_boards import DecisionsBoard

            return DecisionsBoard(name, context)
        case _:
            from tui.stream_boards import EventsBoard

            return EventsBoard(name, context)
