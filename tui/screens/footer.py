"""Footer, playback line and help text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterd.tui.model.keys import NAVIGATION_KEYS, available
from clusterd.tui.model.lines import Line, clock, line
from clusterd.tui.model.state_styles import Look
from clusterd.units import duration

if TYPE_CHECKING:
    from clusterd.tui.source.playback import Player


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
