"""The footer, the playback line and the help: which keys there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterd.units import duration
from tui.model.columns import clock
from tui.model.keys import MOVING, offered
from tui.model.lines import Line, line
from tui.model.state_styles import Look

if TYPE_CHECKING:
    from tui.source.playback import Player


def footer(screen: str, can_act: bool, replays: bool, cells: int) -> tuple[list[Line], dict[str, str]]:
    """Keys of this screen, as many as find room, and what a click on each does."""
    verbs = [verb for verb in offered(screen, can_act, replays) if screen in verb.footer]
    while sum(len(verb.shown) + len(verb.short) + 3 for verb in verbs) > cells and len(verbs) > 1:
        verbs.remove(max(reversed(verbs), key=lambda verb: verb.rank))
    runs: list[tuple[str, str]] = []
    actions: dict[str, str] = {}
    for verb in verbs:
        label = f" {verb.short}  "
        runs += ((verb.shown, "key"), (label, ""))
        actions[verb.shown] = actions[label] = f"verb('{verb.action}')"
    return [((" ", ""), *runs)], actions


def playback_line(player: Player, look: Look, cells: int) -> Line:
    """Where we are in a recording, and how fast we go."""
    sign = look.glyph("pause" if not player.playing else "play")
    speed = f"x{player.speed:g}"
    at, end = clock(player.now_s, player.end_s), clock(player.end_s, player.end_s)
    start = f" {sign} {speed:<7} {at} "
    rest = f" {end}  change {player.index}/{len(player) - 1}, {duration(player.end_s - player.start_s)} in all "
    room = max(cells - len(start) - len(rest), 0)
    return line((start, "bold"), (look.bar(player.share, room), "info"), (rest, "dim"))


def help_lines(screen: str, can_act: bool, replays: bool, readonly: bool) -> list[Line]:
    """All keys of this screen."""
    made = [line((f"{keys:<15} ", "key"), what) for keys, what in MOVING]
    made.append(line(""))
    made += [line((f"{verb.shown:<15} ", "key"), verb.help) for verb in offered(screen, can_act, replays)]
    if readonly:
        made += [line(""), line(("read-only: what changes the cluster is hidden", "dim"))]
    made += [
        line(""),
        line(
            ("filter          ", "title"),
            "gpt.*large   state:queued   !user:ann   step:>100   two terms: both must hold",
        ),
    ]
    return made
