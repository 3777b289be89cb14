"""``clusterd simulate`` and ``advise``: the scheduler and published baselines on traces and on single situations."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from clusterd.errors import UsageError
from clusterd.units import duration

if TYPE_CHECKING:
    from clusterd.simulate.cluster import Cluster
    from clusterd.simulate.run import Outcome
    from clusterd.simulate.setting import Setting
    from clusterd.simulate.truth import Truth
    from clusterd.simulate.workload import Workload


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

_UNFINISHED_SHOWN = 5


Options = SimpleNamespace
"""Options of the command, by parameter name."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Cluster, step times and jobs of the simulation, with their origin for the report."""

    cluster: Cluster
    truth: Truth
    workload: Workload
    cluster_text: str
    workload_file: Path
    truth_file: Path
    recorded_s: tuple[float, ...] = ()  # completion times in the journal


@click.command()
@click.option("--cluster", default="8x8:a800", show_default=True, help="HOSTSxDEVICES:TYPE, groups joined by +.")
@click.option("--workload", type=click.Path(path_type=Path), help="Trace of jobs, a CSV file.")
@click.option("--generate", metavar="SPEC", help="Generated jobs and step times, as in jobs=200,wide=0.3,seed=1.")
@click.option("--truth", type=click.Path(path_type=Path), help="Measured step times, which determine progress.")
@click.option(
    "--from-journal",
    "journal",
    type=click.Path(path_type=Path),
    help="Journal or state directory of a daemon, instead of cluster, workload and truth.",
)
@click.option("--journal-policy", default="default", show_default=True, help="Policy of an old journal without one.")
@click.option("--policy", "policies", multiple=True, help="Policy; may be repeated; `all`: all of them.")
@click.option("--scale-steps", type=float, default=1.0, show_default=True, help="Factor of all jobs' steps.")
@click.option("--load", type=float, help="Compress arrivals until jobs request this multiple of the capacity.")
@click.option("--move-cost", default="78", show_default=True, help="Seconds per move; or `measured`: live for ours.")
@click.option("--start-cost", type=float, default=0.0, show_default=True, help="Seconds before a job's first step.")
@click.option("--oracle", is_flag=True, help="Policies know true step times, not predictions from trials.")
@click.option(
    "--known-by",
    type=click.Choice(["shape", "count"]),
    default="shape",
    show_default=True,
    help="Policies know step times by devices per host, or by the number of devices only.",
)
@click.option(
    "--round",
    "round_s",
    type=float,
    default=0.0,
    show_default=True,
    help="Interval in seconds at which policies see events and decide; 0: at once.",
)
@click.option("--whole-steps", is_flag=True, help="A step that a round interrupts is not counted.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random numbers.")
@click.option("--resample", is_flag=True, help="Resample the trace, by the seed.")
@click.option("--arrivals", type=click.Choice(["trace", "poisson", "burst", "day"]), default="trace", show_default=True)
@click.option("--predictable", type=float, help="Share of jobs with a known number of steps; default: all.")
@click.option("--guaranteed", type=float, help="Share of guaranteed jobs; default: from the trace.")
@click.option("--faults", type=float, default=0.0, help="Failures per host and day.")
@click.option("--repair", type=float, default=1800.0, show_default=True, help="Seconds until a failed host returns.")
@click.option("--drain", "drained", multiple=True, help="HOST@START-END in seconds; may be repeated.")
@click.option("--checkpoint", type=float, default=600.0, show_default=True, help="Seconds between a job's checkpoints.")
@click.option("--horizon", type=float, default=float("inf"), help="End of the simulation, in seconds.")
@click.option("--processes", type=int, help="Policies simulated in parallel; default: one per core.")
@click.option(
    "--bound", is_flag=True, help="Also print lower bounds of any policy, with full knowledge and free migrations."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--record", type=click.Path(path_type=Path), help="Record the first policy's run for top --replay.")
def simulate(**options: Any) -> None:
    """Simulate a workload under one or more policies, and compare them.

    \b
    clusterd simulate --cluster 8x8:a800 --workload jobs.csv --truth step_times.csv --policy default --policy tiresias
    """
    given = Options(**options)
    names = _policies(given)
    _check(given)
    inputs = _read_inputs(given)
    trace = len(inputs.workload.arrivals)
    inputs = replace(inputs, workload=_changed_workload(given, inputs))
    setting = _setting(given, inputs)
    outcomes = _run(setting, names, given.processes, quiet=given.as_json)
    about = _about(given, inputs, jobs_in_trace=trace)
    _write_outputs(given, setting, names[0], outcomes, about)


def _policies(options: Options) -> tuple[str, ...]:
    from clusterd.core.policies import POLICIES
    from clusterd.simulate import run

    names = tuple(POLICIES) if "all" in options.policies else tuple(dict.fromkeys(options.policies)) or ("default",)
    run.check_policies(names)
    if options.journal_policy not in POLICIES:
        raise UsageError(
            f"--journal-policy {options.journal_policy}: unknown policy; known ones are {', '.join(POLICIES)}"
        )
    return names


def _check(options: Options) -> None:
    """Refuse numbers out of range and options that exclude each other.

    Raises:
        UsageError: naming the option.
    """
    for name, share in (("--predictable", options.predictable), ("--guaranteed", options.guaranteed)):
        if share is not None and not 0 <= share <= 1:
            raise UsageError(f"{name} {share:g}: give a share from 0 to 1")
    if options.load is not None and not 0 < options.load < 1000:
        raise UsageError(f"--load {options.load:g}: give a number above 0, as in 1.0")
    if not 0 < options.scale_steps < 1e6:
        raise UsageError(f"--scale-steps {options.scale_steps:g}: give a number above 0, as in 0.2")
    if not 0 <= options.round_s < 1e6:
        raise UsageError(f"--round {options.round_s:g}: give seconds, or 0 for no rounds")
    for name, value, least, most in (
        ("--start-cost", options.start_cost, 0, 1e6),
        ("--faults", options.faults, 0, 1e3),
        ("--repair", options.repair, 1, 1e9),
        ("--checkpoint", options.checkpoint, 1, 1e9),
        ("--horizon", options.horizon, 0, float("inf")),
        ("--processes", options.processes if options.processes is not None else 1, 1, 1000),
    ):
        if not least <= value <= most:
            raise UsageError(f"{name} {value:g}: give a number from {least:g} to {most:g}")
    if options.bound and options.horizon < float("inf"):
        raise UsageError("--bound: jobs beyond the horizon have no completion time; leave --horizon out")
    if options.whole_steps and not options.round_s:
        raise UsageError("--whole-steps applies to rounds: give --round SECONDS too")


def _read_inputs(options: Options) -> _Inputs:
    """Read the journal, or the workload and the step times."""
    if options.journal is not None:
        if options.workload is not None or options.truth is not None:
            raise UsageError("--from-journal includes jobs and step times: leave --workload and --truth out")
        from clusterd.replay import journal_batches, journal_file
        from clusterd.simulate.history import history

        file = options.journal
        recorded = history(journal_batches(journal_file(file)), options.journal_policy)
        return _Inputs(
            recorded.cluster,
            recorded.truth,
            recorded.workload,
            str(recorded.cluster),
            file,
            file,
            recorded.completion_s,
        )
    from clusterd.simulate.cluster import parse_cluster

    if options.generate is not None:
        if options.workload is not None or options.truth is not None:
            raise UsageError("--generate makes jobs and step times: leave --workload and --truth out")
        from clusterd.simulate.generate import generate, parse_spec

        cluster = parse_cluster(options.cluster)
        truth, workload = generate(parse_spec(options.generate), cluster)
        made = Path(f"generated: {options.generate or 'the defaults'}")
        return _Inputs(cluster, truth, workload, options.cluster, made, made)
    if options.workload is None or options.truth is None:
        raise UsageError("give --workload and --truth (jobs and their step times), --generate, or --from-journal")
    from clusterd.simulate.trace import read

    cluster = parse_cluster(options.cluster)
    truth, workload = read(options.workload, options.truth, cluster)
    return _Inputs(cluster, truth, workload, options.cluster, options.workload, options.truth)


def _changed_workload(options: Options, inputs: _Inputs) -> Workload:
    """The workload with all requested changes, up to the horizon."""
    from clusterd.simulate import workload as jobs

    seed = options.seed
    made = jobs.with_steps(inputs.workload, options.scale_steps)
    if options.resample:
        made = jobs.resampled(made, random.Random(f"resample {seed}"))
    made = jobs.with_pattern(made, options.arrivals, random.Random(f"arrivals {seed}"))
    if options.predictable is not None:
        made = jobs.partly_predictable(made, options.predictable, random.Random(f"predictable {seed}"))
    if options.guaranteed is not None:
        made = jobs.partly_guaranteed(made, options.guaranteed, random.Random(f"guaranteed {seed}"))
    if options.load is not None:
        made = jobs.at_load(made, inputs.truth, inputs.cluster, options.load)
    return jobs.until(made, options.horizon)


def _setting(options: Options, inputs: _Inputs) -> Setting:
    from clusterd.simulate import run
    from clusterd.simulate.setting import Setting

    arrivals = inputs.workload.arrivals
    span_s = arrivals[-1].at_s * 3 + 86400.0
    faults = (
        run.faults(inputs.cluster, options.faults, options.repair, span_s, options.seed) if options.faults > 0 else []
    )
    return Setting(
        cluster=inputs.cluster,
        workload=inputs.workload,
        truth=inputs.truth,
        performance_tables=run.believe(
            inputs.truth, options.oracle, options.seed, [a.model for a in arrivals], options.known_by == "count"
        ),
        move_s=_move_cost(options.move_cost),
        start_s=options.start_cost,
        disturbances=tuple(sorted([*faults, *run.drains(inputs.cluster, options.drained)], key=lambda d: d.at_s)),
        checkpoint_s=options.checkpoint,
        horizon_s=options.horizon,
        round_s=options.round_s,
        whole_steps=options.whole_steps,
    )


def _about(options: Options, inputs: _Inputs, jobs_in_trace: int) -> dict[str, Any]:
    """Description of the simulation, as in the JSON output."""
    from clusterd.simulate import workload as jobs

    workload, recorded_s = inputs.workload, inputs.recorded_s
    about = {
        "cluster": inputs.cluster_text,
        "devices": inputs.cluster.devices,
        "workload": str(inputs.workload_file),
        "truth": str(inputs.truth_file),
        "load": jobs.load_of(workload, inputs.truth, inputs.cluster),
        "move_cost": options.move_cost,
        "oracle": options.oracle,
        "known_by": options.known_by,
        "round_s": options.round_s,
        "scale_steps": options.scale_steps,
        "seed": options.seed,
        "left_out": workload.left_out,
        "plans_replaced": workload.replaced,
        "jobs": len(workload.arrivals),
        "after_horizon": jobs_in_trace - len(workload.arrivals),
        "recorded_average_completion_s": sum(recorded_s) / len(recorded_s) if recorded_s else None,
        "recorded_finished": len(recorded_s),
    }
    if options.bound:
        from clusterd.simulate.bounds import bounds

        about["bounds"] = asdict(bounds(inputs.cluster, workload, inputs.truth))
    return about


def _write_outputs(
    options: Options, setting: Setting, first: str, outcomes: dict[str, Outcome], about: dict[str, Any]
) -> None:
    """Write the recording if requested, then print the figures."""
    if options.record is not None:
        from clusterd.simulate import run
        from clusterd.simulate.record import Recording

        with Recording(options.record) as recording:
            run.simulate(setting, first, recording.batch)
    if options.as_json:
        report = {**about, "policies": {name: one.figures for name, one in outcomes.items()}}
        report["paired"] = _paired(outcomes)
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        _show(outcomes, about)


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


def _paired(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Differences in completion time per job: each other policy minus the first."""
    import statistics

    first, *others = outcomes.values()
    table: dict[str, Any] = {}
    for other in others:
        differences = sorted(b - a for a, b in zip(first.completion_s, other.completion_s, strict=True))
        if not differences:
            continue
        count = len(differences)
        table[other.policy] = {
            "mean_s": statistics.fmean(differences),
            "standard_error_s": statistics.stdev(differences) / len(differences) ** 0.5
            if len(differences) > 1
            else None,
            "p10_s": differences[count // 10],
            "median_s": statistics.median(differences),
            "p90_s": differences[(9 * count) // 10],
            "jobs_later": sum(x < -1e-6 for x in differences),
            "average_ratio": other.figures["average_completion_s"] / first.figures["average_completion_s"],
        }
    return table


def _show(outcomes: dict[str, Outcome], about: dict[str, Any]) -> None:
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
        for name, one in outcomes.items():
            table.add_row(name, *(_cell(one.figures[key], form) for key, _, form in part))
        console.print(table)
        title = ""
    if least := about.get("bounds"):
        average, makespan = duration(least["average_completion_s"]), duration(least["makespan_s"])
        console.print(f"lower bound of any policy: average {average}, makespan {makespan}")
    if about["recorded_finished"]:
        average = duration(about["recorded_average_completion_s"])
        console.print(f"recorded: {about['recorded_finished']} jobs finished, after {average} on average")
    for name, one in outcomes.items():
        for job, why in sorted(one.undone.items())[:_UNFINISHED_SHOWN]:
            console.print(f"{name}: {job} never ends, and counts as ending with the last job: {why}")
        if len(one.undone) > _UNFINISHED_SHOWN:
            console.print(f"{name}: {len(one.undone) - _UNFINISHED_SHOWN} more jobs never end")
    if about["after_horizon"]:
        console.print(f"skipped, because they arrive after the horizon: {about['after_horizon']} jobs")
    if about["left_out"]:
        missing = ", ".join(f"{count} {model}" for model, count in sorted(about["left_out"].items()))
        console.print(f"skipped, because their step times are unknown: {missing}")
    if about["plans_replaced"]:
        count = about["plans_replaced"]
        console.print(f"{count} jobs request a plan without step times: the next best one is used")


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if form == "time":
        return duration(value)
    return f"{value:.0%}" if form == "share" else f"{value:.0f}" if form == "count" else f"{value:.2f}"


@click.command()
@click.option("--stdio", is_flag=True, required=True, help="Read situations from stdin, write answers to stdout.")
@click.option("--policy", default="default", show_default=True, help="The scheduling policy.")
def advise(stdio: bool, policy: str) -> None:
    """Answer scheduling situations: allocation and plan of each job, with reasons (schema: docs/advise.md)."""
    from clusterd import advice
    from clusterd.core.policies import POLICIES

    if policy not in POLICIES:
        raise UsageError(f"--policy {policy}: unknown policy; known ones are {', '.join(POLICIES)}")
    chosen = POLICIES[policy]()
    for number, line in enumerate(sys.stdin, 1):
        if not line.strip():
            continue
        try:
            answer = advice.advise(advice.read(line), chosen)
        except UsageError as error:
            raise UsageError(f"line {number}: {error}") from None
        print(json.dumps(answer), flush=True)
