"""The five screens by name; the module of each is imported when it is first shown."""

from __future__ import annotations

from tui.model.context import Context
from tui.screens.base import Board


def board(name: str, context: Context) -> Board:
    """A new screen of this name."""
    match name:
        case "fleet":
            from tui.screens.fleet import FleetBoard

            return FleetBoard(name, context)
        case "queue":
            from tui.screens.queue import QueueBoard

            return QueueBoard(name, context)
        case "job":
            from tui.screens.job import JobBoard

            return JobBoard(name, context)
        case "decisions":
            from tui.screens.streams import DecisionsBoard

            return DecisionsBoard(name, context)
        case _:
            from tui.screens.streams import EventsBoard

            return EventsBoard(name, context)
