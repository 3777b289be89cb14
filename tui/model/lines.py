"""Styled text as plain values: what the pure half of the interface makes, and the widgets only paint.

A line is a tuple of runs; a run is a text and the name of a style (`tui.model.state_styles.STYLES`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.cells import cell_len, set_cell_size

Run = tuple[str, str]
Line = tuple[Run, ...]

EMPTY: Line = ()


def line(*parts: str | Run) -> Line:
    """A line of runs; bare text has no style."""
    return tuple((part, "") if isinstance(part, str) else part for part in parts)


def plain(runs: Line) -> str:
    """Its text alone."""
    return "".join(text for text, _ in runs)


def printable(text: str) -> str:
    """Without what would move the cursor or hide itself: controls become a middle dot, tabs spaces."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\t\n\r" else "·" for c in text)


def width(runs: Line) -> int:
    """Terminal cells it takes."""
    return sum(cell_len(text) for text, _ in runs)


def fit(runs: Line, cells: int, right: bool = False, more: str = "…") -> Line:
    """Exactly `cells` wide: padded, or cut with `more` at its end."""
    have = width(runs)
    if have == cells:
        return runs
    if have < cells:
        padding = (" " * (cells - have), "")
        return (padding, *runs) if right else (*runs, padding)
    if cells <= 0:
        return EMPTY
    return (*_cut(runs, cells - cell_len(more)), (more, runs[-1][1]))


def _cut(runs: Line, cells: int) -> Iterator[Run]:
    for text, style in runs:
        have = cell_len(text)
        if have <= cells:
            yield text, style
            cells -= have
            continue
        if cells > 0:
            yield set_cell_size(text, cells), style
        return


def wrap(runs: Line, cells: int, hang: int = 0) -> list[Line]:
    """Lines of at most `cells`, broken at spaces, and in plans at commas; all but the first are indented by `hang`."""
    if width(runs) <= cells or cells <= 0:
        return [runs]
    hang = hang if hang < cells // 2 else 0
    made: list[list[Run]] = [[]]
    used = 0
    for text, style in runs:
        for word in _words(text):
            size = cell_len(word)
            if used + len(word.rstrip()) > cells and used > (hang if len(made) > 1 else 0):
                made.append([(" " * hang, "")] if hang else [])
                used = hang
                word = word.lstrip()
                size = cell_len(word)
            while used + cell_len(word.rstrip()) > cells:  # a word longer than the line
                piece = set_cell_size(word, cells - used)
                made[-1].append((piece, style))
                word = word[len(piece.rstrip()) or 1 :]
                size = cell_len(word)
                made.append([(" " * hang, "")] if hang else [])
                used = hang
            made[-1].append((word, style))
            used += size
    return [tuple(_joined(_without_end(piece))) for piece in made]


def _without_end(runs: list[Run]) -> list[Run]:
    """Without the spaces at its end, which would not fit."""
    if runs and runs[-1][0].endswith(" ") and len(runs) > 1:
        return [*runs[:-1], (runs[-1][0].rstrip(), runs[-1][1])]
    return runs


def _words(text: str) -> Iterator[str]:
    """Words with the spaces that follow them; plans, which are long, have a word for each of their parts."""
    start = 0
    for at in range(1, len(text)):
        if (text[at] != " " and text[at - 1] == " ") or (text[at].isalpha() and text[at - 1] == ","):
            yield text[start:at]
            start = at
    if text[start:]:
        yield text[start:]


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """Neighbours of one style as one run."""
    text, style = "", ""
    for piece, name in runs:
        if name == style:
            text += piece
            continue
        if text:
            yield text, style
        text, style = piece, name
    if text:
        yield text, style


def beside(left: list[Line], right: list[Line], left_cells: int, between: str) -> list[Line]:
    """Two columns as one: `left` padded to `left_cells`, then `between`, then `right`."""
    made = []
    for at in range(max(len(left), len(right))):
        mine = fit(left[at] if at < len(left) else EMPTY, left_cells)
        made.append((*mine, (between, "dim"), *(right[at] if at < len(right) else EMPTY)))
    return made
