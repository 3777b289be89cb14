"""``clusterd simulate``: the scheduler on traces, under a virtual clock, beside those it is measured against."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterd.errors import UsageError
from clusterd.units import duration

if TYPE_CHECKING:
    from clusterd.simulate.run import Outcome, Setting

_FIGURES = (
    ("average_completion_s", "average", "time"),
    ("median_completion_s", "median", "time"),
    ("p99_completion_s", "p99", "time"),
    ("makespan_s", "makespan", "time"),
    ("queueing_s", "queued", "time"),
    ("utilisation", "used", "share"),
    ("moves_per_job", "moves", "number"),
    ("guaranteed_met", "kept", "share"),
    ("rho_p95", "rho p95", "number"),
    ("rho_over_1_1", "unfair", "share"),
    ("jain", "Jain", "number"),
    ("finished", "done", "count"),
    ("pass_s", "pass", "time"),
)

_UNDONE_SHOWN = 5


@click.command()
@click.option("--cluster", default="8x8:a800", show_default=True, help="HOSTSxDEVICES:TYPE, several joined by +.")
@click.option("--workload", type=click.Path(path_type=Path), help="Jobs: a file of a known format.")
@click.option("--truth", type=click.Path(path_type=Path), help="Measured step times; progress follows them.")
@click.option(
    "--from-journal",
    "journal",
    type=click.Path(path_type=Path),
    help="Instead of cluster, workload and truth: what a daemon did, from its state directory or journal.",
)
@click.option("--journal-policy", default="default", show_default=True, help="Of an old journal that does not tell it.")
@click.option(
    "--format", "form", default="auto", show_default=True, help="Of the workload: a800, arena, gavel, pollux."
)
@click.option("--policy", "policies", multiple=True, help="One or more; default: default. `all`: all of them.")
@click.option("--scale-steps", type=float, default=1.0, show_default=True, help="Jobs have so many times their steps.")
@click.option("--load", type=float, help="Squeeze arrivals until jobs ask for so many times what the cluster offers.")
@click.option(
    "--move-cost", default="78", show_default=True, help="Seconds, for everybody; or `measured`: live for ours."
)
@click.option("--start-cost", type=float, default=0.0, show_default=True, help="Seconds before a job's first step.")
@click.option("--oracle", is_flag=True, help="Policies know the truth, not what trial runs taught.")
@click.option(
    "--known-by",
    type=click.Choice(["shape", "count"]),
    default="shape",
    show_default=True,
    help="Policies know step times by how devices lie on hosts, or by their number alone.",
)
@click.option(
    "--round", "round_s", type=float, default=0.0, show_default=True, help="Hear and decide every so many seconds only."
)
@click.option("--whole-steps", is_flag=True, help="A round's last step is made whole or not at all.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything random.")
@click.option("--resample", is_flag=True, help="Another trace of the same kind, drawn by the seed.")
@click.option("--arrivals", type=click.Choice(["trace", "poisson", "burst", "day"]), default="trace", show_default=True)
@click.option("--predictable", type=float, help="Share of jobs whose number of steps is known; default: all.")
@click.option("--guaranteed", type=float, help="Share of guaranteed jobs; default: as the trace says.")
@click.option("--faults", type=float, default=0.0, help="Failures per host and day.")
@click.option("--repair", type=float, default=1800.0, show_default=True, help="Seconds until a failed host is back.")
@click.option("--drain", "drained", multiple=True, help="HOST@START-END in seconds; may be repeated.")
@click.option("--checkpoint", type=float, default=600.0, show_default=True, help="Seconds between a job's snapshots.")
@click.option("--horizon", type=float, default=float("inf"), help="Seconds after which nothing more is simulated.")
@click.option("--processes", type=int, help="Policies simulated at once; default: one per core.")
@click.option(
    "--bound", is_flag=True, help="Also what no policy could beat, knowing everything and moving for nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write completion times and a timeline: .svg or .html.")
@click.option("--record", type=click.Path(path_type=Path), help="Write the (first) policy's run for the terminal UI.")
def simulate(
    cluster: str,
    workload: Path | None,
    truth: Path | None,
    journal: Path | None,
    journal_policy: str,
    form: str,
    policies: tuple[str, ...],
    scale_steps: float,
    load: float | None,
    move_cost: str,
    start_cost: float,
    oracle: bool,
    known_by: str,
    round_s: float,
    whole_steps: bool,
    seed: int,
    resample: bool,
    arrivals: str,
    predictable: float | None,
    guaranteed: float | None,
    faults: float,
    repair: float,
    drained: tuple[str, ...],
    checkpoint: float,
    horizon: float,
    processes: int | None,
    bound: bool,
    as_json: bool,
    plot: Path | None,
    record: Path | None,
) -> None:
    """Run a workload under one or more policies, and compare.

    \b
    clusterd simulate --cluster 8x8:a800 --workload jobs.csv --truth step_times.csv --policy default --policy tiresias
    """
    from dataclasses import asdict, replace

    from clusterd.core.policies import POLICIES
    from clusterd.simulate import run
    from clusterd.simulate import workload as jobs
    from clusterd.simulate.cluster import parse_cluster
    from clusterd.simulate.importers import read

    names = tuple(POLICIES) if "all" in policies else tuple(dict.fromkeys(policies)) or ("default",)
    run.check_policies(names)
    if journal_policy not in POLICIES:
        raise UsageError(
            f"--journal-policy {journal_policy}: there is none of that name; there are {', '.join(POLICIES)}"
        )
    for name, share in (("--predictable", predictable), ("--guaranteed", guaranteed)):
        if share is not None and not 0 <= share <= 1:
            raise UsageError(f"{name} {share:g}: give a share from 0 to 1")
    if load is not None and not 0 < load < 1000:
        raise UsageError(f"--load {load:g}: give a number above 0, as in 1.0")
    if not 0 < scale_steps < 1e6:
        raise UsageError(f"--scale-steps {scale_steps:g}: give a number above 0, as in 0.2")
    if not 0 <= round_s < 1e6:
        raise UsageError(f"--round {round_s:g}: give seconds; 0 is without rounds")
    for name, value, least, most in (
        ("--start-cost", start_cost, 0, 1e6),
        ("--faults", faults, 0, 1e3),
        ("--repair", repair, 1, 1e9),
        ("--checkpoint", checkpoint, 1, 1e9),
        ("--horizon", horizon, 0, float("inf")),
        ("--processes", processes if processes is not None else 1, 1, 1000),
    ):
        if not least <= value <= most:
            raise UsageError(f"{name} {value:g}: give a number from {least:g} to {most:g}")
    if bound and horizon < float("inf"):
        raise UsageError("--bound: what does not end before the horizon has no completion time; leave --horizon out")
    if whole_steps and not round_s:
        raise UsageError("--whole-steps: steps are cut by rounds only; give --round SECONDS too")
    recorded: tuple[float, ...] = ()
    if journal is not None:
        if workload is not None or truth is not None:
            raise UsageError("--from-journal brings jobs and speeds along: leave --workload and --truth out")
        from clusterd.replay import journal_batches, journal_file
        from clusterd.simulate.history import history

        past = history(journal_batches(journal_file(journal)), journal_policy)
        hosts, world, given, recorded = past.cluster, past.truth, past.workload, past.completion_s
        cluster, workload, truth = str(hosts), journal, journal
    elif workload is None or truth is None:
        raise UsageError("--workload and --truth are needed: jobs, and how fast they go; or --from-journal")
    else:
        hosts = parse_cluster(cluster)
        world, given = read(form, workload, truth, hosts)
    given = jobs.with_steps(given, scale_steps)
    if resample:
        given = jobs.resampled(given, random.Random(f"resample {seed}"))
    given = jobs.with_pattern(given, arrivals, random.Random(f"arrivals {seed}"))
    if predictable is not None:
        given = jobs.partly_predictable(given, predictable, random.Random(f"predictable {seed}"))
    if guaranteed is not None:
        given = jobs.partly_guaranteed(given, guaranteed, random.Random(f"guaranteed {seed}"))
    if load is not None:
        given = jobs.at_load(given, world, hosts, load)
    trace, given = len(given.arrivals), jobs.until(given, horizon)
    span_s = given.arrivals[-1].at_s * 3 + 86400.0
    broken = run.faults(hosts, faults, repair, span_s, seed) if faults > 0 else []
    setting = run.Setting(
        cluster=hosts,
        workload=given,
        truth=world,
        performance_tables=run.believe(world, oracle, seed, [a.model for a in given.arrivals], known_by == "count"),
        move_s=_move_cost(move_cost),
        start_s=start_cost,
        disturbances=tuple(sorted([*broken, *run.drains(hosts, drained)], key=lambda d: d.at_s)),
        checkpoint_s=checkpoint,
        horizon_s=horizon,
        round_s=round_s,
        whole_steps=whole_steps,
        timeline=plot is not None,
    )
    found = _run(setting, names, processes, quiet=as_json)
    about = {
        "cluster": cluster,
        "devices": hosts.devices,
        "workload": str(workload),
        "truth": str(truth),
        "load": jobs.load_of(given, world, hosts),
        "move_cost": move_cost,
        "oracle": oracle,
        "known_by": known_by,
        "round_s": round_s,
        "scale_steps": scale_steps,
        "seed": seed,
        "left_out": given.left_out,
        "plans_replaced": given.replaced,
        "jobs": len(given.arrivals),
        "after_horizon": trace - len(given.arrivals),
        "recorded_average_completion_s": sum(recorded) / len(recorded) if recorded else None,
        "recorded_finished": len(recorded),
    }
    if bound:
        from clusterd.simulate.bounds import bounds

        about["bounds"] = asdict(bounds(hosts, given, world))
    if record is not None:
        from clusterd.simulate.record import Recording

        with Recording(record) as recording:
            run.simulate(replace(setting, timeline=False), names[0], recording.batch)
    if plot is not None:
        from clusterd.simulate.plot import write_plot

        write_plot(plot, found, about)
    if as_json:
        told = {**about, "policies": {name: one.figures for name, one in found.items()}}
        told["paired"] = _paired(found)
        print(json.dumps(told, indent=2, allow_nan=False))
    else:
        _show(found, about)


def _move_cost(text: str) -> float | None:
    if text == "measured":
        return None
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"--move-cost {text}: give seconds, or `measured`") from None
    if not 0 <= value < 1e6:
        raise UsageError(f"--move-cost {text}: give 0 or more seconds")
    return value


def _run(setting: Setting, names: tuple[str, ...], processes: int | None, quiet: bool) -> dict[str, Outcome]:
    from clusterd.simulate import run

    if quiet or not sys.stderr.isatty():
        return run.side_by_side(setting, names, processes, lambda name: None)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("policies", total=len(names))
        return run.side_by_side(setting, names, processes, lambda name: bar.advance(task))


def _paired(found: dict[str, Outcome]) -> dict[str, Any]:
    """Of the first policy against each other one, job by job: other's completion time minus ours."""
    import statistics

    first, *others = found.values()
    table: dict[str, Any] = {}
    for other in others:
        apart = sorted(b - a for a, b in zip(first.completion_s, other.completion_s, strict=True))
        if not apart:
            continue
        table[other.policy] = {
            "mean_s": statistics.fmean(apart),
            "standard_error_s": statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None,
            "p10_s": apart[len(apart) // 10],
            "median_s": statistics.median(apart),
            "p90_s": apart[(9 * len(apart)) // 10],
            "jobs_later": sum(x < -1e-6 for x in apart),
            "average_ratio": other.figures["average_completion_s"] / first.figures["average_completion_s"],
        }
    return table


def _show(found: dict[str, Outcome], about: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    load = "" if about["load"] is None else f" at load {about['load']:.2f}"
    title = f"{about['jobs']} jobs on {about['cluster']}{load}, {about['move_cost']} s per move"
    console = Console(markup=False)
    for part in (_FIGURES[:7], _FIGURES[7:]):
        table = Table(title=title, title_justify="left")
        table.add_column("policy", no_wrap=True)
        for _, heading, _ in part:
            table.add_column(heading, justify="right", no_wrap=True)
        for name, one in found.items():
            table.add_row(name, *(_cell(one.figures[key], form) for key, _, form in part))
        console.print(table)
        title = ""
    if least := about.get("bounds"):
        average, makespan = duration(least["average_completion_s"]), duration(least["makespan_s"])
        console.print(f"no policy could do better than: average {average}, makespan {makespan}")
    if about["recorded_finished"]:
        average = duration(about["recorded_average_completion_s"])
        console.print(f"as it was: {about['recorded_finished']} jobs finished, after {average} on average")
    for name, one in found.items():
        for job, why in sorted(one.undone.items())[:_UNDONE_SHOWN]:
            console.print(f"{name}: {job} never ends, and counts as if it ended with the last: {why}")
        if len(one.undone) > _UNDONE_SHOWN:
            console.print(f"{name}: {len(one.undone) - _UNDONE_SHOWN} more jobs never end")
    if about["after_horizon"]:
        console.print(f"left out, for they arrive after the horizon: {about['after_horizon']} jobs")
    if about["left_out"]:
        missing = ", ".join(f"{count} {model}" for model, count in sorted(about["left_out"].items()))
        console.print(f"left out, for nothing says how fast they are: {missing}")
    if about["plans_replaced"]:
        count = about["plans_replaced"]
        console.print(f"{count} jobs ask for a plan that the truth does not hold: the next best stands for it")


def _cell(value: Any, form: str) -> str:

    if value is None:
        return "-"
    if form == "time":
        return duration(value)
    return f"{value:.0%}" if form == "share" else f"{value:.0f}" if form == "count" else f"{value:.2f}"
