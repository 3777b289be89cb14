"""Commands about jobs that are there."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

import click

from clusterd.cli.completing import complete_job
from clusterd.cli.following import first_failure, show_logs, until_over, wait_for
from clusterd.cli.naming import is_meant, own_jobs
from clusterd.cli.output import (
    ago,
    note,
    output_option,
    raise_all,
    show_json,
    show_table,
    shown,
    tell,
    use_colour,
    words,
)
from clusterd.client import Client, refusal
from clusterd.errors import ClusterError, UsageError
from clusterd.units import duration, parse_duration_s

SILENT_S, SILENT_STEPS = 60.0, 20
"""Without a step for both, a job is said to be."""

LINES_MAX = 20
"""Of more jobs than these there is one line for all."""


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=complete_job)
@click.option("-a", "--all", "everything", is_flag=True, help="Finished jobs too.")
@click.option("--state", help="Only jobs in this state.")
@output_option
def ls(jobs: tuple[str, ...], everything: bool, state: str | None, output: str) -> None:
    """List jobs: those that are not over, and with --all the others; of JOBS alone, which may be 'net_*'."""
    with Client() as cluster:
        rows = cluster.call("jobs", all=everything or state is not None)
    if jobs:
        rows = [row for row in rows if is_meant(row, jobs)]
    if state is not None:
        _check_state(state)
        rows = [row for row in rows if row["state"] == state]
    if output != "table":
        show_json(rows, output)
        return
    headings = ["id", "name", "state", "plan", "devices", "step", "left", "loss", "age", "reason"]
    lines = [_line(row) for row in rows]
    if len({row["user"] for row in rows}) > 1:
        headings.insert(1, "user")
        for row, line in zip(rows, lines, strict=True):
            line.insert(1, row["user"])
    empty = "no such jobs" if jobs else "no jobs"
    if not (everything or state):
        empty += " are queued or running (clusterd ls --all shows finished ones)"
    show_table(headings, lines, empty)


def _check_state(state: str) -> None:
    from clusterd.types import JobState

    if state not in list(JobState):
        raise UsageError(f"--state {state}: there is no such state; it is one of {', '.join(JobState)}")


def _line(row: dict[str, Any]) -> list[Any]:
    devices = compact_devices(row["devices"]) if row["holds_devices"] else f"({row['asked']})" if row["asked"] else ""
    step = f"{row['step']}/{row['steps']}" if row["steps"] else (row["step"] or "")
    loss = f"{row['loss']:.4f}" if row["loss"] is not None else ""
    left_s = row.get("left_s")  # a daemon of before may still be there
    left = duration(left_s) if left_s is not None and row["state"] == "running" else ""
    age = ago(row["submitted_s"])
    return [row["id"], row["name"], row["state"], row["plan"], devices, step, left, loss, age, row["reason"]]


def compact_devices(devices: list[str]) -> str:
    """``gpu01:gpu0-3 gpu02:gpu1``: runs of devices by host."""
    by_kind: dict[tuple[str, str], list[int]] = {}
    for device in devices:
        host, _, local = device.rpartition(":")
        kind = local.rstrip("0123456789")
        by_kind.setdefault((host, kind), []).append(int(local[len(kind) :]))
    parts: list[str] = []
    for (host, kind), numbers in by_kind.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and runs[-1][-1] == number - 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        said = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        parts.append(f"{host}:{kind}{said}")
    return " ".join(parts)


@click.command()
@click.argument("job", shell_complete=complete_job)
@output_option
def show(job: str, output: str) -> None:
    """Everything about one job."""
    with Client() as cluster:
        row = cluster.call("job", job=job)
    if output != "table":
        show_json(row, output)
        return
    spec = row["spec"]
    tell(f"{row['id']}  {row['name']}  {row['state']}: {row['reason']}")
    facts = {
        "kind": row["kind"],
        "command": " ".join(spec["command"]),
        "user": f"{row['user']} (tenant {row['tenant']})",
        "priority": f"{row['priority']}{', guaranteed' if row['guaranteed'] else ''}",
        "asked": f"{row['asked']} devices" if row["asked"] else "CPU cores",
        "env": " ".join(f"{name}={value}" for name, value in spec["env"].items()),
        "after": ", ".join(spec["after"]),
        "submitted": _when(row["submitted_s"]),
        "started": _when(row["started_s"]),
        "ended": _when(row["ended_s"]),
        "exit code": row["exit_code"],
        "step": f"{row['step']} of {row['steps']}" if row["steps"] else row["step"] or None,
        "loss": f"{row['first_loss']:.4f} -> {row['loss']:.4f}" if row["loss"] is not None else None,
        "step time": duration(row["step_time_s"]) if row["step_time_s"] else None,
    }
    for name, value in facts.items():
        if value is not None and value != "":
            tell(f"  {name:<10} {value}")
    for move in row["migrations"]:
        cost = f"downtime {duration(move['downtime_s'])}" if move["downtime_s"] is not None else move["failure"]
        at = f"after step {move['step']}, " if move["step"] is not None else ""
        tell(f"  move {move['number']}: {move['from']} -> {move['to']} {at}{cost}: {move['reason']}")
    for attempt in row["attempts"]:
        said = [attempt["state"]]
        said += [f"plan {attempt['plan']}"] if attempt["plan"] else []
        said += [f"{count} CPU cores on {host}" for host, count in attempt["cores"].items()]
        said += [attempt["why"]] if attempt["why"] else []
        tell(f"  attempt {attempt['number']}: {', '.join(said)}")
        for rank in attempt["ranks"]:
            where = rank["device"] or f"{rank['host']} (CPU cores)"
            tell(f"    rank {rank['rank']:<4} {where:<24} {rank['end'] or ''}".rstrip())


def _when(at_s: float | None) -> str | None:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at_s))} ({ago(at_s)} ago)" if at_s else None


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@click.option("--rank", type=int, help="Of this rank alone; default: rank 0.")
@click.option("--all-ranks", is_flag=True, help="Of every rank, each line with its number.")
@click.option("--attempt", type=int, help="Of an earlier attempt.")
def logs(job: str, follow: bool, rank: int | None, all_ranks: bool, attempt: int | None) -> None:
    """A job's output."""
    with Client() as cluster:
        row = cluster.call("job", job=job)
    show_logs(row, None if all_ranks else (rank or 0), follow, attempt)


