"""Draw the main claims from the tables of the pages that state them: docs/charts/*.svg.

``python docs/charts.py`` writes the charts; ``--check`` fails where a table has other figures than its chart. A chart
has no figures of its own.
"""

from __future__ import annotations

import html
import re
import sys
from collections import defaultdict
from math import ceil
from pathlib import Path

DOCS = Path(__file__).parent
FOLDER = DOCS / "charts"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
WIDTH, ROW, LEFT, RIGHT, TOP = 720, 22, 250, 70, 44

Points = list[tuple[str, float]]


def table(page: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the table of a page whose heading row begins with these words."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def number(cell: str) -> float:
    """First number of a cell."""
    found = re.search(r"-?\d+(?:\.\d+)?", cell)
    assert found is not None, f"no number in {cell!r}"
    return float(found[0])


def bars(title: str, groups: dict[str, Points], unit: str, mark: float | None = None) -> str:
    """Horizontal bars by group, with their values; a dashed line at `mark`."""
    most = max(value for points in groups.values() for _, value in points)
    scale = (WIDTH - LEFT - RIGHT) / most
    parts, y = [], TOP
    for index, (name, points) in enumerate(groups.items()):
        if name:
            parts.append(_text(LEFT, y + 15, name, "start", bold=True))
            y += ROW
        for label, value in points:
            parts.append(_text(LEFT - 8, y + 15, label, "end"))
            parts.append(
                f'<rect x="{LEFT}" y="{y + 3}" width="{value * scale:.1f}" height="{ROW - 7}" fill="{COLOURS[index]}"/>'
            )
            parts.append(_text(LEFT + value * scale + 6, y + 15, f"{value:g}{unit}", "start"))
            y += ROW
    if mark is not None:
        x = LEFT + mark * scale
        parts.append(f'<path d="M{x:.1f} {TOP}V{y}" stroke="#888" stroke-dasharray="4 4"/>')
    return _picture(title, parts, y + 10)


def curves(title: str, series: dict[str, Points], unit: str, below: str) -> str:
    """Lines over positions that are named alike in all series."""
    labels = sorted({label for points in series.values() for label, _ in points}, key=float)
    most, height = 10 * ceil(max(value for points in series.values() for _, value in points) / 10), 220
    x = {label: 60 + index * (WIDTH - 240) / (len(labels) - 1) for index, label in enumerate(labels)}
    floor = TOP + height
    parts = [_text(x[label], floor + 18, label, "middle") for label in labels]
    parts.append(_text((60 + WIDTH - 180) / 2, floor + 38, below, "middle"))
    for part in range(5):
        value = most * part / 4
        y = floor - height * part / 4
        parts += [_text(52, y + 4, f"{value:.0f}{unit}", "end"), f'<path d="M60 {y}H{WIDTH - 180}" stroke="#8884"/>']
    for index, (name, points) in enumerate(series.items()):
        drawn = " ".join(f"{x[label]:.1f},{floor - value / most * height:.1f}" for label, value in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{COLOURS[index]}" stroke-width="2.5"/>')
        parts.append(f'<rect x="{WIDTH - 165}" y="{TOP + 24 * index}" width="14" height="14" fill="{COLOURS[index]}"/>')
        parts.append(_text(WIDTH - 145, TOP + 24 * index + 12, name, "start"))
    return _picture(title, parts, floor + 50)


def _text(x: float, y: float, text: str, anchor: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'


def _picture(title: str, parts: list[str], height: float) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        "<style>text { font-family: system-ui, sans-serif; font-size: 13px; fill: #444 }",
        "@media (prefers-color-scheme: dark) { text { fill: #bbb } }</style>",
        _text(10, 22, title, "start", bold=True),
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip


def charts() -> dict[str, str]:
    """Charts by their names."""
    baselines = [(row[0], number(row[1])) for row in table("simulate.md", "load 1.0")]
    times: dict[str, Points] = defaultdict(list)
    state, plan = "", ""
    for cells in table("benchmarks.md", "dp=2,tp=2"):
        state = cells[1] or state
        is_back = cells[0].startswith("and back")
        plan = plan if is_back else cells[0].removeprefix("to ")
        times[f"{state} of state"].append(
            (f"from {plan}, between hosts" if is_back else f"to {plan}, within hosts", number(cells[2]))
        )
    errors: dict[str, Points] = defaultdict(list)
    for cells in table("profiling.md", "table, trials"):
        name, _, trials = cells[0].rpartition(", ")
        if trials in ("1", "2", "3", "5", "7") and name in ("A800", "vTrain, 56 models", "T4", "drawn"):
            errors[name].append((trials, number(cells[2])))
    return {
        "completion": bars(
            "Average completion time, theirs over ours, at load 1.0",
            {"": sorted(baselines, key=lambda one: one[1])},
            "",
            1,
        ),
        "downtime": bars("Downtime of live moves between dp=2,tp=2 and other plans", dict(times), " s"),
        "error": curves("Mean error of predicted step times", dict(errors), "%", "plans that were measured"),
    }


def main(options: list[str]) -> int:
    """Write or check the charts; returns the exit code."""
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in charts().items():
        file = FOLDER / f"{name}.svg"
        if "--check" not in options:
            file.write_text(drawn, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != drawn:
            print(f"{file} is out of date: python {Path(__file__).name}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
