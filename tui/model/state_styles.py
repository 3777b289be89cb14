"""Symbol, word and colour of each state; no information is in the colour alone.

The colours are Okabe and Ito's, which remain distinct under colour blindness ("Color Universal Design", 2008).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style

JOB_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00", "#B9A6FF")

STYLES: dict[str, Style] = {
    "": Style(),
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(color="#2BBF92"),
    "warn": Style(color="#E69F00"),
    "bad": Style(color="#FF7A45", bold=True),
    "info": Style(color="#56B4E9"),
    "title": Style(color="#56B4E9", bold=True),
    "key": Style(color="#F0E442", bold=True),
    "reverse": Style(reverse=True),
    "heading": Style(bold=True, underline=True),
    **{f"job{n}": Style(color=colour) for n, colour in enumerate(JOB_COLOURS)},
    # A tile is text on a coloured area; black on these colours is readable, and so is plain reverse.
    **{f"tile{n}": Style(color=colour, reverse=True) for n, colour in enumerate(JOB_COLOURS)},
}


@lru_cache(256)
def style(name: str) -> Style:
    """Style of this name; names can be combined, as in ``bold warn``."""
    made = Style()
    for part in name.split():
        made += STYLES[part]
    return made


_STATES: dict[str, tuple[str, str, str]] = {
    # state: (shape, ASCII shape, style)
    "queued": ("○", "o", "warn"),
    "starting": ("◔", "~", "info"),
    "running": ("●", "*", "good"),
    "moving": ("⇄", "=", "info"),
    "silent": ("?", "?", "bad"),
    "stopping": ("◕", "~", "info"),
    "finished": ("✓", "+", "info"),
    "failed": ("✗", "x", "bad"),
    "cancelled": ("–", "-", "dim"),
    "up": ("●", "*", "good"),
    "connecting": ("◔", "~", "warn"),
    "unreachable": ("?", "?", "bad"),
    "lost": ("✗", "x", "bad"),
    "drained": ("◇", "d", "warn"),
}

_GLYPHS: dict[str, tuple[str, str]] = {
    "more": ("…", "~"),
    "mark": ("✓", "+"),
    "crumb": ("›", ">"),
    "rule": ("─", "-"),
    "bar": ("│", "|"),
    "full": ("█", "#"),
    "none": ("░", "."),
    "free": ("·", "."),
    "foreign": ("▒", "#"),
    "up": ("▲", "^"),
    "down": ("▼", "v"),
    "play": ("▶", ">"),
    "pause": ("‖", "||"),
    "to": ("→", "->"),
    "dot": ("·", "-"),
}


@dataclass(frozen=True, slots=True)
class Look:
    """Symbols for the terminal: Unicode, or ASCII only."""

    ascii: bool = False

    def glyph(self, name: str) -> str:
        """A drawing character by name."""
        return _GLYPHS[name][1 if self.ascii else 0]

    def state(self, name: str) -> tuple[str, str]:
        """Symbol and word of a state as one run, with its style."""
        shape, letter, style_name = _STATES.get(name, ("?", "?", ""))
        return f"{letter if self.ascii else shape} {name}", style_name

    def shape(self, name: str) -> tuple[str, str]:
        """Symbol of a state, with its style."""
        shape, letter, style_name = _STATES.get(name, ("?", "?", ""))
        return (letter if self.ascii else shape), style_name

    def bar(self, share: float, cells: int) -> str:
        """A horizontal bar, filled to `share`."""
        full = round(max(0.0, min(1.0, share)) * cells) if share == share else 0  # not for NaN, which a host may report
        return self.glyph("full") * full + self.glyph("none") * (cells - full)

    def height(self, share: float | None) -> str:
        """A cell filled from below to a share of 0 to 1; a space where that is not known."""
        heights = _HEIGHTS_ASCII if self.ascii else _HEIGHTS
        if share is None or share != share:
            return " "
        return heights[round(max(0.0, min(1.0, share)) * (len(heights) - 1))]

    def plain(self, text: str) -> str:
        """The text, without characters that the terminal cannot show."""
        if not self.ascii:
            return text
        for name, (fancy, letter) in _GLYPHS.items():
            if name != "none":
                text = text.replace(fancy, letter)
        return text.encode("ascii", "replace").decode()


_HEIGHTS, _HEIGHTS_ASCII = "▁▂▃▄▅▆▇█", "_.-:=+*#"


def job_colour(job: str) -> int:
    """Index of a job's colour: the same on every screen and in every session."""
    number = int(job) if job.isdecimal() else sum(job.encode())
    return number % len(JOB_COLOURS)