@click.command()
@click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)
@click.option("--wait", "and_wait", is_flag=True, help="Until their devices are free.")
@click.option("--now", is_flag=True, help="Kill them at once, also those that are being cancelled: nothing is saved.")
def cancel(jobs: tuple[str, ...], and_wait: bool, now: bool) -> None:
    """End jobs and free what they hold; 'net_*' is those of yours that have such a name and are not over."""
    failures: list[ClusterError] = []
    with Client() as cluster:
        first, *others = own_jobs(cluster, jobs, over=False)
        at_once: dict[str, Any] = {"now": True} if now else {}
        if others:  # at one moment: one that ends would make room for the next
            answer = cluster.call("cancel", job=first, also=others, **at_once)
            rows, failures = answer["jobs"], [refusal(error) for error in answer["refused"]]
        else:
            rows = [cluster.call("cancel", job=first, **at_once)]
    many: dict[str, int] = {}
    for row in rows:
        if and_wait:
            row = until_over(row["id"])
        state = "being cancelled" if row["state"] == "stopping" else row["state"]
        many[state] = many.get(state, 0) + 1
        if len(rows) <= LINES_MAX:
            note(f"{row['id']} ({row['name']}) is {state}")
    if len(rows) > LINES_MAX:
        note(f"{len(rows)} jobs: {', '.join(f'{count} {state}' for state, count in many.items())}")
    raise_all(failures)


