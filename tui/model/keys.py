"""Table of key commands: the one source of bindings, footer, help and palette."""

from __future__ import annotations

from dataclasses import dataclass

ALL = ("fleet", "queue", "job", "decisions", "events")
TABLES = ("fleet", "queue", "decisions", "events")
JOBS = ("queue", "job", "decisions", "events", "fleet")
HOSTS = ("fleet", "decisions", "events")


@dataclass(frozen=True, slots=True)
class Command:
    """A command bound to one key."""

    key: str  # as Textual names it
    shown: str  # as printed on the keyboard
    action: str
    short: str  # for the footer
    help: str
    screens: tuple[str, ...] = ALL
    acts: bool = False  # changes something in the cluster: hidden when read-only, and in recordings
    footer: tuple[str, ...] = ()  # screens whose footer shows it
    rank: int = 0  # narrow footers drop commands of the highest rank first
    replay: bool | None = None  # True: in recordings only; False: with a daemon only


COMMANDS: tuple[Command, ...] = (
    Command("question_mark", "?", "help", "help", "all keys", footer=ALL, rank=-2),
    Command("w", "w", "why", "why", "why a job is in its state", JOBS, footer=("queue", "job"), replay=False),
    Command("C", "C", "calendar", "calendar", "who is expected where: jobs, bookings, claims", replay=False),
    Command("m", "m", "migrate", "move", "move a job to another plan", JOBS, acts=True, footer=("queue", "job")),
    Command("c", "c", "cancel", "cancel", "cancel jobs", JOBS, acts=True, footer=("queue", "job")),
    Command("p", "p", "priority", "priority", "change jobs' priority", JOBS, acts=True, footer=("queue",), rank=7),
    Command("h", "h", "hold", "hold", "hold queued jobs; held ones: release", JOBS, acts=True, rank=8),
    Command("H", "H", "pause", "pause", "pause running jobs; paused ones: go on", JOBS, acts=True, rank=8),
    Command("P", "P", "pin", "pin", "move a job to a plan and pin it there; a pinned one: unpin", JOBS, acts=True),
    Command("K", "K", "checkpoint", "checkpoint", "write a job's state to disk", JOBS, acts=True, footer=("job",),
            rank=4),
    Command("n", "n", "submit", "new", "submit a job file", acts=True, footer=("queue",), rank=2),
    Command("d", "d", "drain", "drain", "drain hosts: jobs that can move, do", HOSTS, acts=True,
            footer=("fleet",)),
    Command("u", "u", "undrain", "undrain", "return drained hosts to service", HOSTS, acts=True,
            footer=("fleet",)),
    Command("l", "l", "logs", "log", "a job's log, full screen", JOBS, footer=("queue", "job"), rank=1,
            replay=False),
    Command("L", "L", "previous_logs", "", "the log of its previous attempt", JOBS, replay=False),
    Command("o", "o", "pager", "", "a job's log in $PAGER", JOBS, replay=False),
    Command("exclamation_mark", "!", "shell", "", "a shell inside a running job", JOBS, acts=True),
    Command("y", "y", "copy", "", "copy the id under the cursor"),
    Command("space", "space", "mark", "mark", "mark a row; commands apply to all marked rows", TABLES,
            footer=("queue",), rank=7, replay=False),
    Command("A", "A", "mark_all", "", "mark all shown rows, or none", TABLES, replay=False),
    Command("slash", "/", "filter", "filter", "filter: regular expressions, field:value, field:>3, !not", TABLES,
            footer=TABLES, rank=5),
    Command("s", "s", "sort", "sort", "sort by a column; the same one again reverses", TABLES, footer=TABLES, rank=6),
    Command("a", "a", "show_all", "all", "also jobs that are over, or routine events and decisions", TABLES,
            footer=("queue", "decisions", "events"), rank=6),
    Command("f2", "F2", "columns", "", "choose columns", TABLES),
    Command("full_stop", ".", "step_on", "step", "one change forward", footer=ALL, rank=2, replay=True),
    Command("comma", ",", "step_back", "back", "one change back", footer=ALL, rank=3, replay=True),
    Command("space", "space", "play", "play", "play or pause", footer=ALL, replay=True),
    Command("greater_than_sign", ">", "faster", "faster", "twice as fast", footer=ALL, rank=1, replay=True),
    Command("less_than_sign", "<", "slower", "slower", "half as fast", footer=ALL, rank=4, replay=True),
    Command("right_square_bracket", "]", "skip_on", "", "a twentieth of the recording forward", replay=True),
    Command("left_square_bracket", "[", "skip_back", "", "a twentieth of the recording back", replay=True),
    Command("R", "R", "rewind", "", "back to the start", replay=True),
    Command("q", "q", "quit", "quit", "quit; jobs keep running", footer=ALL, rank=-1),
)  # fmt: skip


def available(screen: str, can_act: bool, replays: bool) -> list[Command]:
    """Commands available on a screen."""
    return [
        command
        for command in COMMANDS
        if screen in command.screens
        and (can_act or not command.acts)
        and (command.replay is None or command.replay == replays)
    ]


NAVIGATION_KEYS = (
    ("1 - 5", "fleet, queue, job, decisions, events"),
    ("enter", "open: a job's page, a host's jobs, a decision's job"),
    ("esc", "back: closes a dialog, a filter, marks, a screen"),
    ("tab", "the next pane"),
    ("j k  arrows", "down, up"),
    ("g G", "first, last"),
    ("ctrl+d ctrl+u", "a page down, up"),
    ("ctrl+p", "the command palette"),
)
"""Keys that are not commands, for the help."""
