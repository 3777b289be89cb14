"""Command line of the performance model: ``python -m clusterd.profiling evaluate TABLE...``.

``python -m clusterd.profiling predictability JOBS.csv`` shows how well the end of jobs is foreseen.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clusterd.profiling.evaluate import AIMS, default_method, evaluate, met
from clusterd.profiling.predictability import judge, read_jobs
from clusterd.profiling.table import TableError, is_table, read_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for unusable input."""
    parser = argparse.ArgumentParser(prog="python -m clusterd.profiling", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("evaluate", help="pick trials from a table of measured step times, predict the rest")
    command.add_argument(
        "tables",
        nargs="+",
        type=Path,
        metavar="TABLE",
        help="CSV file with one measured plan per row, or folder of such",
    )
    command.add_argument("--budget", type=int, default=7, help="trials per model (default 7)")
    command.add_argument("--seeds", type=int, default=20, help="repeats per model (default 20)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--fast", action="store_true", help="skip leave_one_model_out_error")
    command.add_argument(
        "--one-cluster", action="store_true", help="models share their estimates of links and network cards"
    )
    command.add_argument("--most-hosts", type=int, help="most hosts of a trial (default: any number)")
    command = commands.add_parser("predictability", help="foresee which jobs of a table are predictable")
    command.add_argument("table", type=Path, help="CSV file with one job that is over per row")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    if given.command == "predictability":
        return _predictability(given.table, as_json=given.json)
    for name in ("budget", "seeds", "most_hosts"):
        if (value := getattr(given, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    try:
        results = {str(path): _evaluate(path, given) for path in _tables(given.tables)}
    except TableError as error:
        print(f"profiling: {error}", file=sys.stderr)
        return 2
    one = next(iter(results.values())) if len(results) == 1 else None
    if given.json:
        print(json.dumps(one or {"tables": results}, indent=2))
        return 0
    if one is not None:
        show(one, Console())
    show_by_trials(results, Console())
    return 0


def _tables(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths`, and the tables of step times in the folders among them."""
    found = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
        elif inside := [file for file in sorted(path.rglob("*.csv")) if is_table(file)]:
            found += inside
        else:
            raise TableError(f"{path}: no table of step times in this folder; give CSV files")
    return found


def _evaluate(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    method = default_method()
    try:
        result = evaluate(
            read_table(path),
            budget=given.budget,
            seeds=given.seeds,
            method=replace(method, design=replace(method.design, most_hosts=given.most_hosts)),
            leave_one_out=not given.fast,
            one_cluster=given.one_cluster,
        )
    except TableError:
        raise
    except ValueError as error:
        raise TableError(f"{path}: {error}") from None
    if skipped := result["skipped"]:
        few = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        print(f"profiling: {path}: left out {len(skipped)} models without 2 rows that differ: {few}", file=sys.stderr)
    return result


def _predictability(path: Path, *, as_json: bool) -> int:
    try:
        jobs = read_jobs(path)
        result = {"submit": judge(jobs, online=False)}
        if any(not math.isnan(job.fit_error) for job in jobs):
            result["online"] = judge(jobs, online=True)
    except ValueError as error:
        text = str(error) if isinstance(error, TableError) else f"{path}: {error}"
        print(f"profiling: {text}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(result, indent=2))
        return 0
    console = Console()
    _show_split(result["submit"], console)
    for name, title in (("submit", "at submission"), ("online", "after the first steps")):
        if name not in result:
            continue
        figures = result[name]
        console.print(
            f"{title}: AUC {figures['auc']:.3f}, Brier score {figures['brier']:.3f}, calibration error "
            f"{figures['calibration_error']:.3f}; {figures['jobs']} jobs, "
            f"{_percent(figures['predictable'])} predictable"
        )
        table = Table("jobs", "predicted", "actual")
        for part in figures["bins"]:
            table.add_row(str(part["jobs"]), _percent(part["predicted"]), _percent(part["actual"]))
        console.print(table)
    return 0


def _show_split(figures: dict[str, Any], console: Console) -> None:
    if figures["split"] == "time order":
        split = "each later fifth of the jobs is judged, by those that were over before it"
    else:
        split = "without times of submission: five shuffled folds, each judged by the others"
    console.print(f"{figures['split']}: {split}")
    if columns := figures["further_features"]:
        console.print(escape(f"further columns as features: {', '.join(columns)}"))


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures with their aims, the errors of each model and family, and those by distance from the trials."""
    table = Table(title=f"{result['budget']} trials per model, {result['seeds']} seeds", title_justify="left")
    for column in ("figure", "measured", "aim", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name, value in result["figures"].items():
        least, most = AIMS.get(name, (0.0, 0.0))
        aim = (
            ""
            if name not in AIMS
            else f">= {least:g}"
            if most == 1.0
            else f"{least:g} to {most:g}"
            if least
            else f"<= {most:g}"
        )
        good = met(name, value)
        table.add_row(name, _percent(value), aim, "" if good is None else "met" if good else "[bold]missed[/bold]")
    console.print(table)
    keys = ("mean_error", "max_error", "multi_node_mean_error", "coverage_90", "regret_mean", "regret_max")
    table = Table("model", "family", *keys, title="held-out rows", title_justify="left")
    for model, values in result["models"].items():
        table.add_row(escape(model), "all", *(_percent(values[k]) for k in keys))
        for family, of_family in values["families"].items():
            table.add_row("", escape(family), *(_percent(of_family.get(k)) for k in keys))
    console.print(table)
    few = ("mean_error", "max_error", "coverage_90")
    table = Table("model", "rows", "held out", *few)
    table.title, table.title_justify = "by hosts beyond the trials, and by devices on each of several hosts", "left"
    for model, values in [("all", result), *result["models"].items()]:
        for kind, suffix in (("hosts_beyond", " hosts beyond"), ("counts", "")):
            for group, of_group in values[kind].items():
                figures = (_percent(of_group[k]) for k in few)
                table.add_row(escape(model), f"{group}{suffix}", str(of_group["rows"]), *figures)
    console.print(table)


def show_by_trials(results: Mapping[str, dict[str, Any]], console: Console) -> None:
    """Print errors, regret and intervals of each table after each number of trials, with the rule as yardstick."""
    columns = {
        "error": "error", "regret": "regret", "regret_95": "95%", "regret_max": "worst", "coverage": "cover",
        "coverage_within": "near", "coverage_beyond": "far", "width": "width", "score": "score",
    }  # fmt: skip
    table = Table(
        "table", "k", "by", title="after k trials, mean of models", title_justify="left", padding=(0, 0, 0, 1)
    )
    for title in columns.values():
        table.add_column(title, justify="right", no_wrap=True)
    for name, result in results.items():
        for entry in result["by_trials"]:
            for kind in ("model", "rule"):
                cells = (_percent(entry[kind].get(column), 1) for column in columns)
                table.add_row(escape(Path(name).stem), str(entry["count"]), kind, *cells)
    console.print(table)
    console.print(
        "regret: by how much the chosen plan is slower than the best; cover: rows inside their 90% interval, near: on\n"
        "no more hosts than a trial, far: on more; width, score: of the interval of the logarithm of the step time;\n"
        "rule: step = c x samples per device x pipeline bubble x recomputation, c from the same trials"
    )


def _percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


if __name__ == "__main__":
    sys.exit(main())
