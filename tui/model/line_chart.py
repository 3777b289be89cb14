"""Line charts in braille dots, two columns and four rows per cell, or in asterisks for ASCII terminals.

Dot numbering: Unicode, "Braille Patterns" (U+2800).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from clusterd.tui.model.lines import Line, line

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the dot at [column][row], rows from the top."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one curve, by ascending x, and its style."""

    points: Sequence[Point]
    style: str = "info"
    joined: bool = True  # joined by lines; otherwise dots only


class Canvas:
    """Grid of dots over terminal cells."""

    def __init__(self, cells: int, rows: int, ascii: bool = False) -> None:
        self.cells, self.rows, self._ascii = cells, rows, ascii
        self._bits = [[0] * cells for _ in range(rows)]
        self._styles = [[""] * cells for _ in range(rows)]
        self._across, self._down = (1, 1) if ascii else (2, 4)

    @property
    def dots(self) -> tuple[int, int]:
        """Dots across and down."""
        return self.cells * self._across, self.rows * self._down

    def dot(self, x: int, y: int, style: str) -> None:
        """Set one dot; (0, 0) is the top left. Dots outside the canvas are ignored."""
        across, down = self.dots
        if 0 <= x < across and 0 <= y < down:
            row, cell = y // self._down, x // self._across
            self._bits[row][cell] |= 1 if self._ascii else _DOTS[x % 2][y % 4]
            self._styles[row][cell] = style

    def segment(self, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
        """Draw a straight line of dots."""
        (x0, y0), (x1, y1) = start, end
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            self.dot(round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps), style)

    def lines(self) -> list[Line]:
        """The drawing as styled lines."""
        made = []
        for bits, styles in zip(self._bits, self._styles, strict=True):
            runs: list[tuple[str, str]] = []
            for bit, style in zip(bits, styles, strict=True):
                shown = " " if not bit else "*" if self._ascii else chr(0x2800 + bit)
                if runs and runs[-1][1] == style:
                    runs[-1] = (runs[-1][0] + shown, style)
                else:
                    runs.append((shown, style))
            made.append(tuple(runs))
        return made


def chart(series: Sequence[Series], cells: int, rows: int, ascii: bool = False, unit: str = "") -> list[Line]:
    """The curves in one drawing with the scale at the left and below: `rows` + 1 lines of `cells`.

    Non-finite points are dropped; without any point, returns a single line that says so.
    """
    clean = [
        Series([p for p in one.points if math.isfinite(p[0]) and math.isfinite(p[1])], one.style, one.joined)
        for one in series
    ]
    points = [point for one in clean for point in one.points]
    if not points:
        return [line(("nothing measured yet", "dim"))]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    bottom, top = min(y for _, y in points), max(y for _, y in points)
    labels = (f"{top:.4g}{unit}", f"{bottom:.4g}{unit}")
    margin = max(map(len, labels)) + 1
    canvas = Canvas(max(cells - margin, 4), max(rows, 2), ascii)
    across, down = canvas.dots
    wide, high = right - left, top - bottom
    for one in clean:
        places = [
            (
                round((x - left) / wide * (across - 1)) if wide else 0,
                round(down - 1 - (y - bottom) / high * (down - 1)) if high else down // 2,
            )
            for x, y in one.points
        ]
        for place in places:
            canvas.dot(*place, one.style)
        if one.joined:
            for start, end in itertools.pairwise(places):
                canvas.segment(start, end, one.style)
    made = []
    for at, drawn in enumerate(canvas.lines()):
        label = labels[0] if at == 0 else labels[1] if at == canvas.rows - 1 and top > bottom else ""
        made.append(((label.rjust(margin - 1) + " ", "dim"), *drawn))
    first, last = f"{left:.6g}", f"{right:.6g}"
    gap = canvas.cells - len(first) - len(last)
    made.append((((" " * margin) + first + (" " * max(gap, 1) + last if right > left else ""), "dim"),))
    return made