@click.command(context_settings={"ignore_unknown_options": True})  # -5 is a number here
@click.argument("job", shell_complete=complete_job)
@click.argument("priority", type=int)
def priority(job: str, priority: int) -> None:
    """Change a job's priority; higher goes first."""
    with Client() as cluster:
        row = cluster.call("priority", job=job, priority=priority)
    note(f"{row['id']} ({row['name']}) has priority {row['priority']}")


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("jobs", nargs=-1, required=True, shell_complete=complete_job)
@click.option("--timeout", help="Give up after this long (exit code 124).")
@output_option
def wait(jobs: tuple[str, ...], timeout: str | None, output: str) -> int:
    """Wait until jobs are over; returns the exit code of the first that failed."""
    timeout_s = time_s("--timeout", timeout, "; without it, wait has no end") if timeout is not None else None
    deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
    with Client() as cluster:
        # A name that nobody has is told now, and not when those before it are over.
        ids = [cluster.call("job", job=job)["id"] for job in jobs]
    ended: list[dict[str, Any]] = []
    for job, name in zip(ids, jobs, strict=True):
        left_s = max(deadline_s - time.monotonic(), 0.01) if deadline_s is not None else None
        row = wait_for(job, left_s)
        if row is None:
            note(f"{name} is not over after {duration(timeout_s or 0.0)}")
            break
        ended.append(row)
        if output == "table":
            note(f"{row['id']} ({row['name']}) {row['state']}: {row['reason']}")
    if output != "table":
        show_json(ended, output)
    if len(ended) < len(ids):
        return 124
    return first_failure(ended)


def time_s(option: str, text: str, hint: str = "") -> float:
    """Seconds that were given to an option.

    Raises:
        UsageError: they are no time, or none that can go by.
    """
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{option} {text}: it must be a time from 0 on, as in 90s{hint}")
    return seconds


@click.command()
@click.argument("job", shell_complete=complete_job)
@output_option
def why(job: str, output: str) -> None:
    """Why a job is where it is: its reason, who stands before it, what was decided so far."""
    with Client() as cluster:
        answer = cluster.call("why", job=job)
    if output != "table":
        show_json(answer, output)
        return
    said = shown(f"{answer['name']} ({answer['id']}) is {answer['state']}: {answer['reason']}")
    print(click.style(said, bold=True) if use_colour() else said)
    if silence := _silence(answer):
        tell(f"  {silence}")
    for host, reason in answer.get("unfit", {}).items():  # a daemon that was not restarted since may not say it
        tell(f"  {host} is left out: {reason}")
    for plan, reason in answer.get("refused", {}).items():
        tell(f"  it cannot train under {plan}: {reason}")
    if answer["ahead"]:
        names = ", ".join(answer["ahead"][:5]) + (" ..." if len(answer["ahead"]) > 5 else "")
        tell(f"  {len(answer['ahead'])} ahead in the queue: {names}")
    if answer["state"] == "queued":
        for name, count in sorted(answer["holders"].items(), key=lambda item: -item[1])[:8]:
            left_s = answer.get("holders_left_s", {}).get(name)
            until = f", for about {duration(left_s)} more" if left_s is not None else ""
            tell(f"  {name} holds {count} device{'s' if count > 1 else ''}{until}")
        for reason in answer["unusable"]:
            tell(f"  {reason}")
    for (kind, reason), group in groupby(answer["decisions"], lambda decision: (decision["kind"], decision["reason"])):
        first, *others = group  # the same of several hosts
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(first["at_s"]))
        tell(f"  {at}  {words(kind)}: {reason}{f' ({1 + len(others)} times)' if others else ''}")


def _silence(job: dict[str, Any]) -> str:
    """What to know of a running job that has made no step for much longer than its steps take."""
    if job["state"] != "running" or job["progressed_s"] is None:
        return ""
    silent_s, step_s = time.time() - job["progressed_s"], job["step_time_s"] or 0.0
    if silent_s < max(SILENT_S, SILENT_STEPS * step_s):
        return ""
    return f"no step for {duration(silent_s)} after step {job['step']}, and one takes {duration(step_s)}"
