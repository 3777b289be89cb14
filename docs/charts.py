"""Draw the main claims, and write the tables that state them, from what benchmarks printed: docs/measured/*.json.

``python docs/charts.py`` writes docs/charts/*.svg and the tables of pages between ``<!-- NAME: ... -->`` and
``<!-- end of NAME -->``; ``--check`` fails where one says other than the JSON. `make figures` runs the benchmarks anew.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
WIDTH, ROW, LEFT, RIGHT, TOP = 720, 22, 250, 70, 44
PAGES = ("benchmarks.md", "profiling.md", "simulate.md")
TABLE = re.compile(r"(<!-- ([\w-]+): written by docs/charts.py -->\n).*?(?=<!-- end of \2 -->)", re.DOTALL)
LOADS = {"0.7": "0.7", "1.0": "1.0", "live": "1.0, live moves", "1.5": "1.5"}
RIVALS = ("tiresias", "optimus", "gavel", "sia+plans", "aiturbo+plans", "rubick")
TRIALS = (1, 2, 3, 5, 7)
SIZES = ("0.06", "0.25")
TIMES = ("average_completion", "p99_completion", "makespan")
GROUPS = (
    ("on no more hosts than a trial", "hosts_beyond", "0"),
    ("1 host more", "hosts_beyond", "1"),
    ("2 hosts more", "hosts_beyond", "2"),
    ("3 or 4 more", "hosts_beyond", "3-4"),
    ("5 and more", "hosts_beyond", "5+"),
    ("one host", "counts", "one host"),
    ("several hosts, all with even numbers of devices", "counts", "even"),
    ("several hosts, some with odd numbers", "counts", "odd"),
)

Points = list[tuple[str, float]]


def measured(name: str) -> Any:
    """Object that a benchmark printed."""
    return json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8"))


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows)) + "\n"


def percent(share: float, digits: int = 1) -> str:
    """A share as the pages write it."""
    return f"{100 * share:.{digits}f}%"


def aims(columns: dict[str, str]) -> str:
    """Figures of files by heading, beside their aims."""
    found = [measured(name) for name in columns.values()]
    rows = []
    for figure, aim in found[0]["aims"].items():
        cells = [f"{one['figures'][figure]:.3g}{'' if one['aims'][figure]['met'] else ', missed'}" for one in found]
        rows.append([f"`{figure}`", *cells, aim["aim"]])
    return markdown(["figure", *columns, "aim"], rows)


def completion() -> str:
    """Policies at load 1.0: theirs over ours, and over what no policy could beat."""
    rows = []
    for name, policy in measured("completion-1.0")["policies"].items():
        average, p99, makespan = (policy["factor"][f"{key}_s"] for key in TIMES)
        spread = f"{average['min']:.2f} to {average['max']:.2f}"
        factors = (average["most"], p99["of_means"], makespan["of_means"], makespan["most"])
        rows.append([name, f"{average['of_means']:.2f}", spread, *(f"{factor:.2f}" for factor in factors)])
    bound = "over the bound"
    return markdown(["load 1.0", "average", "least to most", bound, "p99", "makespan", bound], rows)


def loads() -> str:
    """Ours at each load, and the averages of rivals over it; a workload is lost to a policy that is faster on it."""
    rows = []
    for name, title in LOADS.items():
        policies = measured(f"completion-{name}")["policies"]
        averages = {policy: row["factor"][f"{TIMES[0]}_s"] for policy, row in policies.items()}
        ours, most = policies["default"]["figures"], averages["default"]["most"]
        lost = [f"{average['lost']} to {policy}" for policy, average in averages.items() if average["lost"]]
        factors = [f"{averages[rival]['of_means']:.2f}" if rival in averages else "" for rival in RIVALS]
        mine = [f"{ours['average_completion_s']:.0f} s", f"{ours['moves_per_job']:.2f}", f"{most:.2f}"]
        rows.append([title, *mine, *factors, ", ".join(lost)])
    headings = ["load", "ours", "moves per job", "over the bound", *RIVALS, "workloads lost"]
    return markdown(headings, rows)


def shared() -> dict[str, Any]:
    """Accuracy by table: of models that share what they learn about a cluster, where several run on one."""
    tables: dict[str, dict[str, Any]] = measured("accuracy")["tables"]
    return tables["alone"] | tables["one cluster"]


def accuracy() -> str:
    """Figures of each table after some numbers of trials."""
    alone, rows = measured("accuracy")["tables"]["alone"], []
    for name, result in shared().items():
        for entry, other in zip(result["by_trials"], alone[name]["by_trials"], strict=True):
            if entry["count"] in TRIALS:
                model = entry["model"]
                errors = (percent(one["error"]) for one in (model, other["model"], entry["rule"]))
                regret = [f"{100 * model[key]:.1f}" for key in ("regret", "regret_95", "regret_max") if model.get(key)]
                width = f"{model['width']:.2f}"
                rows.append(
                    [f"{name}, {entry['count']}", *errors, " / ".join(regret), percent(model["coverage"]), width]
                )
    headings = ["table, trials", "error", "error alone", "error of the rule", "regret in %", "coverage", "width"]
    return markdown(headings, rows)


def groups() -> str:
    """Errors and coverage after all trials, by how far rows are from them."""
    results, rows = shared(), []
    for title, kind, group in GROUPS:
        of_group = [result[kind].get(group) for result in results.values()]
        cells = [f"{percent(one['mean_error'])} ({percent(one['coverage_90'], 0)})" if one else "" for one in of_group]
        rows.append([title, *cells])
    return markdown(["mean error (coverage)", *results], rows)


def migration() -> str:
    """Medians of each pair of plans, there and back, by size of the state."""
    rows, machines = [], []
    for size in SIZES:
        found = measured(f"migration-{size}")
        machines.append(
            "{size} GB: {date}, {cores} cores, Python {python}, torch {torch}.".format(size=size, **found["machine"])
        )
        for label, pair in found["pairs"][size]["pairs"].items():
            ratios = [pair["ratios"].get(key) for key in ("downtime_vs_restart", "downtime_vs_live_checkpoint")]
            ratios.append(pair["ratios"].get("transfer_vs_wire", pair["ratios"].get("transfer_vs_memcpy")))
            cells = [f"{ratio:#.2g}" if ratio is not None else "" for ratio in ratios]
            rows.append([way(label), f"{size} GB", f"{pair['downtime_s']['median']:.2f} s", *cells])
    headings = ["dp=2,tp=2", "state", "downtime", "over (a)", "over (b)", "transfer over (c)"]
    return "\n".join([markdown(headings, rows), *machines, ""])


def way(label: str) -> str:
    """Name of a pair of plans: the way back crosses hosts."""
    plan = label.removesuffix(" and back")
    return f"to {plan}, within hosts" if plan == label else f"from {plan}, between hosts"


TABLES = {
    "completion": completion,
    "completion-aims": lambda: aims({"load 1.0": "completion-1.0"}),
    "loads": loads,
    "accuracy": accuracy,
    "groups": groups,
    "migration": migration,
    "migration-aims": lambda: aims({f"{size} GB": f"migration-{size}" for size in SIZES}),
}


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
            parts.append(_text(LEFT + value * scale + 6, y + 15, f"{value:.3g}{unit}", "start"))
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
    policies = measured("completion-1.0")["policies"]
    averages = [(name, row["factor"]["average_completion_s"]["of_means"]) for name, row in policies.items()]
    times: dict[str, Points] = defaultdict(list)
    for size in SIZES:
        for label, pair in measured(f"migration-{size}")["pairs"][size]["pairs"].items():
            times[f"{size} GB of state"].append((way(label), pair["downtime_s"]["median"]))
    errors: dict[str, Points] = {}
    for name, result in shared().items():
        points = [(one["count"], one["model"]["error"]) for one in result["by_trials"] if one["count"] in TRIALS]
        if len(points) == len(TRIALS):  # models of one table have fewer rows
            errors[name] = [(str(count), 100 * error) for count, error in points]
    return {
        "completion": bars(
            "Average completion time, theirs over ours, at load 1.0",
            {"": sorted(((name, factor) for name, factor in averages if name != "default"), key=lambda one: one[1])},
            "",
            1,
        ),
        "downtime": bars("Downtime of live moves between dp=2,tp=2 and other plans", dict(times), " s"),
        "error": curves("Mean error of predicted step times", errors, "%", "plans that were measured"),
    }


def main(options: list[str]) -> int:
    """Write or check charts and tables; returns the exit code."""
    wanted = {DOCS / "charts" / f"{name}.svg": drawn for name, drawn in charts().items()}
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        wanted[DOCS / page] = TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n", text)
    for file, text in wanted.items():
        if "--check" not in options:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            print(f"{file} is out of date: python {Path(__file__).name}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
